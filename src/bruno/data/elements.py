"""Single elements as users have them: image files, folders of them, rows of numbers; one at a time."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bruno.data.archives import READ_ERRORS, reason
from bruno.data.examples import column_positions, rescale_levels
from bruno.data.readers import decode, is_image, is_unreadable_image, open_text, parse_numbers


class Element(NamedTuple):
    """An element and what to call it: the path of an image, the line of a row, which may name its set too."""

    name: str
    x: Tensor
    group: str = ""


class ElementReader:
    """Reads elements as a model takes them: of its shape, with its number of levels.

    Args:
        shape: (channels, height, width) for images, which are resized to it, or (dim,) for rows.
        levels: of the images; 0 for rows of real numbers.
        invert: 255 − pixel, for dark ink on bright paper where the model knows bright ink.
        skip_bad: leave out what cannot be read instead of raising; `skipped` names it.
        group: for rows: the column that names their set, where the header has it; it is no number of a row.
        columns: for rows: what their numbers are called; where there is a header, they are found by it.
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
        self.shape, self.levels, self.invert, self.skip_bad = tuple(shape), levels, invert, skip_bad
        self.group, self.columns = group, tuple(columns)
        self.skipped: list[str] = []

    def read(self, paths: Iterable[str | Path]) -> Iterator[Element]:
        """Each image file, each row of a CSV, and those of a folder in the order of their names."""
        for path in map(Path, paths):
            if path.is_dir():
                for file in self.files(path):
                    yield from self._of_file(file)
            elif path.exists() or self.skip_bad:
                yield from self._of_file(path)
            else:
                raise FileNotFoundError(f"{path}: there is no such file or folder.")

    def files(self, folder: Path) -> list[Path]:
        """The images of a folder, or the CSVs if elements are rows, in the order of their names."""
        wanted = is_image if self.levels else _is_csv
        files = sorted(file for file in folder.iterdir() if wanted(file.name))
        if not files:
            kind = "images" if self.levels else "CSV files"
            raise ValueError(f"{folder}: must be a folder of {kind}; there is none in it (not below it).")
        unread = sorted(file.name for file in folder.iterdir() if is_unreadable_image(file.name))
        if self.levels and unread:
            warnings.warn(
                f"{folder}: {len(unread)} of its images cannot be read, first {unread[0]}; save them as PNG.",
                stacklevel=2,
            )
        return files

    def read_lines(self, lines: Iterable[str], origin: str = "") -> Iterator[Element]:
        """As they come: the path of an image on each line, or a row of numbers, below a header or not."""
        if self.levels:
            for line in filter(None, map(str.strip, lines)):
                yield from self.read([line])
            return
        header = list(self.columns) or [f"number {i}" for i in range(1, self.shape[0] + 1)]
        places, begun = list(range(len(header))), False
        table = csv.reader(line.removeprefix("\ufeff") for line in lines)  # the mark that Excel puts first
        try:
            for cells in table:
                if not any(map(str.strip, cells)):
                    continue
                if not begun and self._is_header(cells):
                    header, places = cells, self._places(cells, origin or "the header: ")
                else:
                    row = partial(self._row, cells, header, places)
                    group = dict(zip(header, cells, strict=False)).get(self.group, "")
                    yield from self._checked(f"{origin}line {table.line_num}", row, group)
                begun = True
        except csv.Error as error:
            raise ValueError(f"{origin}line {table.line_num} cannot be read as CSV: {error}.") from error

    def _is_header(self, cells: list[str]) -> bool:
        """Whether these are the columns' names, or at least no numbers."""
        return bool(self.columns and set(self.columns) <= set(cells)) or not any(map(_is_number, cells))

    def _places(self, header: list[str], origin: str) -> list[int]:
        """Which cells of a line are the numbers of a row."""
        if not self.columns:
            return [place for place, name in enumerate(header) if not self.group or name != self.group]
        try:
            return column_positions(self.columns, header)
        except ValueError as error:
            raise ValueError(f"{origin}{error}") from error

    def read_all(self, paths: Iterable[str | Path]) -> tuple[Tensor, tuple[str, ...]]:
        """All of them at once: (n, *shape), and their names."""
        elements = list(self.read(paths))
        if not elements:
            raise ValueError(
                f"there must be something to read; got {', '.join(map(str, paths)) or 'nothing'}."
            )
        return torch.stack([element.x for element in elements]), tuple(element.name for element in elements)

    def _of_file(self, path: Path) -> Iterator[Element]:
        if self.levels:
            yield from self._checked(str(path), partial(self._image, path))
            return
        try:
            with open_text(path) as file:
                yield from self.read_lines(file, f"{path}, ")
        except ValueError:
            if not self.skip_bad:
                raise
            self.skipped.append(str(path))

    def _checked(self, name: str, read: Callable[[], Tensor], group: str = "") -> Iterator[Element]:
        try:
            yield Element(name, read(), group)
        except (*READ_ERRORS, ValueError) as error:
            if not self.skip_bad:
                raise ValueError(f"{name}: cannot be used: {reason(error)}.") from error
            self.skipped.append(name)

    def _image(self, path: Path) -> Tensor:
        channels, height, width = self.shape
        pixels = torch.from_numpy(decode(path.read_bytes(), (height, width), channels == 1).copy())
        return rescale_levels(255 - pixels if self.invert else pixels, 256, self.levels)

    def _row(self, cells: list[str], header: list[str], places: list[int]) -> Tensor:
        row = torch.tensor(parse_numbers(cells, header, places), dtype=torch.double)
        if row.shape != self.shape:
            raise ValueError(f"a row must be {self.shape[0]} numbers; there are {len(row)}")
        return row


def _is_csv(name: str) -> bool:
    return name.lower().endswith(".csv") and not name.startswith(".")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
