"""Train a recipe into a run folder, or fine-tune a trained model into another."""

from __future__ import annotations

import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from bruno.config import Recipe, check_count, check_same, from_dict, load_recipe, to_dict
from bruno.data import Examples, SetSampler
from bruno.data.frames import is_frame
from bruno.devices import process_group, resolve_device
from bruno.flow.preprocessing import ColumnScales, Standardise
from bruno.model import Bruno
from bruno.recipe_data import (
    RecipeData,
    check_enough_rows,
    fitted_to,
    imputed,
    is_path,
    keep_frame,
    log_columns,
    log_scales,
    unseen_split,
    warn_of_far_numbers,
    with_absolute_path,
)
from bruno.tasks import FewShotProtocol, Progress, measure_bits_per_dim, measure_few_shot
from bruno.tasks.evaluation import BitsPerDim, default_sets_per_class
from bruno.tasks.few_shot import FewShotResult
from bruno.trained import Trained
from bruno.trained import open as open_trained
from bruno.training import LogEntry, Run, Trainer
from bruno.training.distributed import broadcast, rank_and_processes
from bruno.training.pace import MOST_ELEMENTS, affordable_elements, measure_cost, with_elements

_log = logging.getLogger(__name__)

_FINETUNING_WAY = 20
# Fraction of the original learning rate: at the full one, a new optimiser undoes the training in a few steps.
_FINETUNING_RATE = 0.1
_FINETUNING_WARMUP = 0.1
_FINETUNING_EPISODES = 16
_PROBED = 40  # elements to measure the cost of an element on
_COMPARED_SETS = 10  # of a class, at most: more would have the same elements in another order
_LONG = 7200  # seconds; a run of more steps than that is announced


class TrainingInterrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM stopped a training after its step and checkpoint; `train(resume=True)` continues it.

    Attributes:
        signal: the number of the signal.
        step: the last step, which is saved.
        folder: the run folder.
    """

    def __init__(self, signal: int, step: int, folder: Path) -> None:
        super().__init__(signal)
        self.signal, self.step, self.folder = signal, step, folder

    def __str__(self) -> str:
        return f"stopped by signal {self.signal} after step {self.step:,}, saved in {self.folder}"


def train(
    recipe: Recipe | str | Path,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    data_dir: str | Path | None = None,
    device: str = "auto",
    validation_sets: int = 64,
    save_every: float = 60.0,
    progress: Callable[[LogEntry], None] | None = None,
    **settings: Any,
) -> Trained:
    """Train a recipe into a run folder, and return the trained model.

    ``bruno.train("digits", steps=200, flow={"units": 64})``

    Args:
        recipe: a `Recipe`, the name of a preset, or the path of a TOML file.
        out: the run folder; runs/PRESET by default.
        resume: continue from the last checkpoint in `out`.
        data_dir: the folder of published datasets; $BRUNO_DATA by default.
        device: "auto", "cpu", "cuda" or "cuda:NUMBER".
        validation_sets: held-out sets to measure at each checkpoint, to keep the best; 0 for none.
        save_every: seconds between checkpoints.
        progress: called with a log entry after every step, or every few steps on a GPU.
        settings: override those of the recipe: a section as a dictionary, ``data={"name": "table.csv"}``, or
            settings of training by their names, ``minutes=5``. The name of the data may be a frame of pandas,
            polars or pyarrow, whose rows are kept in the run folder.

    Raises:
        ValueError: if a setting is invalid, or if `out` has a run and `resume` is false.
        TrainingInterrupted: after SIGINT or SIGTERM, once a checkpoint is saved.
        TrainingFailedError: if gradients stay non-finite even at smaller learning rates.
    """
    check_count("validation_sets", validation_sets or 2, 2)
    if not isinstance(recipe, Recipe | str | Path):
        raise TypeError(
            f"`recipe` must be a Recipe, a preset or the path of a TOML file; got {type(recipe).__name__}."
        )
    name = "run" if isinstance(recipe, Recipe) else Path(recipe).stem
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(str(recipe))
    settings, frame = _without_frame(settings)
    recipe, explicit = with_settings(recipe, settings)
    run = Run(out or Path("runs") / name)
    if resume:
        recipe = _with_planned_length(recipe, run, explicit)
    if frame is not None:
        recipe = keep_frame(frame, recipe, run.folder)
    device = resolve_device(device)
    data = RecipeData(recipe, data_dir)
    examples = data.training()
    if is_path(recipe.data.name):
        if frame is None:
            log_columns(data.split("all"), recipe.data, Path(recipe.data.name).name)
        check_enough_rows(examples, recipe.data)
        recipe = fitted_to(recipe, examples, explicit)
        kept = evolve(recipe.data, columns=examples.columns, format=examples.table_format)
        recipe = evolve(recipe, data=kept)
        warn_of_far_numbers(examples)
    with process_group(device):
        torch.manual_seed(recipe.train.seed)
        element = data.split(recipe.data.split) if recipe.data.original else examples
        model = Bruno.from_config(recipe.model(element.shape, element.levels)).to(device)
        examples = _learn_columns(model, examples, recipe.train.seed)
        measure = _validation(recipe, data, model, validation_sets)
        model = _run(run, recipe, model, examples, resume, measure, save_every, progress)
    return Trained(model, recipe, run.folder, data_dir=data_dir)


@dataclass(frozen=True)
class FineTuningComparison:
    """Bits/dim and few-shot accuracy before and after fine-tuning, on classes unseen in both trainings.

    Attributes:
        split: split of the data.
        trials: number of few-shot trials.
        bits: bits/dim "before" and "after".
        few_shot: accuracy "before" and "after"; empty if the split has one class, or classes of one element.
    """

    split: str
    trials: int
    bits: dict[str, BitsPerDim]
    few_shot: dict[str, tuple[FewShotResult, ...]]


@dataclass(frozen=True, eq=False)
class FineTuned:
    """A fine-tuned model, and its comparison with the original model.

    Attributes:
        trained: the fine-tuned model.
        comparison: with the original model; None if it was not asked for.
        unseen: the split that is unseen in both trainings.
    """

    trained: Trained
    comparison: FineTuningComparison | None
    unseen: str


def finetune(
    trained: Trained | str,
    out: str | Path | None = None,
    *,
    way: int | None = None,
    shot: int = 1,
    episodes: int | None = None,
    generative: float = 1.0,
    split: str | None = None,
    trials: int = 5,
    resume: bool = False,
    save_every: float = 60.0,
    progress: Callable[[LogEntry], None] | None = None,
    compare_progress: Progress | None = None,
    **settings: Any,
) -> FineTuned:
    """Fine-tune a model on k-way n-shot episodes and on its density, into a new run folder.

    Args:
        trained: the model to start from, or an argument of `bruno.open`.
        out: the run folder; the model's folder with -finetuned appended by default.
        way: classes in an episode; 20, or all if there are fewer, by default.
        shot: support elements of each class.
        episodes: episodes per step. By default, episodes also serve as sets, and their number and queries are
            those that fit into `minutes` and, on a CPU, 2 GiB of memory; `batch` or `shared` in `settings`
            switch that off.
        generative: weight of bits/dim relative to the cross-entropy of the episodes.
        split: the split to compare both models on; unseen classes by default.
        trials: number of few-shot trials in the comparison; 0 for no comparison.
        resume: continue from the last checkpoint in `out`.
        save_every: seconds between checkpoints.
        progress: called with a log entry after every step, or every few steps on a GPU.
        compare_progress: called as progress(done, total) during the comparison.
        settings: override those of the model's recipe, as in `train`; ``data={"name": "folder"}`` fine-tunes
            on user data, resized to the model's shape.
    """
    check_count("trials", trials or 2, 2)  # to estimate a standard error
    before = open_trained(trained) if isinstance(trained, str) else trained
    if before.recipe is None:
        raise ValueError(f"`trained` must have a recipe; {before.folder} has none.")
    plan: dict[str, Any] = {
        "episodes": _FINETUNING_EPISODES,
        "way": _FINETUNING_WAY,
        "shot": shot,
        "queries": 1,
        "shared": False,
    }
    plan |= {"discriminative": 1.0, "onset": 0.0, "generative": generative, "minutes": 0.0, "seed": 0}
    plan |= {"rate": _FINETUNING_RATE * before.recipe.train.rate, "warmup": _FINETUNING_WARMUP}
    started, _ = with_settings(before.recipe, plan)
    given = {name: value for name, value in (("way", way), ("episodes", episodes)) if value is not None}
    recipe, explicit = with_settings(started, {**settings, **given})
    if before.drawings is not None and "data.drawings" not in explicit:
        recipe = evolve(recipe, data=evolve(recipe.data, drawings=before.drawings))
    if recipe.data.name != before.recipe.data.name:
        recipe = _with_shape_of(before.model, recipe, explicit)
    model_settings = ("pixels", "alpha", "missing", "scales", "flow", "process")
    check_same(
        str(before.folder), *({k: to_dict(r)[k] for k in model_settings} for r in (before.recipe, recipe))
    )
    run = Run(out or before.folder.with_name(f"{before.folder.name}-finetuned"))
    if resume:
        recipe = _with_planned_length(recipe, run, explicit)
    data, levels = RecipeData(recipe, before.data_dir), before.model.levels
    unseen = unseen_split(before.recipe, recipe)
    split = split or unseen
    held_out = imputed(data.split(split).with_levels(levels), before.model) if trials else None
    if held_out is not None and held_out.shape != before.model.shape:
        raise ValueError(
            f"`data` must have elements of the model's shape {before.model.shape}; got {held_out.shape}."
        )
    generator = torch.Generator().manual_seed(recipe.train.seed)
    examples = imputed(data.training().with_levels(levels), before.model, generator)
    if recipe.data != before.recipe.data:
        before.warn_if_unfamiliar(examples.elements, remedy="`data.invert`")
    if len(examples.names) < 2:
        raise ValueError(
            f"`data` must have at least 2 classes; {recipe.data.name} has {len(examples.names)}."
        )
    recipe, model = fitted_to(recipe, examples, explicit), copy.deepcopy(before.model).requires_grad_(True)
    with process_group(str(before.device)):
        if not explicit & {"train.episodes", "train.batch", "train.shared"}:
            resized = examples if examples.shape == model.shape else data.split(recipe.data.split)
            recipe = _with_sized_steps(recipe, model, resized, explicit, run if resume else None)
        model = _run(run, recipe, model, examples, resume, None, save_every, progress)
    after = Trained(model, recipe, run.folder, data_dir=before.data_dir)
    if held_out is None:
        return FineTuned(after, None, unseen)
    comparison = _compared(before, after, held_out, split, trials, compare_progress)
    return FineTuned(after, comparison, unseen)


def _with_sized_steps(
    recipe: Recipe, model: Bruno, examples: Examples, explicit: set[str], resumed: Run | None
) -> Recipe:
    """The recipe with episodes that also serve as sets, as large as time and memory allow.

    A resumed run keeps the episodes that it began with. On a GPU, neither time nor memory is short.
    """
    train, smallest = recipe.train, int(examples.counts.min())
    if resumed is not None and resumed.checkpoints:
        planned = resumed.recipe.train
        chosen = {name: getattr(planned, name) for name in ("episodes", "way", "queries", "shared")}
        return evolve(recipe, train=evolve(train, **chosen))
    if "train.queries" not in explicit:
        train = evolve(train, queries=max(1, min(train.set_size, smallest) - train.shot))
    train = evolve(train, shared=train.generative > 0, episodes=_FINETUNING_EPISODES)
    most = MOST_ELEMENTS
    if model.device.type == "cpu":
        some = examples.elements[:_PROBED].unsqueeze(0)
        generator = torch.Generator().manual_seed(0)
        most = affordable_elements(broadcast(measure_cost(model, some, generator)), train.minutes)
    fixed = {"way"} if "train.way" in explicit else set()
    fixed |= {"queries"} if explicit & {"train.queries", "train.set_size"} else set()
    train = with_elements(train, most, fixed)
    _, processes = rank_and_processes()
    train = evolve(train, episodes=math.ceil(train.episodes / processes) * processes)
    _log.info(
        "%d elements per step: %d episode%s of %d classes, %d-shot, with %d quer%s of each class",
        train.elements,
        train.episodes,
        "s" * (train.episodes > 1),
        train.way,
        train.shot,
        train.queries,
        "ies" if train.queries > 1 else "y",
    )
    return evolve(recipe, train=train)


def with_settings(recipe: Recipe, settings: Mapping[str, Any]) -> tuple[Recipe, set[str]]:
    """A recipe with overridden settings, and the names of these settings, such as "train.steps".

    A section is a dictionary; a setting without a section is one of training. A number of steps replaces
    minutes. For user data, `data.original` of a preset does not apply: user images come in any size.
    """
    values = to_dict(recipe)
    explicit: set[str] = set()
    for name, value in settings.items():
        if isinstance(value, Mapping) and isinstance(values.get(name, {}), dict):
            values[name] = values.get(name, {}) | dict(value)
            new = {f"{name}.{key}" for key in value}
        elif name in values:
            values[name], new = value, {name}
        else:
            values["train"][name], new = value, {f"train.{name}"}
        for key in sorted(explicit & new):
            raise ValueError(f"`{key}` must be given once; got it in `train` and by its name.")
        explicit |= new
    if "train.steps" in explicit and "train.minutes" not in explicit:
        values["train"]["minutes"] = 0.0
    if "data.name" in explicit and "data.original" not in explicit and is_path(values["data"]["name"]):
        values["data"]["original"] = False
    return with_absolute_path(from_dict(Recipe, values)), explicit


def _learn_columns(model: Bruno, examples: Examples, seed: int) -> Examples:
    """Fit the scales of columns and the imputer to all rows; return the rows with missing numbers drawn."""
    if not isinstance(model.preprocessing, Standardise):
        return examples
    x, labels = examples.elements.to(model.device), examples.labels.to(model.device)
    model.preprocessing.fit(x)
    if isinstance(model.preprocessing, ColumnScales):
        log_scales(model.preprocessing.kinds, model.preprocessing.step.tolist(), examples.columns)
    if model.imputer is None:
        return examples
    model.imputer.fit(model.preprocessing(x)[0], labels)
    return imputed(examples, model, torch.Generator().manual_seed(seed))


def _without_frame(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The settings with the path of a file in place of a frame, and the frame, None if there is none."""
    section = settings.get("data")
    section = {"name": section} if is_frame(section) else section
    if not isinstance(section, Mapping) or not is_frame(section.get("name")):
        return dict(settings), None
    return {**settings, "data": {**section, "name": "frame.npz"}}, section["name"]


