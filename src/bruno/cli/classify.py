"""`bruno classify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bruno.cli.options import ModelOptions, ReadingOptions, Views, check_number
from bruno.cli.output import show


def classify(
    model: ModelOptions,
    queries: Annotated[
        list[Path],
        typer.Argument(metavar="ELEMENTS", help="Images or CSV files to classify, or folders of them."),
    ],
    support: Annotated[
        Path,
        typer.Option(help="Examples of each class: a folder of class folders, or a table with groups."),
    ],
    files: ReadingOptions,
    prior: Annotated[
        str,
        typer.Option(
            help="Prior probability of each class, in order of name, such as 0.9,0.1; equal by default."
        ),
    ] = "",
    temperature: Annotated[
        float | None,
        typer.Option(help="Divides the log-probabilities; by default fitted on the calibration, or 1."),
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit the temperature on unseen classes.")
    ] = False,
    views: Views = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="With --calibrate: use this, not the model's data: a dataset, class folders, or a CSV."
        ),
    ] = None,
    none_rate: Annotated[
        float | None,
        typer.Option(
            help="Fraction of a class that may be classified as none of these; 0.01 if calibrated before."
        ),
    ] = None,
) -> None:
    """Classify your own elements into your own classes, given a few examples of each."""
    if temperature is not None:
        check_number("--temperature", temperature, 1e-6)
    trained = model.open()
    outcome = trained.classify(
        queries,
        support,
        prior=_parse_prior(prior) if prior else None,
        temperature=temperature,
        calibrate=calibrate,
        views=views,
        data=data,
        none_rate=none_rate,
        seed=model.seed,
        **files.reading,
    )
    show(trained, outcome, model.seed)


def _parse_prior(text: str) -> list[float]:
    try:
        if "_" in text or not text.isascii():
            raise ValueError
        return [float(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"`--prior` takes numbers, such as 0.9,0.1; got {text!r}.") from None
