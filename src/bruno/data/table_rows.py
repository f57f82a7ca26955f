"""The lines and rows of the text of a table, read as they arrive."""

from __future__ import annotations

import csv
import io
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TextIO

_MAX_LINE = 2**24  # characters
_MAX_QUOTED_LINES = 20  # that one row may span
_MAX_IN_MESSAGE = 80  # characters of a line


def lines_of(text: str) -> Iterator[str]:
    """The lines of a text, with their ends: a line feed, a carriage return, or both."""
    return iter(io.StringIO(text, newline=""))


def bounded_lines(file: TextIO | io.TextIOBase) -> Iterator[str]:
    """The lines of an open file, as they arrive; raises ValueError for one that has no end."""
    while line := file.readline(_MAX_LINE + 1):
        if len(line) > _MAX_LINE:
            raise ValueError(f"a line must have at most {_MAX_LINE:,} characters; got more.")
        yield line


def ended_lines(lines: Iterable[str], name: str) -> Iterator[str]:
    """The lines that have an end; warns about a last line without one, as it may be half written."""
    for line in lines:
        if line.endswith(("\n", "\r")):
            yield line
        elif line.strip():
            warnings.warn(
                f"{name}: the last line does not end with a newline and may be half written: it is skipped "
                "until it does. Add a newline if it is complete.",
                stacklevel=2,
            )


class Row(NamedTuple):
    """The cells of a row, and the number of its last line; if it cannot be split, the reason."""

    line: int
    cells: list[str]
    problem: str = ""


def split_rows(lines: Iterable[str], delimiter: str) -> Iterator[Row]:
    """Yield the rows of these lines, as the lines arrive; blank lines are skipped.

    A row is one line, unless a quoted cell is closed on a later line. A stray quote must not swallow rows: if
    a quote stays open, or encloses whole rows, only its own line is a problem, and the next row begins on the
    line after it.
    """
    source, waiting, number = iter(lines), deque[str](), 0
    width = 0
    while (line := waiting.popleft() if waiting else next(source, None)) is not None:
        number += 1
        if '"' not in line and len(line) <= csv.field_size_limit():
            row = Row(number, line.rstrip("\r\n").split(delimiter))
        else:
            row = _quoted_row(line, number, source, waiting, delimiter, width)
            number = row.line
        if row.problem or any(map(str.strip, row.cells)):
            width = width or len(row.cells)
            yield row


def _quoted_row(
    line: str, number: int, source: Iterator[str], waiting: deque[str], delimiter: str, width: int
) -> Row:
    """The row that begins with this line; lines that do not belong to it go back to `waiting`."""
    taken, problem = [line], ""
    try:
        while (cells := _cells(taken, delimiter)) is None:
            following = waiting.popleft() if waiting else next(source, None)
            if following is None or len(taken) == _MAX_QUOTED_LINES:
                waiting.extendleft([following] if following is not None else [])
                break
            taken.append(following)
    except csv.Error as error:
        start = (
            "it opens a quote that is not closed before a delimiter" if len(taken) > 1 else "it is not CSV"
        )
        cells, problem = None, f"{start}: {error}"
    # The cells of each line alone: the lines are whole rows if all have as many as the header.
    whole = len(taken) > 1 and all(len(one.split(delimiter)) == width > 1 for one in taken)
    if cells is not None and not whole:
        return Row(number + len(taken) - 1, cells)
    if not problem and cells is None:
        problem = f"it opens a quote that is not closed within {_MAX_QUOTED_LINES} lines"
    problem = problem or f"it opens a quote that encloses rows up to line {number + len(taken) - 1}"
    waiting.extendleft(reversed(taken[1:]))
    return Row(number, [line.rstrip("\r\n")[:_MAX_IN_MESSAGE]], problem)


def _cells(lines: list[str], delimiter: str) -> list[str] | None:
    """The cells of a row; None if a quoted cell is still open at the end."""
    is_open = False

    def feed() -> Iterator[str]:
        nonlocal is_open
        yield from lines
        is_open = True  # the reader asks for another line

    try:
        cells = next(csv.reader(feed(), delimiter=delimiter, strict=len(lines) > 1), [])
    except csv.Error:
        if not is_open:
            raise
    return None if is_open else cells
