"""`bruno report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bruno.cli.options import ModelName
from bruno.cli.output import console
from bruno.text import arguments_renamed


def report(
    model: ModelName,
    out: Annotated[
        Path | None, typer.Option(help="The page; by default report.html beside the results.")
    ] = None,
) -> None:
    """Gather all results of a model, and its learning curve, into one self-contained HTML page."""
    from bruno.reporting.page import report as write_report
    from bruno.trained import results_folder

    with arguments_renamed({"folder": "model"}):
        path = write_report(results_folder(model), out)
    console.print(f"written: {path}", soft_wrap=True)
