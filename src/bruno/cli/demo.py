"""`bruno demo`."""

from __future__ import annotations

import sys
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import bruno
from bruno.cli.options import Seed
from bruno.cli.output import console, print_result, stopped_by_signal, training_bar
from bruno.cli.page import serve

if TYPE_CHECKING:
    from bruno.reporting.results import Result

_PRETRAINED = "omniglot"


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
    from bruno.reporting.page import report

    folder = _unused(out)
    console.print("Training on handwritten digits; 2, 5 and 8 are held out …")
    settings = {"seed": seed} | ({} if steps is None else {"steps": steps})
    resume = f"`bruno train digits --seed {seed} --out {folder} --resume`"
    with stopped_by_signal(resume), training_bar() as progress:
        trained = bruno.train("digits", folder, progress=progress, train=settings)
    pretrained, digits = _pretrained_results(seed), _digits_results(trained, seed)
    for result in pretrained:
        result.write(folder, config={"model": _PRETRAINED}, seed=seed)
    for result in digits:
        trained.save_result(result, seed)
    page = report(folder)
    for result in pretrained:
        console.print(f"{result.title}. {result.note}")
    for result in digits:
        print_result(result)
    console.print(f"All results, with pictures, on one page: {page}", soft_wrap=True)
    if show:
        webbrowser.open(page.resolve().as_uri())
    invite(show)


def _pretrained_results(seed: int) -> tuple[Result, ...]:
    """New characters, more of the same, and the odd one out, by the pretrained model."""
    from bruno.page.symbols import as_examples, draw_symbols
    from bruno.reporting.summaries import class_samples_picture, summarise

    trained = bruno.open(_PRETRAINED)
    symbols = as_examples(draw_symbols(), trained.model.shape[-1])
    new = trained.sample_prior(36, temperature=0.5, seed=seed)
    more = trained.sample_classes(examples=symbols, given=4, temperature=0.5, seed=seed)
    snail, hook = (
        symbols.elements[symbols.labels == symbols.names.index(name)] for name in ("snail", "hook")
    )
    row = snail.clone()
    row[5] = hook[0]
    odd = summarise(trained.judge_batch(row, threshold=0.0))
    by = f"By the pretrained model {_PRETRAINED}"
    return (
        replace(
            summarise(new), name="new-characters", title="New characters", note=f"{by}, given no elements."
        ),
        replace(
            summarise(more),
            name="more-of-the-same",
            title="More of the same",
            note=f"{by}. Left: four drawings of a symbol that it has never seen. Right: samples given these.",
            picture=class_samples_picture(more),
        ),
        replace(odd, name="odd-one-out", title="Odd one out", note=f"{by}. {odd.note}"),
    )


def _digits_results(trained: bruno.Trained, seed: int) -> tuple[Result, ...]:
    """More of the digits, few-shot accuracy and bits/dim of the model that was just trained."""
    from bruno.reporting.summaries import class_samples_picture, summarise

    samples = trained.sample_classes(split="all", seed=seed)
    pictured = replace(
        summarise(samples),
        name="samples-by-class",
        title="Digits: more of the same",
        note="Left: six examples of a digit. Right: samples given these. 2, 5 and 8 were held out.",
        picture=class_samples_picture(samples),
    )
    few_shot = summarise(trained.few_shot(trials=100, noise=False, rotations=False, seed=seed))
    return pictured, few_shot, summarise(trained.evaluate(seed=seed))


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


def _unused(folder: Path) -> Path:
    """The folder, or the first one with a number that does not exist."""
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate
