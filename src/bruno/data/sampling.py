"""Sets, episodes and contaminated sets, drawn from labelled examples where the examples live."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Generator, Tensor

from bruno.data.examples import Examples

_MOST_KEYS = 2**13  # random numbers for a set, of which the largest are chosen: in larger classes, one by one


class Episodes(NamedTuple):
    """k-way n-shot tasks: which of the k supports does each query belong to? Query i belongs to support i."""

    support: Tensor  # (batch, way, shot, *shape)
    query: Tensor  # (batch, way, *shape)


class ContaminatedSets(NamedTuple):
    """Sets of one class with some elements of others among them."""

    x: Tensor  # (batch, n, *shape)
    outlier: Bool[Tensor, "batch n"]


class SetSampler:
    """Draws sets of elements of one class by tensor operations, on the device of the examples.

    All elements lie sorted by class in one tensor; a draw is an index. With `rotations` every class counts
    four times, rotated by 0, 90, 180 and 270 degrees, and all elements of a set are rotated alike.
    """

    def __init__(
        self, examples: Examples, *, rotations: bool = False, device: torch.device | str = "cpu"
    ) -> None:
        order = torch.argsort(examples.labels, stable=True)
        self.elements = examples.elements[order].to(device)
        self.counts = examples.counts.to(device)
        self.names = examples.names
        # Known ahead: to ask later would make the host wait for the device at every draw.
        self.min_count, self.max_count = int(examples.counts.min()), int(examples.counts.max())
        if self.min_count == 0:
            empty = examples.names[int(self.counts.argmin())]
            raise ValueError(f"every class must have elements; {empty!r} has none.")
        self.starts = self.counts.cumsum(0) - self.counts
        self.rotations = rotations
        if rotations:
            _check_square(examples)

    @property
    def classes(self) -> int:
        """How many there are, rotations counted."""
        return len(self.counts) * (4 if self.rotations else 1)

    def sets(self, batch: int, n: int, generator: Generator) -> Tensor:
        """(batch, n, *shape): for each set a class drawn uniformly, then n of its elements, none twice."""
        classes = torch.randint(self.classes, (batch,), generator=generator, device=self.counts.device)
        return self.sets_of(classes, n, generator)

    def sets_of(self, classes: Int[Tensor, " sets"], n: int, generator: Generator) -> Tensor:
        """(sets, n, *shape): n elements of each of these classes, none twice.

        Classes go from 0 to below `classes`. With rotations, the class c rotated t times by 90 degrees is
        number t · (how many there are unturned) + c.
        """
        return self.at(self.indices_of(classes, n, generator))

    def indices_of(
        self, classes: Int[Tensor, " sets"], n: int, generator: Generator
    ) -> Int[Tensor, "sets n"]:
        """Where the elements that `sets_of` draws are.

        A place stands for an element and its rotation: t · (how many elements there are) + element.
        """
        self.check_set_size(n, "n")
        unturned = len(self.counts)
        offset = classes // unturned * len(self.elements)
        return self.distinct(classes % unturned, n, generator) + offset.unsqueeze(1)

    def at(self, places: Int[Tensor, "*batch"]) -> Tensor:
        """(*batch, *shape): the elements at these places, each with its rotation."""
        turns = places // len(self.elements) if self.rotations else None
        return self.rotated(self.elements[places % len(self.elements)], turns)

    def episodes(self, batch: int, way: int, shot: int, generator: Generator) -> Episodes:
        """Tasks with a support and one query of each class."""
        self.check_episodes(way, shot)
        x = self.tasks(batch, way, shot + 1, generator)
        return Episodes(x[:, :, :shot], x[:, :, shot])

    def tasks(self, batch: int, way: int, n: int, generator: Generator) -> Tensor:
        """(batch, way, n, *shape): n elements of each of `way` different classes, as often as `batch`.

        A class and its rotation never meet in one task.
        """
        keys = torch.rand((batch, len(self.counts)), generator=generator, device=self.counts.device)
        classes = keys.topk(way, 1).indices
        index = self.distinct(classes.flatten(), n, generator).view(batch, way, n)
        return self.rotated(self.elements[index], self._turns((batch, way), generator))

    def contaminated(self, batch: int, n: int, rate: float, generator: Generator) -> ContaminatedSets:
        """Sets in which each element is, with this rate, replaced by one of another class."""
        if not 0 <= rate < 1:
            raise ValueError(f"`rate` must be from 0 up to 1; got {rate}.")
        if len(self.counts) < 2:
            raise ValueError("`contaminated` needs at least two classes; there is one.")
        self.check_set_size(n, "n")
        device = self.counts.device
        classes = torch.randint(len(self.counts), (batch,), generator=generator, device=device)
        index = self.distinct(classes, n, generator)
        outlier = torch.rand((batch, n), generator=generator, device=device) < rate
        step = torch.randint(1, len(self.counts), (batch, n), generator=generator, device=device)
        others = (classes.unsqueeze(1) + step) % len(self.counts)
        places = torch.rand((batch, n), generator=generator, device=device) * self.counts[others]
        strangers = self.starts[others] + places.long().minimum(self.counts[others] - 1)
        x = self.elements[torch.where(outlier, strangers, index)]
        return ContaminatedSets(self.rotated(x, self._turns((batch,), generator)), outlier)

    def check_episodes(self, way: int, shot: int, queries: int = 1, prefix: str = "") -> None:
        """Raise unless there are so many classes and every class has so many elements and queries."""
        self.check_set_size(shot + queries, f"{prefix}shot + {queries}")
        if not 2 <= way <= len(self.counts):
            raise ValueError(f"`{prefix}way` must be from 2 to the {len(self.counts)} classes; got {way}.")

    def distinct(self, classes: Int[Tensor, " sets"], n: int, generator: Generator) -> Int[Tensor, "sets n"]:
        """The places in `elements` of n different elements of each class, rotations not counted.

        In random order; n must be at most `min_count`.
        """
        counts = self.counts[classes]
        if self.max_count <= _MOST_KEYS:
            chosen = _largest_keys(counts, self.max_count, n, generator)
        else:
            chosen = _one_by_one(counts, n, generator)
        return self.starts[classes].unsqueeze(1) + chosen

    def _turns(self, shape: tuple[int, ...], generator: Generator) -> Tensor | None:
        if not self.rotations:
            return None
        return torch.randint(4, shape, generator=generator, device=self.counts.device)

    @staticmethod
    def rotated(x: Tensor, turns: Int[Tensor, "..."] | None) -> Tensor:
        """Images rotated against the clock by 90 degrees, so many times; None for not at all.

        The dimensions of `turns` are the first ones of x: all that is within one of them turns alike.
        """
        if turns is None:
            return x
        turns = turns.view(*turns.shape, *[1] * (x.ndim - turns.ndim))
        x = torch.where(turns >= 2, x.flip(-2, -1), x)
        return torch.where(turns % 2 == 1, x.transpose(-2, -1).flip(-2), x)

    def check_set_size(self, n: int, name: str) -> None:
        """Raise unless every class has n elements; `name` is what the caller calls n."""
        if not 1 <= n <= self.min_count:
            where = self.names[int(self.counts.argmin())]
            raise ValueError(
                f"`{name}` must be from 1 to {self.min_count}, what class {where!r} has; got {n}."
            )


def _largest_keys(
    counts: Int[Tensor, " sets"], most: int, n: int, generator: Generator
) -> Int[Tensor, "sets n"]:
    """n different numbers below each count, at most `most`: where the largest of as many random keys are."""
    keys = torch.rand((len(counts), most), generator=generator, device=counts.device)
    inside = torch.arange(most, device=counts.device) < counts.unsqueeze(1)
    return keys.masked_fill(~inside, -1.0).topk(n, 1).indices


def _one_by_one(counts: Int[Tensor, " sets"], n: int, generator: Generator) -> Int[Tensor, "sets n"]:
    """The same by Floyd's algorithm, whatever the counts in n steps.

    Step i picks any of the first count − n + i + 1 numbers and, if it has that already, the last of them,
    which it cannot have. That makes every selection as likely as any other, though not its order.
    """
    shape, device = (len(counts), n), counts.device
    chosen = torch.full(shape, -1, device=device)
    uniform = torch.rand(shape, generator=generator, dtype=torch.double, device=device)
    for i in range(n):
        last = counts - n + i
        pick = (uniform[:, i] * (last + 1)).long().minimum(last)
        chosen[:, i] = torch.where((chosen == pick.unsqueeze(1)).any(1), last, pick)
    return chosen.gather(1, torch.rand(shape, generator=generator, device=device).argsort(1))


def with_rotations(examples: Examples) -> Examples:
    """Every class four times, rotated by 0, 90, 180 and 270 degrees, each a class of its own.

    They are numbered as `SetSampler.sets_of` has them: first all classes as they are, then all rotated once.
    """
    _check_square(examples)
    offsets = torch.arange(4) * len(examples.names)
    return Examples(
        torch.cat([SetSampler.rotated(examples.elements, torch.tensor(turns)) for turns in range(4)]),
        (examples.labels + offsets.unsqueeze(1)).flatten(),
        tuple(f"{name}, {turns * 90}°" if turns else name for turns in range(4) for name in examples.names),
        examples.skipped,
        examples.levels,
    )


def _check_square(examples: Examples) -> None:
    if len(examples.shape) != 3 or examples.shape[1] != examples.shape[2]:
        raise ValueError(
            f"`rotations` needs square images; the elements have shape {examples.shape}. "
            "Resize them (`data.size`), or do without rotations."
        )
