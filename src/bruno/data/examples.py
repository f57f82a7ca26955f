"""Labelled examples in memory: the output of readers and the input of samplers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bruno.arrays import ArrayLike, NumpyResult, as_tensor, image_to_array
from bruno.checks import check_all_differ
from bruno.data.archives import read_arrays, reason
from bruno.files import atomic_write
from bruno.kinds import rescale_levels

_FIELDS = (
    "elements",
    "labels",
    "names",
    "skipped",
    "levels",
    "columns",
    "ignored",
    "table_format",
)  # of a file


@dataclass(frozen=True, eq=False, init=False)
class Examples(NumpyResult):
    """Elements and their classes: images, uint8 (n, channels, height, width), or rows, float (n, dim).

    Args:
        elements: in any order; a tensor, an array, or a list of tensors, arrays, PIL images or rows.
        labels: for each element the index of its class in `names`: a tensor, an array or a list.
        names: the names of the classes.
        skipped: the names of files, lines and classes that a reader skipped.
        levels: number of grey values, 256 for 8-bit images; always 0 if elements are real numbers.
        columns: for rows: the names of their columns, if known.
        ignored: for rows: the columns of the table that were not read, with the reason.
        table_format: for rows: how the table was written, in the words of `TableFormat`.
    """

    elements: Tensor
    labels: Int[Tensor, " n"]
    names: tuple[str, ...]
    skipped: tuple[str, ...]
    levels: int
    columns: tuple[str, ...]
    ignored: tuple[str, ...]
    table_format: str

    def __init__(
        self,
        elements: Tensor | NDArray[Any] | Sequence[Any],
        labels: Tensor | NDArray[Any] | Sequence[Any],
        names: Sequence[str],
        skipped: Sequence[str] = (),
        levels: int = 256,
        columns: Sequence[str] = (),
        ignored: Sequence[str] = (),
        table_format: str = "",
    ) -> None:
        x, y = _as_tensor(elements, "elements"), _as_tensor(labels, "labels")
        check_labels(y, len(x))
        _check_classes(y, len(names))
        values = {
            "elements": x,
            "labels": y.long(),
            "names": tuple(names),
            "skipped": tuple(skipped),
            "levels": 0 if x.is_floating_point() else levels,
            "columns": tuple(columns),
            "ignored": tuple(ignored),
            "table_format": table_format,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.elements)

    def __repr__(self) -> str:
        kind = "images" if self.is_images else "rows"
        return f"Examples({len(self)} {kind} of shape {self.shape} in {len(self.names)} classes)"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one element."""
        return tuple(self.elements.shape[1:])

    @property
    def is_images(self) -> bool:
        """Whether the elements are images, integers below `levels`, rather than rows of real numbers."""
        return self.levels > 0

    @property
    def counts(self) -> Int[Tensor, " classes"]:
        """The number of elements in each class."""
        return torch.bincount(self.labels, minlength=len(self.names))

    def by_class(self) -> tuple[Int[Tensor, " members"], ...]:
        """The positions of the elements of each class, in order."""
        return members_by_label(self.labels, len(self.names))

    def at(self, places: Int[Tensor, " some"] | Bool[Tensor, " n"]) -> Examples:
        """Return the examples at some positions; all classes stay, even those without examples."""
        return replace(self, elements=self.elements[places], labels=self.labels[places])

    def inverted(self) -> Examples:
        """Return the images with dark and bright exchanged."""
        if not self.is_images:
            raise ValueError("`invert` must be omitted for rows; it is for images.")
        return replace(self, elements=self.levels - 1 - self.elements)

    def with_levels(self, levels: int) -> Examples:
        """Return images rescaled to another number of grey values; rows stay unchanged."""
        if not levels or not self.is_images:
            return self
        return replace(self, elements=rescale_levels(self.elements, self.levels, levels), levels=levels)

    def of_classes(self, keep: Iterable[int]) -> Examples:
        """Return the examples of some classes, which are renumbered in the given order."""
        order = list(keep)
        check_all_differ("keep", order)
        for index in order:
            if not 0 <= index < len(self.names):
                raise ValueError(f"`keep` must be from 0 to {len(self.names) - 1}; got {index}.")
        position = torch.full((len(self.names),), -1)
        position[order] = torch.arange(len(order))
        kept = self.at(position[self.labels] >= 0)
        names = tuple(self.names[i] for i in order)
        return replace(kept, labels=position[kept.labels], names=names)

    def select(self, names: Sequence[str]) -> Examples:
        """Return the examples of the classes with these names, in this order."""
        check_all_differ("classes", names)
        missing = sorted(set(names) - set(self.names))
        if missing:
            known = ", ".join(self.names[:8]) + (", …" if len(self.names) > 8 else "")
            raise ValueError(f"`classes` must be among {known}; got {missing[0]!r}.")
        return self.of_classes(self.names.index(name) for name in names)

    def without(self, names: Iterable[str]) -> Examples | None:
        """Return the examples of all classes but those with these names; None if no class is left."""
        dropped = set(names)
        kept = [i for i, name in enumerate(self.names) if name not in dropped]
        return self.of_classes(kept) if kept else None

    def with_at_least(self, count: int) -> Examples:
        """Return the classes with at least `count` elements and add the others to `skipped`.

        Returns all classes if none has `count` elements.
        """
        counts = self.counts.tolist()
        if max(counts) < count:
            return self
        kept = self.of_classes(i for i, has in enumerate(counts) if has >= count)
        small = (f"{name} (only {has})" for name, has in zip(self.names, counts, strict=True) if has < count)
        return replace(kept, skipped=(*self.skipped, *small))

    def save(self, path: str | Path) -> None:
        """Write an npz without pickles, atomically. Images are compressed, real numbers are not."""
        save = np.savez_compressed if self.is_images else np.savez
        with atomic_write(Path(path)) as beside, beside.open("wb") as file:
            save(
                file,
                elements=self.elements.numpy(),
                labels=self.labels.numpy(),
                names=np.array(self.names),
                skipped=np.array(self.skipped, dtype=str),
                levels=np.array(self.levels),
                columns=np.array(self.columns, dtype=str),
                ignored=np.array(self.ignored, dtype=str),
                table_format=np.array(self.table_format),
            )

    @classmethod
    def load(cls, path: str | Path) -> Examples:
        """Read a file that `save` wrote; raises ValueError with its path if it is another file or damaged."""
        path = Path(path)
        try:
            content = read_arrays(path, _FIELDS)
            return cls(
                content["elements"],
                content["labels"],
                tuple(map(str, content["names"])),
                tuple(map(str, content["skipped"])),
                int(content["levels"]),
                tuple(map(str, content.get("columns", ()))),
                tuple(map(str, content.get("ignored", ()))),
                str(content.get("table_format", "")),
            )
        except Exception as error:  # numpy, zipfile and zlib raise many different errors for damaged files
            raise ValueError(f"{path}: must be a file of `Examples.save`; got: {reason(error)}.") from error


