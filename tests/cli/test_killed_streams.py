"""`bruno anomaly keyed` under kill -9: the scores and states are those of an uninterrupted run."""

import json
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cli.commandline import run

HEADER = "machine,heat,speed\n"
ROWS_OF_A_BATCH = 1000  # judged together, and committed together


@pytest.fixture(autouse=True)
def run_folder(trained_once, workplace) -> None:
    """The model `run`, of two columns."""
    shutil.copytree(trained_once, "run")


def write_stream(rows: int) -> None:
    """Rows of 40 machines in random order; one in a hundred is an outlier."""
    numbers = np.random.default_rng(1)
    machine = numbers.integers(0, 40, rows)
    x = numbers.normal(60, 5, (40, 2))[machine] + numbers.normal(0, 1, (rows, 2))
    x[numbers.random(rows) < 0.01] += 40
    lines = [f"m{m},{a:.3f},{b:.3f}\n" for m, (a, b) in zip(machine, x, strict=True)]
    Path("stream.csv").write_text(HEADER + "".join(lines))


def watched(store: str, source: list[str], settings: list[str], kill_after: int | None) -> list[str]:
    """The whole lines that the command reported; it is killed after some of them, unless None."""
    command = [sys.executable, "-m", "bruno", "anomaly", "keyed", "run", *source, "--store", store, "--json"]
    with open("stream.csv") as stream, open("errors.txt", "w") as errors:
        child = subprocess.Popen(
            [*command, "--threshold", "-9", "--commit-rows", "1", *settings],
            stdin=stream if source[0] == "-" else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line)
        if len(lines) == kill_after:
            child.kill()
    child.stdout.close()
    code = child.wait()
    assert code == (0 if kill_after is None or len(lines) < kill_after else -9), Path(
        "errors.txt"
    ).read_text()
    return [line for line in lines if line.startswith("{") and line.endswith("}\n")]


def watched_here(store: str, source: list[str], settings: list[str]) -> list[str]:
    """The same lines, reported by a command in this process, which nobody kills."""
    words = ["anomaly", "keyed", "run", *source, "--store", store, "--json"]
    text = Path("stream.csv").read_text() if source[0] == "-" else None
    output = run(*words, "--threshold", "-9", "--commit-rows", "1", *settings, stdin=text)
    return [line for line in output.splitlines(keepends=True) if line.startswith("{")]


def content(store: str) -> dict[str, list[tuple]]:
    """Everything in a store."""
    with sqlite3.connect(store) as database:
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: sorted(database.execute(f"SELECT * FROM {name}"), key=repr) for name in tables}


def killed_often(kills: int, source: list[str], settings: list[str]) -> None:
    write_stream(ROWS_OF_A_BATCH * (kills + 1))
    moments, killed, reported = random.Random(0), 0, {}
    while killed <= kills:
        # At any moment of a batch: while it is judged, reported or committed.
        after = moments.randint(1, 2 * ROWS_OF_A_BATCH) if killed < kills else None
        for line in watched("killed.db", source, settings, after):
            assert (
                reported.setdefault(json.loads(line)["element"], line) == line
            )  # what is reported again is the same
        killed += 1
    whole = watched_here("whole.db", source, settings)
    assert list(reported.values()) == whole
    assert len(whole) == ROWS_OF_A_BATCH * (kills + 1)
    assert content("killed.db") == content("whole.db")


@pytest.mark.slow
def test_a_killed_command_reports_and_keeps_the_same_as_an_uninterrupted_one():
    killed_often(1, ["stream.csv"], [])


@pytest.mark.long
@pytest.mark.parametrize("settings", [[], ["--window", "30"]], ids=str)
@pytest.mark.parametrize("source", [["stream.csv"], ["-", "--replay"]], ids=str)
def test_a_command_killed_50_times_reports_and_keeps_the_same(source, settings):
    killed_often(50, source, settings)
