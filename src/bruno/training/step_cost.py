"""The cost of a training step, and steps that fit into the time and the memory of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from bruno.config import TrainConfig, to_dict
from bruno.model import Bruno
from bruno.training.trainer import Trainer

FEWEST_STEPS = 100  # fewer steps learn little, as warm-up and decay of the learning rate also take steps
_PLANNED_STEPS = 150  # more than `FEWEST_STEPS`, as the computer may be busier than during the measurement
_MEMORY = 800 * 2**20  # bytes of activations; a whole process then stays below 2 GiB
_FRACTIONS = (0.03, 0.1, 0.3)  # of the steps of a run, which are also tried
MOST_ELEMENTS = 1280  # of a step, if there is enough time and memory
_MIN_ELEMENTS = 40  # a step with fewer elements hardly takes less time


@dataclass(frozen=True)
class ElementCost:
    """The cost of one element in a training step.

    Attributes:
        seconds: time of its forward and backward pass.
        memory: bytes of activations that are kept for the backward pass.
    """

    seconds: float
    memory: float


def measure_cost(
    model: Bruno, x: Tensor, generator: torch.Generator, now: Callable[[], float] = time.monotonic
) -> ElementCost:
    """The cost of an element of sets (batch, n, *shape), from two forward and backward passes.

    The second pass is timed: the first one allocates memory. The model has no gradients afterwards.
    """
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}  # bytes by address, as several operations may keep the same tensor

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    begun = now()
    for _ in range(2):
        begun = now()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model.log_prob(x, generator, validate=False).mean()
            memory = sum(kept.values())
        loss.backward()
        kept.clear()
    seconds = now() - begun
    model.zero_grad(set_to_none=True)
    elements = math.prod(x.shape[:2])
    return ElementCost(seconds / elements, memory / elements)


def affordable_elements(cost: ElementCost, minutes: float) -> int:
    """The number of elements in a step that a run of this many minutes can afford; 0 minutes: no limit."""
    most = min(MOST_ELEMENTS, _MEMORY / max(cost.memory, 1))
    if minutes:
        most = min(most, 60 * minutes / (_PLANNED_STEPS * max(cost.seconds, 1e-9)))
    return max(_MIN_ELEMENTS, int(most))


def with_elements(config: TrainConfig, most: int, fixed: Collection[str] = ()) -> TrainConfig:
    """The config with at most `most` elements in a step: fewer sets and episodes or, if needed, smaller ones.

    A set keeps at least two elements, and an episode at least two classes with one query each, even if these
    are more than `most` elements. `fixed` are names of settings to keep.
    """
    sets, episodes = config.generative and not config.shared, config.discriminative
    used = {"batch", "set_size"} if sets else set()
    used |= {"episodes", "queries", "way"} if episodes else set()
    for least in ({"batch": 1, "episodes": 1}, {"set_size": 2, "queries": 1}, {"way": 2}):
        share = min(1.0, most / config.elements)
        sizes = {name: int(share * getattr(config, name)) for name in least}
        if "queries" in sizes:
            sizes["queries"] = int(share * (config.shot + config.queries)) - config.shot
        names = [name for name in least if name in used and name not in fixed]
        changed = {name: min(getattr(config, name), max(least[name], sizes[name])) for name in names}
        config = evolve(config, **changed)
    return config


def few_steps_warning(config: TrainConfig, steps: float, step_seconds: float) -> str:
    """A warning if a timed run has too few steps, with settings that give it enough; otherwise empty.

    Args:
        config: settings of the run.
        steps: estimated number of steps of the whole run.
        step_seconds: time of a step.
    """
    if steps >= FEWEST_STEPS:
        return ""
    lighter = with_elements(config, max(1, int(config.elements * steps / FEWEST_STEPS)))
    changed = {name: value for name, value in to_dict(lighter).items() if value != getattr(config, name)}
    minutes = math.ceil(FEWEST_STEPS * step_seconds / 60)
    remedies = [f"{minutes} minute{'s' * (minutes > 1)}"]
    remedies += [f"smaller steps ({', '.join(_settings(changed))})"] * bool(changed)
    if lighter.elements > 1.2 * config.elements * steps / FEWEST_STEPS:
        remedies.append("a smaller flow")
    return (
        f"{config.minutes:g} minutes allow only about {max(1, round(steps))} steps of {step_seconds:.2g} s, "
        f"too few to train well. For {FEWEST_STEPS} steps, use {', or '.join(remedies)}."
    )


def _settings(changed: dict[str, Any]) -> list[str]:
    return [f"train.{name}={value}" for name, value in changed.items()]


def suitable_steps(trainer: Callable[[int], Trainer], measure: Callable[[Bruno], float], steps: int) -> int:
    """The number of training steps, at most `steps`, with the lowest bits/dim on validation sets.

    A few sets are soon memorised, so fewer steps may be better. Each number is tried in a separate run, as
    the schedule of the learning rate depends on it.

    Args:
        trainer: returns a new trainer for a run of a given number of steps.
        measure: returns the bits/dim of a model on validation sets.
        steps: the number of steps of the recipe.
    """
    found = {}
    for number in sorted({max(1, round(fraction * steps)) for fraction in (*_FRACTIONS, 1.0)}):
        current = trainer(number)
        current.begin()
        for _ in range(number):
            current.step()
        bits = measure(current.trained())
        found[number] = math.inf if math.isnan(bits) else bits
    return min(found, key=lambda number: found[number])