def _run(
    run: Run,
    recipe: Recipe,
    model: Bruno,
    examples: Examples,
    resume: bool,
    measure: Callable[[Bruno], float] | None,
    save_every: float,
    progress: Callable[[LogEntry], None] | None,
) -> Bruno:
    """Train to the end and return the model, frozen, with its moving average if it has one."""
    sampler = SetSampler(examples, rotations=recipe.data.rotations, device=model.device)
    trainer = Trainer(model, sampler, recipe.train)
    entries = run.fit(trainer, recipe, resume=resume, measure=measure, save_every=save_every)
    _watch(entries, trainer, progress)
    if run.stop_signal:
        raise TrainingInterrupted(run.stop_signal, trainer.index, run.folder)
    model = trainer.trained().requires_grad_(False)
    model.source = str(run.folder.resolve())
    return model


def _watch(
    entries: Iterator[LogEntry], trainer: Trainer, progress: Callable[[LogEntry], None] | None
) -> None:
    taken = skipped = 0
    for entry in entries:
        taken += 1
        if taken == 3 and not trainer.config.minutes and entry.seconds_left > _LONG:
            _log.info(
                "%s steps of %.2g s take about %.1f hours; minutes limit the time, steps their number",
                f"{trainer.config.steps:,}",
                entry.step_seconds,
                entry.seconds_left / 3600,
            )
        skipped += entry.skipped
        if entry.note:
            warnings.warn(entry.note, stacklevel=2)
        if progress is not None:
            progress(entry)
    if skipped:
        plural = "s" * (skipped > 1)
        warnings.warn(f"skipped {skipped} step{plural} with a non-finite gradient.", stacklevel=2)
    if not taken:
        _log.info(
            "the run is already at step %d; to train it further, increase steps or minutes", trainer.index
        )


