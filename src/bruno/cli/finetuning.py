"""`bruno finetune`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from bruno.cli.options import (
    Checkpoint,
    DataDir,
    Device,
    RunFolder,
    Seed,
    Settings,
    choose_device,
    console,
    held_out_examples,
    say,
)
from bruno.cli.training import (
    Minutes,
    Resume,
    SaveEvery,
    Steps,
    as_planned,
    length_overrides,
    process_group,
    rounds_of,
    run_to_the_end,
    trainer_of,
    training_examples,
)
from bruno.config import Recipe, check_same, override, to_dict
from bruno.data import Examples
from bruno.evaluation import measure_bits_per_dim
from bruno.figures import accuracy_bars
from bruno.model import Bruno
from bruno.report import Result
from bruno.runs import Run
from bruno.sequences import SetSampler
from bruno.tasks.fewshot import FewShotResult, measure_few_shot


@process_group()
def finetune(
    run: RunFolder,
    settings: Settings = None,
    data_dir: DataDir = None,
    out: Annotated[Path | None, typer.Option(help="The new run's folder; RUN-finetuned if left out.")] = None,
    way: Annotated[int, typer.Option(help="Classes in an episode.")] = 20,
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
    split: Annotated[str, typer.Option(help="Where before and after are compared.")] = "validation",
    trials: Annotated[int, typer.Option(help="Of few-shot classification, to compare; 0 for none.")] = 5,
    device: Device = "auto",
    save_every: SaveEvery = 60.0,
) -> None:
    """Train a run's model further to tell classes apart: k-way n-shot episodes, beside the density itself."""
    if trials < 0 or trials == 1:
        raise ValueError(
            f"`--trials` must be at least 2, for a spread to be told, or 0 for none; got {trials}."
        )
    before = Run(run)
    # Whatever episodes the run had, those of fine-tuning are its own, beside its sets.
    tasks = {"episodes": episodes, "way": way, "shot": shot, "queries": 1, "shared": False}
    values = to_dict(before.recipe)
    values["train"] |= {
        **tasks,
        "discriminative": 1.0,
        "generative": generative,
        "seed": seed,
        "minutes": 0.0,
    }
    recipe = override(Recipe, values, [*(settings or []), *length_overrides(steps, minutes)])
    model_settings = ("pixels", "alpha", "flow", "process")
    check_same(run.name, *({k: to_dict(r)[k] for k in model_settings} for r in (before.recipe, recipe)))
    after = Run(out or run.with_name(f"{run.name}-finetuned"))
    if resume and steps is None and minutes is None:
        recipe = as_planned(recipe, after)
    place = choose_device(device)
    model = before.model(checkpoint, place)
    examples = held_out_examples(recipe, split, data_dir) if trials else None
    trainer = trainer_of(model, recipe, training_examples(recipe, data_dir), place)
    run_to_the_end(after, recipe, trainer, None, resume=resume, save_every=save_every)
    if examples is not None and trainer.rank == 0:
        models = {"before": before.model(checkpoint, place), "after": after.model("last", place)}
        result = _compared(models, recipe, examples, split, trials, seed)
        say(result)
        path = result.write(after.folder, config=to_dict(recipe), seed=seed)
        console.print(f"written: {path}")


def _compared(
    models: dict[str, Bruno], recipe: Recipe, examples: Examples, split: str, trials: int, seed: int
) -> Result:
    """Bits/dim and few-shot accuracy of models, side by side, on classes that none was trained on."""
    columns = []
    values = {}
    accuracies: dict[str, tuple[FewShotResult, ...]] = {}
    fewest = int(examples.counts.min())
    for name, model in models.items():
        device = model.process.mean.device
        bits = measure_bits_per_dim(
            model,
            SetSampler(examples, device=device),
            sets=None,
            rounds=rounds_of(examples),
            length=min(recipe.train.length, fewest),
            generator=torch.Generator(device).manual_seed(seed),
        )
        accuracies[name] = accuracy = measure_few_shot(
            model,
            examples,
            ways=sorted({min(way, len(examples.names)) for way in (5, 20)}),
            shots=sorted({min(shot, fewest - 1) for shot in (1, 5)}),
            trials=trials,
            rotations=recipe.data.rotations,
            generator=torch.Generator().manual_seed(seed),
        )
        values[name] = {"bits_per_dim": asdict(bits), "few_shot": [asdict(result) for result in accuracy]}
        columns.append(
            {"bits/dim": f"{bits.mean:.4f} ± {bits.error:.4f}"}
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
        f"Accuracy: mean of {trials} trials ± standard deviation from trial to trial.",
        accuracy_bars(accuracies),
    )
