"""The rows of a stream in batches, which are judged together."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

from bruno.data.reader import Placed

_BATCH = 1000  # rows
_NOTHING = object()


def batches(rows: Iterator[Placed]) -> Iterator[list[Placed]]:
    """Yield rows in batches; if reading raises, the rows before the error are yielded first."""
    batch: list[Placed] = []
    try:
        for row in rows:
            batch.append(row)
            if len(batch) == _BATCH:
                full, batch = batch, []
                yield full
    except (ValueError, OSError):
        if batch:
            yield batch
        raise
    if batch:
        yield batch


def batches_as_they_arrive(rows: Iterator[Placed], seconds: float) -> Iterator[list[Placed]]:
    """Yield the rows that have arrived, in batches; an empty batch if none arrives for this many seconds.

    A thread reads the rows, so that no row waits for a later one.
    """
    arrived: queue.Queue[Placed | BaseException | None] = queue.Queue(maxsize=4 * _BATCH)

    def read() -> None:
        try:
            for row in rows:
                arrived.put(row)
            arrived.put(None)
        except BaseException as error:
            arrived.put(error)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            batch = [arrived.get(timeout=max(seconds, 0.01))]
        except queue.Empty:
            yield []
            continue
        batch += islice(iter(lambda: _next(arrived), _NOTHING), _BATCH - 1)
        last = batch[-1]
        found = [row for row in batch if isinstance(row, Placed)]
        if found:
            yield found
        if isinstance(last, BaseException):
            raise last
        if last is None:
            return


def _next(arrived: queue.Queue[Any]) -> Any:
    try:
        return arrived.get_nowait()
    except queue.Empty:
        return _NOTHING
