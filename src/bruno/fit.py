"""Train a recipe into a run folder."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from bruno.arrays import is_frame
from bruno.checks import check_count
from bruno.config import Recipe, from_dict, load_recipe, to_dict
from bruno.data import Examples, SetSampler
from bruno.data.quality import (
    check_enough_rows,
    has_few_sets,
    log_columns,
    log_lost_colour,
    log_scales,
    warn_of_far_numbers,
    warn_of_misleading_columns,
    warn_of_one_class,
)
from bruno.devices import process_group, resolve_device
from bruno.flow.preprocessing import ColumnScales
from bruno.model import Bruno
from bruno.provenance import provenance
from bruno.recipe_data import (
    RecipeData,
    fitted_to,
    imputed,
    is_path,
    keep_frame,
    learn_columns,
    with_absolute_path,
    with_backdrop,
)
from bruno.tasks import Familiarity, measure_bits_per_dim
from bruno.trained import Trained
from bruno.training import LogEntry, Run, Trainer
from bruno.training.step_cost import suitable_steps

_log = logging.getLogger(__name__)

_LONG = 7200  # seconds; the duration of a longer run is logged


class TrainingInterrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM stopped training after a step and a checkpoint; `train(resume=True)` continues it.

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
        validation_sets: number of held-out sets that choose the best checkpoint; 0 for none.
        save_every: seconds between checkpoints.
        progress: called with a log entry after every step, or every few steps on a GPU.
        settings: override those of the recipe: a section as a dictionary, ``data={"name": "table.csv"}``, or
            training settings by their names, ``minutes=5``. ``data="table.csv"`` is short for the name of
            the data, which may be a frame of pandas, polars or pyarrow; its rows are kept in the run folder.

    Raises:
        ValueError: if a setting is invalid, or if `out` has a run and `resume` is false.
        TrainingInterrupted: after SIGINT or SIGTERM, once a checkpoint is saved.
        TrainingFailedError: if gradients stay non-finite even at smaller learning rates.
    """
    check_count("validation_sets", validation_sets or 2, 2)
    name, recipe = _named_recipe(recipe)
    settings, frame = without_frame(settings)
    recipe, explicit = with_settings(recipe, settings)
    run = Run(out or Path("runs") / name)
    if resume:
        recipe = with_planned_length(recipe, run, explicit)
    recipe = recipe if frame is None else keep_frame(frame, recipe, run.folder)
    recipe = with_backdrop(recipe, explicit)
    device = resolve_device(device)
    data = RecipeData(recipe, data_dir)
    examples = data.training()
    if is_path(recipe.data.name):
        if frame is None:
            _log_user_data(recipe, data, examples, explicit)
        recipe = _fitted_to_user_data(recipe, examples, explicit)
    with process_group(device):
        as_modelled = data.split(recipe.data.split) if recipe.data.original else examples
        config = recipe.model(as_modelled.shape, as_modelled.levels)
        model = Bruno.from_config(config, seed=recipe.train.seed).to(device)
        examples = _learn_columns(model, examples, recipe.train.seed)
        measure = _validation(recipe, data, model, validation_sets)
        if measure and not resume and not explicit & {"train.steps", "train.minutes"}:
            recipe = _with_suitable_steps(recipe, data, model, examples, measure)
        data = data.with_recipe(recipe)
        return run_training(run, data, model, examples, resume, measure, save_every, progress)


def _named_recipe(recipe: Recipe | str | Path) -> tuple[str, Recipe]:
    """The name of a recipe, and the recipe itself."""
    if isinstance(recipe, Recipe):
        return "run", recipe
    if not isinstance(recipe, str | Path):
        raise TypeError(
            f"`recipe` must be a Recipe, a preset or the path of a TOML file; got {type(recipe).__name__}."
        )
    return Path(recipe).stem, load_recipe(recipe)


def _log_user_data(recipe: Recipe, data: RecipeData, examples: Examples, explicit: set[str]) -> None:
    """Log how user files were read: their columns, and whether colour was dropped."""
    log_columns(data.split("all"), recipe.data, Path(recipe.data.name).name)
    if "data.colour" not in explicit:
        log_lost_colour(examples, recipe.data)


def _fitted_to_user_data(recipe: Recipe, examples: Examples, explicit: set[str]) -> Recipe:
    """The recipe with settings that suit the data, and with the columns and format that were found."""
    check_enough_rows(examples, recipe.data)
    warn_of_one_class(examples)
    recipe = fitted_to(recipe, examples, explicit)
    warn_of_misleading_columns(examples)
    kept = evolve(recipe.data, columns=examples.columns, format=examples.table_format)
    return evolve(recipe, data=kept)


