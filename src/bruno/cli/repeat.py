"""`bruno repeat`."""

from __future__ import annotations

from typing import Annotated

import typer

from bruno.cli.options import (
    DataOptions,
    Given,
    ModelOptions,
    SkipBad,
    Temperature,
    check_number,
    parse_numbers,
)
from bruno.cli.output import show


def repeat(
    model: ModelOptions,
    data: DataOptions,
    given: Given = None,
    repeats: Annotated[
        str, typer.Option(help="Repeats of an element, such as 1,5 or 480-500; 1 to 20 by default.")
    ] = "",
    samples: Annotated[int, typer.Option(help="Samples for each number of repeats.")] = 8,
    set_size: Annotated[
        int | None, typer.Option(help="Elements to draw from the data; 8 by default.")
    ] = None,
    temperature: Temperature = 1.0,
    skip_bad: SkipBad = False,
) -> None:
    """Sample given the same element several times: the more repeats, the smaller the spread."""
    check_number("--samples", samples, 1)
    check_number("--temperature", temperature, 0)
    trained = model.open()
    outcome = trained.sample_repeats(
        given,
        repeats=parse_numbers("--repeats", repeats) if repeats else None,
        samples=samples,
        set_size=set_size,
        temperature=temperature,
        skip_bad=skip_bad,
        seed=model.seed,
        **data.selection,
    )
    show(trained, outcome, model.seed, samples=True)
