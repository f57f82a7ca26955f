"""Agreement between the processes of a process group; without one, every function is the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch import distributed

T = TypeVar("T")


def rank_and_processes() -> tuple[int, int]:
    """This process's rank and the number of processes: (0, 1) without a process group."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def broadcast(value: T) -> T:
    """The value of the first process, in every process.

    Decisions are broadcast, as processes that disagree, for example on when to stop, wait for each other
    forever.
    """
    if not distributed.is_initialized():
        return value
    values = [value]
    distributed.broadcast_object_list(values)
    return values[0]


def on_first_process(function: Callable[[], T]) -> T:
    """Call a function in the first process only; every process returns its result, or raises its error."""
    outcome: tuple[Any, ValueError | OSError | None] = (None, None)
    if rank_and_processes()[0] == 0:
        try:
            outcome = (function(), None)
        except (ValueError, OSError) as error:
            outcome = (None, error)
    result, failure = broadcast(outcome)
    if failure is not None:
        raise failure
    return cast(T, result)
