"""Image files and tables as elements that are not decoded yet."""

from __future__ import annotations

import logging
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bruno.data.columns import Columns, check_numbers, column_names, column_positions
from bruno.data.frames import frame_rows
from bruno.data.images import decode, is_image, is_unreadable_image
from bruno.data.table_format import TableFormat, detect
from bruno.data.table_rows import bounded_lines, ended_lines, split_rows
from bruno.data.tables import is_parquet, is_table, open_text, parse_numbers, read_parquet
from bruno.files import read_regular
from bruno.kinds import rescale_levels

_log = logging.getLogger(__name__)
_SAMPLE = 200  # lines from which the format of a file is detected


class Place(NamedTuple):
    """Where a row is in its source: its line, a checksum of its text, and the value of the offset column."""

    line: int
    check: int
    offset: int | None = None


class Unread(NamedTuple):
    """An element that is not decoded yet; `load` raises if it is bad."""

    name: str
    load: Callable[[], Tensor]
    group: str = ""
    line: int = 0
    place: Callable[[], Place] | None = None


class ImageReader:
    """Finds and decodes image files."""

    plural = "images"

    def __init__(
        self,
        shape: tuple[int, ...],
        levels: int,
        invert: bool | None,
        drawings: bool = False,
        backdrop: str = "",
    ) -> None:
        self.shape, self.levels, self.invert, self.drawings = shape, levels, invert, drawings
        self.backdrop = backdrop

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

    def parse(self, path: Path) -> Iterator[Unread]:
        """Yield the one element of an image file."""
        yield Unread(str(path), partial(self._load, path))

    def _load(self, path: Path) -> Tensor:
        channels, height, width = self.shape
        array = decode(
            read_regular(path),
            (height, width),
            channels == 1,
            drawings=self.drawings,
            invert=self.invert,
            backdrop=self.backdrop,
        )
        pixels = torch.from_numpy(array.copy())
        inverted = 255 - pixels if self.invert and not self.drawings else pixels
        return rescale_levels(inverted, 256, self.levels)


