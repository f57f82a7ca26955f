"""Tables of numbers: CSV and other text, Parquet, and frames of pandas and pyarrow.

A group column assigns each row to a set. Without one, consecutive rows form sets.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from numpy.typing import NDArray

from bruno.data.archives import is_hidden, reason
from bruno.data.examples import Examples
from bruno.data.table_format import (
    MISSING,
    TableFormat,
    codec,
    decode,
    detect,
    detect_encoding,
    is_missing,
    lines_of,
    split_rows,
)

MAX_NUMBER = float(np.finfo(np.float32).max)  # its square is finite in float64
_MIN_FAST_BYTES = 2**20  # smaller tables are parsed faster than pyarrow is imported
_HEAD = 2**20  # bytes from which the encoding is detected
_SAMPLE = 500  # lines from which the format and the kinds of columns are detected
BLOCK = 20  # rows of a set, if there is no group column
_TEXT, _PARQUET = (".csv", ".tsv", ".tab", ".txt"), (".parquet", ".pq")
_DATE = re.compile(
    r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}([T ]+\d{1,2}[:.]\d{2}.*)?"  # 2026-01-31, 31.1.2026 10:15
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


class _Rows(NamedTuple):
    """Parsed rows: their numbers (n, columns), the sorted group names, and the group of each row.

    Without a group column there are no names and no labels.
    """

    numbers: NDArray[np.float64]
    names: NDArray[Any]
    labels: NDArray[Any]
    skipped: Sequence[str] = ()


def is_table(path: str | Path, *, in_folder: bool = False) -> bool:
    """Whether a file is a table by its name; in a folder, a .txt is more likely a note."""
    name = str(path).lower()
    return name.endswith((*_TEXT, *_PARQUET)) and not (
        in_folder and (name.endswith(".txt") or is_hidden(name))
    )


def is_parquet(path: str | Path) -> bool:
    """Whether a file is Parquet by its name."""
    return str(path).lower().endswith(_PARQUET)


def is_frame(value: object) -> bool:
    """Whether a value is a frame: of pandas, polars or pyarrow, none of which is imported."""
    return hasattr(value, "column_names") or (hasattr(value, "columns") and hasattr(value, "__getitem__"))


def read_table(
    path: Path,
    group: str = "",
    *,
    columns: Sequence[str] = (),
    skip_bad: bool = False,
    table_format: str = "",
    prefer: str = "",
    missing: bool = False,
) -> Examples:
    """Read a table: rows with the same value in the `group` column form a set.

    Args:
        path: a CSV or another text file, or Parquet.
        group: the group column. Without one, each 20 consecutive rows form a set.
        columns: the columns to read, in this order; by default all that are numbers.
        skip_bad: skip lines that cannot be read; `Examples.skipped` names them.
        table_format: words for the parts of the format that are not to be detected, as "semicolon".
        prefer: the format of similar tables, chosen if several fit equally well.
        missing: read missing cells as NaN; otherwise they are errors.
    """
    if is_parquet(path):
        return _named(path, lambda: read_frame(read_parquet(path), group, columns, skip_bad, missing))
    return _named(path, lambda: _read_text(path, group, columns, skip_bad, table_format, prefer, missing))


def read_frame(
    frame: Any, group: str = "", columns: Sequence[str] = (), skip_bad: bool = False, missing: bool = False
) -> Examples:
    """Examples from a frame of pandas, polars or pyarrow; for the arguments see `read_table`."""
    arrays = _frame_columns(frame)
    found = choose_columns(list(arrays), [_column_kind(array) for array in arrays.values()], group, columns)
    values = np.stack([_as_numbers(name, arrays[name]) for name in found.names], axis=1)
    groups = None if found.group is None else [_text(cell) for cell in arrays[group]]
    bad = ~_usable(values, missing)
    if groups is not None:
        bad |= np.array([is_missing(name) for name in groups], dtype=bool)
    if bad.any() and not skip_bad:
        _check_row(values[bad][0], int(bad.argmax()) + 1, found, missing)
    kept = np.flatnonzero(~bad)
    skipped = [f"row {i + 1}" for i in np.flatnonzero(bad)]
    rows = _Rows(values[kept], *_grouped(None if groups is None else [groups[i] for i in kept]), skipped)
    return _examples(rows, found, "")


def choose_columns(
    header: list[str], kinds: Sequence[str], group: str, columns: Sequence[str] = ()
) -> Columns:
    """The columns to read: those asked for, or all numbers but the group; raises if there are none."""
    names = column_names(header)
    if group and group not in names:
        raise ValueError(
            f"`group` must be a column, one of {', '.join(names)}; got {group!r}. Set it (`data.group`)."
        )
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


def parse_numbers(
    cells: Sequence[str],
    columns: Columns,
    form: TableFormat | None = None,
    *,
    missing: bool = False,
) -> list[float]:
    """Return the numbers of a row, NaN for missing ones; raises ValueError unless all can be used.

    They must be below `MAX_NUMBER`, so that their squares are also finite.
    """
    form, header = form or TableFormat(), columns.header
    if len(cells) != len(header):
        raise ValueError(f"it must have {len(header)} cells; got {len(cells)}: {form.delimiter.join(cells)}")
    row: list[float] = []
    for name, cell in ((header[position], cells[position]) for position in columns.numbers):
        value = form.number(cell)
        if value is None and not (missing and is_missing(cell)):
            raise ValueError(f"{name!r} must be a number; got {cell!r}")
        row.append(math.nan if value is None else value)
    check_numbers(row, columns.names, missing)
    return row


def check_numbers(numbers: Sequence[float], names: Sequence[str], missing: bool) -> None:
    """Raise unless the numbers of a row can be used: finite, below `MAX_NUMBER`, and not all missing."""
    for name, value in zip(names, numbers, strict=False):
        if abs(value) > MAX_NUMBER or (math.isnan(value) and not missing):
            raise ValueError(f"{name!r} must be finite and below {MAX_NUMBER:.1e}; got {value}")
    if all(map(math.isnan, numbers)):
        raise ValueError("it must have at least one number; all are missing")


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


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a text file in the encoding of its first MiB; raises ValueError if it cannot be read."""
    try:
        with path.open("rb") as file:
            encoding = detect_encoding(file.read(_HEAD))
        with path.open(newline="", encoding=codec(encoding)) as text:
            yield text
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {reason(error)}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be text in UTF-8, UTF-16 or cp1252; got {error}.") from error


