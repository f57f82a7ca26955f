"""`bruno export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bruno.cli.options import ModelName
from bruno.cli.output import console


def export(
    model: ModelName,
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    half: Annotated[bool, typer.Option("--half", help="Store the weights in half precision.")] = False,
    checkpoint: Annotated[str, typer.Option(help="Of a run: last, or best on validation.")] = "last",
) -> None:
    """Write a model to one file, with its recipe, to use or share without its run folder."""
    from bruno.trained import export as export_model

    path = export_model(model, out, half=half, checkpoint=checkpoint)
    console.print(f"written: {path}, {path.stat().st_size / 2**20:.1f} MiB", soft_wrap=True)
