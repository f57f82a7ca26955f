"""Single elements from user files: images, folders of images, and rows of numbers; one at a time."""

from __future__ import annotations

import io
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

from bruno import limits
from bruno.checks import check_levels
from bruno.data.archives import READ_ERRORS, reason
from bruno.data.columns import Columns, check_numbers, column_names, column_positions
from bruno.data.frames import frame_rows, is_frame
from bruno.data.images import decode, is_image, is_unreadable_image
from bruno.data.table_format import TableFormat, bounded_lines, detect, split_rows
from bruno.data.tables import is_parquet, is_table, open_text, parse_numbers, read_parquet
from bruno.files import check_regular, read_regular
from bruno.kinds import rescale_levels

_log = logging.getLogger(__name__)
_BYTES_OF_ELEMENT = 600  # in memory, besides its values: its name and the tensor
_SAMPLE = 200  # lines from which the format of a file is detected


class Place(NamedTuple):
    """Where a row is in its source: its line, a checksum of its text, and the value of the offset column."""

    line: int
    check: int
    offset: int | None = None


class Element(NamedTuple):
    """An element, its name (the path of an image, the line of a row), and the set that its line names."""

    name: str
    x: Tensor
    group: str = ""


class Placed(NamedTuple):
    """An element, and its place in its source; None for an image."""

    element: Element
    place: Place | None


class _Unread(NamedTuple):
    """An element that is not decoded yet; `load` raises if it is bad."""

    name: str
    load: Callable[[], Tensor]
    group: str = ""
    line: int = 0
    place: Callable[[], Place] | None = None


def collected(elements: Iterable[Element]) -> list[Element]:
    """All elements in a list; raises ValueError as soon as they need more than `limits.MEMORY`."""
    found: list[Element] = []
    amount = 0
    for element in elements:
        amount += element.x.nbytes + _BYTES_OF_ELEMENT
        limits.MEMORY.check(amount, "the elements in memory")
        found.append(element)
    return found


class ImageReader:
    """Finds and decodes image files."""

    plural = "images"

    def __init__(
        self, shape: tuple[int, ...], levels: int, invert: bool | None, drawings: bool = False
    ) -> None:
        self.shape, self.levels, self.invert, self.drawings = shape, levels, invert, drawings

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
        array = decode(
            read_regular(path), (height, width), channels == 1, drawings=self.drawings, invert=self.invert
        )
        pixels = torch.from_numpy(array.copy())
        inverted = 255 - pixels if self.invert and not self.drawings else pixels
        return rescale_levels(inverted, 256, self.levels)


