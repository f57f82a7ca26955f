"""Atomic writes: a file is complete or does not exist."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from torch import Tensor, contiguous_format, uint8


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` at the end: a crash leaves the old file or the new one.

    So does a power cut, since the contents are synced to disk first. The temporary name is unique, so several
    processes may write the same file at once.
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
    """The values of a tensor in order, as bytes, for any type and strides."""
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=contiguous_format)
    return flat.view(uint8).numpy().tobytes()
