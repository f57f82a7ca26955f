"""Text for people: names of files and classes, which may contain any character."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text with control characters, line breaks and undecodable bytes escaped.

    Printed raw, they could move the cursor or start a line of their own.

    >>> print(printable("a\x1b[2J\n.png"))
    a\x1b[2J\n.png
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def is_utf8(text: str) -> bool:
    """Whether a name is valid UTF-8: names of files can be any bytes, and some packages reject them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