def _with_planned_length(recipe: Recipe, run: Run, explicit: set[str]) -> Recipe:
    """The recipe with the planned steps or minutes of the run to resume, unless they are overridden."""
    if not run.checkpoints or explicit & {"train.steps", "train.minutes"}:
        return recipe
    planned = run.recipe.train
    return evolve(recipe, train=evolve(recipe.train, steps=planned.steps, minutes=planned.minutes))


def _with_shape_of(model: Bruno, recipe: Recipe, explicit: set[str]) -> Recipe:
    """The recipe with user images resized to the model, unless the user set how to read them.

    Without `slant` and `warp`, unless they are set: they blur images of the model's size, and a model that
    learns the blur has worse bits/dim, even of the images of training.
    """
    shape = model.shape
    chosen = explicit & {"data.size", "data.original", "data.colour"}
    if chosen or not is_path(recipe.data.name) or len(shape) != 3 or shape[1] != shape[2]:
        return recipe
    data = evolve(recipe.data, size=shape[1], colour=shape[0] == 3, original=False)
    without: dict[str, Any] = {name: 0.0 for name in ("slant", "warp") if f"train.{name}" not in explicit}
    return evolve(recipe, data=data, train=evolve(recipe.train, **without))


def _validation(recipe: Recipe, data: RecipeData, model: Bruno, sets: int) -> Callable[[Bruno], float] | None:
    """Bits/dim on the same held-out sets each time; None if training also uses the validation classes."""
    if not sets or recipe.data.split == "trainval":
        return None
    sampler = SetSampler(imputed(data.split("validation"), model), device=model.device)
    set_size = min(recipe.train.set_size, sampler.min_count)

    def measure(model: Bruno) -> float:
        generator = torch.Generator(model.device).manual_seed(0)
        return measure_bits_per_dim(model, sampler, sets=sets, set_size=set_size, generator=generator).mean

    return measure


