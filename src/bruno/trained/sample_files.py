"""Files of samples, written part by part: an npz, and a CSV for rows."""

from __future__ import annotations

import csv
import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bruno.arrays import to_numpy
from bruno.data.archives import ArrayWriter
from bruno.files import atomic_write
from bruno.model import Samples
from bruno.tasks import Progress
from bruno.text import numbered

_PIXELS_SHOWN = 4_000_000  # of all samples in a picture
_NUMBERS_SHOWN = 10_000  # in rows that are kept for a table, which shows some of them


def write_parts(
    folder: Path,
    name: str,
    arrays: dict[str, Any],
    shape: tuple[int, ...],
    parts: Iterable[Samples],
    columns: Sequence[str],
) -> list[Path]:
    """Write arrays and samples to files, part by part; no file is left if that fails. Returns the paths.

    Args:
        folder: the folder of the files; created if it does not exist.
        name: name of the files, without suffix.
        arrays: arrays to write before the samples; "seen" has the numbers of elements conditioned on.
        shape: shape of all samples together.
        parts: the samples, in order.
        columns: names of the columns of rows; if empty, columns are numbered from 1.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_disk(folder, shape)
    paths = [folder / f"{name}.npz"]
    parts = iter(parts)
    first = next(parts)  # all parts have its dtype
    with ExitStack() as stack:
        archive = stack.enter_context(ArrayWriter(stack.enter_context(atomic_write(paths[0]))))
        for key, array in arrays.items():
            archive.add(key, np.asarray(to_numpy(array)))
        write = stack.enter_context(archive.parts("samples", shape, _values(first).dtype))
        table = None
        if not first.is_images:
            paths.append(folder / f"{name}.csv")
            beside = stack.enter_context(atomic_write(paths[1]))
            file = stack.enter_context(beside.open("w", newline="", encoding="utf-8"))
            columns = columns or numbered(shape[-1])
            table = _RowWriter(csv.writer(file), arrays["seen"], shape[-2], columns)
        for part in chain([first], parts):
            write(_values(part))
            if table:
                table.write(part.x)
    return paths


def _values(samples: Samples) -> NDArray[Any]:
    """The samples as they are saved: pixels as integers, rows as they are."""
    return np.asarray(to_numpy(samples.images if samples.is_images else samples.x))


class FirstSamples:
    """Passes parts of samples on, and keeps the first samples of each set that fit into a picture."""

    def __init__(
        self, shape: tuple[int, ...], axes: int, parts: Iterable[Samples], progress: Progress | None
    ) -> None:
        self._parts, self._progress = parts, progress
        self._sets, self._element = shape[: -axes - 1], shape[-axes:]
        self._samples, sets = shape[-axes - 1], math.prod(self._sets)
        shown = (_PIXELS_SHOWN if axes > 1 else _NUMBERS_SHOWN) // (sets * math.prod(self._element))
        self._most = min(self._samples, max(1, shown))
        self.shown, self.total = sets * self._most, sets * self._samples
        self._kept: list[Samples] = []
        self._clamped = 0

    def __iter__(self) -> Iterator[Samples]:
        done = 0
        for part in self._parts:
            self._clamped += part.clamped
            place = torch.arange(done, done + len(part.x), device=part.x.device) % self._samples
            if bool((place < self._most).any()):
                self._kept.append(replace(part, x=part.x[place < self._most].cpu()))
            done += len(part.x)
            if self._progress:
                self._progress(done, self.total)
            yield part

    def samples(self) -> Samples:
        """The first samples of each set, with the clamped values of all."""
        x = torch.cat([part.x for part in self._kept])
        shape = (*self._sets, self._most, *self._element)
        return replace(self._kept[0], x=x.reshape(shape), clamped=self._clamped)


class _RowWriter:
    """Writes rows of samples as CSV, with the number of their set and of the elements seen."""

    def __init__(self, writer: Any, seen: Sequence[int], samples: int, columns: Sequence[str]) -> None:
        self._writer, self._seen, self._samples, self._done = writer, seen, samples, 0
        writer.writerow(("set", "seen", *columns))

    def write(self, x: Tensor) -> None:
        """Write the next rows."""
        for row in x.tolist():
            prefix = self._done // self._samples
            number, n = prefix // len(self._seen) + 1, self._seen[prefix % len(self._seen)]
            self._writer.writerow((number, n, *(f"{value:.10g}" for value in row)))
            self._done += 1


def _check_disk(folder: Path, shape: Sequence[int]) -> None:
    """Raise if samples of this shape cannot fit on the disk, with at least one bit for each number."""
    free, needed = shutil.disk_usage(folder).free, math.prod(shape) // 8
    if needed > free:
        raise ValueError(
            f"`samples` must fit on the disk of {folder}, which has {free // 2**30:,} GiB; got samples of "
            f"shape {tuple(shape)}, at least {needed // 2**30:,} GiB."
        )
