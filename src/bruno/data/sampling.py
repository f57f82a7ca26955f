"""Random sets, episodes and contaminated sets from labelled examples, drawn on the device of the examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Generator, Tensor

from bruno import limits
from bruno.arrays import Arrays, as_tensor, fields_to_numpy
from bruno.checks import check_between, check_whole
from bruno.data.examples import Examples

_MAX_SEED = 2**63 - 1  # of torch
_MAX_KEYS = 2**13  # largest class that is sampled with a random key for each element


def seeded_generator(seed: int, device: torch.device | str = "cpu") -> Generator:
    """A generator of random numbers on a device, with a seed."""
    check_whole("seed", seed, 0)
    check_between("seed", seed, 0, _MAX_SEED)
    return Generator(device).manual_seed(seed)


class Episodes(NamedTuple):
    """k-way n-shot episodes: find the support of each query. Query i belongs to support i."""

    support: Tensor  # (batch, way, shot, *shape)
    query: Tensor  # (batch, way, *shape)

    def numpy(self) -> dict[str, Any]:
        """The fields by name as numpy arrays."""
        return fields_to_numpy(self._asdict())


class ContaminatedSets(NamedTuple):
    """Sets of one class in which some elements are replaced by outliers, elements of other classes."""

    x: Tensor  # (batch, n, *shape)
    outlier: Bool[Tensor, "batch n"]

    def numpy(self) -> dict[str, Any]:
        """The fields by name as numpy arrays."""
        return fields_to_numpy(self._asdict())


class SetSampler:
    """Draws random sets of elements of one class by tensor operations.

    Elements are sorted by class in one tensor, and drawn by index. With `rotations`, each class is four
    classes, rotated by 0, 90, 180 and 270 degrees; all elements of a set have the same rotation.

    Args:
        examples: the elements and their classes; every class must have at least one element.
        rotations: add rotated classes; for square images.
        device: where the elements are kept and sets are drawn.
    """

    def __init__(
        self, examples: Examples, *, rotations: bool = False, device: torch.device | str = "cpu"
    ) -> None:
        order = torch.argsort(examples.labels, stable=True)
        self.elements = examples.elements[order].to(device)
        self.counts = examples.counts.to(device)
        self.names = examples.names
        # Computed once, as reading these numbers from the device would synchronise at every draw.
        self.min_count, self.max_count = int(examples.counts.min()), int(examples.counts.max())
        if self.min_count == 0:
            empty = examples.names[int(self.counts.argmin())]
            raise ValueError(f"`examples` must have elements in every class; got none in {empty!r}.")
        self.starts = self.counts.cumsum(0) - self.counts
        self.rotations = rotations
        if rotations:
            _check_square(examples)

    @property
    def classes(self) -> int:
        """The number of classes, including rotated ones."""
        return len(self.counts) * (4 if self.rotations else 1)

    @property
    def labels(self) -> Int[Tensor, " n"]:
        """The class of each element, without rotations."""
        return torch.arange(len(self.counts), device=self.counts.device).repeat_interleave(self.counts)

    def sets(self, batch: int, n: int, generator: Generator) -> Tensor:
        """Draw sets (batch, n, *shape): a class uniformly for each set, then n different elements of it."""
        self.check_draw("batch", batch, n, elements=True)
        classes = torch.randint(self.classes, (batch,), generator=generator, device=self.counts.device)
        return self.sets_of(classes, n, generator)

    def sets_of(self, classes: Int[Tensor, " sets"] | Arrays, n: int, generator: Generator) -> Tensor:
        """Draw n different elements of each given class: (sets, n, *shape).

        Classes are numbered from 0 to `classes` − 1. Class c, rotated t times by 90 degrees, has number
        t · (number of classes without rotations) + c.
        """
        return self.at(self.indices_of(classes, n, generator))

    def indices_of(
        self, classes: Int[Tensor, " sets"] | Arrays, n: int, generator: Generator
    ) -> Int[Tensor, "sets n"]:
        """Draw the indices of the elements that `sets_of` returns, for `at`.

        An index encodes an element and its rotation: t · (number of elements) + element.
        """
        classes = as_tensor(classes, "classes", device=self.counts.device)
        if classes.ndim != 1 or classes.is_floating_point():
            raise TypeError(
                f"`classes` must be a list of whole numbers; got {classes.dtype} of shape "
                f"{tuple(classes.shape)}."
            )
        self.check_set_size(n, "n")
        self.check_draw("classes", len(classes), n)
        _check_indices("classes", classes, self.classes)
        unrotated = len(self.counts)
        offset = classes // unrotated * len(self.elements)
        return self.distinct(classes % unrotated, n, generator) + offset.unsqueeze(1)

    def at(self, indices: Int[Tensor, "*batch"] | Arrays) -> Tensor:
        """Return the elements at these indices of `indices_of`, rotated: (*batch, *shape)."""
        indices = as_tensor(indices, "indices", device=self.counts.device)
        _check_indices("indices", indices, len(self.elements) * (4 if self.rotations else 1))
        turns = indices // len(self.elements) if self.rotations else None
        return self.rotated(self.elements[indices % len(self.elements)], turns)

    def episodes(self, batch: int, way: int, shot: int, generator: Generator) -> Episodes:
        """Draw episodes with a support set and one query of each class."""
        self.check_episodes(way, shot)
        x = self.sets_of_different_classes(batch, way, shot + 1, generator)
        return Episodes(x[:, :, :shot], x[:, :, shot])

    def sets_of_different_classes(self, batch: int, way: int, n: int, generator: Generator) -> Tensor:
        """Draw n different elements of each of `way` different classes: (batch, way, n, *shape).

        The classes of a draw never include two rotations of one class.
        """
        check_whole("batch", batch)
        self.check_set_size(n, "n")
        if not 1 <= way <= len(self.counts):
            raise ValueError(f"`way` must be from 1 to {len(self.counts)}, the number of classes; got {way}.")
        self.check_draw("batch", batch * way, n, elements=True)
        keys = torch.rand((batch, len(self.counts)), generator=generator, device=self.counts.device)
        classes = keys.topk(way, 1).indices
        index = self.distinct(classes.flatten(), n, generator).view(batch, way, n)
        return self.rotated(self.elements[index], self._turns((batch, way), generator))

    def contaminated(
        self, batch: int, n: int, rate: float, generator: Generator, *, of: int | None = None
    ) -> ContaminatedSets:
        """Draw sets in which each element is, with probability `rate`, replaced by one of another class.

        All sets are of class number `of`; by default, each is of a random class.
        """
        if not 0 <= rate < 1:
            raise ValueError(f"`rate` must be at least 0 and below 1; got {rate}.")
        if len(self.counts) < 2:
            raise ValueError(f"`examples` must have at least two classes; got {len(self.counts)}.")
        self.check_set_size(n, "n")
        self.check_draw("batch", batch, n, elements=True)
        device = self.counts.device
        if of is None:
            classes = torch.randint(len(self.counts), (batch,), generator=generator, device=device)
        else:
            classes = torch.full((batch,), of, device=device)
            _check_indices("of", classes, len(self.counts))
        index = self.distinct(classes, n, generator)
        outlier = torch.rand((batch, n), generator=generator, device=device) < rate
        step = torch.randint(1, len(self.counts), (batch, n), generator=generator, device=device)
        others = (classes.unsqueeze(1) + step) % len(self.counts)
        positions = torch.rand((batch, n), generator=generator, device=device) * self.counts[others]
        outliers = self.starts[others] + positions.long().minimum(self.counts[others] - 1)
        x = self.elements[torch.where(outlier, outliers, index)]
        return ContaminatedSets(self.rotated(x, self._turns((batch,), generator)), outlier)

    def check_episodes(self, way: int, shot: int, queries: int = 1, prefix: str = "") -> None:
        """Raise unless there are `way` classes and every class has `shot` + `queries` elements.

        `prefix` precedes the names of the arguments in messages.
        """
        check_whole(f"{prefix}shot", shot)
        check_whole(f"{prefix}queries", queries)
        self.check_set_size(shot + queries, f"{prefix}shot + {queries}")
        if not 2 <= way <= len(self.counts):
            raise ValueError(
                f"`{prefix}way` must be from 2 to {len(self.counts)}, the number of classes; got {way}."
            )

    def distinct(self, classes: Int[Tensor, " sets"], n: int, generator: Generator) -> Int[Tensor, "sets n"]:
        """Draw the indices in `elements` of n different elements of each class, in random order.

        Rotations are ignored; n must be at most `min_count`.
        """
        counts = self.counts[classes]
        if self.max_count <= _MAX_KEYS:
            chosen = _largest_keys(counts, self.max_count, n, generator)
        else:
            chosen = _floyd_sample(counts, n, generator)
        return self.starts[classes].unsqueeze(1) + chosen

    def _turns(self, shape: tuple[int, ...], generator: Generator) -> Tensor | None:
        if not self.rotations:
            return None
        return torch.randint(4, shape, generator=generator, device=self.counts.device)

    @staticmethod
    def rotated(x: Tensor, turns: Int[Tensor, "..."] | None) -> Tensor:
        """Rotate images anticlockwise by `turns` times 90 degrees; None leaves them unchanged.

        `turns` has the leading dimensions of x: one number rotates all images of the remaining dimensions.
        """
        if turns is None:
            return x
        turns = turns.view(*turns.shape, *[1] * (x.ndim - turns.ndim))
        x = torch.where(turns >= 2, x.flip(-2, -1), x)
        return torch.where(turns % 2 == 1, x.transpose(-2, -1).flip(-2), x)

    def check_set_size(self, n: int, name: str) -> None:
        """Raise unless every class has n elements; `name` is the name of n in the message."""
        if not 1 <= n <= self.min_count:
            smallest = self.names[int(self.counts.argmin())]
            raise ValueError(
                f"`{name}` must be from 1 to {self.min_count}, the size of class {smallest!r}; got {n}."
            )

    def check_draw(self, name: str, sets: int, n: int, *, elements: bool = False) -> None:
        """Raise unless a draw of sets of n elements fits into memory: its random keys and its elements.

        Errors call the number of sets `name`. With `elements`, the memory of the drawn elements is included.
        """
        check_whole(name, sets)
        keys = self.max_count if self.max_count <= _MAX_KEYS else n
        size = self.elements[:1].nbytes if elements else 8
        limits.MEMORY.check_argument(name, sets, sets * (8 * keys + n * size))


def _check_indices(name: str, indices: Tensor, count: int) -> None:
    """Raise unless indices are from 0 to count − 1; on a GPU, torch checks them without waiting."""
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise TypeError(f"`{name}` must be whole numbers; got {indices.dtype}.")
    if indices.is_cuda or not indices.numel():
        return
    lowest, highest = int(indices.min()), int(indices.max())
    if lowest < 0 or highest >= count:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"`{name}` must be from 0 to {count - 1}; got {wrong}.")


def _largest_keys(
    counts: Int[Tensor, " sets"], max_count: int, n: int, generator: Generator
) -> Int[Tensor, "sets n"]:
    """Draw n different numbers below each count: the positions of the n largest of `count` random keys."""
    keys = torch.rand((len(counts), max_count), generator=generator, device=counts.device)
    inside = torch.arange(max_count, device=counts.device) < counts.unsqueeze(1)
    return keys.masked_fill(~inside, -1.0).topk(n, 1).indices


def _floyd_sample(counts: Int[Tensor, " sets"], n: int, generator: Generator) -> Int[Tensor, "sets n"]:
    """Draw n different numbers below each count by Floyd's algorithm: n steps for any count.

    Step i picks one of the first count − n + i + 1 numbers. If that number was picked before, it takes the
    last of them, which no earlier step could pick. All subsets are equally likely; the shuffle at the end
    also makes all orders equally likely.
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
    """Return every class rotated by 0, 90, 180 and 270 degrees, as four separate classes.

    They are numbered like those of `SetSampler.sets_of`: all classes unrotated, then all rotated once, etc.
    """
    _check_square(examples)
    offsets = torch.arange(4) * len(examples.names)
    turned = [SetSampler.rotated(examples.elements, torch.tensor(turns)) for turns in range(4)]
    return replace(
        examples,
        elements=torch.cat(turned),
        labels=(examples.labels + offsets.unsqueeze(1)).flatten(),
        names=tuple(
            f"{name}, {turns * 90}°" if turns else name for turns in range(4) for name in examples.names
        ),
    )


def _check_square(examples: Examples) -> None:
    if len(examples.shape) != 3 or examples.shape[1] != examples.shape[2]:
        raise ValueError(
            f"`rotations` must be false unless images are square; got elements of shape {examples.shape}. "
            "Resize them (`data.size`), or omit rotations."
        )
