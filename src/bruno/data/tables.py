"""Files of tables: CSV and other text, and Parquet.

A group column assigns each row to a set. Without one, consecutive rows form sets.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bruno import limits
from bruno.data.archives import is_hidden, reason
from bruno.data.columns import (
    Columns,
    ParsedRows,
    check_numbers,
    choose_columns,
    grouped,
    kind_of_cells,
    to_examples,
    usable_rows,
)
from bruno.data.examples import Examples
from bruno.data.frames import read_frame
from bruno.data.table_format import MISSING, TableFormat, codec, decode, detect, detect_encoding, is_missing
from bruno.data.table_rows import lines_of, split_rows
from bruno.extras import imports_of
from bruno.files import check_regular

_MIN_FAST_BYTES = 2**20  # smaller tables are parsed faster than pyarrow is imported
_HEAD = 2**20  # bytes from which the encoding is detected
_SAMPLE = 500  # lines from which the format and the kinds of columns are detected
_BYTES_OF_ROW, _BYTES_OF_CELL = 128, 24  # in memory: the group and label of a row; a number
_PARQUET_ROWS = 1 << 14  # rows of Parquet to decode at a time
_TEXT, _PARQUET = (".csv", ".tsv", ".tab", ".txt"), (".parquet", ".pq")


def is_table(path: str | Path, *, in_folder: bool = False) -> bool:
    """Whether a file is a table by its name; in a folder, a .txt is more likely a note."""
    name = str(path).lower()
    return name.endswith((*_TEXT, *_PARQUET)) and not (
        in_folder and (name.endswith(".txt") or is_hidden(name))
    )


def is_parquet(path: str | Path) -> bool:
    """Whether a file is Parquet by its name."""
    return str(path).lower().endswith(_PARQUET)


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
        table_format: words for the known parts of the format, such as "semicolon"; others are detected.
        prefer: the format of similar tables, chosen if several fit equally well.
        missing: read missing cells as NaN; otherwise they are errors.
    """
    with _naming(path):
        if is_parquet(path):
            return read_frame(read_parquet(path), group, columns, skip_bad, missing)
        return _read_text(path, group, columns, skip_bad, table_format, prefer, missing)


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


def _read_bytes(path: Path) -> bytes:
    """The content of a text file; raises ValueError with its path if it cannot be read or is too large."""
    try:
        size = check_regular(path)
        limits.MEMORY.check(2 * size, f"{path}: its text in memory")  # as bytes and as characters
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {reason(error)}.") from error


# --- text -------------------------------------------------------------------------------------------------


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
    content, fixed = _read_bytes(path), TableFormat.parse(table_format, "table_format")
    text, encoding = decode(content, fixed.get("encoding", ""))
    sample, wanted = _sample_lines(text), {*columns, *([group] if group else [])}
    preferred = TableFormat(**TableFormat.parse(prefer)) if prefer else None
    form = detect(sample, wanted=wanted, fixed=fixed | {"encoding": encoding}, prefer=preferred)
    rows = [row.cells for row in split_rows(sample, form.delimiter) if not row.problem]
    if len(rows) <= form.header:
        raise ValueError("must contain at least one row of numbers; got none.")
    header = rows[0] if form.header else [str(i) for i in range(1, len(rows[0]) + 1)]
    body = [row for row in rows[form.header :] if len(row) == len(header)]
    kinds = [kind_of_cells([row[i] for row in body], form, header[i]) for i in range(len(header))]
    found = choose_columns(header, kinds, group, columns)
    _check_memory(path, content, len(found.numbers))
    utf8 = content if encoding == "utf-8" and not content.startswith(b"\xef") else text.encode()
    parsed = _parse_fast(utf8, found, form, missing) or _parse(text, found, form, skip_bad, missing)
    return to_examples(parsed, found, str(form))


def _check_memory(path: Path, content: bytes, columns: int) -> None:
    """Raise if the rows need too much memory: numbers are copied twice, and a row has a group and a label."""
    lines = max(content.count(b"\n"), content.count(b"\r")) + 1
    needed = 2 * len(content) + lines * (_BYTES_OF_CELL * columns + _BYTES_OF_ROW)
    limits.MEMORY.check(needed, f"{path}: its rows in memory")


def _parse(text: str, columns: Columns, form: TableFormat, skip_bad: bool, missing: bool) -> ParsedRows:
    """Parse a text in Python."""
    numbers, groups, skipped = array("d"), [], []
    for line, cells, problem in islice(split_rows(lines_of(text), form.delimiter), int(form.header), None):
        other = "the columns that are numbers (`columns`)"
        try:
            if problem:
                raise ValueError(problem)
            row = parse_numbers(cells, columns, form, missing=missing)
            other = "another group column (`group`)"
            if columns.group is not None and not cells[columns.group].strip():
                raise ValueError(f"{columns.header[columns.group]!r} must name a group; got an empty cell")
        except ValueError as error:
            if not skip_bad:
                raise ValueError(
                    f"line {line} cannot be used: {error}. Correct it, skip such lines (`skip_bad`), or "
                    f"select {other}."
                ) from error
            skipped.append(f"line {line}")
            continue
        numbers.extend(row)
        groups.append("" if columns.group is None else cells[columns.group])
    if not numbers:
        raise ValueError("must contain at least one row of numbers; got none.")
    rows = np.array(numbers).reshape(-1, len(columns.numbers))
    return ParsedRows(rows, *grouped(None if columns.group is None else groups), skipped)


def _parse_fast(content: bytes, columns: Columns, form: TableFormat, missing: bool) -> ParsedRows | None:
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
    if not usable_rows(values, missing).all():
        return None
    if group is None:
        return ParsedRows(values, *grouped(None))
    encoded = table[header[group]].dictionary_encode().combine_chunks()
    names, order = grouped(encoded.dictionary.to_pylist())
    return (
        ParsedRows(values, names, order[encoded.indices.to_numpy()]) if all(map(str.strip, names)) else None
    )


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


# --- Parquet ----------------------------------------------------------------------------------------------


def read_parquet(path: Path) -> Any:
    """The content of a Parquet file, as a pyarrow table."""
    with imports_of("data", f"`{path}`"):
        import pyarrow
        from pyarrow import parquet
    try:
        with path.open("rb") as opened:
            file = parquet.ParquetFile(opened)
            limits.MEMORY.check(_declared_bytes(file.metadata), f"{path}: its cells in memory")
            batches, amount = [], 0
            for batch in file.iter_batches(_PARQUET_ROWS):  # a dictionary of long texts declares little
                amount += batch.nbytes
                limits.MEMORY.check(amount, f"{path}: its cells in memory")
                batches.append(batch)
            table = pyarrow.Table.from_batches(batches, file.schema_arrow)
            table.validate(full=True)  # damaged text would raise later, in a conversion
            return table
    except (pyarrow.ArrowException, OSError, OverflowError) as error:
        raise ValueError(f"{path}: cannot be read as Parquet: {reason(error)}.") from error


def _declared_bytes(metadata: Any) -> int:
    """The memory that the cells of a Parquet file need at least, from the numbers that it declares.

    The metadata of a column have no safe access: pyarrow aborts the process if they are damaged.
    """
    return _BYTES_OF_CELL * int(metadata.num_rows) * int(metadata.num_columns)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in errors of the body."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(f"{path}: "):
            raise
        raise ValueError(f"{path}: {error}") from error
