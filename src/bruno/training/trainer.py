"""Training steps, and the state of a trainer, which can be saved and restored."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from attrs import evolve
from torch import Generator, Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from bruno import limits
from bruno.config import TrainConfig
from bruno.data.augmentation import augment_sets, downsample
from bruno.data.sampling import SetSampler
from bruno.flow import set_compiled, set_dropout, set_network_dtype, set_recompute
from bruno.flow.preprocessing import ColumnScales, dequantise
from bruno.model import Bruno
from bruno.training.cuda_graph import CapturedStep
from bruno.training.distributed import rank_and_processes
from bruno.training.objective import Objective
from bruno.training.schedule import (
    MovingAverage,
    augmentation_factor,
    cross_entropy_weight,
    learning_rate_factor,
    make_optimiser,
)

_AT_A_TIME = 1024  # images that are downsampled at a time


@dataclass(frozen=True)
class Step:
    """Measurements of one training step.

    Attributes:
        index: number of the step, from 1.
        loss: weighted sum of bits/dim and cross-entropy.
        bits_per_dim: mean over sets and positions; NaN if the step had no sets.
        accuracy: fraction of episode queries classified correctly; NaN if the step had no episodes, as before
            the onset of cross-entropy if sets and episodes are drawn separately.
        rate: learning rate of the flow's parameters.
        gradient_norm: norm of the gradient before clipping.
        skipped: whether the step changed no weight because its gradient was not finite.
    """

    index: int
    loss: float
    bits_per_dim: float
    accuracy: float
    rate: float
    gradient_norm: float
    skipped: bool


class Trainer:
    """Trains a model in place, step by step; its whole state can be saved and restored.

    All random numbers come from `config.seed`. A step whose gradient is not finite changes no weight and is
    reported as skipped. On a CPU, a restored trainer continues bit for bit as if it had never stopped. On a
    GPU, the step is captured as one CUDA graph. In a process group, every process draws the same batch and
    computes its own part of it, so that the result does not depend on the number of processes.

    Attributes:
        index: number of steps taken.
        scale: factor on all learning rates, reduced when a run goes back to a checkpoint.
        seconds: training time so far, set by the caller (`Clock`).
    """

    def __init__(self, model: Bruno, sampler: SetSampler, config: TrainConfig) -> None:
        if not any(weight.requires_grad for weight in model.parameters()):
            model.requires_grad_(True)  # loaded models are frozen
        self.model, self.sampler, self.config = model, sampler, config
        self.index, self.scale, self.seconds = 0, 1.0, 0.0
        self.rank, self.processes = rank_and_processes()
        self._check_elements()
        self._check_memory()
        if config.generative and not config.shared:
            sampler.check_set_size(config.set_size, "train.set_size")
            self._check_divisible("batch", config.batch)
        if config.discriminative:
            sampler.check_episodes(config.way, config.shot, config.queries, "train.")
            self._check_divisible("episodes", config.episodes)
        self.device = model.process.mean.device
        self.generator = Generator(self.device).manual_seed(config.seed)
        self.optimiser = make_optimiser(model, config)
        self.average: MovingAverage | None = None
        self._parameters = list(model.parameters())
        # Values that change from step to step are tensors: a captured CUDA graph reads their memory.
        zeros = torch.zeros(7, device=self.device).unbind()
        self._factor, self._keep, self._discriminative, *strengths = zeros
        self._shifted, self._slant, self._warp, self._restyle = strengths
        self._augmentation: dict[str, Any] = {
            "mirror": config.mirror,
            "shift": config.shift,
            "shifted": self._shifted,
            "slant": self._slant if config.slant else None,
            "warp": self._warp if config.warp else None,
            "restyle": self._restyle if config.restyle else None,
        }
        self._initialised = False
        self._has_episodes = config.discriminative > 0  # of the current step
        self._run: Callable[[], Tensor] | None = None

    def begin(self) -> None:
        """Initialise the model from data, and build the objective and the moving average; only once."""
        if self._run is not None:
            return
        if not self._initialised:
            set_size = min(self.config.set_size, self.sampler.min_count)
            if self.rank == 0 and not self.model.is_fitted:
                self.model.fit_preprocessing(self._plain_elements(), self.sampler.labels)
            first = self._prepare(self.sampler.sets(self.config.batch, set_size, self.generator))
            if self.rank == 0:
                self.model.initialise(first)
            self._initialised = True
        captured = None
        if self.device.type == "cuda" and self.config.graph:
            captured = CapturedStep(self._step, self.generator)
        self._captured, self._run = captured, captured or self._step
        self._objective: nn.Module = Objective(self.model, self.config, self._discriminative)
        if distributed.is_initialized():
            # Copies the weights of the first process to all, and sums gradients in the current stream.
            with torch.cuda.stream(captured.stream) if captured else contextlib.nullcontext():
                self._objective = DistributedDataParallel(self._objective)
        self.average = MovingAverage(self.model) if self.config.ema else None

    @property
    def elements(self) -> int:
        """Number of elements encoded in the last step: before the onset of cross-entropy, only the sets."""
        config = self.config
        return (config if self._has_episodes else evolve(config, discriminative=0.0)).elements

    def step(self) -> Step:
        """Take one step."""
        return self.advance(1)[0]

    def advance(self, count: int, progress: float | None = None) -> list[Step]:
        """Take several steps, then read their results, so that a GPU never waits in between.

        Args:
            count: number of steps.
            progress: progress of the run, from 0 to 1, for the schedules of learning rate, cross-entropy and
                augmentation; by default, the fraction of `train.steps` taken.
        """
        if self._run is None:
            self.begin()
        assert self._run is not None
        rates, results = [], []
        for _ in range(count):
            self.index += 1
            planned = (self.index - 0.5) / self.config.steps  # the middle of the step: never 0
            rates.append(self._apply_schedules(min(1.0, planned if progress is None else progress)))
            results.append(self._run().clone())
        values = torch.stack(results)
        if self.processes > 1:
            distributed.all_reduce(values)
            values /= self.processes
        first = self.index - count + 1
        return [
            Step(first + i, loss, bits, accuracy, rates[i], norm, not math.isfinite(norm))
            for i, (loss, bits, accuracy, norm) in enumerate(values.tolist())
        ]

    def trained(self) -> Bruno:
        """A copy of the model, with the moving average of its weights if the config has one."""
        result = copy.deepcopy(self.model)
        if self.average is not None:
            result.load_state_dict(self.average.weights)
        return result.requires_grad_(True)

    def state(self) -> dict[str, Tensor]:
        """Copies of weights, optimiser state, moving average, random state and step count, by name."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for i, values in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{i}.{name}": torch.as_tensor(value) for name, value in values.items()}
        if self.average is not None:
            tensors |= {f"average.{name}": tensor for name, tensor in self.average.weights.items()}
        numbers = {"index": torch.tensor(self.index), "scale": torch.tensor(self.scale, dtype=torch.double)}
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return {**copies, "generator": self.generator.get_state(), **numbers}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore a state of a trainer of the same model and config, saved on any device."""
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimiser": {}, "average": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            if rest:
                parts[part][rest] = tensor
        self.model.load_state_dict(parts["model"])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in parts["optimiser"].items():
            i, _, key = name.partition(".")
            state.setdefault(int(i), {})[key] = tensor.clone()  # the optimiser changes it in place
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": state, "param_groups": groups})
        self.index, self.scale = int(tensors["index"]), float(tensors["scale"])
        self._restore_generator(tensors["generator"].cpu())
        self._initialised, self._run = True, None
        self.begin()
        if self.average is not None:
            for name, tensor in parts["average"].items():
                self.average.weights[name].copy_(tensor)

    def _restore_generator(self, state: Tensor) -> None:
        """Restore the random state, or reseed if it comes from another kind of device."""
        if len(state) == len(self.generator.get_state()):
            self.generator.set_state(state)
            return
        warnings.warn(
            "the checkpoint is from another kind of device: training continues with new random numbers.",
            stacklevel=3,
        )
        self.generator.manual_seed((self.config.seed + 0x9E3779B97F4A7C15 * self.index) % 2**63)

    def _apply_schedules(self, progress: float) -> float:
        """Set the values that depend on the run's progress; returns the learning rate of the flow."""
        config = self.config
        factor, distortion = learning_rate_factor(config, progress), augmentation_factor(config, progress)
        self._factor.fill_(self.scale * factor)
        weight = cross_entropy_weight(config, progress)
        self._discriminative.fill_(weight)
        self._set_has_episodes(weight > 0 or config.shared)
        self._shifted.fill_(distortion)
        self._slant.fill_(config.slant * distortion)
        self._warp.fill_(config.warp * distortion)
        self._restyle.fill_(config.restyle * distortion)
        # The average forgets faster at first, as the first weights are poor.
        self._keep.fill_(min(config.ema, self.index / (self.index + 9)))
        return config.learning_rate * self.scale * factor

    def _set_has_episodes(self, value: bool) -> None:
        """Draw episodes from now on, or none: a step without cross-entropy takes less time."""
        if value != self._has_episodes and self._captured:
            self._captured.restart()
        self._has_episodes = value

    def _step(self) -> Tensor:
        """Take a step with the options of the flow that only training uses switched on."""
        config, on_gpu = self.config, self.device.type == "cuda"
        set_compiled(self.model, on_gpu and config.graph)
        set_network_dtype(self.model, torch.bfloat16 if on_gpu and config.precision == "bfloat16" else None)
        set_recompute(self.model, config.recompute)
        set_dropout(self.model, config.dropout, self.generator, self.rank)
        try:
            return self._plain_step()
        finally:
            set_compiled(self.model, False)
            set_network_dtype(self.model, None)
            set_recompute(self.model, False)
            set_dropout(self.model, 0.0)

    def _plain_step(self) -> Tensor:
        """Take a step without waiting for the device; returns (loss, bits/dim, accuracy, gradient norm)."""
        self.optimiser.zero_grad(set_to_none=True)
        loss, bits, accuracy = self._objective(*self._draw())
        loss.backward()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if self.config.clip:
            nn.utils.clip_grads_with_norm_(self._parameters, self.config.clip, norm)
        for group in self.optimiser.param_groups:
            torch.mul(self._factor, group["rate"], out=group["lr"])
        self._skip_unless(norm.isfinite(), gradients)
        self.optimiser.step()
        if self.average is not None:
            self.average.update(self._keep)
        return torch.stack([loss.detach(), bits.detach(), accuracy, norm])

    def _skip_unless(self, finite: Tensor, gradients: list[Tensor]) -> None:
        """Make the optimiser's next step change nothing unless `finite`, without reading its value."""
        if self.optimiser.defaults.get("fused"):
            self.optimiser.found_inf = (~finite).float()  # type: ignore[attr-defined]  # as GradScaler does
            return
        for gradient in gradients:  # other optimisers get a gradient and a learning rate of 0
            gradient.masked_fill_(~finite, 0.0)
        for group in self.optimiser.param_groups:
            group["lr"].mul_(finite)

    def _draw(self) -> tuple[Tensor | None, Tensor | None]:
        """Draw the sets and episodes of a step, and return the part of this process."""
        config, generator = self.config, self.generator
        sets, episodes = None, None
        if config.generative and not config.shared:
            sets = self.sampler.sets(config.batch, config.set_size, generator)
            sets = self._part(self._prepare(sets, **self._augmentation))
        if self._has_episodes:
            n = config.shot + config.queries
            drawn = self.sampler.sets_of_different_classes(config.episodes, config.way, n, generator)
            drawn = self._prepare(drawn.flatten(0, 1), noise=config.episode_noise, **self._augmentation)
            episodes = self._part(drawn.unflatten(0, (config.episodes, config.way)))
        return sets, episodes

    def _prepare(self, x: Tensor, *, noise: str = "full", **augmentation: Any) -> Tensor:
        """Augment images and resize them to the model's size; dequantise integers and coarse columns.

        Without noise, integers are dequantised by ½, and columns are left as they are. "varied" noise of an
        element of x (sets, n, *shape) is narrower by a factor that is uniform on [0, 1).
        """
        if len(self.model.shape) == 3:
            x = augment_sets(x, self.model.shape[-2:], self.generator, **augmentation)
        plain = x if x.is_floating_point() else dequantise(x)
        if noise == "none":
            return plain
        if isinstance(self.model.preprocessing, ColumnScales):
            noisy = self.model.preprocessing.dequantise(x, self.generator)
        else:
            noisy = x if x.is_floating_point() else dequantise(x, self.generator)
        if noise == "full":
            return noisy
        width = torch.rand((*x.shape[:2], *[1] * (x.ndim - 2)), generator=self.generator, device=x.device)
        return plain + width * (noisy - plain)

    def _plain_elements(self) -> Tensor:
        """All elements, without augmentation, in the shape of the model."""
        x, shape = self.sampler.elements, self.model.shape
        if tuple(x.shape[1:]) == shape:
            return x
        return torch.cat([downsample(part, (shape[-2], shape[-1])) for part in x.split(_AT_A_TIME)])

    def _check_elements(self) -> None:
        """Raise unless the elements fit the model and the augmentation.

        They must have the model's shape, or be larger images with the same channels.
        """
        drawn, shape = tuple(self.sampler.elements.shape[1:]), self.model.shape
        augmented = ("mirror", "shift", "slant", "warp", "restyle")
        if len(shape) != 3 and any(getattr(self.config, name) for name in augmented):
            raise ValueError(
                f"{', '.join(f'`train.{name}`' for name in augmented)} are for images; "
                f"got elements {shape}. Leave them at their defaults."
            )
        images = len(drawn) == len(shape) == 3 and drawn[0] == shape[0]
        if drawn != shape and not (images and drawn[1] >= shape[1] and drawn[2] >= shape[2]):
            raise ValueError(
                f"`sampler` must have elements of the model's shape {shape}, or larger images; got {drawn}."
            )
        if len(shape) == 3 and self.config.shift >= min(shape[1:]):
            raise ValueError(
                f"`train.shift` must be below the height and width of the images, {shape[1]} × {shape[2]}; "
                f"got {self.config.shift}."
            )
        if len(shape) == 1 and bool(self.sampler.elements.isnan().any()):
            raise ValueError(
                "`sampler` must have complete rows; got missing numbers (NaN). Fit the imputer and impute "
                "them before: model.fit_preprocessing(x, labels), then model.impute(x, labels, generator)."
            )
        if self.config.restyle and drawn == shape:
            raise ValueError(
                f"`train.restyle` must be 0 for images of the model's size; got {self.config.restyle}. "
                "Train on larger images (`data.original`)."
            )

    def _check_memory(self) -> None:
        """Raise an error if the elements of a step exceed the limit of memory."""
        config, drawn = self.config, tuple(self.sampler.elements.shape[1:])
        if len(drawn) == 3:
            ratio = max(have / want for have, want in zip(drawn[1:], self.model.shape[1:], strict=True))
            margin = 2 * round(config.shift * ratio)
            drawn = (drawn[0], drawn[1] + margin, drawn[2] + margin)
        limits.MEMORY.check_argument(
            "train.batch", f"{config.elements} elements in a step", 4 * config.elements * math.prod(drawn)
        )

    def _check_divisible(self, name: str, size: int) -> None:
        if size % self.processes:
            raise ValueError(f"`train.{name}` must be a multiple of {self.processes} processes; got {size}.")

    def _part(self, x: Tensor) -> Tensor:
        return x.chunk(self.processes)[self.rank]


def train_steps(model: Bruno, sampler: SetSampler, config: TrainConfig) -> Iterator[Step]:
    """Train a model in place for `config.steps`, and yield each step.

    After the last step the model has the averaged weights, if the config has a moving average.
    """
    if config.minutes:
        raise ValueError(
            f"`train.minutes` must be 0 to train by steps; got {config.minutes}. "
            "Use `Run.train` to train by time."
        )
    trainer = Trainer(model, sampler, config)
    while trainer.index < config.steps:
        yield trainer.step()
    model.load_state_dict(trainer.trained().state_dict())
