"""`bruno export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bruno.checkpoint import save
from bruno.cli.options import Checkpoint, RunFolder, console
from bruno.config import to_dict
from bruno.provenance import provenance
from bruno.runs import Run


def export(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    half: Annotated[bool, typer.Option("--half", help="Weights in half precision: half the size.")] = False,
    checkpoint: Checkpoint = "last",
) -> None:
    """Write a run's model to one file, with what it was made from, to use or share without the run."""
    recipe = Run(run).recipe
    about = {"recipe": to_dict(recipe), "provenance": provenance(recipe.train.seed)}
    save(Run(run).model(checkpoint), out, half=half, about=about)
    console.print(f"written: {out}, {out.stat().st_size / 2**20:.1f} MiB")
