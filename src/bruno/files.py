"""Files that are there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside another, which it replaces in the end: a crash leaves the old or the new one.

    Its name is its own, however many processes write the same file at once.
    """
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        yield beside
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
