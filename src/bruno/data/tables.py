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
    Bad lines raise, or are
       skipped if `skip_bad`.
    """
    with open_text(path) as file:
        table = csv.reader(file)
        try:
            found = _find_columns(path, next(table, []), group, columns)
            rows = _parse(path, table, found, skip_bad)
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

    They must be below `MAX_NUMBER`, so that their squares are finite, too.
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
        raise ValueError(f"{path}: must have columns of numbers beside {group!r}; got none.")
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
