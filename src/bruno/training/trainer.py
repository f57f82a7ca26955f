"""Training: what is minimised, by which steps, at which rate."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Generator, Tensor, distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from bruno.config import TrainConfig
from bruno.data.augmentation import augment_sets
from bruno.data.sampling import SetSampler
from bruno.flow import set_compiled, set_network_dtype
from bruno.flow.preprocessing import Standardise, dequantise
from bruno.model import Bruno
from bruno.process import Evidence, ExchangeableProcess
from bruno.training.cuda_graph import CapturedStep
from bruno.training.schedule import (
    MovingAverage,
    augmentation_factor,
    cross_entropy_weight,
    learning_rate_factor,
    make_optimiser,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """What one training step saw.

    Attributes:
        index: counted from 1.
        loss: the weighted sum that was minimised.
        bits_per_dim: of the sets, at the mean over positions; NaN if the step had no sets.
        accuracy: share of episode queries given to their own class; NaN if the step had no episodes.
        rate: of the flow's parameters.
        gradient_norm: before clipping.
        skipped: whether the step was left out because loss or gradient were not finite.
    """

    index: int
    loss: float
    bits_per_dim: float
    accuracy: float
    rate: float
    gradient_norm: float
    skipped: bool


def episode_log_probs(
    process: ExchangeableProcess, z: Float[Tensor, "batch way n dim"], shot: int
) -> Float[Tensor, "batch way queries way"]:
    """log p(query j of class i | support of class k) for all i, j and k of each task.

    The support are the first `shot` of a class, the queries all others. This is the density of latents: the
    Jacobian of a query is the same under every class.
    """
    support, query = z[:, :, :shot], z[:, :, shot:]
    batch, way = support.shape[:2]
    classes = Evidence.of(support, validate=False).reshape(batch, 1, 1, way)
    return process.predictive(classes).log_prob(query.unsqueeze(3)).sum(-1)


class Objective(nn.Module):
    """What is minimised: bits/dim of sets, the cross-entropy of episodes, or their weighted sum.

    A module of its own so that DistributedDataParallel can wrap it. Takes elements that are dequantised. The
    weight of the cross-entropy is a tensor, so that a captured step sees it change.
    """

    def __init__(self, model: Bruno, config: TrainConfig, discriminative: Float[Tensor, ""]) -> None:
        super().__init__()
        self.model, self.config, self.discriminative = model, config, discriminative

    def forward(
        self,
        sets: Float[Tensor, "batch n *shape"] | None,
        tasks: Float[Tensor, "episodes way each *shape"] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(loss, bits/dim, accuracy); NaN for what there is no data for."""
        nothing = self.model.process.mean.new_full((), math.nan)
        loss, bits, accuracy = torch.zeros_like(nothing), nothing, nothing
        log_prob = None if sets is None else self.model.log_prob(sets, validate=False)
        if tasks is not None:
            z, log_det = self.model.encode(tasks, validate=False)
            scores = episode_log_probs(self.model.process, z, self.config.shot)
            target = torch.arange(scores.shape[1], device=z.device)[:, None].expand(scores.shape[:3])
            error = F.cross_entropy(scores.flatten(0, 2), target.flatten())
            loss = loss + self.discriminative * error
            accuracy = (scores.argmax(3) == target).float().mean()
            if self.config.shared:
                log_prob = self.model.process.step_log_prob(z, validate=False) + log_det
        if log_prob is not None:
            bits = self.model.bits_per_dim(log_prob).mean()
            loss = loss + self.config.generative * bits
        return loss, bits, accuracy


