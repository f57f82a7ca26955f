"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from torch import Tensor, contiguous_format, uint8


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A file to write beside another, which it replaces in the end: a crash leaves the old or the new one.

    So does a power cut: what was written is on the disk before it gets its name. Its own name until then is
    unlike any other, however many processes write the same file at once.
    """
    beside = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        yield beside
        with beside.open("rb+") as written:
            os.fsync(written.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def raw_bytes(tensor: Tensor) -> bytes:
    """Of all its numbers in order, whatever their type and its strides."""
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=contiguous_format)
    return flat.view(uint8).numpy().tobytes()
