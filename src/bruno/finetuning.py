"""Fine-tune a trained model on episodes into a new run folder, and compare both models."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from bruno.checks import check_choice, check_count
from bruno.config import Recipe, to_dict
from bruno.data import Examples, SetSampler
from bruno.data.datasets import SPLITS
from bruno.devices import process_group
from bruno.fit import run_training, with_planned_length, with_settings, without_frame
from bruno.model import Bruno
from bruno.recipe_data import (
    RecipeData,
    fitted_to,
    imputed,
    is_path,
    keep_frame,
    unseen_split,
    with_backdrop,
)
from bruno.settings import check_same
from bruno.tasks import FewShotProtocol, Progress, measure_bits_per_dim, measure_few_shot
from bruno.tasks.evaluation import BitsPerDim, default_sets_per_class
from bruno.tasks.few_shot import FewShotResult
from bruno.trained import Trained
from bruno.trained import open as open_trained
from bruno.training import LogEntry, Run
from bruno.training.distributed import broadcast, rank_and_processes
from bruno.training.step_cost import MOST_ELEMENTS, affordable_elements, measure_cost, with_elements

_log = logging.getLogger(__name__)

_WAY = 20
# Fraction of the original learning rate; at the full rate, a new optimiser undoes the training in few steps.
_RATE = 0.1
_WARMUP = 0.1
_EPISODES = 16
_PROBED = 40  # elements that the cost of an element is measured on
_COMPARED_SETS = 10  # of a class, at most; more would have the same elements in another order


@dataclass(frozen=True)
class FineTuningComparison:
    """Bits/dim and few-shot accuracy before and after fine-tuning, on classes that neither training used.

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
        comparison: comparison with the original model; None if not requested.
        unseen: the split that neither training used.
    """

    trained: Trained
    comparison: FineTuningComparison | None
    unseen: str


def finetune(
    trained: Trained | str | Path,
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
        episodes: episodes per step. By default, episodes also serve as sets, and their number and their
            queries are chosen to fit into `minutes` and, on a CPU, into 2 GiB of memory; `batch` or `shared`
            in `settings` switch that off.
        generative: weight of bits/dim relative to the cross-entropy of the episodes.
        split: the split to compare both models on; unseen classes by default.
        trials: number of few-shot trials in the comparison; 0 for no comparison.
        resume: continue from the last checkpoint in `out`.
        save_every: seconds between checkpoints.
        progress: called with a log entry after every step, or every few steps on a GPU.
        compare_progress: called as progress(done, total) during the comparison.
        settings: override those of the model's recipe, as in `train`; ``data="folder"`` fine-tunes on user
            data, resized to the model's shape.
    """
    check_count("trials", trials or 2, 2)  # to estimate a standard error
    if split is not None:
        check_choice("split", split, SPLITS)
    before, original = _opened(trained)
    settings, frame = without_frame(settings)
    settings |= {name: value for name, value in (("way", way), ("episodes", episodes)) if value is not None}
    plan = {"shot": shot, "generative": generative}
    recipe, explicit = _finetuning_recipe(before, original, plan, settings)
    run = Run(out or before.folder.with_name(f"{before.folder.name}-finetuned"))
    recipe = with_planned_length(recipe, run, explicit) if resume else recipe
    recipe = recipe if frame is None else keep_frame(frame, recipe, run.folder)
    data, unseen = RecipeData(recipe, before.data_dir), unseen_split(original, recipe)
    held_out = _held_out(before.model, data, split or unseen) if trials else None
    examples = _examples(before, original, recipe, data)
    recipe, model = fitted_to(recipe, examples, explicit), copy.deepcopy(before.model).requires_grad_(True)
    with process_group(str(before.device)):
        if not explicit & {"train.episodes", "train.batch", "train.shared", "train.episode_noise"}:
            recipe = _with_sized_steps(recipe, model, examples, data, explicit, run if resume else None)
        data = data.with_recipe(recipe)
        after = run_training(run, data, model, examples, resume, None, save_every, progress)
    if held_out is None:
        return FineTuned(after, None, unseen)
    comparison = _compared(before, after, held_out, split or unseen, trials, compare_progress)
    return FineTuned(after, comparison, unseen)


def _opened(trained: Trained | str | Path) -> tuple[Trained, Recipe]:
    """The model to start from, and its recipe."""
    found = open_trained(trained) if isinstance(trained, str | Path) else trained
    if found.recipe is None:
        raise ValueError(f"`trained` must have a recipe; {found.folder} has none.")
    return found, found.recipe


