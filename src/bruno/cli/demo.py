"""`bruno demo`."""

from __future__ import annotations

import sys
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

import bruno
from bruno.cli.options import Seed
from bruno.cli.output import console, print_result, stopped_by_signal, training_bar


def demo(
    out: Annotated[Path, typer.Option(help="The run folder; a number is appended if it exists.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int | None, typer.Option(help="Training steps; by default those of the preset.")] = None,
    show: Annotated[bool, typer.Option(help="Open the page in a browser at the end.")] = sys.stdout.isatty(),
    seed: Seed = 0,
) -> None:
    """Train on handwritten digits, three of them held out, and show the result; no dataset needed."""
    from bruno.reporting.page import report
    from bruno.reporting.summaries import class_samples_picture, summarise

    folder = _unused(out)
    console.print("Training on handwritten digits; 2, 5 and 8 are held out …")
    settings = {"seed": seed} | ({} if steps is None else {"steps": steps})
    resume = f"`bruno train digits --seed {seed} --out {folder} --resume`"
    with stopped_by_signal(resume), training_bar() as progress:
        trained = bruno.train("digits", folder, progress=progress, train=settings)
    samples = trained.sample_classes(split="all", seed=seed)
    pictured = replace(
        summarise(samples),
        name="samples-by-class",
        title="More of the same",
        note="Left: six examples of a digit. Right: samples given these. 2, 5 and 8 were held out.",
        picture=class_samples_picture(samples),
    )
    few_shot = summarise(trained.few_shot(trials=100, noise=False, rotations=False, seed=seed))
    results = (pictured, few_shot, summarise(trained.evaluate(seed=seed)))
    for result in results:
        trained.save_result(result, seed)
    page = report(folder)
    for result in results:
        print_result(result)
    console.print(f"All results on one page: {page}", soft_wrap=True)
    if show:
        webbrowser.open(page.resolve().as_uri())


def _unused(folder: Path) -> Path:
    """The folder, or the first one with a number that does not exist."""
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
