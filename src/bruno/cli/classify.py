"""`bruno classify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bruno.cli.options import ModelOptions, ReadingOptions, check_number
from bruno.cli.output import show


def classify(
    model: ModelOptions,
    images: Annotated[list[Path], typer.Argument(help="What to classify: files, or folders of them.")],
    support: Annotated[
        Path,
        typer.Option(help="Examples of each class: a folder of class folders, or a CSV with a group column."),
    ],
    files: ReadingOptions,
    prior: Annotated[
        str, typer.Option(help="Prior probability of each class, in order of name, as 0.9,0.1; else equal.")
    ] = "",
    temperature: Annotated[
        float, typer.Option(help="Divides the log-probabilities; above 1 for less confident answers.")
    ] = 1.0,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit the temperature on classes that training has not seen.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(help="Calibrate on this instead of the model's data: a data set, or class folders."),
    ] = None,
) -> None:
    """Classify your own elements into your own classes, given a few examples of each."""
    check_number("--temperature", temperature, 1e-6)
    if calibrate and temperature != 1.0:
        raise ValueError(f"`--calibrate` fits the temperature; leave out --temperature {temperature}.")
    if data and not calibrate:
        raise ValueError("`--data` is for calibration; leave it out, or add --calibrate.")
    trained = model.open()
    outcome = trained.classify(
        images,
        support,
        prior=_parse_prior(prior) if prior else None,
        temperature=None if calibrate else temperature,
        data=data,
        seed=model.seed,
        **files.reading,
    )
    show(trained, outcome, model.seed)


def _parse_prior(text: str) -> list[float]:
    try:
        return [float(share) for share in text.split(",")]
    except ValueError:
        raise ValueError(f"`--prior` takes numbers, as 0.9,0.1; got {text!r}.") from None
