"""Frames of pandas, polars and pyarrow, none of which is imported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bruno.data.columns import (
    Columns,
    ParsedRows,
    check_numbers,
    choose_columns,
    column_names,
    grouped,
    kind_of_cells,
    to_examples,
    usable_rows,
)
from bruno.data.examples import Examples
from bruno.data.table_format import TableFormat, is_missing

_SAMPLE = 500  # cells from which the kind of a column is detected


def read_frame(
    frame: Any, group: str = "", columns: Sequence[str] = (), skip_bad: bool = False, missing: bool = False
) -> Examples:
    """Examples from a frame of pandas, polars or pyarrow; for the arguments see `read_table`."""
    arrays = _frame_columns(frame)
    if not all(map(len, arrays.values())):
        raise ValueError("data must contain at least one row of numbers; got none.")
    found, values = _numbers(arrays, group, columns)
    groups = None if found.group is None else [_group_name(cell) for cell in arrays[group]]
    bad = ~usable_rows(values, missing)
    if groups is not None:
        bad |= np.array([not name for name in groups], dtype=bool)
    if bad.any() and not skip_bad:
        _check_row(values[bad][0], int(bad.argmax()) + 1, found, missing)
    kept = np.flatnonzero(~bad)
    skipped = [f"row {i + 1}" for i in np.flatnonzero(bad)]
    rows = ParsedRows(values[kept], *grouped(None if groups is None else [groups[i] for i in kept]), skipped)
    return to_examples(rows, found, "")


def frame_rows(frame: Any, group: str, columns: Sequence[str] = ()) -> tuple[NDArray[np.float64], list[str]]:
    """The numbers of a frame (n, columns), unchecked, and the group of each row, "" without such a column."""
    arrays = _frame_columns(frame)
    found, values = _numbers(arrays, group if group in arrays else "", columns)
    groups = [""] * len(values) if found.group is None else map(_group_name, arrays[group])
    return values, list(groups)


def _frame_columns(frame: Any) -> dict[str, NDArray[Any]]:
    """The columns of a frame by their names."""
    is_arrow = hasattr(frame, "column_names")
    labels = list(frame.column_names if is_arrow else frame.columns)
    names = column_names(list(map(str, labels)))
    if len(set(names)) < len(names):
        raise ValueError(f"columns must have different names; got {', '.join(names)}.")
    columns = map(frame.column, range(len(labels))) if is_arrow else (frame[label] for label in labels)
    return dict(zip(names, map(np.asarray, columns), strict=True))


def _numbers(
    arrays: dict[str, NDArray[Any]], group: str, columns: Sequence[str]
) -> tuple[Columns, NDArray[np.float64]]:
    """The columns to read, and their numbers (n, columns), NaN where a cell is missing."""
    found = choose_columns(list(arrays), [_column_kind(array) for array in arrays.values()], group, columns)
    return found, np.stack([_as_numbers(name, arrays[name]) for name in found.names], axis=1)


def _column_kind(array: NDArray[Any]) -> str:
    if array.dtype.kind in "fiu":
        return "empty" if array.dtype.kind == "f" and np.isnan(array).all() else "number"
    if array.dtype.kind in "Mm":
        return "date"
    spread = array[:: max(1, len(array) // _SAMPLE)]
    return kind_of_cells([_text(cell) for cell in spread], TableFormat(), "named")


def _as_numbers(name: str, array: NDArray[Any]) -> NDArray[np.float64]:
    """A column as float64, NaN where a cell is missing."""
    if array.dtype.kind in "fiu":
        return array.astype(np.float64)
    form, numbers = TableFormat(), np.full(len(array), math.nan)
    for i, cell in enumerate(map(_text, array)):
        value = form.number(cell)
        if value is None and not is_missing(cell):
            raise ValueError(f"row {i + 1} cannot be used: {name!r} must be a number; got {cell!r}.")
        numbers[i] = math.nan if value is None else value
    return numbers


def _text(cell: object) -> str:
    """A cell of a frame as text; whole floats as integers, as missing cells turn integers into floats."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


def _group_name(cell: object) -> str:
    """The group that a cell names, "" if it is missing; texts such as "NA" are names, as in a CSV."""
    text = _text(cell).strip()
    return "" if not isinstance(cell, str) and is_missing(text) else text


def _check_row(row: NDArray[np.float64], number: int, columns: Columns, missing: bool) -> None:
    """Raise for a row that `usable_rows` rejects, or that has no group."""
    try:
        check_numbers(row.tolist(), columns.names, missing)
        raise ValueError("it must name a group")
    except ValueError as error:
        raise ValueError(f"row {number} cannot be used: {error}.") from None
