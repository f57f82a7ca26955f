"""The model: preprocessing, flow and process as one density of sets, and what it knows given a set."""

from __future__ import annotations

import hashlib
import math
import operator
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from bruno.config import ModelConfig, check_at_least
from bruno.files import raw_bytes
from bruno.flow import Bijection, ConvRealNVP, DenseRealNVP, initialise
from bruno.flow.preprocessing import Gaussianise, Logit, Pixels, Standardise, dequantise, quantise
from bruno.process import Evidence, ExchangeableProcess, GaussianProcess, StudentTProcess
from bruno.process.checks import may_look_at_values


class Encoded(NamedTuple):
    """Latents of a batch of elements and the log-det of the way there."""

    z: Float[Tensor, "*batch dim"]
    log_det: Float[Tensor, "*batch"]


class Samples(NamedTuple):
    """Elements drawn from a posterior, in the range of the data, and how many numbers had to be put there."""

    x: Float[Tensor, "*batch_and_shape"]
    clamped: int
    levels: int

    @property
    def images(self) -> Tensor:
        """The elements as integers (uint8 for up to 256 levels)."""
        if not self.levels:
            raise ValueError("`images` needs a model of integers; this one has levels = 0. Use `x`.")
        return quantise(self.x, self.levels)


class Bruno(nn.Module):
    """An exchangeable density of sets: p(x_i | x_1..x_{i−1}) for elements of any shape, exact.

    Each element goes through the preprocessing and the flow, x -> z; every dimension of z is an exchangeable
    process; log p(x) = log p(z) + log |det ∂z/∂x|.

    Integers are dequantised with uniform noise from a `generator`; without one with ½, so that the same
    element always has the same latents and can be removed again. Train and measure bits/dim with a generator.

    Args:
        shape: of an element.
        flow: any `Bijection` from elements to vectors of as many numbers.
        process: with as many dimensions.
        preprocessing: the first step, `Logit` or `Gaussianise` for pixels, `Standardise` for real numbers.
        config: what the model was built from; without it, it can be trained and used but not saved whole.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        flow: Bijection,
        process: ExchangeableProcess,
        preprocessing: Pixels | Standardise,
        config: ModelConfig | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.dim = tuple(shape), math.prod(shape)
        if process.dim != self.dim:
            raise ValueError(
                f"`process` must have {self.dim} dimensions for {self.shape}; got {process.dim}."
            )
        if flow.output_shape(self.shape) != (self.dim,):
            raise ValueError(
                f"`flow` must give vectors of {self.dim} numbers for shape {self.shape}; got "
                f"{flow.output_shape(self.shape)}. Put Flatten({self.shape}) in a Chain before or after it."
            )
        self.preprocessing, self.flow, self.process = preprocessing, flow, process
        self.config = config

    @classmethod
    def from_config(cls, config: ModelConfig) -> Bruno:
        """Build a model, with fresh weights."""
        return cls(config.shape, _flow(config), _process(config), _preprocessing(config), config)

    @property
    def levels(self) -> int:
        """How many integers an element's numbers range over; 0 for real numbers."""
        return self.preprocessing.levels if isinstance(self.preprocessing, Pixels) else 0

    def initialise(self, x: Tensor, generator: Generator | None = None) -> None:
        """Take from elements (*batch, *shape) what depends on data; a second time changes nothing.

        That is the scale of weight-normalised layers and how the numbers of elements are distributed, if the
        preprocessing wants to know.
        """
        if self._batch_of(x).numel() < 2:
            raise ValueError(f"`x` must be at least two elements to take a scale from; got {tuple(x.shape)}.")
        if isinstance(self.preprocessing, Standardise | Gaussianise):
            self.preprocessing.fit(x.reshape(-1, *self.shape))
        initialise(self, lambda: self.encode(x, generator))

    def encode(self, x: Tensor, generator: Generator | None = None, *, validate: bool = True) -> Encoded:
        """Latents of elements (*batch, *shape); `validate` looks at their values and waits for the device."""
        batch = self._batch_of(x)
        if validate:
            self._check_values(x)
        flat = x.reshape(-1, *self.shape)
        if not x.is_floating_point():
            flat = dequantise(flat, generator)
        dtype = self.process.mean.dtype
        y, first = self.preprocessing(flat.to(torch.promote_types(flat.dtype, dtype)))
        z, second = self.flow(y.to(dtype))
        return Encoded(z.reshape(*batch, self.dim), (first.to(dtype) + second).reshape(batch))

    @torch.no_grad()
    def latents(
        self, x: Tensor, generator: Generator | None = None, *, batch_size: int = 256
    ) -> Float[Tensor, "*batch dim"]:
        """The latents of any number of elements (*batch, *shape), from any device, in the memory of a few."""
        batch, here = self._batch_of(x, anywhere=True), self.process.mean.device
        parts = x.reshape(-1, *self.shape).split(batch_size)
        z = torch.cat([self.encode(part.to(here), generator).z for part in parts])
        return z.reshape(*batch, self.dim)

    def decode(self, z: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch_and_shape"]:
        """Elements from latents, in the range of the data."""
        return self._decode(z).x

    def log_prob(
        self, x: Tensor, generator: Generator | None = None, *, validate: bool = True
    ) -> Float[Tensor, "*batch n"]:
        """log p(x_i | x_1..x_{i−1}) for sets (*batch, n, *shape), for every i at once."""
        self._check_sets(x)
        z, log_det = self.encode(x, generator, validate=validate)
        return self.process.step_log_prob(z, validate=validate) + log_det

    def bits_per_dim(self, log_prob: Tensor) -> Tensor:
        """−log₂ p for each number of an element: what the literature reports."""
        return -log_prob / (self.dim * math.log(2))

    def prior(self) -> Posterior:
        """What the model knows of a set before it sees any element."""
        return Posterior(self, Evidence.empty(self.dim, device=self.process.mean.device))

    def condition(self, x: Tensor, generator: Generator | None = None) -> Posterior:
        """What the model knows given sets (*batch, n, *shape)."""
        self._check_sets(x)
        return Posterior(self, Evidence.of(self.encode(x, generator).z))

    def fingerprint(self) -> str:
        """A short name for these very weights: latents of one model mean nothing to another."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.state_dict().items()):
            digest.update(name.encode())
            digest.update(raw_bytes(tensor))
        return digest.hexdigest()[:16]

    def is_same(self, other: Bruno) -> bool:
        """Whether another model has these very weights."""
        return other is self or other.fingerprint() == self.fingerprint()

    def _decode(self, z: Tensor) -> Samples:
        """Elements in range: a latent far in the tail may overflow on the way, and ends at an end of it."""
        y, _ = self.flow.inverse(z.reshape(-1, self.dim).to(self.process.mean.dtype))
        x, astray = self.preprocessing.clamped(self.preprocessing.inverse(y)[0])
        return Samples(x.reshape(*z.shape[:-1], *self.shape), int(astray.sum()), self.levels)

    def _check_sets(self, x: Tensor) -> None:
        if len(self._batch_of(x)) < 1:
            raise ValueError(
                f"`x` must be sets (*batch, n, *{self.shape}); got shape {tuple(x.shape)}. "
                "A set of one element is x.unsqueeze(0)."
            )

    def _batch_of(self, x: Tensor, *, anywhere: bool = False) -> torch.Size:
        """The batch axes of elements, once their shape and type are what the model takes."""
        if not isinstance(x, Tensor):
            raise TypeError(f"`x` must be a torch.Tensor; got {type(x).__name__}. Use torch.as_tensor(x).")
        axes = len(self.shape)
        if x.shape[x.ndim - axes :] != self.shape or x.ndim < axes:
            hint = ""
            if axes == 3 and x.ndim >= 3 and (*x.shape[-1:], *x.shape[-3:-1]) == self.shape:
                hint = " Channels come first: x.movedim(-1, -3)."
            raise ValueError(f"`x` must end in shape {self.shape}; got {tuple(x.shape)}.{hint}")
        if not x.numel():
            raise ValueError(
                f"`x` must hold at least one element; got shape {tuple(x.shape)}. "
                "What is known of a set before its first element is model.prior()."
            )
        if x.dtype == torch.bool or x.is_complex():
            raise TypeError(f"`x` must be integers or floating point; got {x.dtype}.")
        here = self.process.mean.device
        if x.device != here and not anywhere:
            raise ValueError(f"`x` must be on the device of the model, {here}; got {x.device}.")
        if not x.is_floating_point() and not self.levels:
            raise TypeError(f"`x` must be real numbers for this model; got {x.dtype}. Use x.double().")
        return x.shape[: x.ndim - axes]

    def _check_values(self, x: Tensor) -> None:
        """Integers must be levels, pixels within them, real numbers finite."""
        if not may_look_at_values(x):
            return
        low, high = x.min().item(), x.max().item()
        top = self.levels - (not x.is_floating_point())
        if self.levels and not (low >= 0 and high <= top):
            wrong = low if not low >= 0 else high
            raise ValueError(f"`x` must be from 0 to {top} for this model; got {wrong:g}.")
        if not math.isfinite(low) or not math.isfinite(high):
            raise ValueError(f"`x` must be finite; got {low if not math.isfinite(low) else high}.")
        if self.levels > 2 and x.is_floating_point() and high > 1 and bool((x == x.floor()).all()):
            warnings.warn(
                "`x` is taken for pixels with noise, and all of them are whole numbers. "
                "Levels themselves are integers: x.byte().",
                stacklevel=4,
            )
        if self.levels > 2 and x.is_floating_point() and 0 < high <= 1:
            warnings.warn(
                f"`x` is taken for pixels from 0 to {self.levels}, and none of them is above 1. "
                f"Shares of the full brightness are (x * {self.levels - 1}).round().byte().",
                stacklevel=4,
            )


def _preprocessing(config: ModelConfig) -> Pixels | Standardise:
    if not config.levels:
        return Standardise(config.shape)
    kind = {"logit": Logit, "gaussianise": Gaussianise}[config.pixels]
    return kind(config.levels, config.alpha)


def _flow(config: ModelConfig) -> Bijection:
    flow = config.flow
    if flow.kind == "dense":
        return DenseRealNVP(
            config.shape, couplings=flow.couplings, units=flow.units, weight_norm=flow.weight_norm
        )
    if len(config.shape) == 1:
        raise ValueError("`flow.kind` must be dense for rows of numbers, as in the preset table; got conv.")
    return ConvRealNVP(
        config.shape,
        scales=flow.scales,
        filters=flow.filters,
        blocks=flow.blocks,
        squeeze_first=flow.squeeze_first,
        dense_couplings=flow.couplings,
        dense_units=flow.units,
        weight_norm=flow.weight_norm,
    )


def _process(config: ModelConfig) -> ExchangeableProcess:
    start, dim = config.process, math.prod(config.shape)
    if start.leading > dim:
        raise ValueError(f"`process.leading` must be at most the {dim} dimensions; got {start.leading}.")
    correlation = torch.full((dim,), start.correlation)
    correlation[: start.leading] = start.leading_correlation
    if start.kind == "gaussian":
        return GaussianProcess(dim, variance=start.variance, correlation=correlation)
    return StudentTProcess(dim, dof=start.dof, variance=start.variance, correlation=correlation)


@dataclass(frozen=True, eq=False)
class Posterior:
    """A model and what it has seen of some sets: a few vectors, however large the sets.

    An immutable value: `update`, `remove` and `merge` give a new one. Batches of elements broadcast with the
    batch of sets: k sets score q elements as ``posterior.log_prob(x.unsqueeze(1))``, (q, k).
    """

    model: Bruno
    evidence: Evidence

    def log_prob(self, x: Tensor, generator: Generator | None = None) -> Float[Tensor, "*batch"]:
        """log p(x | set) of single elements (*batch, *shape)."""
        z, log_det = self.model.encode(x, generator)
        return self.model.process.log_prob(z, self.evidence) + log_det

    def score(self, x: Tensor, generator: Generator | None = None) -> Float[Tensor, "*batch"]:
        """log p(x | set) − log p(x): how much better the set explains the element than nothing does.

        The Jacobian cancels, so this is computed from latents alone.
        """
        z = self.model.encode(x, generator).z
        return self.model.process.log_prob(z, self.evidence) - self.model.process.log_prob(z)

    @torch.no_grad()
    def sample(self, n: int = 1, *, generator: Generator | None = None, temperature: float = 1.0) -> Samples:
        """n more elements of each set, (n, *batch, *shape); temperature scales their latents' deviation."""
        try:
            n = operator.index(n)
        except TypeError:
            raise TypeError(f"`n` must be a whole number; got {n!r}.") from None
        check_at_least("n", n, 1)
        check_at_least("temperature", temperature, 0)
        predictive = self.model.process.predictive(self.evidence)
        z = predictive.sample((n,), generator=generator)
        z = predictive.mean + temperature * (z - predictive.mean) if temperature != 1.0 else z
        return self.model._decode(z)

    def update(self, x: Tensor, generator: Generator | None = None) -> Posterior:
        """Having seen more: one element for each set, (*batch, *shape), or several, (*batch, n, *shape)."""
        return Posterior(self.model, self.evidence.add(self.model.encode(x, generator).z))

    def remove(self, x: Tensor) -> Posterior:
        """As if some elements had never been seen; they must have been, without a generator."""
        return Posterior(self.model, self.evidence.remove(self.model.encode(x).z))

    def detach(self) -> Posterior:
        """The same, cut off from the graph that made it."""
        return Posterior(self.model, self.evidence.detach())

    def merge(self, other: Posterior) -> Posterior:
        """Having seen what both have seen."""
        if not self.model.is_same(other.model):
            raise ValueError("`other` must be a posterior of the same model; got one of other weights.")
        return Posterior(self.model, self.evidence + other.evidence)

    def __getitem__(self, index: Any) -> Posterior:
        """Of some sets of the batch."""
        return Posterior(self.model, self.evidence[index])

    def __repr__(self) -> str:
        counts = self.evidence.count.flatten().tolist()
        seen = f"{min(counts)} to {max(counts)}" if len(set(counts)) > 1 else f"{counts[0] if counts else 0}"
        return f"Posterior(batch_shape={tuple(self.evidence.batch_shape)}, seen={seen})"