class Trainer:
    """Trains a model in place, a step at a time; all that the next step depends on can be saved and restored.

    Every random number comes from the config's seed. A step whose gradient is not finite changes no weight
    and says so. On a CPU, a restored trainer goes on to the bit. On a GPU the step is captured as one CUDA
    graph. In a process group, every process draws the same batch and works on its share of it: as many
    processes give what one would.

    Attributes:
        index: steps taken.
        scale: of all rates, lowered when a run had to go back.
        seconds: spent on training, for runs that go by the clock; kept by whoever drives the trainer.
    """

    def __init__(self, model: Bruno, sampler: SetSampler, config: TrainConfig) -> None:
        if not any(weight.requires_grad for weight in model.parameters()):
            model.requires_grad_(True)  # as a file leaves it, a model is not to be trained
        self.model, self.sampler, self.config = model, sampler, config
        self.index, self.scale, self.seconds = 0, 1.0, 0.0
        self.rank, self.processes = _rank_and_processes()
        self._check_elements()
        if config.generative and not config.shared:
            sampler.check_set_size(config.set_size, "train.set_size")
            self._check_shares("batch", config.batch)
        if config.discriminative:
            sampler.check_episodes(config.way, config.shot, config.queries, "train.")
            self._check_shares("episodes", config.episodes)
        self.device = model.process.mean.device
        self.generator = Generator(self.device).manual_seed(config.seed)
        self.optimiser = make_optimiser(model, config)
        self.average: MovingAverage | None = None
        self._parameters = list(model.parameters())
        # What changes from step to step: a captured step reads it here.
        self._factor, self._keep, self._slant, self._warp, self._discriminative = torch.zeros(
            5, device=self.device
        ).unbind()
        self._augmentation: dict[str, Any] = {
            "mirror": config.mirror,
            "shift": config.shift,
            "slant": self._slant if config.slant else None,
            "warp": self._warp if config.warp else None,
        }
        self._initialised = False
        self._run: Callable[[], Tensor] | None = None

    def begin(self) -> None:
        """What comes before the first step: initialisation from data, once, and what holds the weights."""
        if self._run is not None:
            return
        if not self._initialised:
            set_size = min(self.config.set_size, self.sampler.min_count)
            first = self._seen(self.sampler.sets(self.config.batch, set_size, self.generator))
            if self.rank == 0:
                if isinstance(self.model.preprocessing, Standardise):
                    # By all rows: what is rare in a column may be missing from a batch.
                    self.model.preprocessing.fit(self.sampler.elements.to(first.device))
                self.model.initialise(first)
            self._initialised = True
        self._run = self._step
        captured = None
        if self.device.type == "cuda":
            self._run = self._switched_step
            if self.config.graph:
                self._run = captured = CapturedStep(self._switched_step, self.generator)
        self._objective: nn.Module = Objective(self.model, self.config, self._discriminative)
        if distributed.is_initialized():
            # It hands out the weights of the first process; its gradients add up in the stream it is made in.
            with torch.cuda.stream(captured.stream) if captured else contextlib.nullcontext():
                self._objective = DistributedDataParallel(self._objective)
        self.average = MovingAverage(self.model) if self.config.ema else None

    def step(self) -> Step:
        """One step."""
        return self.advance(1)[0]

    def advance(self, count: int, progress: float | None = None) -> list[Step]:
        """Several steps, and only then a look at what they gave: a GPU does not wait in between.

        Rates, weights, random_shears and random_affines follow the share of the config's steps that are done, or the
        `progress` given.
        """
        if self._run is None:
            self.begin()
        assert self._run is not None
        rates, results = [], []
        for _ in range(count):
            self.index += 1
            done = (self.index - 0.5) / self.config.steps if progress is None else progress  # never 0
            done = min(1.0, done)
            factor = self.scale * learning_rate_factor(self.config, done)
            self._factor.fill_(factor)
            self._discriminative.fill_(cross_entropy_weight(self.config, done))
            distortion = augmentation_factor(self.config, done)
            self._slant.fill_(self.config.slant * distortion)
            self._warp.fill_(self.config.warp * distortion)
            # Early on the average keeps less: it has nothing worth keeping yet.
            self._keep.fill_(min(self.config.ema, self.index / (self.index + 9)))
            rates.append(self.config.rate * factor)
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
        """A copy of the model as it is now, with averaged weights where they are kept."""
        result = copy.deepcopy(self.model)
        if self.average is not None:
            result.load_state_dict(self.average.weights)
        return result.requires_grad_(True)

    def state(self) -> dict[str, Tensor]:
        """Weights, optimiser, average, random numbers and step count, as named tensors of their own."""
        tensors = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for i, values in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{i}.{name}": torch.as_tensor(value) for name, value in values.items()}
        if self.average is not None:
            tensors |= {f"average.{name}": tensor for name, tensor in self.average.weights.items()}
        numbers = {"index": torch.tensor(self.index), "scale": torch.tensor(self.scale, dtype=torch.double)}
        own = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return {**own, "generator": self.generator.get_state(), **numbers}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Go back to a saved state, of a trainer of the same model and config, on whatever device it was."""
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimiser": {}, "average": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            if rest:
                parts[part][rest] = tensor
        self.model.load_state_dict(parts["model"])
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in parts["optimiser"].items():
            i, _, key = name.partition(".")
            state.setdefault(int(i), {})[key] = tensor.clone()  # which the optimiser changes in place
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
        """Its random numbers where they were; those of another kind of device begin anew from here."""
        if len(state) == len(self.generator.get_state()):
            self.generator.set_state(state)
            return
        warnings.warn(
            "this run was on another kind of device: its sets are drawn anew from here on, and not as there.",
            stacklevel=3,
        )
        self.generator.manual_seed((self.config.seed + 0x9E3779B97F4A7C15 * self.index) % 2**63)

    def _step(self) -> Tensor:
        """(loss, bits/dim, accuracy, gradient norm) of one step, by operations that wait for no value."""
        self.optimiser.zero_grad(set_to_none=True)
        loss, bits, accuracy = self._objective(*self._draw())
        loss.backward()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if self.config.clip:
            nn.utils.clip_grads_with_norm_(self._parameters, self.config.clip, norm)
        for group in self.optimiser.param_groups:
            torch.mul(self._factor, group["rate"], out=group["lr"])
        self._leave_out_unless(norm.isfinite(), gradients)
        self.optimiser.step()
        if self.average is not None:
            self.average.update(self._keep)
        return torch.stack([loss.detach(), bits.detach(), accuracy, norm])

    def _leave_out_unless(self, finite: Tensor, gradients: list[Tensor]) -> None:
        """Tell the optimiser, without looking at the value, whether its next step is to change anything."""
        if self.optimiser.defaults.get("fused"):
            self.optimiser.found_inf = (~finite).float()  # type: ignore[attr-defined]  # as GradScaler does
            return
        for gradient in gradients:  # for the others, a step of no length along no gradient
            gradient.masked_fill_(~finite, 0.0)
        for group in self.optimiser.param_groups:
            group["lr"].mul_(finite)

    def _draw(self) -> tuple[Tensor | None, Tensor | None]:
        """This process's share of the sets and of the episodes' classes of a step."""
        config, generator = self.config, self.generator
        sets, tasks = None, None
        if config.generative and not config.shared:
            sets = self.sampler.sets(config.batch, config.set_size, generator)
            sets = self._share(self._seen(sets, **self._augmentation))
        if config.discriminative:
            n = config.shot + config.queries
            tasks = self.sampler.tasks(config.episodes, config.way, n, generator).flatten(0, 1)
            tasks = self._seen(tasks, **self._augmentation)
            tasks = self._share(tasks.unflatten(0, (config.episodes, config.way)))
        return sets, tasks

    def _seen(self, x: Tensor, **augmentation: Any) -> Tensor:
        """Sets as the model sees them: images augmented and in its size, integers dequantised."""
        if len(self.model.shape) == 3:
            x = augment_sets(x, self.model.shape[-2:], self.generator, **augmentation)
        return x if x.is_floating_point() else dequantise(x, self.generator)

    def _check_elements(self) -> None:
        """Raise unless the sampler's elements are the model's, or larger images of as many channels."""
        drawn, shape = tuple(self.sampler.elements.shape[1:]), self.model.shape
        augmented = ("mirror", "shift", "slant", "warp")
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

    def _check_shares(self, name: str, size: int) -> None:
        if size % self.processes:
            raise ValueError(f"`train.{name}` must be a multiple of {self.processes} processes; got {size}.")

    def _share(self, x: Tensor) -> Tensor:
        return x.chunk(self.processes)[self.rank]

    def _switched_step(self) -> Tensor:
        """A step with the model as it is trained on a GPU; to everyone else it is the plain one."""
        set_compiled(self.model, self.config.graph)
        set_network_dtype(self.model, torch.bfloat16 if self.config.precision == "bfloat16" else None)
        try:
            return self._step()
        finally:
            set_compiled(self.model, False)
            set_network_dtype(self.model, None)


def _rank_and_processes() -> tuple[int, int]:
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def broadcast(value: T) -> T:
    """What the first process says: processes that disagree on when to stop would wait for ever."""
    if not distributed.is_initialized():
        return value
    said = [value]
    distributed.broadcast_object_list(said)
    return said[0]


def train_steps(model: Bruno, sampler: SetSampler, config: TrainConfig) -> Iterator[Step]:
    """All steps of a training run, one after the other: the caller decides what to do after each.

    After the last of them the model has the averaged weights, if the config asks for an average.
    """
    if config.minutes:
        raise ValueError(
            f"`train.minutes` must be 0 for a number of steps to be taken; got {config.minutes}. "
            "`bruno train` goes by the clock."
        )
    trainer = Trainer(model, sampler, config)
    while trainer.index < config.steps:
        yield trainer.step()
    model.load_state_dict(trainer.trained().state_dict())
