"""`bruno specks`."""

from __future__ import annotations

from typing import Annotated

import typer

from bruno.cli.options import DataOptions, ModelOptions, Temperature, check_number
from bruno.cli.output import progress_bar, show


def specks(
    model: ModelOptions,
    data: DataOptions,
    samples: Annotated[int, typer.Option(help="Number of samples, each given a random set.")] = 1000,
    given: Annotated[int, typer.Option(help="Number of images of a class to condition each sample on.")] = 5,
    temperature: Temperature = 1.0,
) -> None:
    """Measure the fraction of samples, and of the data, with an isolated dot of one or two pixels."""
    check_number("--samples", samples, 2)
    check_number("--given", given, 1)
    check_number("--temperature", temperature, 0)
    trained = model.open()
    with progress_bar("samples") as progress:
        outcome = trained.measure_specks(
            samples=samples,
            given=given,
            temperature=temperature,
            seed=model.seed,
            progress=progress,
            **data.selection,
        )
    show(trained, outcome, model.seed)
