"""`bruno finetune`."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from bruno.cli.opening import Opened, held_out_examples, is_own, open_model, unseen_by
from bruno.cli.options import (
    Checkpoint,
    DataDir,
    Device,
    ModelName,
    Seed,
    Settings,
    console,
    keep,
    progress_bar,
)
from bruno.cli.training import (
    Minutes,
    Resume,
    SaveEvery,
    Steps,
    as_far_as_there_is,
    as_planned,
    bits_with_error,
    length_overrides,
    located,
    process_group,
    rounds_of,
    run_to_the_end,
    trainer_of,
    training_examples,
)
from bruno.config import Recipe, check_same, named, override, to_dict
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.model import Bruno
from bruno.reporting.plots import accuracy_bars
from bruno.reporting.results import Result
from bruno.tasks.evaluation import measure_bits_per_dim
from bruno.tasks.few_shot import FewShotResult, measure_few_shot
from bruno.training.run import Run

_WAY = 20
_GENTLER = 0.1  # times the rate of the training before
_WARMUP = 0.1  # of the fine-tuning


@process_group()
def finetune(
    run: ModelName,
    settings: Settings = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path | None, typer.Option(help="The new run's folder; -finetuned beside RUN's if left out.")
    ] = None,
    way: Annotated[
        int | None, typer.Option(help="Classes in an episode; 20, or all if there are fewer, if left out.")
    ] = None,
    shot: Annotated[int, typer.Option(help="Examples of each class in an episode.")] = 1,
    episodes: Annotated[int, typer.Option(help="Episodes in a step.")] = 16,
    generative: Annotated[
        float, typer.Option(help="Weight of bits/dim beside the episodes' cross-entropy; 0 for none.")
    ] = 1.0,
    steps: Steps = None,
    minutes: Minutes = None,
    seed: Seed = 0,
    resume: Resume = False,
    checkpoint: Checkpoint = "last",
    split: Annotated[
        str | None,
        typer.Option(help="Where before and after are compared; what training has not seen if left out."),
    ] = None,
    trials: Annotated[int, typer.Option(help="Of few-shot classification, to compare; 0 for none.")] = 5,
    device: Device = "auto",
    save_every: SaveEvery = 60.0,
) -> None:
    """Train a model further to tell classes apart: k-way n-shot episodes, beside the density itself."""
    if trials < 0 or trials == 1:
        raise ValueError(
            f"`--trials` must be at least 2, for a spread to be told, or 0 for none; got {trials}."
        )
    before = open_model(run, checkpoint, device)
    if before.recipe is None:
        raise ValueError(f"`run` must say what it was trained on, and how; {run} does not.")
    values = to_dict(before.recipe)
    # Whatever episodes the run had, those of fine-tuning are its own, beside its sets.
    values["train"] |= {"episodes": episodes, "way": _WAY, "shot": shot, "queries": 1, "shared": False}
    values["train"] |= {"discriminative": 1.0, "onset": 0.0, "generative": generative}
    values["train"] |= {"seed": seed, "minutes": 0.0}
    # At the full rate of its training, a few steps of a new optimiser undo what a model has learnt.
    values["train"] |= {"rate": _GENTLER * before.recipe.train.rate, "warmup": _WARMUP}
    overrides = [*(settings or []), *length_overrides(steps, minutes, settings or [])]
    overrides += [] if way is None else [f"train.way={way}"]
    recipe = located(override(Recipe, values, overrides))
    if recipe.data.name != before.recipe.data.name:
        recipe = _in_shape(recipe, before, overrides)
    model_settings = ("pixels", "alpha", "flow", "process")
    check_same(run, *({k: to_dict(r)[k] for k in model_settings} for r in (before.recipe, recipe)))
    after = Run(out or before.folder.with_name(f"{before.folder.name}-finetuned"))
    if resume:
        recipe = as_planned(recipe, after, overrides)
    split = split or unseen_by(before.recipe, recipe)
    device, levels = str(before.device), before.model.levels
    examples = held_out_examples(recipe, split, data_dir).with_levels(levels) if trials else None
    if examples is not None and examples.shape != before.model.shape:
        raise ValueError(
            f"`data` must be elements of the model's shape {before.model.shape}; got {examples.shape}."
        )
    learnt = training_examples(recipe, data_dir).with_levels(levels)
    before.warn_if_unlike(learnt.elements, invert="--set data.invert=…")
    if len(learnt.names) < 2:
        raise ValueError(
            f"`data` must have two classes or more to tell apart; {recipe.data.name} has {len(learnt.names)}."
        )
    recipe = as_far_as_there_is(recipe, learnt, overrides)
    trainer = trainer_of(deepcopy(before.model), recipe, learnt, device)
    run_to_the_end(after, recipe, trainer, None, resume=resume, save_every=save_every)
    if examples is not None and trainer.rank == 0:
        console.print(f"before and after it, on {split} (--trials {trials}; 0 for none):")
        models = {"before": before.model, "after": after.model("last", device)}
        result = _compared(models, recipe, examples, split, trials, seed)
        keep(result, after.folder, to_dict(recipe), seed)


def _in_shape(recipe: Recipe, before: Opened, overrides: Sequence[str]) -> Recipe:
    """With images of one's own in the size of the model, unless the user says how to read them."""
    shape = before.model.shape
    told = named(overrides, "data.size", "data.original", "data.colour")
    if told or not is_own(recipe.data.name) or len(shape) != 3 or shape[1] != shape[2]:
        return recipe
    data = replace(recipe.data, size=shape[1], colour=shape[0] == 3, original=False)
    return replace(recipe, data=data)


