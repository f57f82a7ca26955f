"""`bruno demo`."""

from __future__ import annotations

import sys
import webbrowser
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from bruno.cli.options import Seed, choose_device, console, few_shot_bars, say
from bruno.cli.training import fresh_model, run_to_the_end, trainer_of
from bruno.config import load_recipe, to_dict
from bruno.data import Examples, load_examples
from bruno.data.sampling import SetSampler
from bruno.model import Bruno
from bruno.reporting.images import grid
from bruno.reporting.plots import BACKGROUND, accuracy_bars, curves, picture, to_uint8
from bruno.reporting.results import Result, page, read_results
from bruno.tasks.evaluation import measure_bits_per_dim
from bruno.tasks.few_shot import FewShotProtocol, measure_few_shot, measure_pixels
from bruno.tasks.generation import draw_samples
from bruno.training.run import Run

_SHOWN = 6  # examples given, and samples drawn, of each digit
_TEMPERATURE = 0.8


def demo(
    out: Annotated[Path, typer.Option(help="The run folder; a number is appended if it exists.")] = Path(
        "runs/demo"
    ),
    steps: Annotated[int | None, typer.Option(help="Training steps; by default the preset's.")] = None,
    show: Annotated[bool, typer.Option(help="Open the page in a browser at the end.")] = sys.stdout.isatty(),
    seed: Seed = 0,
) -> None:
    """Train on handwritten digits, three of them held out, and show the result; no data set needed."""
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
    for result in (pictured, few_shot, summarise(trained.evaluate(seed=seed))):
        trained.save_result(result, seed)
        print_result(result)
    page = report(folder)
    console.print(f"\nAll results on one page: {page}", soft_wrap=True)
    if show:
        webbrowser.open(page.resolve().as_uri())


def _unused(folder: Path) -> Path:
    """The folder, or the first one with a number that does not exist."""
    candidate, number = folder, 1
    while candidate.exists():
        number += 1
        candidate = folder.with_name(f"{folder.name}-{number}")
    return candidate


def _bits(model: Bruno, learnt: Examples, unseen: Examples, device: str, seed: int) -> Result:
    rows, values, lines = [], {}, {}
    for name, examples in (("digits it learnt from", learnt), ("digits it never saw", unseen)):
        generator = torch.Generator(device).manual_seed(seed)
        sampler = SetSampler(examples, device=device)
        bits = measure_bits_per_dim(model, sampler, sets=100, set_size=20, generator=generator)
        rows.append((name, f"{bits.first:.3f}", f"{bits.by_position[-1]:.3f}", f"{bits.mean:.3f}"))
        values[name] = {"first": bits.first, "by_position": bits.by_position, "mean": bits.mean}
        lines[name] = (range(1, 21), bits.by_position)
    return Result(
        "bits",
        "Bits per pixel",
        values,
        ("", "first of a set", "after 19 others", "mean"),
        tuple(rows),
        "How many bits a pixel of 17 grey values takes; it would be 4.09 if all were equally likely.",
        line_plot(lines, "position in the set", "bits/pixel"),
    )


def _few_shot(model: Bruno, unseen: Examples, seed: int) -> Result:
    protocol = FewShotProtocol(ways=(len(unseen.names),), shots=(1, 5), trials=300)
    ours = measure_few_shot(model, unseen, protocol, generator=torch.Generator().manual_seed(seed))
    pixels = measure_pixels(unseen, protocol, generator=torch.Generator().manual_seed(seed))
    rows = tuple(
        (
            f"{a.way}-way {a.shot}-shot",
            *(f"{100 * share:.1f} %" for share in (a.accuracy, b.accuracy, 1 / a.way)),
        )
        for a, b in zip(ours, pixels, strict=True)
    )
    return Result(
        "few-shot",
        "Which digit is it? From one or five examples of digits it never saw",
        {"bruno": [a.accuracy for a in ours], "pixels": [b.accuracy for b in pixels]},
        ("", "this model", "nearest pixels", "chance"),
        rows,
        f"{ours[0].episodes} episodes each; in the picture ± standard error.",
        few_shot_bars({"this model": ours, "nearest pixels": pixels}),
    )


def _samples(model: Bruno, learnt: Examples, unseen: Examples, device: str, seed: int) -> Result:
    """For each digit, some examples and then samples given those."""
    generator = torch.Generator(device).manual_seed(seed)
    rows = []
    for examples in (learnt, unseen):
        for label in range(len(examples.names)):
            given = examples.elements[examples.labels == label][:_SHOWN].to(device)
            drawn = draw_samples(
                model.condition(given), _SHOWN, generator=generator, temperature=_TEMPERATURE
            )
            rows.append(torch.cat([given, torch.zeros_like(given[:1]), drawn.images]))
    images = to_uint8(torch.stack(rows), model.levels)
    images[:, _SHOWN] = BACKGROUND  # between what is given and what is drawn
    return Result(
        "digits",
        "More of the same",
        {"temperature": _TEMPERATURE},
        note=f"Left: {_SHOWN} examples of a digit. Right: new ones drawn given these. The last "
        f"{len(unseen.names)} rows are digits that the model never saw.",
        picture=png(grid(images.flatten(0, 1), 2 * _SHOWN + 1, padding=1, background=BACKGROUND)),
    )
