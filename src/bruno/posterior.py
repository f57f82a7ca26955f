"""The posterior of a model given sets, and samples from it."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from bruno import known_models
from bruno.arrays import ArrayLike, NumpyResult, to_numpy
from bruno.checks import check_at_least, check_count
from bruno.flow.preprocessing import quantise
from bruno.process import Evidence
from bruno.process.checks import check_type
from bruno.text import arguments_renamed

if TYPE_CHECKING:
    from bruno.model import Bruno


@dataclass(frozen=True, eq=False)
class Samples(NumpyResult):
    """Elements drawn from a posterior.

    Attributes:
        x: the elements: dequantised pixels within their range, or finite numbers.
        clamped: number of values that were clamped to the range of the pixels, or that were not finite and
            were replaced by the middle of their column.
        levels: number of values that a pixel can take; 0 for rows.
        columns: names of the columns of rows, if known.
    """

    x: Float[Tensor, "*batch_and_shape"]
    clamped: int
    levels: int
    columns: tuple[str, ...] = ()

    @property
    def is_images(self) -> bool:
        """Whether the elements are images."""
        return self.levels > 0

    @property
    def images(self) -> Tensor:
        """The elements as integers (uint8 for up to 256 levels)."""
        if not self.is_images:
            raise ValueError("`images` needs a model of images; this one has levels = 0. Use `x`.")
        return quantise(self.x, self.levels)

    def numpy(self) -> dict[str, Any]:
        """The fields by name, tensors as numpy arrays; for images also the integers, as `images`."""
        return super().numpy() | ({"images": to_numpy(self.images)} if self.is_images else {})


@dataclass(frozen=True, eq=False)
class Posterior:
    """A model with the evidence of one set or a batch of sets: a few vectors, however large the sets.

    A posterior is immutable: `update`, `remove` and `merge` return a new one. Batches of elements broadcast
    with the batch of sets: k sets score q elements by ``posterior.log_prob(x.unsqueeze(1))``, (q, k).

    A batch has a length, and can be indexed and iterated over; `stack` makes a batch. A pickled posterior
    names its model by its fingerprint, and does not carry the weights. When it is unpickled, it uses the
    model with this fingerprint in the process, or opens the file that the model was read from or saved to.
    """

    model: Bruno
    evidence: Evidence

    def log_prob(self, x: ArrayLike, generator: Generator | None = None) -> Float[Tensor, "*batch"]:
        """log p(x | set) of single elements (*batch, *shape)."""
        z, log_det = self.model.encode(self.impute(x), generator)
        return self.model.process.log_prob(z, self.evidence) + log_det

    def score(self, x: ArrayLike, generator: Generator | None = None) -> Float[Tensor, "*batch"]:
        """log p(x | set) − log p(x): the score of single elements, in nats.

        The Jacobian cancels, so it is computed from latents alone.
        """
        z = self.model.encode(self.impute(x), generator).z
        return self.model.process.log_prob(z, self.evidence) - self.model.process.log_prob(z)

    def impute(self, x: ArrayLike, sets: Int[Tensor, " n"] | None = None) -> Tensor:
        """Elements (*batch, *shape) with their missing numbers, NaN, replaced by means given the set.

        The centre of the set is the element at the mean of the predictive.

        Args:
            x: the elements; their batch broadcasts with that of the sets.
            sets: for elements (n, *shape), the set of each by its place in the batch of sets.
        """
        model = self.model
        x = model.as_elements(x)
        if model.imputer is None or not bool(x.isnan().any()):
            return x
        with torch.no_grad():
            z, count = model.process.predictive(self.evidence).mean, self.evidence.count
            centre = model.flow.inverse(z.reshape(-1, model.dim))[0].view(z.shape).double()
            if sets is not None:
                centre, count = centre[sets], count[sets]
            y = model.preprocessing(x.reshape(-1, model.dim).double())[0].view(x.shape)
            filled = model.imputer.impute_next(y, centre, count)
            filled = model.preprocessing.inverse(filled.reshape(-1, model.dim))[0].view(filled.shape)
        return torch.where(x.isnan(), filled.to(x), x)

    @torch.no_grad()
    def sample(self, n: int = 1, *, generator: Generator | None = None, temperature: float = 1.0) -> Samples:
        """n samples of the next element, (n, *batch, *shape); temperature scales the spread of latents."""
        z = self.sample_latents(n, generator=generator, temperature=temperature)
        return self.model.decode_samples(z)

    @torch.no_grad()
    def sample_latents(
        self, n: int = 1, *, generator: Generator | None = None, temperature: float = 1.0
    ) -> Float[Tensor, "n *batch dim"]:
        """Latents of n samples of the next element, for `Bruno.decode`."""
        check_count("n", n)
        check_at_least("temperature", temperature, 0)
        if not temperature <= sys.float_info.max:
            raise ValueError(f"`temperature` must be finite; got {temperature}.")
        predictive = self.model.process.predictive(self.evidence)
        z = predictive.sample((operator.index(n),), generator=generator)
        return predictive.mean + float(temperature) * (z - predictive.mean) if temperature != 1.0 else z

    def update(self, x: ArrayLike, generator: Generator | None = None) -> Posterior:
        """Add one element to each set, (*batch, *shape), or several, (*batch, n, *shape)."""
        x = self.model.as_elements(x)
        several = self.model.batch_of(x) != self.evidence.batch_shape
        given = Posterior(self.model, self.evidence.unsqueeze()) if several else self
        z = self.model.encode(given.impute(x), generator).z
        with arguments_renamed({"z": "x"}):
            return Posterior(self.model, self.evidence.add(z))

    def remove(self, x: ArrayLike) -> Posterior:
        """Remove elements that were added before; they must have been added without a generator."""
        z = self.model.encode(x).z
        with arguments_renamed({"z": "x"}):
            return Posterior(self.model, self.evidence.remove(z))

    def detach(self) -> Posterior:
        """The same posterior, detached from the graph."""
        return Posterior(self.model, self.evidence.detach())

    def merge(self, other: Posterior) -> Posterior:
        """The posterior given the elements of both."""
        check_type("other", other, Posterior)
        if not self.model.is_same(other.model):
            raise ValueError("`other` must be a posterior of the same model; got one of another model.")
        return Posterior(self.model, self.evidence + other.evidence)

    def __add__(self, other: Posterior) -> Posterior:
        return self.merge(other) if isinstance(other, Posterior) else NotImplemented

    def to(self, device: torch.device | str) -> Posterior:
        """The posterior and its model on another device; the model is copied unless it is there already."""
        model = known_models.on_device(self.model, device)
        return Posterior(model, self.evidence.to(model.device))

    @classmethod
    def stack(cls, posteriors: Sequence[Posterior]) -> Posterior:
        """Posteriors of one model, with the same batch shape, as one batch with a new first axis."""
        if not posteriors:
            raise ValueError("`posteriors` must have at least one posterior; got none.")
        for one in posteriors:
            check_type("posteriors", one, Posterior)
        first = posteriors[0].model
        for one in posteriors:
            if not first.is_same(one.model):
                raise ValueError("`posteriors` must all be of the same model; got one of another model.")
        return Posterior(first, Evidence.stack([one.evidence for one in posteriors]))

    def __len__(self) -> int:
        """Number of sets along the first axis of the batch."""
        if not self.evidence.batch_shape:
            raise TypeError("a posterior of one set has no length; its number of elements is evidence.count.")
        return self.evidence.batch_shape[0]

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Posterior]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Posterior:
        """The posterior of some sets of the batch."""
        return Posterior(self.model, self.evidence[index])

    def __reduce__(self) -> tuple[Any, ...]:
        """The fingerprint and the source of the model, and the evidence."""
        evidence, model = self.evidence.detach(), self.model
        # Arrays are pickled, as a tensor that is a view would be pickled with its whole storage.
        arrays = tuple(to_numpy(part) for part in (evidence.count, evidence.mean, evidence.scatter))
        return _posterior, (model.fingerprint(), model.source, str(evidence.mean.device), *arrays)

    def __deepcopy__(self, memo: dict[int, Any]) -> Posterior:
        return self

    def __repr__(self) -> str:
        counts = self.evidence.count.flatten().tolist()
        seen = f"{min(counts)} to {max(counts)}" if len(set(counts)) > 1 else f"{counts[0] if counts else 0}"
        return f"Posterior(batch_shape={tuple(self.evidence.batch_shape)}, seen={seen})"


def _posterior(
    fingerprint: str, source: str | None, device: str, count: Any, mean: Any, scatter: Any
) -> Posterior:
    """A posterior from a pickle."""
    model = known_models.find(fingerprint, mean.shape[-1], source, device)
    evidence = Evidence(*(torch.from_numpy(part.copy()) for part in (count, mean, scatter)))
    known = not isinstance(model, known_models.UnknownModel)
    return Posterior(model, evidence.to(model.device) if known else evidence)
