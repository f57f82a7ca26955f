"""`bruno export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bruno.cli.options import ModelName
from bruno.cli.output import console
from bruno.text import arguments_renamed


def export(
    model: ModelName,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write; with --onnx, a folder.")],
    half: Annotated[bool, typer.Option("--half", help="Store the weights in half precision.")] = False,
    int8: Annotated[
        bool,
        typer.Option(
            "--int8",
            help="Store most weights as 8-bit integers: half the size of --half, almost as accurate.",
        ),
    ] = False,
    checkpoint: Annotated[str, typer.Option(help="For a run: last, or best on validation.")] = "last",
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write ONNX graphs that encode, decode and score elements.")
    ] = False,
) -> None:
    """Write a model to one file, with its recipe, or as ONNX graphs, to use without its run folder."""
    from bruno.trained import export as export_model

    with arguments_renamed({"path": "model"}):
        path = export_model(model, out, half=half, int8=int8, checkpoint=checkpoint, onnx=onnx)
    files = sorted(path.iterdir()) if onnx else [path]
    size = sum(file.stat().st_size for file in files)
    console.print(f"written: {path}, {_size(size)}", soft_wrap=True)


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