def read_bytes(path: Path) -> bytes:
    """The content of a file; raises ValueError with its path if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {reason(error)}.") from error


# --- text ---------------------------------------------------------------------------------------------------


def _read_text(
    path: Path,
    group: str,
    columns: Sequence[str],
    skip_bad: bool,
    table_format: str,
    prefer: str,
    missing: bool,
) -> Examples:
    """Read a text file.

    pyarrow, if it is installed, parses large tables. A table that it rejects is parsed again in Python, which
    reports the line and the column of the problem, or skips the line if `skip_bad`.
    """
    content, fixed = read_bytes(path), TableFormat.parse(table_format)
    text, encoding = decode(content, fixed.get("encoding", ""))
    sample, wanted = _sample_lines(text), {*columns, *([group] if group else [])}
    preferred = TableFormat(**TableFormat.parse(prefer)) if prefer else None
    form = detect(sample, wanted=wanted, fixed=fixed | {"encoding": encoding}, prefer=preferred)
    rows = [row.cells for row in split_rows(sample, form.delimiter) if not row.problem]
    if len(rows) <= form.header:
        raise ValueError("must contain at least one row of numbers; got none.")
    header = rows[0] if form.header else [str(i) for i in range(1, len(rows[0]) + 1)]
    body = [row for row in rows[form.header :] if len(row) == len(header)]
    kinds = [_cells_kind([row[i] for row in body], form, header[i]) for i in range(len(header))]
    found = choose_columns(header, kinds, group, columns)
    utf8 = content if encoding == "utf-8" and not content.startswith(b"\xef") else text.encode()
    parsed = _parse_fast(utf8, found, form, missing) or _parse(text, found, form, skip_bad, missing)
    return _examples(parsed, found, str(form))


def _parse(text: str, columns: Columns, form: TableFormat, skip_bad: bool, missing: bool) -> _Rows:
    """Parse a text in Python."""
    numbers, groups, skipped = [], [], []
    for line, cells, problem in islice(split_rows(lines_of(text), form.delimiter), int(form.header), None):
        try:
            if problem:
                raise ValueError(problem)
            row = parse_numbers(cells, columns, form, missing=missing)
            if columns.group is not None and not cells[columns.group].strip():
                raise ValueError(f"{columns.header[columns.group]!r} must name a group; got an empty cell")
        except ValueError as error:
            if not skip_bad:
                raise ValueError(
                    f"line {line} cannot be used: {error}. Correct it, skip such lines (--skip-bad, "
                    "`data.skip_bad`), or select the columns that are numbers (`data.columns`)."
                ) from error
            skipped.append(f"line {line}")
            continue
        numbers.append(row)
        groups.append("" if columns.group is None else cells[columns.group])
    if not numbers:
        raise ValueError("must contain at least one row of numbers; got none.")
    return _Rows(np.array(numbers), *_grouped(None if columns.group is None else groups), skipped)


def _parse_fast(content: bytes, columns: Columns, form: TableFormat, missing: bool) -> _Rows | None:
    """Parse UTF-8 with pyarrow; None if it is short, if pyarrow is missing, or if results might differ.

    The numbers that pyarrow accepts are a subset of those that Python accepts, with the same values.
    """
    header, group, numbers, _ = columns
    if len(content) < _MIN_FAST_BYTES or len(set(header)) < len(header) or group in numbers or form.thousands:
        return None
    try:
        import pyarrow  # type: ignore[import-untyped]  # optional
        from pyarrow import csv as fast_csv
    except ImportError:
        return None
    groups = {} if group is None else {header[group]: pyarrow.string()}
    types = groups | {header[i]: pyarrow.float64() for i in numbers}
    convert = fast_csv.ConvertOptions(
        column_types=types,
        include_columns=list(types),
        null_values=sorted({case(word) for word in MISSING for case in (str, str.upper, str.title)} | {"NaN"})
        if missing
        else [],
        decimal_point=form.decimal,
    )
    read = fast_csv.ReadOptions(column_names=header, skip_rows=int(form.header))
    parse = fast_csv.ParseOptions(delimiter=form.delimiter)
    try:
        content.decode()  # pyarrow decodes only the columns that it converts
        table = fast_csv.read_csv(
            pyarrow.BufferReader(content), read_options=read, parse_options=parse, convert_options=convert
        )
    except (UnicodeDecodeError, pyarrow.ArrowException):
        return None
    chosen = [table[header[i]] for i in numbers]
    values = np.stack([column.to_numpy() for column in chosen], axis=1)
    holes = sum(column.null_count for column in chosen)
    if not _has_one_line_each(content, len(values), form.header) or np.isnan(values).sum() != holes:
        return None
    if not _usable(values, missing).all():
        return None
    if group is None:
        return _Rows(values, *_grouped(None))
    encoded = table[header[group]].dictionary_encode().combine_chunks()
    names, order = _grouped(encoded.dictionary.to_pylist())
    return _Rows(values, names, order[encoded.indices.to_numpy()]) if all(map(str.strip, names)) else None


def _has_one_line_each(content: bytes, rows: int, header: bool) -> bool:
    """Whether the header and at least one row take one line each, no longer than Python's limit of a cell.

    A blank line has only its end, at most two characters. A row has more: a delimiter, a digit and an end.
    """
    ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n"))
    lengths = np.diff(ends, prepend=-1, append=len(content))
    lines = int((lengths > 2).sum())
    return (
        content.count(b"\r") == content.count(b"\r\n")
        and int(lengths[0]) > 2
        and lines == rows + header > header
        and int(lengths.max()) <= csv.field_size_limit()
    )


def _sample_lines(text: str) -> list[str]:
    """All lines of a short text; the first lines of a long one, and lines spread over the rest."""
    first = list(islice(lines_of(text), _SAMPLE))
    begin = sum(map(len, first))
    rest = []
    for offset in (
        np.linspace(begin, len(text), _SAMPLE, endpoint=False).astype(int) if begin < len(text) else ()
    ):
        start = text.find("\n", offset) + 1
        end = text.find("\n", start)
        if 0 < start < end and '"' not in (line := text[start : end + 1]):
            rest.append(line)
    return first + rest


def _cells_kind(cells: Sequence[str], form: TableFormat, name: str) -> str:
    """The kind of a column: "number", "date", "text", "empty" or "row number"; half of the cells decide."""
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
    steps = np.diff(numbers)
    return unnamed and numbers[0] in (0, 1) and bool((steps > 0).all() and (steps % 1 == 0).all())


# --- frames -------------------------------------------------------------------------------------------------


def read_parquet(path: Path) -> Any:
    """The content of a Parquet file, as a pyarrow table."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError("needs pyarrow to be read as Parquet. Install it: pip install pyarrow") from None
    try:
        return parquet.read_table(pyarrow.BufferReader(read_bytes(path)))
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"cannot be read as Parquet: {reason(error)}.") from error


