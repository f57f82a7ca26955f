"""Single elements from user files: images, folders of images, and rows of numbers; one at a time."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bruno import limits
from bruno.arrays import is_frame
from bruno.checks import check_levels
from bruno.data.archives import READ_ERRORS, is_hidden, reason
from bruno.data.file_readers import ImageReader, Place, RowReader, Unread
from bruno.data.table_rows import bounded_lines, ended_lines
from bruno.files import check_regular

_BYTES_OF_ELEMENT = 600  # in memory, besides its values: its name and the tensor


class Element(NamedTuple):
    """An element, its name (the path of an image, the line of a row), and the set that its line names."""

    name: str
    x: Tensor
    group: str = ""


class Placed(NamedTuple):
    """An element, and its place in its source; None for an image."""

    element: Element
    place: Place | None


def collected(elements: Iterable[Element]) -> list[Element]:
    """All elements in a list; raises ValueError as soon as they need more than `limits.MEMORY`."""
    found: list[Element] = []
    amount = 0
    for element in elements:
        amount += element.x.nbytes + _BYTES_OF_ELEMENT
        limits.MEMORY.check(amount, "the elements in memory")
        found.append(element)
    return found


class ElementReader:
    """Reads elements in the shape and with the grey values that a model expects.

    Args:
        shape: (channels, height, width) for images, which are resized to it, or (dim,) for rows.
        levels: number of grey values of the images; 0 for rows of real numbers.
        invert: use 255 − pixel, for dark ink on bright paper if the model expects bright ink.
        drawings: normalise images as line drawings (see `normalise_drawing`). If `invert` is None, the reader
            detects whether ink is darker than paper.
        backdrop: "black" or "white", behind transparent pixels; by default what contrasts with each image.
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
        backdrop: str = "",
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
        self.backdrop = backdrop
        self.group, self.columns = group, tuple(columns)
        self.skipped: list[str] = []
        self._source = (
            ImageReader(tuple(shape), levels, invert, drawings, backdrop)
            if levels
            else RowReader(
                shape[0], group, columns, table_format=table_format, missing=missing, offset=offset
            )
        )

    @property
    def header(self) -> tuple[str, ...]:
        """The columns of the latest table, if it has a header; empty for images."""
        return self._source.header if isinstance(self._source, RowReader) else ()

    def read(self, paths: Iterable[str | Path], *, class_folders: bool = False) -> Iterator[Element]:
        """Yield each image file and each row of a table; the files of a folder are sorted by name.

        With `class_folders`, a folder may have a subfolder for each set, see `sets_in`.
        """
        for given in paths:
            if not str(given):
                raise ValueError("`paths` must not be empty; got ''. The current folder is '.'.")
            path = Path(given)
            if path.is_dir():
                for name, folder in (self.sets_in(path) if class_folders else {"": path}).items():
                    for element in chain.from_iterable(map(self._read_file, self.files(folder))):
                        yield element._replace(group=name) if name else element
            elif path.exists() or self.skip_bad:
                yield from self._read_file(path)
            else:
                raise FileNotFoundError(f"{path}: no such file or folder.")

    def read_lines(self, lines: Iterable[str]) -> Iterator[Element]:
        """Yield elements as lines arrive: paths of images, or rows of numbers with an optional header."""
        if isinstance(lines, io.TextIOBase):
            lines = bounded_lines(lines)
        if isinstance(self._source, RowReader):
            yield from self._load(self._source.parse_lines(lines, ""))
        else:
            for line in filter(None, map(str.strip, lines)):
                yield from self.read([line])

    def read_placed(
        self, source: Path | Iterable[str], after: Place | None = None, *, ended: bool = False
    ) -> Iterator[Placed]:
        """Yield the rows of a table, or of lines as they arrive, with their places; images have none.

        Rows up to the place `after` are skipped; raises ValueError if the row at that place has changed.
        With `ended`, a last line without a newline at its end is skipped with a warning, as a program may
        still be writing it.
        """
        if not isinstance(self._source, RowReader):
            elements = self.read([source]) if isinstance(source, Path) else self.read_lines(source)
            yield from (Placed(element, None) for element in elements)
            return
        if isinstance(source, Path):
            check_regular(source)
            rows, origin = self._source.parse(source, ended=ended), str(source)
        else:
            origin = "standard input"
            rows = self._source.parse_lines(ended_lines(source, origin) if ended else source, "")
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

    def sets_in(self, folder: Path) -> dict[str, Path]:
        """Return the folders of sets by name: the subfolders with images, if the folder itself has no images.

        Any other folder is one set, which has no name.
        """
        if isinstance(self._source, ImageReader) and not self._source.find(folder):
            inside = [path for path in sorted(folder.iterdir()) if path.is_dir() and not is_hidden(path.name)]
            if found := {path.name: path for path in inside if self._source.find(path)}:
                return found
        return {"": folder}

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

    def _load(self, unread: Iterable[Unread]) -> Iterator[Element]:
        return (placed.element for placed in self._load_placed(one._replace(place=None) for one in unread))

    def _load_placed(self, unread: Iterable[Unread]) -> Iterator[Placed]:
        for name, load, group, _, place in unread:
            try:
                placed = Placed(Element(name, load(), group), place and place())
            except (*READ_ERRORS, ValueError) as error:
                if not self.skip_bad:
                    raise ValueError(
                        f"{name}: cannot be used: {reason(error)}. Correct it, or skip it (`skip_bad`)."
                    ) from error
                self.skipped.append(name)
                continue
            yield placed


def _after(rows: Iterable[Unread], place: Place, origin: str) -> Iterator[Unread]:
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
            "is missing or has changed. Give the file another name to judge all of it."
        )