def _compared(
    models: dict[str, Bruno], recipe: Recipe, examples: Examples, split: str, trials: int, seed: int
) -> Result:
    """Bits/dim and few-shot accuracy of models, side by side, on classes that none was trained on.

    There is no accuracy to tell of a single class, nor of classes of a single element.
    """
    columns = []
    values = {}
    accuracies: dict[str, tuple[FewShotResult, ...]] = {}
    min_count = int(examples.counts.min())
    for name, model in models.items():
        device = model.process.mean.device
        bits = measure_bits_per_dim(
            model,
            SetSampler(examples, device=device),
            sets=None,
            rounds=rounds_of(examples),
            set_size=min(recipe.train.set_size, min_count),
            generator=torch.Generator(device).manual_seed(seed),
        )
        accuracy: tuple[FewShotResult, ...] = ()
        if len(examples.names) > 1 and min_count > 1:
            with progress_bar(f"elements, {name}") as progress:
                accuracies[name] = accuracy = measure_few_shot(
                    model,
                    examples,
                    ways=sorted({min(way, len(examples.names)) for way in (5, 20)}),
                    shots=sorted({min(shot, min_count - 1) for shot in (1, 5)}),
                    trials=trials,
                    rotations=recipe.data.rotations,
                    generator=torch.Generator().manual_seed(seed),
                    progress=progress,
                )
        values[name] = {"bits_per_dim": asdict(bits), "few_shot": [asdict(result) for result in accuracy]}
        columns.append(
            {"bits/dim": bits_with_error(bits)}
            | {
                f"{r.way}-way {r.shot}-shot, %": f"{100 * r.accuracy:.1f} ± {100 * r.spread:.1f}"
                for r in accuracy
            }
        )
    rows = tuple((what, *(column[what] for column in columns)) for what in columns[0])
    return Result(
        f"finetuning-{split}",
        f"What fine-tuning changed, on {split}",
        values,
        ("", *models),
        rows,
        f"Bits/dim ± standard error. Accuracy: mean of {trials} trials ± standard deviation from trial to "
        "trial, in the picture ± standard error."
        if accuracies
        else "Too few classes are held out, or elements of each, to tell accuracy.",
        accuracy_bars(accuracies) if accuracies else b"",
    )
