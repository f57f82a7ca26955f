"""The columns of a table: which are numbers and which names the group; rows as examples."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bruno.data.examples import Examples
from bruno.data.table_format import TableFormat, is_missing

MAX_NUMBER = float(np.finfo(np.float32).max)  # its square is finite in float64
BLOCK = 20  # consecutive rows that form a set if there is no group column
_DAY = r"(0?[1-9]|[12]\d|3[01])"  # or a month: the order varies
_DATE = re.compile(
    rf"(\d{{4}}([-/.]){_DAY}\2{_DAY}|{_DAY}([-/.]){_DAY}\6(\d{{2}}|\d{{4}}))"  # 2026-01-31, 31.1.2026
    r"([T ]+\d{1,2}[:.]\d{2}.*)?"  # 10:15 after it
    r"|\d{1,2}:\d{2}(:\d{2}([.,]\d+)?)?( ?[ap]m)?"  # 10:15
    r"|(\w+,? )?(\d{1,2}\.? )?(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.? \d.*",
    re.IGNORECASE,
)


class Columns(NamedTuple):
    """The names of the columns of a table, and the positions of the group column and of the numbers.

    `ignored` describes the other columns: "time (date)".
    """

    header: list[str]
    group: int | None
    numbers: list[int]
    ignored: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns of numbers."""
        return tuple(self.header[i] for i in self.numbers)


class ParsedRows(NamedTuple):
    """Parsed rows: their numbers (n, columns), the sorted group names, and the group of each row.

    Without a group column there are no names and no labels.
    """

    numbers: NDArray[np.float64]
    names: NDArray[Any]
    labels: NDArray[Any]
    skipped: Sequence[str] = ()


def choose_columns(
    header: list[str], kinds: Sequence[str], group: str, columns: Sequence[str] = ()
) -> Columns:
    """The columns to read: the requested ones, or all numbers but the group; raises if there are none."""
    names = column_names(header)
    if group and group not in names:
        raise ValueError(f"`group` must be a column, one of {', '.join(names)}; got {group!r}.")
    [position] = column_positions([group], names) if group else [None]
    if columns:
        numbers = column_positions(columns, names)
        ignored = [names[i] for i in range(len(names)) if i not in (*numbers, position)]
        return Columns(names, position, numbers, tuple(ignored))
    numbers = [i for i, kind in enumerate(kinds) if kind == "number" and i != position]
    if not numbers:
        found = [
            f"{name} ({kind})"
            for i, (name, kind) in enumerate(zip(names, kinds, strict=True))
            if i != position
        ]
        raise ValueError(
            f"must have columns of numbers{f' besides {group!r}' if group else ''}; "
            f"got {', '.join(found) or 'none'}."
        )
    column_positions([names[i] for i in numbers], names)  # raises if a name is repeated
    ignored = [f"{names[i]} ({kind})" for i, kind in enumerate(kinds) if i != position and i not in numbers]
    return Columns(names, position, numbers, tuple(ignored))


def check_numbers(numbers: Sequence[float], names: Sequence[str], missing: bool) -> None:
    """Raise unless the numbers of a row can be used: finite, below `MAX_NUMBER`, and not all missing."""
    for name, value in zip(names, numbers, strict=False):
        if abs(value) > MAX_NUMBER or (math.isnan(value) and not missing):
            raise ValueError(f"{name!r} must be finite and below {MAX_NUMBER:.1e}; got {value}")
    if all(map(math.isnan, numbers)):
        raise ValueError("it must have at least one number; all are missing")


def check_not_all_missing(missing: NDArray[np.bool_], name: str) -> None:
    """Raise if a row of an argument misses all its numbers; `missing` (n, columns) marks those it misses."""
    if missing.size and (empty := missing.all(1)).any():
        raise ValueError(
            f"`{name}` must have at least one number in every row; row {int(empty.argmax()) + 1} has none. "
            "Leave it out."
        )


def column_names(header: Sequence[str]) -> list[str]:
    """The names of a header without spaces around them; columns without a name are numbered."""
    return [name.strip() or f"column {i}" for i, name in enumerate(header, start=1)]


def column_positions(wanted: Sequence[str], header: Sequence[str]) -> list[int]:
    """Return the position of each column in a header; raises ValueError if one is missing or repeated."""
    absent = [name for name in wanted if name not in header]
    if absent:
        raise ValueError(
            f"columns must include {', '.join(wanted)}, in any order; {absent[0]!r} is missing from "
            f"{', '.join(header)}."
        )
    if repeated := [name for name in wanted if list(header).count(name) > 1]:
        raise ValueError(f"columns must have different names; got {repeated[0]!r} more than once.")
    return [list(header).index(name) for name in wanted]


def kind_of_cells(cells: Sequence[str], form: TableFormat, name: str) -> str:
    """The kind of a column: "number", "date", "text", "empty" or "row number", by half of its cells."""
    given = [cell.strip() for cell in cells if not is_missing(cell)]
    if not given:
        return "empty"
    numbers = [value for cell in given if (value := form.number(cell)) is not None]
    if 2 * len(numbers) >= len(given):
        return "row number" if _counts_rows(name, numbers) else "number"
    return "date" if 2 * sum(_DATE.fullmatch(cell) is not None for cell in given) >= len(given) else "text"


def _counts_rows(name: str, numbers: Sequence[float]) -> bool:
    """Whether a column is the index that pandas writes: unnamed, and increasing whole numbers from 0 or 1."""
    unnamed = not name.strip() or name.startswith("Unnamed:")
    if not unnamed or numbers[0] not in (0, 1) or not np.isfinite(numbers).all():
        return False
    steps = np.diff(numbers)
    return bool((steps > 0).all() and (steps % 1 == 0).all())


def usable_rows(values: NDArray[np.float64], missing: bool) -> NDArray[np.bool_]:
    """Which rows have only numbers that can be used; with `missing`, some may be NaN."""
    holes = np.isnan(values)
    fine = (np.abs(values) <= MAX_NUMBER) | holes
    return np.asarray(fine.all(1) & ~(holes.all(1) if missing else holes.any(1)))


def to_examples(rows: ParsedRows, columns: Columns, form: str) -> Examples:
    """The rows as examples: one set for each group or, without groups, for each block of rows."""
    if columns.group is None:
        names, labels = consecutive_sets(len(rows.numbers))
    else:
        names, labels = tuple(map(str, rows.names)), rows.labels
    return Examples(
        rows.numbers,
        labels,
        names,
        tuple(rows.skipped),
        columns=columns.names,
        ignored=columns.ignored,
        table_format=form,
    )


def grouped(groups: Sequence[str] | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """The sorted group names, without spaces around them, and the group of each row."""
    stripped = np.array([name.strip() for name in groups or ()], dtype=np.str_)
    names, labels = np.unique(stripped, return_inverse=True)
    return names, labels


def consecutive_sets(rows: int) -> tuple[tuple[str, ...], NDArray[Any]]:
    """Sets of consecutive rows, the last with the rest: their names, and the set of each row."""
    count = max(1, rows // BLOCK)
    starts = [BLOCK * i + 1 for i in range(count)]
    ends = [*(start - 1 for start in starts[1:]), rows]
    names = tuple(f"rows {start}-{end}" for start, end in zip(starts, ends, strict=True))
    return names, np.minimum(np.arange(rows) // BLOCK, count - 1)
