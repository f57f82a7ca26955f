"""The evidence of a set: a count, and a mean and a scatter for every latent dimension."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bruno.arrays import Arrays, NumpyResult, as_real_tensor, as_tensor
from bruno.checks import check_whole
from bruno.kinds import Rows
from bruno.process.checks import check_devices, check_finite, check_observations, check_type, widened
from bruno.text import arguments_renamed

# Tolerance between removed and added observations: an element that is encoded again, in another batch,
# differs in the last digits of a float32.
_TOLERANCE = 1e-4


@dataclass(frozen=True, eq=False, init=False)
class Evidence(NumpyResult):
    """The sufficient statistic of a set under every exchangeable process of this package.

    For one dimension of a set z_1..z_n::

        count = n    mean = z̄ = Σ z_i / n    scatter = M2 = Σ (z_i − z̄)²

    Evidence is an immutable value and a commutative monoid: ``a + b`` is the evidence of the union of two
    sets, ``Evidence.empty`` is the neutral element, and ``a - b`` removes a part again. The order and the
    grouping of the observations make no difference. It does not depend on the process that uses it. It is
    float64 for data of any type: a few vectors cost nothing, and removing an observation leaves an error of
    only 1e-16 of its square.

    Arguments may be tensors, numpy arrays, lists and numbers.

    Attributes:
        count: number of observations of each set of the batch.
        mean: their mean, zero for an empty set.
        scatter: sum of squared deviations from the mean.

    >>> z = torch.tensor([[1.0], [2.0], [6.0]])
    >>> evidence = Evidence.of(z)
    >>> evidence.count.item(), evidence.mean.item(), evidence.scatter.item()
    (3, 3.0, 14.0)
    >>> rest = evidence.remove(z[2])
    >>> rest.count.item(), rest.mean.item(), rest.scatter.item()
    (2, 1.5, 0.5)
    >>> (Evidence.of(z[:1]) + Evidence.of(z[1:])).mean.item()
    3.0
    """

    count: Int[Tensor, "*batch"]
    mean: Float[Tensor, "*batch dim"]
    scatter: Float[Tensor, "*batch dim"]

    def __init__(
        self,
        count: Int[Tensor, "*batch"] | Arrays | int,
        mean: Float[Tensor, "*batch dim"] | Arrays,
        scatter: Float[Tensor, "*batch dim"] | Arrays,
    ) -> None:
        if not (isinstance(count, Tensor) and isinstance(mean, Tensor) and isinstance(scatter, Tensor)):
            count, mean, scatter = _as_tensors(count, mean, scatter)
        object.__setattr__(self, "count", count)
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "scatter", scatter)

    @classmethod
    def empty(
        cls,
        dim: int,
        batch_shape: Sequence[int] = (),
        *,
        device: torch.device | str | None = None,
    ) -> Evidence:
        """The evidence of no observations."""
        check_whole("dim", dim)
        zero = torch.zeros((), dtype=torch.double, device=device)
        count = torch.zeros((), dtype=torch.long, device=device)
        return cls(count.expand(tuple(batch_shape)), *[zero.expand(*batch_shape, dim)] * 2)

    @classmethod
    def of(cls, z: Float[Tensor, "*batch n dim"] | Arrays, *, validate: bool = True) -> Evidence:
        """The evidence of whole sets.

        Args:
            z: the sets.
            validate: check for NaN and infinity, which synchronises with the GPU.
        """
        z = _checked(z, validate).double()
        mean = z.mean(-2)
        scatter = (z - mean.unsqueeze(-2)).square().sum(-2)
        return cls(_filled(z.shape[-2], z.shape[:-2], z.device), mean, scatter)

    @classmethod
    def single(
        cls, z: Float[Tensor, "*batch dim"], count: Int[Tensor, "*batch"] | Bool[Tensor, "*batch"] | int = 1
    ) -> Evidence:
        """The evidence of one element of each set, or of `count` copies of it, which have no scatter."""
        count = torch.as_tensor(count, device=z.device).long().expand(z.shape[:-1])
        return cls(count, z.double(), torch.zeros_like(z, dtype=torch.double))

    @classmethod
    def prefixes(cls, z: Float[Tensor, "*batch n dim"] | Arrays, *, validate: bool = True) -> Evidence:
        """The evidence *before* each element: position i of batch ``(*batch, n)`` has seen z_1..z_{i−1}.

        Deviations are taken from the first element, so that a large common offset costs no precision::

            M2_i = Σ_{j<i} (z_j − z̄_{j−1})² · (j − 1)/j
        """
        z = _checked(z, validate).double()
        n = z.shape[-2]
        seen = torch.arange(n, device=z.device)
        size = seen.to(z.dtype).unsqueeze(-1)
        y = z - z[..., :1, :]
        before = exclusive_cumsum(y) / size.clamp(min=1)
        scatter = exclusive_cumsum((y - before).square() * (size / (size + 1)))
        mean = torch.where(size > 0, z[..., :1, :] + before, 0.0)
        return cls(seen.expand(z.shape[:-1]), mean, scatter)

    @classmethod
    def stack(cls, sets: Sequence[Evidence]) -> Evidence:
        """Several batches of the same shape as one batch, with a new first axis."""
        if not sets:
            raise ValueError("`sets` must have the evidence of at least one set; got none.")
        for one in sets:
            check_type("sets", one, Evidence)
        counts, means, scatters = zip(*((one.count, one.mean, one.scatter) for one in sets), strict=True)
        return cls(torch.stack(counts), torch.stack(means), torch.stack(scatters))

    @property
    def dim(self) -> int:
        """Number of latent dimensions."""
        return self.mean.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the batch of sets."""
        return self.mean.shape[:-1]

    @classmethod
    def checked(
        cls, dim: int, count: Tensor | Arrays | int, mean: Tensor | Arrays, scatter: Tensor | Arrays
    ) -> Evidence:
        """The evidence in these values; raises ValueError unless sets of `dim` dimensions can have it."""
        count, mean, scatter = _as_tensors(count, mean, scatter)
        if count.is_floating_point() or count.is_complex() or count.dtype == torch.bool:
            raise ValueError(f"`count` must be whole numbers; got {count.dtype}.")
        for name, values in (("mean", mean), ("scatter", scatter)):
            if not values.is_floating_point() or values.shape != (*count.shape, dim):
                raise ValueError(
                    f"`{name}` must be floating point of shape {(*count.shape, dim)}; got {values.dtype} of "
                    f"shape {tuple(values.shape)}."
                )
            if not values.isfinite().all():
                raise ValueError(f"`{name}` must be finite; got {values[~values.isfinite()][0].item()}.")
        for name, values in (("count", count), ("scatter", scatter)):
            if (values < 0).any():
                raise ValueError(f"`{name}` must be at least 0; got {values[values < 0][0].item():g}.")
        empty = (count == 0).unsqueeze(-1) & ((mean != 0) | (scatter != 0))
        if empty.any():
            raise ValueError("`count` must be above 0 where `mean` or `scatter` is not 0; got 0.")
        return cls(count, mean, scatter)

    def add(self, z: Float[Tensor, "..."] | Arrays) -> Evidence:
        """Add observations: one for each set, ``(*batch, dim)``, or several, ``(*batch, n, dim)``."""
        return self.merge(Evidence.of(self._as_sets(z)))

    def remove(self, z: Float[Tensor, "..."] | Arrays) -> Evidence:
        """Remove observations that were added before; shapes as in `add`."""
        removed = Evidence.of(self._as_sets(z))
        with arguments_renamed({"other": "z"}):
            return self - removed

    def without_each(self, z: Float[Tensor, "*any dim"], inside: Bool[Tensor, "*any"]) -> Evidence:
        """The evidence without each element that is `inside`, for all at once; batches broadcast."""
        own = torch.where(inside.unsqueeze(-1), z.double(), self.mean)  # nothing to remove outside
        return self - Evidence.single(own, inside)

    def merge(self, other: Evidence) -> Evidence:
        """The evidence of both sets together (Chan's update); batches broadcast."""
        check_type("other", other, Evidence)
        check_devices(self.mean, other=other.mean)
        self._check_dim(other)
        n_a, n_b = self.count, other.count
        n = n_a + n_b
        share = _ratio(n_b, n)
        gap = other.mean - self.mean
        mean = self.mean + share * gap
        scatter = self.scatter + other.scatter + gap.square() * share * n_a.unsqueeze(-1)
        return Evidence(n.expand(mean.shape[:-1]), mean, scatter)

    def __add__(self, other: Evidence) -> Evidence:
        return self.merge(other) if isinstance(other, Evidence) else NotImplemented

    def __sub__(self, other: Evidence) -> Evidence:
        """The evidence of a set without a part of it: the inverse of `merge`.

        Warns if the part is so much larger than the rest that the rest has lost its significant digits.

        Raises:
            ValueError: if the part is larger than the set or contradicts it (the rest would have a negative
                scatter, or a positive one with fewer than two observations).
        """
        if not isinstance(other, Evidence):
            return NotImplemented
        check_devices(self.mean, other=other.mean)
        self._check_dim(other)
        rest = self.count - other.count
        if (rest < 0).any():
            most, asked = _first_where(rest < 0, self.count, other.count)
            raise ValueError(
                f"`other` must have at most {most} observations, as many as were added; got {asked}."
            )
        share = _ratio(other.count, rest)
        gap = self.mean - other.mean
        mean = self.mean + gap * share
        taken = other.scatter + gap.square() * share * self.count.unsqueeze(-1)
        scatter = self.scatter - taken

        # The scatter of a set is at least 0, and exactly 0 for fewer than two observations.
        variance = self.scatter / self.count.clamp(min=1).unsqueeze(-1)
        scale = (self.mean.square() + other.mean.square() + variance).amax(-1, keepdim=True)
        slack = _TOLERANCE * (scale + taken)
        wrong = (scatter < -slack) | ((rest < 2).unsqueeze(-1) & (scatter > slack))
        wrong |= (rest == 0).unsqueeze(-1) & (gap.square() > _TOLERANCE**2 * scale)
        if wrong.any():
            raise ValueError(
                "`other` must be of observations that were added before; got some that were not: they leave "
                f"{_first_where(wrong.any(-1), rest)[0]} observations with a scatter of "
                f"{scatter[wrong][0].item():.6g}."
            )
        alive = (rest > 0).unsqueeze(-1)
        scatter = torch.where((rest > 1).unsqueeze(-1), scatter.clamp(min=0), 0.0)
        lost = torch.where(alive, torch.finfo(torch.double).eps * taken, 0.0)
        left = (1 + mean.square() + scatter / rest.clamp(min=1).unsqueeze(-1)).amax(-1, keepdim=True)
        if (lost > _TOLERANCE * left).any():
            warnings.warn(
                "removing observations lost significant digits of the others: their scatter is off by about "
                f"{lost.max().item():.1g}, since the removed ones are larger by orders of magnitude. Compute "
                "the evidence of the others again.",
                stacklevel=3,
            )
        return Evidence(rest.expand(mean.shape[:-1]), torch.where(alive, mean, 0.0), scatter)

    def __getitem__(self, index: Any) -> Evidence:
        """The evidence of some sets of the batch."""
        if not self.batch_shape:
            raise IndexError("evidence of a single set has no batch to index; its batch shape is ().")
        count = self.count[index]
        shape = (*count.shape, self.dim)
        # Index the positions of the sets, so that the index cannot reach the last axis.
        rows = torch.arange(self.count.numel(), device=count.device).view(self.batch_shape)[index].reshape(-1)
        mean, scatter = (t.reshape(-1, self.dim)[rows].reshape(shape) for t in (self.mean, self.scatter))
        return Evidence(count, mean, scatter)

    def reshape(self, *batch_shape: int) -> Evidence:
        """The same sets in a batch of another shape; -1 is inferred."""
        count = self.count.reshape(batch_shape)
        mean, scatter = (t.reshape(*count.shape, self.dim) for t in (self.mean, self.scatter))
        return Evidence(count, mean, scatter)

    def unsqueeze(self) -> Evidence:
        """The same evidence with a last batch axis of size 1, to broadcast over the elements of a set."""
        return self.reshape(*self.batch_shape, 1)

    def to(self, device: torch.device | str) -> Evidence:
        """The same evidence on another device."""
        return Evidence(self.count.to(device), self.mean.to(device), self.scatter.to(device))

    def detach(self) -> Evidence:
        """The same values, detached from the graph."""
        return Evidence(self.count, self.mean.detach(), self.scatter.detach())

    def _as_sets(self, z: Tensor | Arrays) -> Tensor:
        """Observations as sets; one observation becomes a set of one. Batch axes must match this evidence."""
        z, axes = as_real_tensor(z, "z", device=self.mean.device), self.mean.ndim
        check_devices(self.mean, z=z)
        if z.ndim == axes:
            z = z.unsqueeze(-2)
        if z.ndim != axes + 1 or z.shape[-1] != self.dim or z.shape[:-2] != self.batch_shape:
            batch = "".join(f"{size}, " for size in self.batch_shape)
            raise ValueError(
                f"`z` must be one observation ({batch}{self.dim}) or several ({batch}n, {self.dim}) for this "
                f"evidence; got shape {tuple(z.shape)}. For another batch, merge with Evidence.of(z)."
            )
        return z

    def _check_dim(self, other: Evidence) -> None:
        if self.dim != other.dim:
            raise ValueError(f"`other` must have {self.dim} dimensions like this evidence; got {other.dim}.")


