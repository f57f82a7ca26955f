"""CSV tables: a header, columns of numbers, and a group column that assigns each row to a set."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from bruno.data.archives import reason
from bruno.data.examples import Examples

MAX_NUMBER = float(np.finfo(np.float32).max)  # its square is finite in float64
_MIN_FAST_BYTES = 2**20  # smaller tables are parsed faster than pyarrow is imported


class _Columns(NamedTuple):
    """The header of a table, and the positions of the group column and the columns of numbers in it."""

    header: list[str]
    group: int
    numbers: list[int]


class _Rows(NamedTuple):
    """Parsed rows: their numbers (n, columns), the sorted group names, and the group of each row."""

    numbers: NDArray[np.float64]
    names: NDArray[np.str_]
    labels: NDArray[np.int64]
    skipped: Sequence[str] = ()


def read_csv(path: Path, group: str, *, columns: Sequence[str] = (), skip_bad: bool = False) -> Examples:
    """Read a CSV with a header: rows with the same value in the `group` column form a set.

    The other columns are numbers. `columns` selects and orders them; by default all are read.

    pyarrow, if it is installed, parses large tables. A table that it rejects is parsed again in Python, which
    reports the line and the column of the problem, or skips the line if `skip_bad`.
    """
    with open_text(path) as file:
        table = csv.reader(file)
        try:
            found = _find_columns(path, next(table, []), group, columns)
            rows = _parse_fast(path, found) or _parse(path, table, found, skip_bad)
        except csv.Error as error:
            raise ValueError(f"{path}: line {table.line_num} cannot be read as CSV: {error}.") from error
    return Examples(
        rows.numbers,
        rows.labels,
        tuple(map(str, rows.names)),
        tuple(rows.skipped),
        columns=tuple(found.header[i] for i in found.numbers),
    )


def parse_numbers(cells: Sequence[str], header: Sequence[str], positions: Iterable[int]) -> list[float]:
    """Return the numbers at these positions of a line; raises ValueError unless all are finite numbers.

    They must be below `MAX_NUMBER`, so that their squares are also finite.
    """
    if len(cells) != len(header):
        raise ValueError(f"it must have {len(header)} cells; got {len(cells)}: {','.join(cells)}")
    row: list[float] = []
    for name, cell in ((header[position], cells[position]) for position in positions):
        try:
            row.append(float(cell))
        except ValueError:
            raise ValueError(f"{name!r} must be a number; got {cell!r}") from None
        if not abs(row[-1]) <= MAX_NUMBER:  # also rejects NaN
            raise ValueError(f"{name!r} must be finite and below {MAX_NUMBER:.1e}; got {cell}")
    return row


def column_positions(wanted: Sequence[str], header: Sequence[str]) -> list[int]:
    """Return the position of each column in a header; raises ValueError if one is missing or repeated."""
    missing = [name for name in wanted if name not in header]
    if missing:
        raise ValueError(
            f"columns must include {', '.join(wanted)}, in any order; {missing[0]!r} is missing from "
            f"{', '.join(header)}."
        )
    if repeated := [name for name in wanted if list(header).count(name) > 1]:
        raise ValueError(f"columns must have different names; got {repeated[0]!r} more than once.")
    return [list(header).index(name) for name in wanted]


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a text file in UTF-8, with or without a byte order mark; raises ValueError if unreadable."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield file
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {reason(error)}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be text in UTF-8; got {error}. Save it as UTF-8.") from error


def _find_columns(path: Path, header: list[str], group: str, columns: Sequence[str]) -> _Columns:
    if group not in header:
        hint = " Columns are separated by commas." if len(header) == 1 else ""
        raise ValueError(
            f"{path}: `group` must be a column, one of {', '.join(header)}; got {group!r}. "
            f"Set it (`data.group`).{hint}"
        )
    if len(header) == 1:
        raise ValueError(f"{path}: must have columns of numbers besides {group!r}; got none.")
    try:
        [position] = column_positions([group], header)
        numbers = column_positions(columns or [name for name in header if name != group], header)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return _Columns(header, position, numbers)


def _parse(path: Path, table: Any, columns: _Columns, skip_bad: bool) -> _Rows:
    """Parse the lines of a `csv.reader` in Python."""
    rows, groups, skipped = [], [], []
    for cells in filter(None, table):  # blank lines are empty lists
        try:
            row = parse_numbers(cells, columns.header, columns.numbers)
            if not cells[columns.group].strip():
                raise ValueError(f"{columns.header[columns.group]!r} must name a group; got an empty cell")
        except ValueError as error:
            if not skip_bad:
                raise ValueError(
                    f"{path}: line {table.line_num} cannot be used: {error}. Correct it, skip such lines "
                    "(--skip-bad, `data.skip_bad`), or select the columns that are numbers (`data.columns`)."
                ) from error
            skipped.append(f"line {table.line_num}")
            continue
        rows.append(row)
        groups.append(cells[columns.group])
    if not rows:
        raise ValueError(f"{path}: must contain at least one row of numbers; got none.")
    names, labels = np.unique(groups, return_inverse=True)
    return _Rows(np.array(rows), names, labels, skipped)


def _parse_fast(path: Path, columns: _Columns) -> _Rows | None:
    """Parse a table with pyarrow; None if it is small, if pyarrow is missing, or if results might differ.

    The numbers that pyarrow accepts are a subset of those that Python accepts, with the same values.
    """
    header, group, numbers = columns
    if path.stat().st_size < _MIN_FAST_BYTES or len(set(header)) < len(header) or group in numbers:
        return None
    try:
        import pyarrow  # type: ignore[import-untyped]  # optional
        from pyarrow import csv as fast_csv
    except ImportError:
        return None
    content = path.read_bytes()
    types = {header[group]: pyarrow.string()} | {header[i]: pyarrow.float64() for i in numbers}
    options = fast_csv.ConvertOptions(column_types=types, include_columns=list(types), null_values=[])
    try:
        content.decode()  # pyarrow decodes only the columns that it converts
        table = fast_csv.read_csv(pyarrow.BufferReader(content), convert_options=options)
    except (UnicodeDecodeError, pyarrow.ArrowException):
        return None
    values = np.stack([table[header[i]].to_numpy() for i in numbers], axis=1)
    if not _has_one_line_each(content, len(values)) or not (np.abs(values) <= MAX_NUMBER).all():
        return None
    groups = table[header[group]].dictionary_encode().combine_chunks()
    names, order = np.unique(groups.dictionary.to_pylist(), return_inverse=True)
    if not all(map(str.strip, names)):
        return None
    return _Rows(values, names, order[groups.indices.to_numpy()])


def _has_one_line_each(content: bytes, rows: int) -> bool:
    """Whether the header and at least one row take one line each, no longer than Python's limit of a cell.

    A blank line has only its end, at most two characters. A row has more: a comma, a digit and an end.
    """
    ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n"))
    lengths = np.diff(ends, prepend=-1, append=len(content))
    lines = int((lengths > 2).sum())
    return (
        content.count(b"\r") == content.count(b"\r\n")
        and lines == rows + 1 > 1
        and int(lengths.max()) <= csv.field_size_limit()
    )