class RowReader:
    """Finds tables and parses their rows; text may have a header or not.

    The format of each table is detected. If several fit, that of training, `table_format`, is chosen.
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
        self.prefer = TableFormat(**TableFormat.parse(table_format))

    def find(self, folder: Path) -> list[Path]:
        """Return the tables of a folder, sorted by name."""
        return sorted(file for file in folder.iterdir() if is_table(file.name, in_folder=True))

    def parse(self, path: Path) -> Iterator[_Unread]:
        """Yield the rows of a table."""
        if is_parquet(path):
            yield from self.parse_frame(read_parquet(path), f"{path}, ")
            return
        with open_text(path) as file:
            lines = bounded_lines(file)
            sample = list(islice(lines, _SAMPLE))
            form = detect(sample, wanted=self.columns, prefer=self.prefer)
            if (form.delimiter, form.decimal) != (self.prefer.delimiter, self.prefer.decimal):
                _log.info("%s: read as %s", path, form.describe() or form)
            yield from self._parse(chain(sample, lines), f"{path}, ", form)

    def parse_lines(self, lines: Iterable[str], origin: str) -> Iterator[_Unread]:
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

    def parse_frame(self, frame: Any, origin: str = "") -> Iterator[_Unread]:
        """Yield the rows of a frame of pandas, polars or pyarrow."""
        rows, groups = frame_rows(frame, self.group, self.columns)
        if self.offset:
            raise ValueError(f"{origin}`offset` is a column of text tables; got {self.offset!r}. Omit it.")
        for i, (row, group) in enumerate(zip(rows, groups, strict=True), start=1):
            place = partial(_place, i, [group, *map(repr, row.tolist())])
            yield _Unread(f"{origin}row {i}", partial(self._checked, row.tolist()), group, i, place)

    def _parse(self, lines: Iterable[str], origin: str, form: TableFormat) -> Iterator[_Unread]:
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
                else (cells[columns.group : columns.group + 1] or [""])[0]
            )
            load = partial(self._load, cells, problem, columns, form)
            yield _Unread(f"{origin}line {line}", load, group, line, partial(_place, line, cells, offset))

    def _columns(self, cells: list[str], is_header: bool, origin: str) -> Columns:
        """The positions of the numbers of a row, and of its group, among the cells of a line."""
        header = column_names(cells if is_header else [str(i) for i in range(1, len(cells) + 1)])
        numbered = not self.prefer.header and set(self.columns) <= set(header)
        if not is_header and not numbered:  # the numbers of a row and nothing else
            header = list(self.columns) or [f"number {i}" for i in range(1, self.dim + 1)]
            return Columns(header, None, list(range(len(header))))
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


class ElementReader:
    """Reads elements in the shape and with the grey values that a model expects.

    Args:
        shape: (channels, height, width) for images, which are resized to it, or (dim,) for rows.
        levels: number of grey values of the images; 0 for rows of real numbers.
        invert: use 255 − pixel, for dark ink on bright paper if the model expects bright ink.
        drawings: normalise images as line drawings (see `normalise_drawing`). If `invert` is None, the reader
            finds out whether ink is darker than paper.
        skip_bad: skip elements that cannot be read, and add them to `skipped`, instead of raising.
        group: for rows: the group column, which is not one of the numbers. A header may lack it.
        columns: for rows: the names of the numbers. If a header is given, they are found by name.
        table_format: for rows: the format of the table in training, chosen if several fit equally well.
        missing: for rows: read missing cells as NaN.
        offset: for rows: the column of their offsets in the input, whole numbers.
    """

    def __init__(
        self,
        shape: Sequence[int],
        levels: int,
        *,
        invert: bool | None = False,
        drawings: bool = False,
        skip_bad: bool = False,
        group: str = "",
        columns: Sequence[str] = (),
        table_format: str = "",
        missing: bool = False,
        offset: str = "",
    ) -> None:
        check_levels(levels)
        if len(shape) != (3 if levels else 1) or min(shape) < 1:
            wanted = "(channels, height, width) for images" if levels else "(dim,) for rows"
            raise ValueError(f"`shape` must be {wanted}; got {tuple(shape)}.")
        self.invert, self.drawings, self.skip_bad = invert, drawings, skip_bad
        self.group, self.columns = group, tuple(columns)
        self.skipped: list[str] = []
        self._source = (
            ImageReader(tuple(shape), levels, invert, drawings)
            if levels
            else RowReader(
                shape[0], group, columns, table_format=table_format, missing=missing, offset=offset
            )
        )

    def read(self, paths: Iterable[str | Path]) -> Iterator[Element]:
        """Yield each image file and each row of a table; the files of a folder are sorted by name."""
        for given in paths:
            if not str(given):
                raise ValueError("`paths` must not be empty; got ''. The current folder is '.'.")
            path = Path(given)
            if path.is_dir():
                for file in self.files(path):
                    yield from self._read_file(file)
            elif path.exists() or self.skip_bad:
                yield from self._read_file(path)
            else:
                raise FileNotFoundError(f"{path}: no such file or folder.")

    def read_lines(self, lines: Iterable[str], origin: str = "") -> Iterator[Element]:
        """Yield elements as lines arrive: paths of images, or rows of numbers with an optional header."""
        if isinstance(lines, io.TextIOBase):
            lines = bounded_lines(lines)
        if isinstance(self._source, RowReader):
            yield from self._load(self._source.parse_lines(lines, origin))
        else:
            for line in filter(None, map(str.strip, lines)):
                yield from self.read([line])

    def read_placed(self, source: Path | Iterable[str], after: Place | None = None) -> Iterator[Placed]:
        """Yield the rows of a table, or of lines as they arrive, with their places; images have none.

        Rows up to a place, `after`, are skipped; raises ValueError if the row there is another one.
        """
        if not isinstance(self._source, RowReader):
            elements = self.read([source]) if isinstance(source, Path) else self.read_lines(source)
            yield from (Placed(element, None) for element in elements)
            return
        if isinstance(source, Path):
            check_regular(source)
            rows, origin = self._source.parse(source), str(source)
        else:
            rows, origin = self._source.parse_lines(source, ""), "standard input"
        yield from self._load_placed(rows if after is None else _after(rows, after, origin))

    def read_frame(self, frame: Any) -> Iterator[Element]:
        """Yield the rows of a frame of pandas, polars or pyarrow."""
        if not isinstance(self._source, RowReader) or not is_frame(frame):
            raise TypeError(f"`frame` must be a frame, for a model of rows; got {type(frame).__name__}.")
        yield from self._load(self._source.parse_frame(frame))

    def read_all(self, paths: Iterable[str | Path]) -> tuple[Tensor, tuple[str, ...]]:
        """Return all elements, (n, *shape), and their names."""
        paths = list(paths)
        elements = collected(self.read(paths))
        if not elements:
            found = ", ".join(map(str, paths)) or "nothing"
            raise ValueError(f"`paths` must contain at least one readable element; got {found}.")
        return torch.stack([element.x for element in elements]), tuple(element.name for element in elements)

    def files(self, folder: Path) -> list[Path]:
        """Return the images of a folder, or its tables if elements are rows, sorted by name."""
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
        return (placed.element for placed in self._load_placed(one._replace(place=None) for one in unread))

    def _load_placed(self, unread: Iterable[_Unread]) -> Iterator[Placed]:
        for name, load, group, _, place in unread:
            try:
                placed = Placed(Element(name, load(), group), place and place())
            except (*READ_ERRORS, ValueError) as error:
                if not self.skip_bad:
                    raise ValueError(f"{name}: cannot be used: {reason(error)}.") from error
                self.skipped.append(name)
                continue
            yield placed


def _place(line: int, cells: list[str], offset: int | None = None) -> Place:
    """The place of a row; raises ValueError if its offset is not a whole number."""
    check = zlib.crc32("\x1f".join(cells).encode("utf-8", "surrogateescape"))
    if offset is None:
        return Place(line, check)
    cell = cells[offset].strip() if offset < len(cells) else ""
    if not (cell.isascii() and cell.removeprefix("-").isdigit() and len(cell) < 19):
        raise ValueError(f"its offset must be a whole number; got {cell!r}")
    return Place(line, check, int(cell))


def _after(rows: Iterable[_Unread], place: Place, origin: str) -> Iterator[_Unread]:
    """The rows after a place; raises ValueError unless the row there has the same text."""
    found = False
    for row in rows:
        if not found and row.line >= place.line:
            found = row.line == place.line and row.place is not None and row.place().check == place.check
            if not found:
                break
        elif found:
            yield row
    if not found:
        raise ValueError(
            f"{origin}: must begin with the rows that were judged before, up to line {place.line}; that row "
            "is missing or another one. Give the file another name to judge all of it."
        )
