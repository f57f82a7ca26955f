"""`bruno calibrate`."""

from __future__ import annotations

from typing import Annotated

import typer

from bruno.cli.options import Group, ModelOptions, ReadingOptions
from bruno.cli.output import progress_bar, show


def calibrate(
    model: ModelOptions,
    reading: ReadingOptions,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            help="Clean groups that the model was not trained on: a dataset, class folders, or a CSV; by "
            "default the unseen classes of its own data.",
        ),
    ] = None,
    group: Group = None,
) -> None:
    """Score clean held-out groups, to compute p-values later."""
    trained = model.open()
    with progress_bar("elements to calibrate on") as progress:
        outcome = trained.calibrate(data, group=group, seed=model.seed, progress=progress, **reading.reading)
    show(trained, outcome, model.seed)