class RowReader:
    """Finds tables and parses their rows; text may have a header or not.

    The format of each table is detected. If several fit, `table_format`, the format in training, is chosen.
    """

    plural = "tables"

    def __init__(
        self,
        dim: int,
        group: str,
        columns: Sequence[str],
        *,
        table_format: str = "",
        missing: bool = False,
        offset: str = "",
    ) -> None:
        self.dim, self.group, self.columns, self.missing = dim, group, tuple(columns), missing
        self.offset = offset
        self.header: tuple[str, ...] = ()  # of the latest table; empty if it has none
        self.prefer = TableFormat(**TableFormat.parse(table_format))

    def find(self, folder: Path) -> list[Path]:
        """Return the tables of a folder, sorted by name."""
        return sorted(file for file in folder.iterdir() if is_table(file.name, in_folder=True))

    def parse(self, path: Path, *, ended: bool = False) -> Iterator[Unread]:
        """Yield the rows of a table; with `ended`, without a last line that has no newline at its end."""
        if is_parquet(path):
            yield from self.parse_frame(read_parquet(path), f"{path}, ")
            return
        with open_text(path) as file:
            lines = bounded_lines(file)
            if ended:
                lines = ended_lines(lines, str(path))
            sample = list(islice(lines, _SAMPLE))
            form = detect(sample, wanted=self.columns, prefer=self.prefer)
            if (form.delimiter, form.decimal) != (self.prefer.delimiter, self.prefer.decimal):
                _log.info("%s: read as %s", path, form.describe() or form)
            yield from self._parse(chain(sample, lines), f"{path}, ", form)

    def parse_lines(self, lines: Iterable[str], origin: str) -> Iterator[Unread]:
        """Yield the rows of these lines as they arrive; `origin` precedes their line numbers in names.

        The format is detected from the first row, and from the header if there is one.
        """
        source = (line.removeprefix("\ufeff") for line in lines)  # the byte order mark of Excel
        first: list[str] = []
        form = self.prefer
        for line in source:
            first.append(line)
            if line.strip():
                is_header, form = form.header, detect(first, wanted=self.columns, prefer=self.prefer)
                if not form.header or (is_header and len([one for one in first if one.strip()]) > 1):
                    break
        yield from self._parse(chain(first, source), origin, form)

    def parse_frame(self, frame: Any, origin: str = "") -> Iterator[Unread]:
        """Yield the rows of a frame of pandas, polars or pyarrow."""
        rows, groups = frame_rows(frame, self.group, self.columns)
        if self.offset:
            raise ValueError(f"{origin}`offset` is a column of text tables; got {self.offset!r}. Omit it.")
        for i, (row, group) in enumerate(zip(rows, groups, strict=True), start=1):
            place = partial(_place, i, [group, *map(repr, row.tolist())])
            yield Unread(f"{origin}row {i}", partial(self._checked, row.tolist()), group, i, place)

    def _parse(self, lines: Iterable[str], origin: str, form: TableFormat) -> Iterator[Unread]:
        columns: Columns | None = None
        offset: int | None = None
        for line, cells, problem in split_rows(lines, form.delimiter):
            is_header = columns is None and form.header and not problem
            if columns is None:
                columns = self._columns(cells, form.header, origin or "the header: ")
                offset = self._offset_in(columns, origin or "the header: ")
            if is_header:
                continue
            group = (
                ""
                if columns.group is None or problem
                else (cells[columns.group : columns.group + 1] or [""])[0].strip()
            )
            load = partial(self._load, cells, problem, columns, form)
            yield Unread(f"{origin}line {line}", load, group, line, partial(_place, line, cells, offset))

    def _columns(self, cells: list[str], is_header: bool, origin: str) -> Columns:
        """The positions of the numbers and the group of a row among the cells of a line."""
        header = column_names(cells if is_header else [str(i) for i in range(1, len(cells) + 1)])
        numbered = not self.prefer.header and set(self.columns) <= set(header)
        if not is_header and not numbered:  # the numbers of a row and nothing else
            self.header = ()
            header = list(self.columns) or [f"number {i}" for i in range(1, self.dim + 1)]
            return Columns(header, None, list(range(len(header))))
        self.header = tuple(header)
        group = header.index(self.group) if self.group in header else None
        if not self.columns:
            others = {group, header.index(self.offset) if self.offset in header else None}
            return Columns(header, group, [i for i in range(len(header)) if i not in others])
        try:
            return Columns(header, group, column_positions(self.columns, header))
        except ValueError as error:
            raise ValueError(f"{origin}{error}") from error

    def _offset_in(self, columns: Columns, origin: str) -> int | None:
        """The position of the offset column."""
        if self.offset and self.offset not in columns.header:
            known = ", ".join(columns.header)
            raise ValueError(f"{origin}`offset` must be a column, one of {known}; got {self.offset!r}.")
        return columns.header.index(self.offset) if self.offset else None

    def _load(self, cells: list[str], problem: str, columns: Columns, form: TableFormat) -> Tensor:
        if problem:
            raise ValueError(problem)
        return self._checked(parse_numbers(cells, columns, form, missing=self.missing))

    def _checked(self, numbers: list[float]) -> Tensor:
        check_numbers(numbers, self.columns or [str(i) for i in range(1, len(numbers) + 1)], self.missing)
        if len(numbers) != self.dim:
            raise ValueError(f"a row must have {self.dim} numbers; got {len(numbers)}")
        return torch.tensor(numbers, dtype=torch.double)


def _place(line: int, cells: list[str], offset: int | None = None) -> Place:
    """The place of a row; raises ValueError if its offset is not a whole number."""
    check = zlib.crc32("\x1f".join(cells).encode("utf-8", "surrogateescape"))
    if offset is None:
        return Place(line, check)
    cell = cells[offset].strip() if offset < len(cells) else ""
    if not (cell.isascii() and cell.removeprefix("-").isdigit() and len(cell) < 19):
        raise ValueError(f"its offset must be a whole number; got {cell!r}")
    return Place(line, check, int(cell))
