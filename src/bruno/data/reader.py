"""Single elements from user files: images, folders of images, and rows of numbers; one at a time."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bruno.config import check_levels
from bruno.data.archives import READ_ERRORS, is_hidden, reason
from bruno.data.images import decode, is_image, is_unreadable_image
from bruno.data.tables import column_positions, open_text, parse_numbers
from bruno.files import check_regular, read_regular
from bruno.kinds import rescale_levels


class Element(NamedTuple):
    """An element, its name (the path of an image, the line of a row), and the set that its line names."""

    name: str
    x: Tensor
    group: str = ""


class _Unread(NamedTuple):
    """An element that is not decoded yet; `load` raises if it is bad."""

    name: str
    load: Callable[[], Tensor]
    group: str = ""


class ImageReader:
    """Finds and decodes image files."""

    plural = "images"

    def __init__(self, shape: tuple[int, ...], levels: int, invert: bool) -> None:
        self.shape, self.levels, self.invert = shape, levels, invert

    def find(self, folder: Path) -> list[Path]:
        """Return the images of a folder, sorted by name; warns about images in unsupported formats."""
        unsupported = sorted(file.name for file in folder.iterdir() if is_unreadable_image(file.name))
        if unsupported:
            warnings.warn(
                f"{folder}: skipped images in unsupported formats ({len(unsupported)}, "
                f"first {unsupported[0]}); save them as PNG.",
                stacklevel=2,
            )
        return sorted(file for file in folder.iterdir() if is_image(file.name))

    def parse(self, path: Path) -> Iterator[_Unread]:
        """Yield the one element of an image file."""
        yield _Unread(str(path), partial(self._load, path))

    def _load(self, path: Path) -> Tensor:
        channels, height, width = self.shape
        pixels = torch.from_numpy(decode(read_regular(path), (height, width), channels == 1).copy())
        return rescale_levels(255 - pixels if self.invert else pixels, 256, self.levels)


class RowReader:
    """Finds CSV files and parses their rows, with or without a header."""

    plural = "CSV files"

    def __init__(self, dim: int, group: str, columns: Sequence[str]) -> None:
        self.dim, self.group, self.columns = dim, group, tuple(columns)

    def find(self, folder: Path) -> list[Path]:
        """Return the CSV files of a folder, sorted by name."""
        return sorted(file for file in folder.iterdir() if _is_csv(file.name))

    def parse(self, path: Path) -> Iterator[_Unread]:
        """Yield the rows of a CSV file."""
        with open_text(path) as file:
            yield from self.parse_lines(file, f"{path}, ")

    def parse_lines(self, lines: Iterable[str], origin: str) -> Iterator[_Unread]:
        """Yield the rows of these lines; `origin` precedes their line numbers in names."""
        header = list(self.columns) or [f"number {i}" for i in range(1, self.dim + 1)]
        positions, first = list(range(len(header))), True
        table = csv.reader(line.removeprefix("\ufeff") for line in lines)  # the byte order mark of Excel
        try:
            for cells in table:
                if not any(map(str.strip, cells)):
                    continue
                if first and self._is_header(cells):
                    header, positions = cells, self._positions(cells, origin or "the header: ")
                else:
                    load = partial(self._load, cells, header, positions)
                    group = dict(zip(header, cells, strict=False)).get(self.group, "")
                    yield _Unread(f"{origin}line {table.line_num}", load, group)
                first = False
        except csv.Error as error:
            raise ValueError(f"{origin}line {table.line_num} cannot be read as CSV: {error}.") from error

    def _is_header(self, cells: list[str]) -> bool:
        """Whether these cells are a header: the names of the columns, or at least not numbers."""
        return bool(self.columns and set(self.columns) <= set(cells)) or not any(map(_is_number, cells))

    def _positions(self, header: list[str], origin: str) -> list[int]:
        """Return the positions of the numbers of a row among the cells of a line."""
        if not self.columns:
            return [i for i, name in enumerate(header) if not self.group or name != self.group]
        try:
            return column_positions(self.columns, header)
        except ValueError as error:
            raise ValueError(f"{origin}{error}") from error

    def _load(self, cells: list[str], header: list[str], positions: list[int]) -> Tensor:
        row = torch.tensor(parse_numbers(cells, header, positions), dtype=torch.double)
        if len(row) != self.dim:
            raise ValueError(f"a row must have {self.dim} numbers; got {len(row)}")
        return row


class ElementReader:
    """Reads elements in the shape and with the grey values that a model expects.

    Args:
        shape: (channels, height, width) for images, which are resized to it, or (dim,) for rows.
        levels: number of grey values of the images; 0 for rows of real numbers.
        invert: use 255 − pixel, for dark ink on bright paper if the model expects bright ink.
        skip_bad: skip elements that cannot be read, and add them to `skipped`, instead of raising.
        group: for rows: the group column, which is not one of the numbers. A header may lack it.
        columns: for rows: the names of the numbers. If a header is given, they are found by name.
    """

    def __init__(
        self,
        shape: Sequence[int],
        levels: int,
        *,
        invert: bool = False,
        skip_bad: bool = False,
        group: str = "",
        columns: Sequence[str] = (),
    ) -> None:
        check_levels(levels)
        if len(shape) != (3 if levels else 1) or min(shape) < 1:
            wanted = "(channels, height, width) for images" if levels else "(dim,) for rows"
            raise ValueError(f"`shape` must be {wanted}; got {tuple(shape)}.")
        self.invert, self.skip_bad = invert, skip_bad
        self.group, self.columns = group, tuple(columns)
        self.skipped: list[str] = []
        self._source = (
            ImageReader(tuple(shape), levels, invert) if levels else RowReader(shape[0], group, columns)
        )

    def read(self, paths: Iterable[str | Path]) -> Iterator[Element]:
        """Yield each image file and each row of a CSV; the files of a folder are sorted by name."""
        for path in map(Path, paths):
            if path.is_dir():
                for file in self.files(path):
                    yield from self._read_file(file)
            elif path.exists() or self.skip_bad:
                yield from self._read_file(path)
            else:
                raise FileNotFoundError(f"{path}: no such file or folder.")

    def read_lines(self, lines: Iterable[str], origin: str = "") -> Iterator[Element]:
        """Yield elements as lines arrive: paths of images, or rows of numbers with an optional header."""
        if isinstance(self._source, RowReader):
            yield from self._load(self._source.parse_lines(lines, origin))
        else:
            for line in filter(None, map(str.strip, lines)):
                yield from self.read([line])

    def read_all(self, paths: Iterable[str | Path]) -> tuple[Tensor, tuple[str, ...]]:
        """Return all elements, (n, *shape), and their names."""
        paths = list(paths)
        elements = list(self.read(paths))
        if not elements:
            found = ", ".join(map(str, paths)) or "nothing"
            raise ValueError(f"`paths` must contain at least one readable element; got {found}.")
        return torch.stack([element.x for element in elements]), tuple(element.name for element in elements)

    def files(self, folder: Path) -> list[Path]:
        """Return the images of a folder, or its CSV files if elements are rows, sorted by name."""
        files = self._source.find(folder)
        if not files:
            raise ValueError(
                f"{folder}: must be a folder of {self._source.plural}; got a folder without any. "
                "Subfolders are ignored."
            )
        return files

    def _read_file(self, path: Path) -> Iterator[Element]:
        try:
            if path.exists():
                check_regular(path)
            yield from self._load(self._source.parse(path))
        except ValueError:
            if not self.skip_bad:
                raise
            self.skipped.append(str(path))

    def _load(self, unread: Iterable[_Unread]) -> Iterator[Element]:
        for name, load, group in unread:
            try:
                x = load()
            except (*READ_ERRORS, ValueError) as error:
                if not self.skip_bad:
                    raise ValueError(f"{name}: cannot be used: {reason(error)}.") from error
                self.skipped.append(name)
                continue
            yield Element(name, x, group)


def _is_csv(name: str) -> bool:
    return name.lower().endswith(".csv") and not is_hidden(name)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
