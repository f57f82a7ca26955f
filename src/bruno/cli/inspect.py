"""`bruno inspect`."""

from __future__ import annotations

from typing import Annotated

import typer

from bruno.cli.options import DataOptions, ModelOptions, check_number
from bruno.cli.output import progress_bar, show_all


def inspect(
    model: ModelOptions,
    data: DataOptions,
    sets: Annotated[int, typer.Option(help="Sets to draw for predictions by position.")] = 200,
) -> None:
    """Show the learnt parameters and their effect: correlations, degrees of freedom and conditioning gain."""
    check_number("--sets", sets, 2)
    trained = model.open()
    with progress_bar("sets") as progress:
        found = trained.inspect(sets=sets, seed=model.seed, progress=progress, **data.selection)
    show_all(trained, [found.correlations, found.dof, found.toy, found.positions], model.seed)
