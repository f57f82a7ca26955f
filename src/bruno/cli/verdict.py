"""`bruno verdict`."""

from __future__ import annotations

from typing import Annotated

import typer

from bruno.cli.options import ModelOptions
from bruno.cli.output import show


def verdict(
    model: ModelOptions,
    elements: Annotated[
        int | None, typer.Option(help="Elements to measure on; by default a fifth of the training elements.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="validation or test; by default data not used in training.")
    ] = None,
) -> None:
    """Measure quickly how good a model is: its density, and its results compared with a simple baseline."""
    trained = model.open()
    show(trained, trained.verdict(split=split, elements=elements, seed=model.seed), model.seed)
