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

FEWEST_STEPS = 100  # fewer learn little: warm-up and decay of the learning rate take a few steps each
_PLANNED_STEPS = 150  # a computer may be busier later than it was when the cost was measured
_MEMORY = 800 * 2**20  # bytes of activations; a whole process then stays below 2 GiB
_SHARES = (0.03, 0.1, 0.3)  # of the steps of a run, to try beside all of them
MOST_ELEMENTS = 1280  # of a step, where neither time nor memory is short
_LEAST_ELEMENTS = 40  # smaller steps hardly take less time


@dataclass(frozen=True)
class ElementCost:
    """What one element costs in a training step.

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
    """Elements of a step of a run of this many minutes, 0 for any time."""
    most = min(MOST_ELEMENTS, _MEMORY / max(cost.memory, 1))
    if minutes:
        most = min(most, 60 * minutes / (_PLANNED_STEPS * max(cost.seconds, 1e-9)))
    return max(_LEAST_ELEMENTS, int(most))


def with_elements(config: TrainConfig, most: int, fixed: Collection[str] = ()) -> TrainConfig:
    """The config with at most this many elements in a step: fewer sets and episodes, or else smaller ones.

    A set keeps two elements, an episode two classes with one query each, even if that is more. `fixed` are
    names of settings to keep.
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


def describe_pace(config: TrainConfig, steps: float, step_seconds: float) -> str:
    """A warning if a timed run has too few steps, with the settings that give it enough; else empty.

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
    remedies = [f"{minutes} minutes"]
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
    """The number of steps, at most `steps`, after which validation sets are most likely.

    A few sets are soon memorised. Each number is tried in a run of its own: the schedule of the
    learning rate depends on it.

    Args:
        trainer: a new trainer for a run of this many steps.
        measure: bits/dim on validation sets; the number with the lowest one is returned.
        steps: the number of steps of the recipe.
    """
    found = {}
    for number in sorted({max(1, round(share * steps)) for share in (*_SHARES, 1.0)}):
        current = trainer(number)
        current.begin()
        for _ in range(number):
            current.step()
        bits = measure(current.trained())
        found[number] = math.inf if math.isnan(bits) else bits
    return min(found, key=lambda number: found[number])
