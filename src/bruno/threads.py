"""Shorter busy-waiting of torch's CPU threads, in any order of imports.

By default, a waiting thread of GNU's OpenMP spins for milliseconds before it sleeps. If other processes use
the same cores, it spins in place of the very thread that it waits for: on two cores, beside one busy process,
a computation takes up to a hundred times as long as with threads that sleep soon. On idle cores, sleeping
soon does not make a computation slower.

OpenMP reads ``GOMP_SPINCOUNT`` once, when torch is imported. If torch was imported before this module,
`configure` uses another way: OpenMP also shortens its waits while it manages more threads than there are
cores, and sleeping threads count. So `configure` parks a few threads, which sleep until the process ends and
use no CPU time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container
from functools import cache
from threading import Event, Thread

# Teams as large as a machine's cores, up to 128 with two threads each, need at most this many. Only small
# teams on many cores would need more: they leave cores free, where a spinning thread does no harm.
_MAX_PARKED = 256


def _is_late(modules: Container[str], environment: Container[str]) -> bool:
    """Whether torch was imported before the waiting time of its threads was set."""
    return "torch" in modules and not any(v in environment for v in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"))


_VARIABLE_IS_LATE = _is_late(sys.modules, os.environ)
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@cache
def configure() -> int:
    """Shorten the waits of torch's threads if the environment variable came too late.

    Called by the packages that import torch. Leaves the number of threads that torch uses as it is.

    Returns:
        The number of parked threads.
    """
    if not _VARIABLE_IS_LATE or sys.platform != "linux":
        return 0
    import torch  # imported already

    team = torch.get_num_threads()
    parked = [Event() for _ in range(_teams_to_park(team, len(os.sched_getaffinity(0))))]
    for event in parked:
        Thread(target=_park, args=(event,), name="bruno-parked", daemon=True).start()
    for event in parked:  # a thread that is still inside torch when the process ends would abort it
        event.wait()
    return len(parked) * team


def _teams_to_park(team: int, cores: int) -> int:
    """The smallest number of idle teams of this size with which OpenMP manages more threads than cores.

    With p idle teams, it manages 1 + (p + 1)·(team − 1) threads.
    """
    if team < 2:
        return 0  # no thread waits
    teams = max(0, -(-cores // (team - 1)) - 1)
    return teams if teams * team <= _MAX_PARKED else 0


def _park(parked: Event) -> None:
    """Start an OpenMP team, set `parked` and sleep: the team lives as long as the thread that started it."""
    import torch

    torch.ones(2**20).add_(1)  # large enough to be computed in parallel
    parked.set()
    Event().wait()
