"""The files of the page: copied to a folder, and served on this machine."""

from __future__ import annotations

import json
import shutil
import tempfile
import webbrowser
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STATIC, BUILT = HERE / "static", HERE / "built"
CONTENTS = "page.json"  # written last by the build


def write_page(out: str | Path) -> Path:
    """Copy the page to a folder, ready for any web server; returns its index.html.

    Args:
        out: the folder; created if it does not exist.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"`out` must be a folder; got the file {out}.")
    check_built()
    for source in (STATIC, BUILT):
        shutil.copytree(source, out, dirs_exist_ok=True)
    return out / "index.html"


def check_built() -> None:
    """Raise an error if the page is not built, or was built for other static files."""
    how = "Build it in the source folder with: make page"
    if not (BUILT / CONTENTS).is_file():
        raise FileNotFoundError(f"the page is not built in this installation. {how}")
    listed = json.loads((BUILT / CONTENTS).read_text("utf-8")).get("page", [])
    if not {path.name for path in STATIC.iterdir()} <= set(listed):
        raise FileNotFoundError(f"the page was built for another version. {how}")


def serve_page(
    folder: str | Path | None = None,
    *,
    port: int = 0,
    open: bool = False,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve a folder on localhost until KeyboardInterrupt, as browsers do not run workers from local files.

    Args:
        folder: what `write_page` wrote; None: a temporary one, with the page.
        port: the port; 0: any free one.
        open: open the page in the browser.
        ready: called with the address.
    """
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            write_page(temporary)
            serve_page(temporary, port=port, open=open, ready=ready)
        return
    handler = partial(PageHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        address = f"http://127.0.0.1:{server.server_port}/"
        if ready:
            ready(address)
        if open:
            webbrowser.open(address)
        server.serve_forever()


class PageHandler(SimpleHTTPRequestHandler):
    """Answers requests for the files of the page."""

    extensions_map = SimpleHTTPRequestHandler.extensions_map | {
        ".mjs": "text/javascript",
        ".js": "text/javascript",
        ".gz": "application/octet-stream",  # inflated by the page, not by the browser
    }

    def end_headers(self) -> None:
        """Make browsers revalidate cached files, as the page may have been rebuilt."""
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""
