"""Labelled examples in memory: what every reader gives and every sampler takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor

from bruno.data.archives import reason
from bruno.files import atomic_write


@dataclass(frozen=True, eq=False)
class Examples:
    """Elements with the class of each: images, uint8 (n, channels, height, width), or rows, float (n, dim).

    Attributes:
        elements: all of them, the classes in any order.
        labels: the index of each element's class in `names`.
        names: of the classes.
        skipped: what a reader left out, if it was told to go on after a bad file.
        levels: images are integers from 0 to levels − 1; 0 for real numbers.
        columns: of rows: what their numbers are called, if that is known.
    """

    elements: Tensor
    labels: Int[Tensor, " n"]
    names: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    levels: int = 256
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("elements", self.elements), ("labels", self.labels)):
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"`{name}` must be a torch.Tensor; got {type(value).__name__}. Use torch.as_tensor."
                )
        if self.labels.dtype.is_floating_point or self.labels.ndim != 1:
            raise TypeError(
                f"`labels` must be integers, one for each element; got {self.labels.dtype} of shape "
                f"{tuple(self.labels.shape)}. Use labels.long()."
            )
        if self.elements.is_floating_point():
            object.__setattr__(self, "levels", 0)
        if len(self.elements) != len(self.labels):
            raise ValueError(
                f"`labels` must be one for each of {len(self.elements)} elements; got {len(self.labels)}."
            )
        if len(self.labels) and not 0 <= int(self.labels.min()) <= int(self.labels.max()) < len(self.names):
            lowest, highest = int(self.labels.min()), int(self.labels.max())
            raise ValueError(
                f"`labels` must be from 0 to {len(self.names) - 1}, for as many names; "
                f"got {lowest if lowest < 0 else highest}."
            )

    def __len__(self) -> int:
        return len(self.elements)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one element."""
        return tuple(self.elements.shape[1:])

    def inverted(self) -> Examples:
        """Images with dark for bright."""
        if not self.levels:
            raise ValueError("`invert` is for images; these are rows of numbers. Leave it out.")
        return replace(self, elements=self.levels - 1 - self.elements)

    def with_levels(self, levels: int) -> Examples:
        """Images of as many grey values as a model has; what is no image stays as it is."""
        if not levels or not self.levels:
            return self
        return replace(self, elements=rescale_levels(self.elements, self.levels, levels), levels=levels)

    @property
    def counts(self) -> Int[Tensor, " classes"]:
        """Elements in each class."""
        return torch.bincount(self.labels, minlength=len(self.names))

    def of_classes(self, keep: Iterable[int]) -> Examples:
        """Some of the classes, numbered anew in this order."""
        order = list(keep)
        place = torch.full((len(self.names),), -1)
        place[order] = torch.arange(len(order))
        labels = place[self.labels]
        inside = labels >= 0
        names = tuple(self.names[i] for i in order)
        return replace(self, elements=self.elements[inside], labels=labels[inside], names=names)

    def named(self, names: Sequence[str]) -> Examples:
        """The classes with these names."""
        missing = sorted(set(names) - set(self.names))
        if missing:
            known = ", ".join(self.names[:8]) + (", …" if len(self.names) > 8 else "")
            raise ValueError(f"`classes` must be among {known}; got {missing[0]!r}.")
        return self.of_classes(self.names.index(name) for name in names)

    def with_at_least(self, count: int) -> Examples:
        """The classes that have so many elements; `skipped` names the others. All, if none has so many."""
        counts = self.counts.tolist()
        if max(counts) < count:
            return self
        kept = self.of_classes(i for i, has in enumerate(counts) if has >= count)
        small = (f"{name} (only {has})" for name, has in zip(self.names, counts, strict=True) if has < count)
        return replace(kept, skipped=(*self.skipped, *small))

    def save(self, path: Path) -> None:
        """One compact file: compressed, and read without unpickling anything.

        It is there as a whole or not at all, however many processes write it at once.
        """
        with atomic_write(path) as beside, beside.open("wb") as file:
            np.savez_compressed(
                file,
                elements=self.elements.numpy(),
                labels=self.labels.numpy(),
                names=np.array(self.names),
                skipped=np.array(self.skipped, dtype=str),
                levels=np.array(self.levels),
                columns=np.array(self.columns, dtype=str),
            )

    @classmethod
    def load(cls, path: Path) -> Examples:
        """Read what `save` wrote; a ValueError that names the file if it is something else, or damaged."""
        try:
            with path.open("rb") as file:
                held = np.load(file, allow_pickle=False)
                if "elements" not in held:
                    raise ValueError(f"it holds {', '.join(held) or 'nothing'}")
                return cls(
                    torch.from_numpy(held["elements"]),
                    torch.from_numpy(held["labels"]).long(),
                    tuple(map(str, held["names"])),
                    tuple(map(str, held["skipped"])),
                    int(held["levels"]),
                    tuple(map(str, held.get("columns", ()))),
                )
        except Exception as error:  # numpy, zipfile and zlib have a dozen ways to say that it is damaged
            raise ValueError(f"{path}: is no compact file of examples: {reason(error)}.") from error


def column_positions(wanted: Sequence[str], header: Sequence[str]) -> list[int]:
    """The place of each in a header; a ValueError if there is none, or more than one."""
    missing = [name for name in wanted if name not in header]
    if missing:
        raise ValueError(
            f"columns must be {', '.join(wanted)}, in any order; {missing[0]!r} is not among "
            f"{', '.join(header)}."
        )
    if twice := [name for name in wanted if list(header).count(name) > 1]:
        raise ValueError(f"columns must have different names; {twice[0]!r} is there twice.")
    return [list(header).index(name) for name in wanted]


def concatenate(parts: Sequence[Examples]) -> Examples:
    """Several sets of examples as one; the classes stay apart."""
    offsets = np.cumsum([0, *(len(part.names) for part in parts[:-1])])
    return Examples(
        torch.cat([part.elements for part in parts]),
        torch.cat([part.labels + int(offset) for part, offset in zip(parts, offsets, strict=True)]),
        tuple(name for part in parts for name in part.names),
        tuple(name for part in parts for name in part.skipped),
        max(part.levels for part in parts),
    )


def rescale_levels(pixels: Integer[Tensor, "*batch"], now: int, wanted: int) -> Integer[Tensor, "*batch"]:
    """Grey values from 0 to now − 1 as those from 0 to wanted − 1."""
    if now == wanted:
        return pixels
    kind = torch.uint8 if wanted <= 256 else torch.long
    return (pixels.double() * ((wanted - 1) / (now - 1))).round().to(kind)
