"""`bruno page`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bruno.cli.output import console


def page(
    out: Annotated[Path | None, typer.Option(help="Write the page to this folder.")] = None,
    open: Annotated[bool, typer.Option("--open", help="Serve the page on this machine and open it.")] = False,
    port: Annotated[int, typer.Option(help="With --open: the port; 0 for any free one.")] = 0,
) -> None:
    """Write or open a page to draw on: the model runs in the browser."""
    from bruno.page import write_page

    if out is None and not open:
        raise typer.BadParameter("`--out` or `--open` must be given; got neither.")
    if out:
        console.print(f"written: {write_page(out)}", soft_wrap=True)
    if open:
        serve(out, port=port, open=open)


def serve(folder: Path | None = None, *, port: int = 0, open: bool = False) -> None:
    """Serve a written page, or one in a temporary folder, and print its address."""
    from bruno.page import serve_page

    serve_page(folder, port=port, open=open, ready=_show_address)


def _show_address(address: str) -> None:
    console.print(f"{address}  (Ctrl-C to stop)", soft_wrap=True)
