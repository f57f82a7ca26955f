"""What the scripts that reproduce experiments share: commands, learning curves, tables in docs/."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from statistics import mean
from typing import Any

from bruno.checkpoint import read_about
from bruno.training.run import Run

ROOT = Path(__file__).parents[1]
WEIGHTS = ROOT / "src" / "bruno" / "weights"
GAUSSIAN = ["--set", "process.kind=gaussian"]
POINTS = 100  # maximum number of points of a learning curve


def start(*command: str) -> subprocess.Popen[bytes]:
    """Start a command of `bruno`."""
    print("bruno", *command, flush=True)
    return subprocess.Popen([sys.executable, "-m", "bruno", *command])


def train(runs: Mapping[Path, Sequence[str]]) -> None:
    """Train runs at the same time, each in its folder, and wait for all of them.

    A run that was stopped is resumed, and a finished one is not repeated.
    """
    started = []
    for folder, arguments in runs.items():
        if not (folder / "model.safetensors").exists():
            resume = ["--resume"] if Run(folder).checkpoints else []
            started.append(start("train", *arguments, "--out", str(folder), *resume))
    failed = [process.args for process in started if process.wait()]
    if failed:
        raise SystemExit(f"failed: {failed}")


def run(*command: str) -> None:
    """Run a command of `bruno`; exit if it fails."""
    if start(*command).wait():
        raise SystemExit(f"failed: {command}")


def measure(commands: Iterable[tuple[Path, Sequence[str]]]) -> None:
    """Run commands one after another, except those whose file exists."""
    for file, command in commands:
        if not file.exists():
            run(*command)


def write_learning_curve(run: Path, to: Path) -> None:
    """Write the learning curve of a run, with the provenance of its model."""
    made = json.dumps(read_about(run / "model.safetensors")["provenance"])
    lines = ",\n".join(map(json.dumps, _points(Run(run).read_log())))
    to.write_text(f'{{"provenance": {made},\n"points": [\n{lines}\n]}}\n')


def read_learning_curve(file: Path) -> list[dict[str, Any]]:
    """The points of a learning curve."""
    points: list[dict[str, Any]] = json.loads(file.read_text())["points"]
    return points


def _points(log: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Points of a log, evenly spaced on a logarithmic axis; each has the means since the previous point."""
    ends = sorted({round(len(log) ** (i / POINTS)) for i in range(POINTS + 1)})
    for begin, end in zip([0, *ends], ends, strict=False):
        point = {key: log[end - 1][key] for key in ("index", "seconds", "memory")}
        for key in ("bits_per_dim", "accuracy", "elements_per_second"):
            known = [line[key] for line in log[begin:end] if line[key] is not None]
            point[key] = mean(known) if known else None
        yield point


def add_to_package(name: str, file: Path, card: Callable[[str], str]) -> None:
    """Copy a model into the package, and write its card, which may refer to the copy."""
    WEIGHTS.mkdir(exist_ok=True)
    shutil.copy(file, WEIGHTS / f"{name}.safetensors")
    (WEIGHTS / f"{name}.md").write_text(card(name))


def values(file: Path) -> Any:
    """The values of a result."""
    return json.loads(file.read_text())["values"]


def cells(runs: Sequence[Sequence[float]], columns: Mapping[str, str], spread: Iterable[str]) -> list[str]:
    """The mean of runs as a row of a table; columns in `spread` also get half the range.

    A run without a value in a column, NaN, does not count there.
    """
    line = []
    for (column, digits), found in zip(columns.items(), zip(*runs, strict=True), strict=False):
        known = [value for value in found if not isnan(value)]
        if not known:
            line.append("")
            continue
        ranges = len(known) > 1 and column in spread
        half = f" ± {(max(known) - min(known)) / 2:{digits}}" * ranges
        line.append(f"{mean(known):{digits}}{half}")
    return line + [""] * (len(columns) - len(line))


def markdown(lines: Iterable[Iterable[str]]) -> str:
    """A table; the second line is the one below the header."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def replace_table(page: Path, new: str) -> None:
    """Replace the table of a page, found by its first line."""
    first_line = new.partition("\n")[0]
    text, found = re.subn(rf"{re.escape(first_line)}\n(\|.*\n)*", lambda _: f"{new}\n", page.read_text())
    if not found:
        raise ValueError(f"{page} has no table with the columns {first_line}; write this line there first")
    page.write_text(text)
