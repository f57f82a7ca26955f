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
    if out.exists() and not out.is_dir():
        raise ValueError(f"`--out` must be a folder; {out} is a file.")
    device = resolve_device(device)
    flow, train = (
        (stability.FULL_FLOW, stability.FULL_TRAIN)
        if full_size
        else (stability.STUDY_FLOW, stability.STUDY_TRAIN)
    )
    # All are loaded before the first is trained on: training takes minutes.
    names = data.split(",")
    for name in names:
        bruno.data.check_source(name)
    datasets = {name: bruno.data.load_examples(name, data_dir=data_dir) for name in names}
    for data_name, examples in datasets.items():
        name = Path(data_name).stem
        with progress_bar("steps") as progress:
            curves = stability.stability_study(
                examples,
                steps=steps,
                seeds=(seed,),
                flow=flow,
                train=train,
                device=device,
                folder=out / f"curves-{name}",
                progress=progress,
            )
        study = stability.StabilityStudy(name, steps, tuple(curves), flow, train)
        result = summarise(study)
        path = result.write(out, config=study.config, seed=seed)
        print_result(result)
        console.print(f"written: {path}", soft_wrap=True)