def members_by_label(labels: Int[Tensor, " n"], classes: int) -> tuple[Int[Tensor, " members"], ...]:
    """The positions of each label from 0 to `classes` − 1, in order, by one sort."""
    counts = torch.bincount(labels, minlength=classes)
    members: tuple[Tensor, ...] = labels.argsort(stable=True).split(counts.tolist())
    return members


def concatenate(parts: Sequence[Examples]) -> Examples:
    """Concatenate several examples; classes stay separate, even if they share a name."""
    offsets = np.cumsum([0, *(len(part.names) for part in parts[:-1])])
    return replace(
        parts[0],
        elements=torch.cat([part.elements for part in parts]),
        labels=torch.cat([part.labels + int(offset) for part, offset in zip(parts, offsets, strict=True)]),
        names=tuple(name for part in parts for name in part.names),
        skipped=tuple(name for part in parts for name in part.skipped),
        levels=max(part.levels for part in parts),
    )


def check_labels(labels: Tensor, elements: int) -> None:
    """Raise unless labels are integers, one for each element."""
    if labels.is_floating_point() or labels.ndim != 1:
        raise TypeError(
            f"`labels` must be integers, one for each element; got {labels.dtype} of shape "
            f"{tuple(labels.shape)}. Use labels.long()."
        )
    if len(labels) != elements:
        raise ValueError(f"`labels` must have one entry for each of {elements} elements; got {len(labels)}.")


def _check_classes(labels: Tensor, classes: int) -> None:
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        lowest, highest = int(labels.min()), int(labels.max())
        raise ValueError(
            f"`labels` must be from 0 to {classes - 1}, one for each of {classes} names; "
            f"got {lowest if lowest < 0 else highest}."
        )


def _as_tensor(values: ArrayLike, name: str) -> Tensor:
    """A tensor of the values; PIL images keep their size and become grey or RGB."""
    if isinstance(values, list | tuple) and values and isinstance(values[0], Image.Image):
        grey = values[0].mode in ("1", "L") or values[0].mode.startswith("I")
        values = [image_to_array(image, None, grey) for image in values]
    return as_tensor(values, name)
