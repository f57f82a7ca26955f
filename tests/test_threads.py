"""Torch's waiting threads soon sleep, in any order of imports."""

import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bruno.threads import _MAX_PARKED, _is_late, _teams_to_park, configure

needs_two_cores = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores"
)

# CPU time that the other threads spend on small parallel operations: nearly all of it is spinning.
MEASURE = """
def spinning():
    def others():
        own = threading.get_native_id()
        ids = [int(name) for name in os.listdir("/proc/self/task")]
        return sum(int(open(f"/proc/self/task/{i}/schedstat").read().split()[0]) for i in ids if i != own)
    x = torch.ones(100_000)
    x.add_(1)
    before = others()
    for _ in range(20):
        x.add_(1)
        time.sleep(0.01)
    return others() - before
"""


@pytest.mark.slow
@needs_two_cores
def test_waits_are_short_even_if_torch_was_imported_first():
    script = f"""
import os, threading, time, torch
{MEASURE}
print(spinning())
import bruno.process
from bruno.threads import configure
print(configure(), torch.get_num_threads())
time.sleep(1)
print(spinning())
"""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    command = [sys.executable, "-c", script]
    child = subprocess.run(
        command, env={**environment, "OMP_NUM_THREADS": "2"}, check=True, capture_output=True, text=True
    )
    before, parked, threads, after = map(int, child.stdout.split())
    assert parked >= 2
    assert threads == 2  # the user's choice
    assert after < before / 2


@pytest.mark.slow
@needs_two_cores
def test_a_process_that_ends_at_once_does_not_abort():
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", "import torch, bruno.process"],
            env={**environment, "OMP_NUM_THREADS": "2"},
            check=True,
        )


def test_nothing_is_parked_if_bruno_was_imported_first():
    assert configure() == 0  # as conftest.py does


@pytest.mark.parametrize(
    ("modules", "environment", "late"),
    [
        ({"torch"}, {}, True),
        ({}, {}, False),
        ({"torch"}, {"GOMP_SPINCOUNT": "5"}, False),
        ({"torch"}, {"OMP_WAIT_POLICY": "active"}, False),
    ],
    ids=["torch first", "bruno first", "spin count chosen", "policy chosen"],
)
def test_the_variable_is_late_only_if_torch_was_imported_and_it_was_not_set(modules, environment, late):
    assert _is_late(modules, environment) == late


@pytest.mark.parametrize("cores", [2, 8, 65, 96, 128])
@pytest.mark.parametrize("threads_per_core", [1, 2])
def test_a_team_of_all_cores_is_parked_on_machines_of_any_size(cores, threads_per_core):
    assert _teams_to_park(cores, cores * threads_per_core) >= 1


@given(st.integers(2, 300), st.integers(1, 300))
def test_no_more_teams_are_parked_than_needed(team, cores):
    needed = next(parked for parked in itertools.count() if 1 + (parked + 1) * (team - 1) > cores)
    assert _teams_to_park(team, cores) == (needed if needed * team <= _MAX_PARKED else 0)
    assert _teams_to_park(1, cores) == 0
