"""`bruno evaluate`."""

from __future__ import annotations

from typing import Annotated

import typer

from bruno.cli.options import DataOptions, ModelOptions, check_number
from bruno.cli.output import show


def evaluate(
    model: ModelOptions,
    data: DataOptions,
    sets: Annotated[
        int | None, typer.Option(help="Number of random sets; by default every class is used equally often.")
    ] = None,
    set_size: Annotated[int, typer.Option(help="Elements in a set, if every class has that many.")] = 20,
) -> None:
    """Measure bits/dim, without rotations: at the first position, at each position, and their mean."""
    check_number("--sets", 2 if sets is None else sets, 2)
    check_number("--set-size", set_size, 1)
    trained = model.open()
    show(
        trained, trained.evaluate(sets=sets, set_size=set_size, seed=model.seed, **data.selection), model.seed
    )
