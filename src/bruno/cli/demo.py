"""`bruno demo`."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from bruno.cli.options import Seed
from bruno.cli.output import console, print_result, stopped_by_signal, training_bar
from bruno.cli.page import serve


def demo(
    out: Annotated[Path, typer.Option(help="The run folder; a number is appended if it exists.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int | None, typer.Option(help="Training steps; by default those of the preset.")] = None,
    show: Annotated[
        bool, typer.Option(help="Open the results in a browser at the end, and serve the page to draw on.")
    ] = sys.stdout.isatty(),
    seed: Seed = 0,
) -> None:
    """Show what the pretrained model can do, and train on handwritten digits; no dataset needed."""
    from bruno.demo import demo as run_demo

    console.print("Training on handwritten digits; 2, 5 and 8 are held out …")
    resume = f"`bruno train digits --seed {seed} --out {{folder}} --resume`"
    with stopped_by_signal(resume), training_bar() as progress:
        done = run_demo(out, steps=steps, seed=seed, progress=progress)
    for result in done.pretrained:
        console.print(f"{result.title}. {result.note}")
    for result in done.digits:
        print_result(result)
    console.print(f"All results, with pictures, on one page: {done.page}", soft_wrap=True)
    if show:
        webbrowser.open(done.page.resolve().as_uri())
    invite(show)


def invite(show: bool) -> None:
    """Serve the page to draw on if it is wanted and built; otherwise say how."""
    from bruno.page.files import check_built

    try:
        check_built()
    except FileNotFoundError:
        console.print("To draw symbols yourself: `make page`, which needs npm, then `bruno page --open`")
        return
    if show:
        console.print("Draw symbols yourself, and the model draws more of them:")
        serve()
    else:
        console.print("To draw symbols yourself: `bruno page --open`")
