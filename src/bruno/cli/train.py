"""`bruno train`."""

from __future__ import annotations

from typing import Annotated

import typer

import bruno
from bruno.cli.options import DataDir, Device, RunOptions, SkipBad, check_number, check_seed
from bruno.cli.output import console, show_verdict, stopped_by_signal, training_bar


def train(
    preset: Annotated[
        str, typer.Argument(metavar="PRESET", help="A preset (see `bruno presets`) or a TOML file.")
    ],
    run: RunOptions,
    data: Annotated[
        str | None, typer.Option(help="Your data: a folder, archive, npz, CSV or Parquet; sets data.name.")
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="Your table: the column that names the set of a row; sets data.group.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="The seed of all random numbers; by default the recipe's.", callback=check_seed),
    ] = None,
    validate: Annotated[
        int, typer.Option(help="Validation sets at every checkpoint, to keep the best one; 0 for none.")
    ] = 64,
    skip_bad: SkipBad = False,
    data_dir: DataDir = None,
    device: Device = "auto",
) -> None:
    """Train a preset, or your own recipe, into a run folder from which it can be resumed."""
    check_number("--validate", validate)
    if validate < 0 or validate == 1:
        raise ValueError(f"`--validate` must be 0, or at least 2; got {validate}.")
    settings = run.overrides
    if seed is not None:
        settings.setdefault("train", {})["seed"] = seed
    given = {"name": data, "group": group, "skip_bad": skip_bad or None}
    settings.setdefault("data", {}).update({key: value for key, value in given.items() if value is not None})
    with stopped_by_signal("--resume"), training_bar() as progress:
        trained = bruno.train(
            preset,
            run.out,
            resume=run.resume,
            data_dir=data_dir,
            device=device,
            validation_sets=validate,
            save_every=run.save_every,
            progress=progress,
            **settings,
        )
    console.print(f"the model is in {trained.folder / 'model.safetensors'}", soft_wrap=True)
    if run.verdict:
        show_verdict(trained, seed or 0)