def with_settings(recipe: Recipe, settings: Mapping[str, Any]) -> tuple[Recipe, set[str]]:
    """A recipe with overridden settings, and the names of these settings, such as "train.steps".

    A section is a dictionary; a setting without a section belongs to `train`. A number of steps replaces
    minutes. For user data, `data.original` of a preset does not apply, as user images come in any size.
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
    """`learn_columns`, with a log of the scales that were chosen, and warnings about extreme values."""
    found, scales = learn_columns(model, examples, seed), model.preprocessing
    if isinstance(scales, ColumnScales):
        log_scales(scales.kinds, scales.step.tolist(), examples.columns)
    if not model.kind.is_images:
        kinds = scales.kinds if isinstance(scales, ColumnScales) else ["linear"] * model.dim
        warn_of_far_numbers(examples, kinds)
    return found


def without_frame(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The settings, with a file name in place of a frame, and the frame; None if there is no frame.

    A path or a frame in place of the section `data` is its name.
    """
    if "data" not in settings:
        return dict(settings), None
    section = settings["data"]
    section = section if isinstance(section, Mapping) else {"name": section}
    name, frame = section.get("name", ""), None
    if is_frame(name):
        name, frame = "frame.npz", name
    elif not isinstance(name, str | Path):
        raise TypeError(f"`data` must be a known dataset, a path or a frame; got {type(name).__name__}.")
    named = {"name": str(name)} if "name" in section else {}
    return {**settings, "data": {**section, **named}}, frame


def run_training(
    run: Run,
    data: RecipeData,
    model: Bruno,
    examples: Examples,
    resume: bool,
    measure: Callable[[Bruno], float] | None,
    save_every: float,
    progress: Callable[[LogEntry], None] | None,
) -> Trained:
    """Train to the end and return the model, frozen, with its moving average if it has one, and its data."""
    recipe = data.recipe
    sampler = SetSampler(examples, rotations=recipe.data.rotations, device=model.device)
    trainer = Trainer(model, sampler, recipe.train)
    describe = partial(_described, data=data) if model.kind.is_images else None
    entries = run.fit(
        trainer, recipe, resume=resume, measure=measure, describe=describe, save_every=save_every
    )
    _watch(entries, trainer, progress)
    if run.stop_signal:
        raise TrainingInterrupted(run.stop_signal, trainer.index, run.folder)
    model = trainer.trained().requires_grad_(False)
    model.source = str(run.folder.resolve())
    about = run.notes | {"recipe": to_dict(recipe), "provenance": provenance(recipe.train.seed)}
    return Trained(model, recipe, run.folder, data_dir=data.data_dir, data=data, about=about)


def _described(model: Bruno, data: RecipeData) -> dict[str, Any]:
    """How likely images of held-out classes are, with which `Familiarity` compares other images."""
    held_out = data.held_out()
    if held_out is None:
        return {}
    return {"familiarity": Familiarity(model).measure(held_out.with_levels(model.levels).elements)}


def _watch(
    entries: Iterator[LogEntry], trainer: Trainer, progress: Callable[[LogEntry], None] | None
) -> None:
    taken = skipped = 0
    for entry in entries:
        taken += 1
        if taken == 3 and not trainer.config.minutes and entry.seconds_left > _LONG:
            _log.info(
                "%s steps of %.2g s take about %.1f hours; set minutes or steps for a shorter run",
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
            "the run has already completed step %d; to train it further, increase steps or minutes",
            trainer.index,
        )


def with_planned_length(recipe: Recipe, run: Run, explicit: set[str]) -> Recipe:
    """The recipe with the planned steps or minutes of the run to resume, unless they are overridden."""
    if not run.checkpoints or explicit & {"train.steps", "train.minutes"}:
        return recipe
    planned = run.recipe.train
    return evolve(recipe, train=evolve(recipe.train, steps=planned.steps, minutes=planned.minutes))


def _with_suitable_steps(
    recipe: Recipe, data: RecipeData, model: Bruno, examples: Examples, measure: Callable[[Bruno], float]
) -> Recipe:
    """The recipe with a number of steps that suits few sets, chosen on validation sets.

    The recipe is unchanged if there are many sets, or if validation sets would share classes with training.
    """
    if not has_few_sets(examples) or set(data.split("validation").names) & set(examples.names):
        return recipe
    sampler, steps = SetSampler(examples, device=model.device), recipe.train.steps

    def trainer(number: int) -> Trainer:
        return Trainer(copy.deepcopy(model), sampler, evolve(recipe.train, steps=number))

    found = suitable_steps(trainer, measure, steps)
    _log.info(
        "Only %d sets: training for %d of %d steps, chosen by bits/dim on validation sets",
        len(examples.names),
        found,
        steps,
    )
    return evolve(recipe, train=evolve(recipe.train, steps=found))


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
