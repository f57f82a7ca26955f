"""How the text of a table is written: encoding, delimiter, decimal and thousands separators, header.

A format is detected from a sample of lines, or named by words such as "semicolon decimal-comma".
"""

from __future__ import annotations

import codecs
import difflib
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from bruno.data.table_rows import split_rows

# Cells that mark a missing value, in lower case; those in angle brackets and "nat" are written by pandas.
MISSING = frozenset(
    {"", "na", "n/a", "#n/a", "nan", "null", "none", "-", "--", "?", "missing", "<na>", "nat"}
)

_WORDS: dict[str, tuple[str, Any]] = {
    "utf-8": ("encoding", "utf-8"),
    "utf-16": ("encoding", "utf-16"),
    "cp1252": ("encoding", "cp1252"),
    "latin-1": ("encoding", "latin-1"),
    "comma": ("delimiter", ","),
    "semicolon": ("delimiter", ";"),
    "tab": ("delimiter", "\t"),
    "pipe": ("delimiter", "|"),
    "decimal-point": ("decimal", "."),
    "decimal-comma": ("decimal", ","),
    "thousands-none": ("thousands", ""),
    "thousands-point": ("thousands", "."),
    "thousands-comma": ("thousands", ","),
    "thousands-space": ("thousands", " "),
    "thousands-apostrophe": ("thousands", "'"),
    "header": ("header", True),
    "no-header": ("header", False),
}
_DELIMITERS = (",", ";", "\t", "|")
# (decimal, thousands); the first that fits most cells is chosen.
_STYLES = ((".", ""), (",", ""), (",", "."), (".", ","), (".", " "), (",", " "), (".", "'"), (",", "'"))
_SPELLINGS = {" ": "[ \u00a0\u202f]", "'": "['\u2019]"}  # variants of a thousands separator
_WORST: tuple[float, ...] = (-1.0,)


@dataclass(frozen=True)
class TableFormat:
    """How a table is written; ``str(format)`` gives the words that `parse` takes.

    >>> str(TableFormat(delimiter=";", decimal=","))
    'utf-8 semicolon decimal-comma thousands-none header'
    """

    encoding: str = "utf-8"
    delimiter: str = ","
    decimal: str = "."
    thousands: str = ""
    header: bool = True

    @staticmethod
    def parse(words: str, argument: str = "format") -> dict[str, Any]:
        """The parts of a format that the words name, ready for ``replace``. Errors name the `argument`.

        >>> TableFormat.parse("semicolon decimal-comma")
        {'delimiter': ';', 'decimal': ','}
        """
        parts: dict[str, Any] = {}
        for word in words.split():
            if word not in _WORDS:
                near = difflib.get_close_matches(word, _WORDS, 1)
                hint = f"Did you mean {near[0]!r}?" if near else f"The words are {', '.join(_WORDS)}."
                raise ValueError(f"`{argument}` must be words such as 'semicolon'; got {word!r}. {hint}")
            name, value = _WORDS[word]
            if parts.setdefault(name, value) != value:
                raise ValueError(f"`{argument}` must have one word for the {name}; got {words!r}.")
        if {"decimal", "thousands"} <= parts.keys() and parts["decimal"] == parts["thousands"]:
            raise ValueError(
                f"`{argument}` must have different decimal and thousands separators; got {words!r}."
            )
        return parts

    def __str__(self) -> str:
        return " ".join(word for word, (name, value) in _WORDS.items() if getattr(self, name) == value)

    def describe(self) -> str:
        """The words that differ from commas, decimal points and a header in UTF-8; often none."""
        usual = set(str(TableFormat()).split())
        return " ".join(word for word in str(self).split() if word not in usual)

    def number(self, cell: str) -> float | None:
        """The number that a cell spells, with ASCII digits; None if it spells none."""
        cell = cell.strip()
        if not self.is_number(cell):
            return None
        if self.thousands:
            cell = re.sub(_SPELLINGS.get(self.thousands, re.escape(self.thousands)), "", cell)
        return float(cell.replace(self.decimal, ".").replace("\u2212", "-"))

    def is_number(self, cell: str) -> bool:
        """Whether a cell without surrounding spaces spells a number."""
        return self._match_number(cell) is not None

    @cached_property
    def _match_number(self) -> Callable[[str], object]:
        return _number_pattern(self.decimal, self.thousands).fullmatch


def is_missing(cell: str) -> bool:
    """Whether a cell marks a missing value: it is empty, or NA, NaN, null and the like."""
    return cell.strip().lower() in MISSING


# --- encodings ----------------------------------------------------------------------------------------------


def decode(content: bytes, encoding: str = "") -> tuple[str, str]:
    """The text of a file and its encoding, detected unless it is given; raises ValueError if neither fits.

    UTF-8 and UTF-16 are recognised, with or without a byte order mark; other text is taken as cp1252, the
    encoding of Windows. Bytes that look like damaged UTF-8 are an error.
    """
    found = encoding or detect_encoding(content)
    try:
        return content.decode(codec(found)), found
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"must be text in UTF-8, UTF-16 or cp1252; line {line} is not {found}: {error.reason}. Correct "
            "it, or name the encoding (`table_format`)."
        ) from error