def _as_tensors(
    count: Tensor | Arrays | int, mean: Tensor | Arrays, scatter: Tensor | Arrays
) -> tuple[Tensor, Tensor, Tensor]:
    real = Rows(())  # whole numbers of a list are a mean, too
    return (
        as_tensor(count, "count"),
        as_tensor(mean, "mean", kind=real),
        as_tensor(scatter, "scatter", kind=real),
    )


def _checked(z: Tensor | Arrays, validate: bool) -> Tensor:
    z = widened(check_observations(z))
    return check_finite(z, "z") if validate else z


def exclusive_cumsum(x: Float[Tensor, "*batch n dim"]) -> Float[Tensor, "*batch n dim"]:
    """Sums over the elements before each one; sum − element would cancel where an element is huge."""
    return torch.nn.functional.pad(x[..., :-1, :].cumsum(-2), (0, 0, 1, 0))


def _filled(value: int, shape: Sequence[int], device: torch.device) -> Tensor:
    """The same number for every set of a batch, stored once."""
    return torch.full((), value, dtype=torch.long, device=device).expand(tuple(shape))


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole with a trailing axis to broadcast over dimensions; 0 / 0 counts as 0."""
    return (part.double() / whole.clamp(min=1)).unsqueeze(-1)


def _first_where(mask: Tensor, *values: Tensor) -> list[int]:
    """The entries of broadcast integer tensors at the first index where the mask is true."""
    return [int(value.expand(mask.shape)[mask][0]) for value in values]
