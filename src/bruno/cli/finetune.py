"""`bruno finetune`."""

from __future__ import annotations

from typing import Annotated

import typer

import bruno
from bruno.cli.options import ModelOptions, RunOptions
from bruno.cli.output import console, progress_bar, show, show_verdict, stopped_by_signal, training_bar


def finetune(
    model: ModelOptions,
    run: RunOptions,
    data: Annotated[
        str | None, typer.Option(help="Your data: a folder, archive, npz, CSV or Parquet; sets data.name.")
    ] = None,
    way: Annotated[
        int | None, typer.Option(help="Classes in an episode; by default 20, or all if there are fewer.")
    ] = None,
    shot: Annotated[int, typer.Option(help="Support elements of each class.")] = 1,
    episodes: Annotated[
        int | None, typer.Option(help="Episodes per step; by default what fits into time and memory.")
    ] = None,
    generative: Annotated[
        float, typer.Option(help="Weight of bits/dim relative to the cross-entropy of episodes; 0 for none.")
    ] = 1.0,
    split: Annotated[
        str | None,
        typer.Option(help="The split to compare both models on; by default unseen classes."),
    ] = None,
    trials: Annotated[int, typer.Option(help="Few-shot trials in the comparison; 0 for no comparison.")] = 5,
) -> None:
    """Train a model further, on k-way n-shot episodes and on its density, into a new run folder."""
    settings = run.overrides
    settings.setdefault("train", {}).setdefault("seed", model.seed)
    if data is not None:
        settings.setdefault("data", {})["name"] = data
    with (
        stopped_by_signal("--resume"),
        progress_bar("elements of the comparison") as compare_progress,
        training_bar() as progress,
    ):
        tuned = bruno.finetune(
            model.open(),
            run.out,
            way=way,
            shot=shot,
            episodes=episodes,
            generative=generative,
            split=split,
            trials=trials,
            resume=run.resume,
            save_every=run.save_every,
            progress=progress,
            compare_progress=compare_progress,
            **settings,
        )
    console.print(f"the model is in {tuned.trained.folder / 'model.safetensors'}", soft_wrap=True)
    if tuned.comparison is not None:
        show(tuned.trained, tuned.comparison, model.seed)
    if run.verdict:
        show_verdict(tuned.trained, model.seed, tuned.unseen)
