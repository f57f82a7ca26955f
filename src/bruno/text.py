"""Text for people: names of files and classes, which may contain any character."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


def printable(text: str) -> str:
    r"""The text with control characters, line breaks and undecodable bytes escaped.

    Printed raw, they could move the cursor or start a line of their own.

    >>> print(printable("a\x1b[2J\n.png"))
    a\x1b[2J\n.png
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(text: str, most: int = 2000) -> str:
    """The text without its middle if it is longer than `most`: a message may quote a name of any length.

    >>> shortened("0123456789", most=5)
    '01 … 89'
    """
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} … {text[-half:]}"


def numbered(count: int) -> tuple[str, ...]:
    """The names of elements, columns or classes that have none: their numbers, from 1.

    >>> numbered(3)
    ('1', '2', '3')
    """
    return tuple(map(str, range(1, count + 1)))


def rename_arguments(message: object, names: Mapping[str, str]) -> str:
    """A message in which the arguments in backticks, such as `set_size` or `invert=False`, have these names.

    >>> rename_arguments("`set_size` must be at least 2; got 1.", {"set_size": "--set-size"})
    '`--set-size` must be at least 2; got 1.'
    """
    return re.sub(r"`([\w.]+(?:=False)?)`", lambda found: f"`{names.get(found[1], found[1])}`", str(message))


@contextmanager
def arguments_renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Give the arguments in backticks these names in the message of an error that the body raises."""
    try:
        yield
    except (ValueError, OSError) as error:
        if len(error.args) == 1:  # others are of the system
            error.args = (rename_arguments(error.args[0], names),)
        raise


def is_utf8(text: str) -> bool:
    """Whether a name is valid UTF-8: a file name can be any bytes, and some packages reject other names."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
