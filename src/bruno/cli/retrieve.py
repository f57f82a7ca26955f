"""`bruno retrieve search` and `bruno retrieve measure`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bruno.cli.options import DataOptions, ModelOptions, ReadingOptions, check_number, parse_numbers
from bruno.cli.output import progress_bar, show


def search(
    model: ModelOptions,
    query: Annotated[Path, typer.Option(help="A folder of examples.")],
    collection: Annotated[Path, typer.Option(help="The elements to rank: a folder of images, or a CSV.")],
    files: ReadingOptions,
    index: Annotated[
        Path | None, typer.Option(help="The file for the encoded collection; by default beside it.")
    ] = None,
    top: Annotated[int, typer.Option(help="Number of elements to show.")] = 40,
) -> None:
    """Rank a collection, encoded once, by log p(x | query) − log p(x)."""
    check_number("--top", top, 1)
    trained = model.open()
    with progress_bar("elements") as progress:
        outcome = trained.retrieve(
            query, collection, index=index, top=top, progress=progress, **files.reading
        )
    show(trained, outcome, model.seed)


def measure(
    model: ModelOptions,
    data: DataOptions,
    shots: Annotated[str, typer.Option("--shot", help="Numbers of examples in a query.")] = "1,5",
    queries: Annotated[int, typer.Option(help="Number of queries.")] = 200,
) -> None:
    """Measure how well a query finds its class, compared with distances between pixels and latents."""
    check_number("--queries", queries, 2)
    trained = model.open()
    with progress_bar("elements") as progress:
        outcome = trained.measure_retrieval(
            shots=parse_numbers("--shot", shots),
            queries=queries,
            seed=model.seed,
            progress=progress,
            **data.selection,
        )
    show(trained, outcome, model.seed)