def _compared(
    before: Trained,
    after: Trained,
    examples: Examples,
    split: str,
    trials: int,
    progress: Progress | None,
) -> FineTuningComparison:
    assert after.recipe is not None
    recipe, smallest = after.recipe, int(examples.counts.min())
    bits: dict[str, BitsPerDim] = {}
    few_shot: dict[str, tuple[FewShotResult, ...]] = {}
    for name, trained in (("before", before), ("after", after)):
        bits[name] = measure_bits_per_dim(
            trained.model,
            SetSampler(examples, device=trained.device),
            sets=None,
            sets_per_class=min(_COMPARED_SETS, default_sets_per_class(len(examples.names))),
            set_size=min(recipe.train.set_size, smallest),
            generator=torch.Generator(trained.device).manual_seed(recipe.train.seed),
        )
        if len(examples.names) > 1 and smallest > 1:
            protocol = FewShotProtocol(
                ways=tuple(sorted({min(way, len(examples.names)) for way in (5, 20)})),
                shots=tuple(sorted({min(shot, smallest - 1) for shot in (1, 5)})),
                trials=trials,
                rotations=recipe.data.rotations,
            )
            generator = torch.Generator().manual_seed(recipe.train.seed)
            few_shot[name] = measure_few_shot(
                trained.model, examples, protocol, generator=generator, progress=progress
            )
    return FineTuningComparison(split, trials, bits, few_shot)
