"""Time of encoding and sampling with the pretrained models on a CPU, relative to `omniglot`.

Times alternate between the models and are medians of CPU time, so that ratios hold on a busy machine. Run
with `make bench`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import bruno
from bruno.provenance import provenance
from bruno.weights import pretrained_names, pretrained_path

RESULTS = Path(__file__).parents[1] / "results"
REFERENCE = "omniglot"
SIZES = (1, 16, 100)  # images at a time


def jobs(model: bruno.Bruno, size: int) -> dict[str, Callable[[], Any]]:
    """What is timed: images in, latents out, and samples."""
    images = torch.randint(0, 256, (size, *model.shape), generator=torch.Generator().manual_seed(0))
    posterior = model.condition(images)
    return {f"encode {size}": lambda: model.encode(images), f"sample {size}": lambda: posterior.sample(size)}


def seconds(runs: dict[str, Callable[[], Any]], times: int) -> dict[str, float]:
    """Median CPU seconds of each run; the runs take turns."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(times + 1):
        for name, run in runs.items():
            begun = time.process_time()
            run()
            taken[name].append(time.process_time() - begun)
    return {name: statistics.median(found[1:]) for name, found in taken.items()}  # the first warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    models = {name: bruno.pretrained(name) for name in pretrained_names()}
    rows: dict[str, dict[str, Any]] = {
        name: {"megabytes": pretrained_path(name).stat().st_size / 1e6} for name in models
    }
    for size in SIZES:
        each = {name: jobs(model, size) for name, model in models.items()}
        for job in each[REFERENCE]:
            taken = seconds({name: runs[job] for name, runs in each.items()}, arguments.times)
            for name, found in taken.items():
                rows[name][job] = {"seconds": found, "times as fast": taken[REFERENCE] / found}
    columns = [job for job in rows[REFERENCE] if job != "megabytes"]
    table = Table("", "MB", *(f"{job}, ms" for job in columns), title="One thread of a CPU")
    for name, row in rows.items():
        cells = (f"{1e3 * row[job]['seconds']:.0f} ({row[job]['times as fast']:.1f}×)" for job in columns)
        table.add_row(name, f"{row['megabytes']:.1f}", *cells)
    Console().print(table)
    report = {"models": rows, "provenance": provenance(0)}
    (arguments.out / "pretrained-cpu.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
