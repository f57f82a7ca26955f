"""`bruno sample`."""

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
from bruno.cli.output import print_samples, progress_bar, show


def sample(
    model: ModelOptions,
    data: DataOptions,
    given: Given = None,
    prior: Annotated[bool, typer.Option("--prior", help="Sample from the prior, given no elements.")] = False,
    samples: Annotated[int, typer.Option(help="Number of samples for each set and prefix.")] = 8,
    sets: Annotated[int | None, typer.Option(help="Sets to draw from the data; 1 by default.")] = None,
    set_size: Annotated[
        int | None, typer.Option(help="Elements of each set drawn from the data; 8 by default.")
    ] = None,
    prefixes: Annotated[
        str,
        typer.Option(help="Numbers of elements to condition on, such as 0,1,5 or 480-500; by default all."),
    ] = "",
    temperature: Temperature = 1.0,
    skip_bad: SkipBad = False,
) -> None:
    """Sample more of the same: given each prefix of a set (from the data or your own), or from the prior."""
    check_number("--samples", samples, 1, limited=False)
    for option, number in (("--sets", sets), ("--set-size", set_size)):
        check_number(option, 1 if number is None else number, 1)
    check_number("--temperature", temperature, 0)
    trained = model.open()
    with progress_bar("samples") as progress:
        written = trained.write_samples(
            given,
            prior=prior,
            samples=samples,
            sets=sets,
            set_size=set_size,
            prefixes=parse_numbers("--prefixes", prefixes) if prefixes else None,
            temperature=temperature,
            skip_bad=skip_bad,
            seed=model.seed,
            progress=progress,
            **data.selection,
        )
    show(trained, written, model.seed)
    print_samples(written.paths)