def frame_rows(frame: Any, group: str, columns: Sequence[str] = ()) -> tuple[NDArray[np.float64], list[str]]:
    """The numbers of a frame (n, columns), unchecked, and the group of each row, "" without such a column."""
    arrays = _frame_columns(frame)
    kinds = [_column_kind(array) for array in arrays.values()]
    found = choose_columns(list(arrays), kinds, group if group in arrays else "", columns)
    values = np.stack([_as_numbers(name, arrays[name]) for name in found.names], axis=1)
    groups = [""] * len(values) if found.group is None else map(_text, arrays[group])
    return values, list(groups)


def _frame_columns(frame: Any) -> dict[str, NDArray[Any]]:
    """The columns of a frame by their names."""
    if hasattr(frame, "column_names"):  # pyarrow
        return {str(name): np.asarray(frame.column(name)) for name in frame.column_names}
    columns = {str(name): np.asarray(frame[name]) for name in frame.columns}
    if len(columns) < len(frame.columns):
        raise ValueError(f"columns must have different names; got {', '.join(map(str, frame.columns))}.")
    return columns


def _column_kind(array: NDArray[Any]) -> str:
    if array.dtype.kind in "fiub":
        return "empty" if array.dtype.kind == "f" and np.isnan(array).all() else "number"
    if array.dtype.kind in "Mm":
        return "date"
    spread = array[:: max(1, len(array) // _SAMPLE)]
    return _cells_kind([_text(cell) for cell in spread], TableFormat(), "named")


def _as_numbers(name: str, array: NDArray[Any]) -> NDArray[np.float64]:
    """A column as float64, NaN where a cell is missing."""
    if array.dtype.kind in "fiub":
        return array.astype(np.float64)
    form, numbers = TableFormat(), np.full(len(array), math.nan)
    for i, cell in enumerate(map(_text, array)):
        value = form.number(cell)
        if value is None and not is_missing(cell):
            raise ValueError(f"row {i + 1} cannot be used: {name!r} must be a number; got {cell!r}.")
        numbers[i] = math.nan if value is None else value
    return numbers


def _text(cell: object) -> str:
    """A cell of a frame as text; whole floats, as of an integer column with holes, as integers."""
    return str(int(cell)) if isinstance(cell, float) and cell.is_integer() else str(cell)


# --- rows ---------------------------------------------------------------------------------------------------


def _usable(values: NDArray[np.float64], missing: bool) -> NDArray[np.bool_]:
    """Which rows have only numbers that can be used; with `missing`, some may be NaN."""
    holes = np.isnan(values)
    fine = (np.abs(values) <= MAX_NUMBER) | holes
    return np.asarray(fine.all(1) & ~(holes.all(1) if missing else holes.any(1)))


def _check_row(row: NDArray[np.float64], number: int, columns: Columns, missing: bool) -> None:
    """Raise for a row that `_usable` rejects, or that has no group."""
    try:
        check_numbers(row.tolist(), columns.names, missing)
        raise ValueError("it must name a group")
    except ValueError as error:
        raise ValueError(f"row {number} cannot be used: {error}.") from None


def _examples(rows: _Rows, columns: Columns, form: str) -> Examples:
    if columns.group is None:
        names, labels = _blocks(len(rows.numbers))
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


def _grouped(groups: Sequence[str] | None) -> tuple[NDArray[Any], NDArray[Any]]:
    """The sorted group names, and the group of each row."""
    names, labels = np.unique(np.array(groups or [], dtype=np.str_), return_inverse=True)
    return names, labels


def _blocks(rows: int) -> tuple[tuple[str, ...], NDArray[Any]]:
    """Sets of consecutive rows, the last with the rest: their names, and the set of each row."""
    count = max(1, rows // BLOCK)
    starts = [BLOCK * i + 1 for i in range(count)]
    ends = [*(start - 1 for start in starts[1:]), rows]
    names = tuple(f"rows {start}-{end}" for start, end in zip(starts, ends, strict=True))
    return names, np.minimum(np.arange(rows) // BLOCK, count - 1)


def _named(path: Path, read: Any) -> Examples:
    """The examples, or an error that names the file."""
    try:
        return read()  # type: ignore[no-any-return]
    except ValueError as error:
        if str(error).startswith(f"{path}: "):
            raise
        raise ValueError(f"{path}: {error}") from error
