"""The drawing page, if it is built: every file has its own route, so that requests reach no other files."""

from __future__ import annotations

import mimetypes
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from bruno.page.files import BUILT, CONTENTS, STATIC, PageHandler


def page_routes() -> list[Route]:
    """The routes of the page; if it is not built, the root leads to the documentation."""
    if not (BUILT / CONTENTS).is_file():
        return [Route("/", _to_documentation)]
    files = {
        f"/{file.relative_to(folder).as_posix()}": file
        for folder in (STATIC, BUILT)
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    return [_file_route(path, file) for path, file in {"/": STATIC / "index.html", **files}.items()]


def _file_route(path: str, file: Path) -> Route:
    kind = PageHandler.extensions_map.get(file.suffix) or mimetypes.guess_type(file.name)[0]

    async def send(request: Request) -> Response:
        return FileResponse(file, media_type=kind)

    return Route(path, send)


async def _to_documentation(request: Request) -> Response:
    return RedirectResponse("/docs")
