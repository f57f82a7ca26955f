"""`bruno inspect`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from bruno.cli.opening import Opened, chosen_split, open_model
from bruno.cli.options import (
    Checkpoint,
    DataDir,
    Device,
    Invert,
    ModelName,
    OtherData,
    Seed,
    Split,
    check_number,
    choose_device,
    keep,
    progress_bar,
)
from bruno.config import to_dict
from bruno.data import load_examples
from bruno.data.sampling import SetSampler
from bruno.reporting.plots import curves, points, study_curves, toy_figure
from bruno.reporting.results import Result
from bruno.tasks.analysis import (
    correlation_and_dof,
    dimensions_by_correlation,
    log_prob_by_position,
    toy_comparison,
    toy_observations,
)
from bruno.tasks.stability import STUDY_FLOW, STUDY_TRAIN, stability_study

_LENGTH = 20


def inspect(
    run: ModelName,
    sets: Annotated[int, typer.Option(help="How many to draw for predictions by position.")] = 200,
    split: Split = None,
    data: OtherData = None,
    data_dir: DataDir = None,
    invert: Invert = None,
    checkpoint: Checkpoint = "last",
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """What a model has learnt: its correlations, degrees of freedom, and how predictions gain from a set."""
    check_number("--sets", sets, 2)
    opened = open_model(run, checkpoint, device)
    split = chosen_split(split, data)
    sampler = SetSampler(opened.examples(split, data_dir, data, invert=invert), device=opened.device)
    for result in (_correlations(opened), _degrees(opened), _toy(seed)):
        opened.keep(result, seed)
    noise = torch.Generator(opened.device).manual_seed(seed)
    opened.keep(_positions(opened, sampler, sets, noise), seed)


def study(
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("runs/study"),
    data: Annotated[str, typer.Option(help="Data sets to train on, as digits,fashion-mnist.")] = "digits",
    steps: Annotated[int, typer.Option(help="Of each of the twelve models.")] = 500,
    data_dir: DataDir = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """What upsets training: Student-t and Gaussian processes under stress, as in the paper's appendix G."""
    check_number("--steps", steps, 1)
    if out.exists() and not out.is_dir():
        raise ValueError(f"`--out` must be a folder; {out} is a file.")
    device = choose_device(device)
    everything = {name: load_examples(name, data_dir=data_dir) for name in data.split(",")}
    common = {"steps": steps, "flow": to_dict(STUDY_FLOW), "train": to_dict(STUDY_TRAIN)}
    for name, examples in everything.items():
        with progress_bar("steps") as progress:
            found = stability_study(
                examples,
                steps=steps,
                seeds=(seed,),
                device=device,
                progress=progress,
            )
        rows = tuple((c.variant, c.process, f"{c.final:.3f}", str(c.skipped)) for c in found)
        result = Result(
            f"study-{Path(name).stem}",
            f"What upsets training, on {Path(name).stem}",
            {"curves": [asdict(curve) for curve in found]},
            ("", "process", "bits/dim at the end", "steps left out"),
            rows,
            f"{steps} steps of RMSProp each. Faint: every step; bold: their running mean.",
            study_curves(found),
        )
        keep(result, out, common, seed)


def _correlations(opened: Opened) -> Result:
    found = dimensions_by_correlation(opened.model)
    above = {
        threshold: int(opened.model.process.correlated(threshold).sum()) for threshold in (0.01, 0.1, 0.5)
    }
    least = opened.model.process.correlation.min().item() / 2  # below it there is nothing to see
    by_threshold = zip(found.thresholds, found.dimensions, strict=True)
    shown = [(t, n) for t, n in by_threshold if n and t > least]
    line = ([t for t, _ in shown], [float(n) for _, n in shown])
    return Result(
        "correlations",
        "How many latent dimensions tell a set from another",
        asdict(found),
        ("correlation above", "dimensions"),
        tuple((f"{threshold}", f"{count} of {found.total}") for threshold, count in above.items()),
        picture=curves({"dimensions": line}, "correlation above", "dimensions", logarithmic="xy"),
    )


def _degrees(opened: Opened) -> Result:
    found = correlation_and_dof(opened.model)
    if found.dof is None:
        return Result("degrees-of-freedom", "Degrees of freedom", {}, note="A Gaussian process has none.")
    return Result(
        "degrees-of-freedom",
        "Correlation and degrees of freedom of every latent dimension",
        asdict(found),
        picture=points(found.correlation, found.dof, "correlation", "degrees of freedom"),
    )


def _toy(seed: int) -> Result:
    found = toy_comparison(toy_observations(generator=torch.Generator().manual_seed(seed)))
    return Result(
        "toy-comparison",
        "Student-t and Gaussian processes on data of a tenth of the variance they expect",
        asdict(found),
        note="Dots: the observations. Band: what each process expects next, ± 2 standard deviations. "
        "The Student-t process learns the spread from what it sees, the sooner the fewer its degrees of "
        "freedom; the Gaussian one cannot.",
        picture=toy_figure(found),
    )


def _positions(opened: Opened, sampler: SetSampler, sets: int, generator: torch.Generator) -> Result:
    length = min(_LENGTH, sampler.min_count)
    with progress_bar("sets") as progress:
        found = log_prob_by_position(
            opened.model, sampler, sets=sets, set_size=length, generator=generator, progress=progress
        )
    seen = list(range(length))
    return Result(
        "gain-by-position",
        "What a set adds to the prediction of its next element",
        asdict(found),
        ("seen", "log p(x | seen) − log p(x), nats"),
        tuple(
            (str(n), f"{found.gain[n]:+.2f} ± {found.gain_error[n]:.2f}")
            for n in (1, 2, 5, length - 1)
            if n < length
        ),
        f"{sets} sets; ± standard error.",
        curves(
            {"gain": (seen, found.gain)}, "elements seen before", "nats", errors={"gain": found.gain_error}
        ),
    )