def detect_encoding(content: bytes) -> str:
    """The encoding of a file or of its beginning: "utf-8", "utf-16", "cp1252" or "latin-1"."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    if content.count(b"\0", 0, 1000) > len(content[:1000]) // 4:
        return "utf-16"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content)
    except UnicodeDecodeError:
        if re.search(rb"[\xc3-\xf4][\x80-\xbf]", content):  # damaged UTF-8 rather than cp1252
            return "utf-8"
        try:
            content.decode("cp1252")
        except UnicodeDecodeError:
            return "latin-1"
        return "cp1252"
    return "utf-8"


def codec(encoding: str) -> str:
    """The name of the encoding for Python, which ignores a byte order mark in UTF-8."""
    return "utf-8-sig" if encoding == "utf-8" else encoding


# --- detection ----------------------------------------------------------------------------------------------


def detect(
    sample: Sequence[str],
    *,
    wanted: Collection[str] = (),
    fixed: dict[str, Any] | None = None,
    prefer: TableFormat | None = None,
) -> TableFormat:
    """Detect the format of a table from its first lines.

    Args:
        sample: lines of the table.
        wanted: column names; a delimiter that splits the header into these names is right.
        fixed: parts of the format that are known, as from `TableFormat.parse`.
        prefer: the format to choose if several fit equally well.
    """
    fixed = fixed or {}
    base = replace(prefer or TableFormat(), **fixed)
    delimiters = [fixed["delimiter"]] if "delimiter" in fixed else [base.delimiter, *_DELIMITERS]
    best, best_fit = base, _WORST
    for delimiter in dict.fromkeys(delimiters):
        rows = [
            [cell.strip() for cell in row.cells] for row in split_rows(sample, delimiter) if not row.problem
        ]
        if not rows:
            continue
        for style in _styles(base, delimiter, fixed):
            tried = replace(base, delimiter=delimiter, decimal=style[0], thousands=style[1])
            tried = replace(tried, header=fixed.get("header", _is_header(rows[0], tried, wanted)))
            fit = _fit(rows, tried, wanted)
            if fit > best_fit:
                best, best_fit = tried, fit
    return best


def _styles(base: TableFormat, delimiter: str, fixed: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of decimal and thousands separators to try, in the order of preference."""
    styles = list(_STYLES)
    if delimiter == ",":  # a quoted 1,234 has a thousands separator
        styles.sort(key=lambda style: style[0] == ",")
    if delimiter == base.delimiter:
        styles.insert(0, (base.decimal, base.thousands))
    for decimal, thousands in dict.fromkeys(styles):
        if fixed.get("decimal", decimal) == decimal and fixed.get("thousands", thousands) == thousands:
            yield decimal, thousands


def _fit(rows: list[list[str]], form: TableFormat, wanted: Collection[str]) -> tuple[float, ...]:
    """How well a format fits: names found, rows as wide as the first row, and cells that are numbers.

    The cells must have no surrounding spaces.
    """
    width = len(rows[0])
    body = [row for row in rows[form.header :] if len(row) == width]
    found = len(_names(wanted, width) & set(rows[0])) if form.header else 0
    regular = len(body) >= 0.5 * (len(rows) - form.header) and width > 1
    numbers, others = 0, 0
    for row in body:
        for cell in row:
            if form.is_number(cell):  # most cells are: no need to ask whether they are missing
                numbers += 1
            elif not is_missing(cell):
                others += 1
    share = numbers / max(1, numbers + others)
    return (float(found), float(regular), share, float(width if regular else 0))


def _is_header(cells: Sequence[str], form: TableFormat, wanted: Collection[str]) -> bool:
    """Whether these cells are a header: they contain all wanted names, or no numbers."""
    names = _names(wanted, len(cells))
    if names and names <= set(map(str.strip, cells)):
        return True
    return not any(form.number(cell) is not None for cell in cells)


def _names(wanted: Collection[str], width: int) -> set[str]:
    """The wanted columns that have a name: without a header, columns are numbered from 1."""
    return {name for name in wanted if not (name.isdecimal() and 1 <= int(name) <= width)}


@cache
def _number_pattern(decimal: str, thousands: str) -> re.Pattern[str]:
    point, whole = re.escape(decimal), "[0-9]+"
    if thousands:
        between = _SPELLINGS.get(thousands, re.escape(thousands))
        whole = rf"(?:[0-9]{{1,3}}(?:{between}[0-9]{{3}})+|[0-9]+)"
    return re.compile(rf"[-+\u2212]?(?:{whole}(?:{point}[0-9]*)?|{point}[0-9]+)(?:[eE][-+]?[0-9]+)?")
