"""`bruno fewshot`."""

from __future__ import annotations

from typing import Annotated

import typer

from bruno.cli.options import DataOptions, ModelOptions, Rotations, Views, check_number, parse_numbers
from bruno.cli.output import progress_bar, show


def fewshot(
    model: ModelOptions,
    data: DataOptions,
    ways: Annotated[
        str,
        typer.Option("--way", help="Numbers of classes; by default 5,20, or all classes if there are fewer."),
    ] = "",
    shots: Annotated[str, typer.Option("--shot", help="Numbers of support elements of each class.")] = "1,5",
    trials: Annotated[int, typer.Option(help="Number of trials, each with one query of every class.")] = 20,
    threshold: Annotated[
        float | None, typer.Option(help="Use only latent dimensions with a correlation above this.")
    ] = None,
    noise: Annotated[
        bool, typer.Option(help="Dequantise with fresh noise, as the protocol does, or with ½ instead.")
    ] = True,
    views: Views = False,
    rotations: Rotations = None,
    rotated_decoys: Annotated[
        bool,
        typer.Option(
            "--rotated-decoys", help="The other classes of an episode may be rotations of the query's."
        ),
    ] = False,
) -> None:
    """Measure n-shot k-way accuracy, compared with nearest neighbours on the same episodes."""
    way, shot = parse_numbers("--way", ways) if ways else None, parse_numbers("--shot", shots)
    for option, value, least in (
        ("--way", min(way or (2,)), 2),
        ("--shot", min(shot), 1),
        ("--trials", trials, 2),
    ):
        check_number(option, value, least)
    if threshold is not None:
        check_number("--threshold", threshold, 0, 1)
    trained = model.open()
    with progress_bar("elements") as progress:
        outcome = trained.few_shot(
            ways=way,
            shots=shot,
            trials=trials,
            threshold=threshold,
            noise=noise,
            views=views,
            rotations=rotations,
            rotated_decoys=rotated_decoys,
            seed=model.seed,
            progress=progress,
            **data.selection,
        )
    show(trained, outcome, model.seed)
