"""`bruno export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bruno.checkpoint import load, read_about, save
from bruno.cli.opening import is_run, model_file
from bruno.cli.options import Checkpoint, ModelName, console
from bruno.training.run import Run


def export(
    run: ModelName,
    out: Annotated[Path, typer.Argument(help="The file to write.")],
    half: Annotated[bool, typer.Option("--half", help="Weights in half precision: half the size.")] = False,
    checkpoint: Checkpoint = "last",
) -> None:
    """Write a model to one file, with what it was made from, to use or share without its run."""
    if out.is_dir() or not out.parent.is_dir():
        raise ValueError(f"`out` must be a file in a folder that is there; got {out}.")
    if is_run(run):
        Run(run).export(out, checkpoint, half=half)
    else:
        path = model_file(run, checkpoint)
        save(load(path), out, half=half, about=read_about(path))
    console.print(f"written: {out}, {out.stat().st_size / 2**20:.1f} MiB", soft_wrap=True)
