"""`bruno study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bruno.cli.options import DataDir, Device, Seed, check_number
from bruno.cli.output import console, print_result, progress_bar


def study(
    out: Annotated[Path, typer.Option(help="The folder of the results.")] = Path("runs/study"),
    data: Annotated[str, typer.Option(help="Datasets to train on, such as digits,fashion-mnist.")] = "digits",
    steps: Annotated[int, typer.Option(help="Training steps of each of the twelve models.")] = 500,
    full_size: Annotated[
        bool,
        typer.Option(
            "--full-size", help="The paper's network and batch size instead of a small network; needs a GPU."
        ),
    ] = False,
    data_dir: DataDir = None,
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Train Student-t and Gaussian processes under stress, as in appendix G of the paper.

    Run the same command again to continue a study that was stopped.
    """
    from bruno.reporting.summaries import summarise
    from bruno.tasks import stability_studies

    check_number("--steps", steps, 1)
    with progress_bar("steps") as progress:
        studies = stability_studies(
            data.split(","),
            out,
            steps=steps,
            full_size=full_size,
            data_dir=data_dir,
            device=device,
            seed=seed,
            progress=progress,
        )
        for one in studies:
            result = summarise(one)
            path = result.write(out, config=one.config, seed=seed)
            print_result(result)
            console.print(f"written: {path}", soft_wrap=True)