def _held_out(model: Bruno, data: RecipeData, split: str) -> Examples:
    """The examples to compare both models on."""
    found = imputed(data.split(split).with_levels(model.levels), model)
    if found.shape != model.shape:
        raise ValueError(f"`data` must have elements of the model's shape {model.shape}; got {found.shape}.")
    return found


def _examples(before: Trained, original: Recipe, recipe: Recipe, data: RecipeData) -> Examples:
    """The examples to fine-tune on; warns if they are unlike those of the first training."""
    generator = torch.Generator().manual_seed(recipe.train.seed)
    found = imputed(data.training().with_levels(before.model.levels), before.model, generator)
    if recipe.data != original.data:
        before.warn_if_unfamiliar(found.elements, remedy="`data.invert`")
    if len(found.names) < 2:
        raise ValueError(f"`data` must have at least 2 classes; {recipe.data.name} has {len(found.names)}.")
    return found


def _finetuning_recipe(
    before: Trained, original: Recipe, plan: dict[str, Any], settings: dict[str, Any]
) -> tuple[Recipe, set[str]]:
    """The recipe of a fine-tuning, and the names of the settings that override the original ones.

    Args:
        before: the model to start from.
        original: its recipe.
        plan: training settings; all others have the defaults of fine-tuning.
        settings: settings that override both.
    """
    defaults: dict[str, Any] = {
        "episodes": _EPISODES,
        "way": _WAY,
        "queries": 1,
        "shared": False,
        "discriminative": 1.0,
    }
    defaults |= {"onset": 0.0, "minutes": 0.0, "seed": 0, "dropout": 0.0, "episode_noise": "full"}
    defaults["learning_rate"] = _RATE * original.train.learning_rate
    started, _ = with_settings(original, {**defaults, "warmup": _WARMUP, **plan})
    recipe, explicit = with_settings(started, settings)
    if before.drawings is not None and "data.drawings" not in explicit:
        recipe = evolve(recipe, data=evolve(recipe.data, drawings=before.drawings))
    if recipe.data.name != original.data.name:
        if "data.format" not in explicit:  # that of each table is detected
            recipe = evolve(recipe, data=evolve(recipe.data, format=""))
        recipe = with_backdrop(_with_shape_of(before.model, recipe, explicit), explicit)
    model_settings = ("pixels", "alpha", "missing", "scales", "flow", "process")
    check_same(str(before.folder), *({k: to_dict(r)[k] for k in model_settings} for r in (original, recipe)))
    return recipe, explicit


def _with_sized_steps(
    recipe: Recipe,
    model: Bruno,
    examples: Examples,
    data: RecipeData,
    explicit: set[str],
    resumed: Run | None,
) -> Recipe:
    """The recipe with episodes that also serve as sets, as large as time and memory allow.

    A resumed run keeps the episodes that it began with. On a GPU, time and memory are not a limit.
    """
    examples = examples if examples.shape == model.shape else data.split(recipe.data.split)
    train, smallest = recipe.train, int(examples.counts.min())
    if resumed is not None and resumed.checkpoints:
        planned = resumed.recipe.train
        chosen = {name: getattr(planned, name) for name in ("episodes", "way", "queries", "shared")}
        return evolve(recipe, train=evolve(train, **chosen))
    if "train.queries" not in explicit:
        train = evolve(train, queries=max(1, min(train.set_size, smallest) - train.shot))
    train = evolve(train, shared=train.generative > 0, episodes=_EPISODES)
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


def _with_shape_of(model: Bruno, recipe: Recipe, explicit: set[str]) -> Recipe:
    """The recipe with user images resized to the model, unless the user set how to read them.

    `slant` and `warp` are 0 unless the user set them, as they blur images of the model's size: a model that
    learns the blur has worse bits/dim, even on the training images.
    """
    shape = model.shape
    chosen = explicit & {"data.size", "data.original", "data.colour"}
    if chosen or not is_path(recipe.data.name) or len(shape) != 3 or shape[1] != shape[2]:
        return recipe
    data = evolve(recipe.data, size=shape[1], colour=shape[0] == 3, original=False)
    without: dict[str, Any] = {name: 0.0 for name in ("slant", "warp") if f"train.{name}" not in explicit}
    return evolve(recipe, data=data, train=evolve(recipe.train, **without))


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
