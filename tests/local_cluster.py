"""A Ray cluster of several processes on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager

import ray
import ray.data

_ATTEMPTS = 6


@contextmanager
def local_cluster() -> Iterator[None]:
    """Start a cluster of two CPUs, and stop it at the end."""
    _start()
    ray.data.DataContext.get_current().enable_progress_bars = False
    try:
        yield
    finally:
        ray.shutdown()


def _start() -> None:
    """Start it, if necessary again: Ray waits 30 s for its processes, too short on a busy machine."""
    for attempt in range(_ATTEMPTS):
        try:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=100 * 2**20,
                log_to_driver=False,
                logging_level="ERROR",
                _system_config={"num_workers_soft_limit": 8},  # keep idle workers: to start one takes seconds
            )
            return
        except Exception as error:
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt == _ATTEMPTS - 1:
                raise
