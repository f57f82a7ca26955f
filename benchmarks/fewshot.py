"""Time of the few-shot protocol compared with encoding the images alone. Run with `make bench`.

Random images replace Omniglot's test characters: 423 characters of 20 drawings in four rotations, or
a tenth of them on a CPU. Each image is encoded once per trial, for any number of episodes.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bruno import Bruno
from bruno.config import load_recipe
from bruno.data import Examples
from bruno.provenance import provenance
from bruno.tasks import FewShotProtocol, measure_few_shot

RESULTS = Path(__file__).parents[1] / "results"
_ROTATIONS = 4  # per character; each counts as a class


def measured(preset: str, characters: int, trials: int, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (20 * characters, 1, 28, 28), dtype=torch.uint8)
    names = tuple(map(str, range(characters)))
    examples = Examples(images, torch.arange(characters).repeat_interleave(20), names)
    model = Bruno.from_config(load_recipe(preset).model((1, 28, 28), 256)).to(device)

    def run(trials: int) -> float:
        begun = time.perf_counter()
        protocol = FewShotProtocol(trials=trials, rotations=True)
        measure_few_shot(model, examples, protocol, generator=torch.Generator().manual_seed(0))
        return time.perf_counter() - begun

    if device == "cuda":
        run(2)
    taken = run(trials)
    some = images[: min(1024, len(images))].to(device)
    with torch.no_grad():
        model.encode(some)
        begun = time.perf_counter()
        model.encode(some).z.sum().item()
        each = (time.perf_counter() - begun) / len(some)
    encoded = trials * _ROTATIONS * len(images)
    return {
        "preset": preset,
        "classes": _ROTATIONS * characters,
        "trials": trials,
        "seconds": taken,
        "images encoded": encoded,
        "times the encoding alone": taken / (each * encoded),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    gpu = torch.cuda.is_available()
    if gpu:
        rows = [measured("omniglot-density", 423, 20, "cuda")]
    else:
        rows = [measured("mnist-dense", 42, 4, "cpu"), measured("omniglot-density", 42, 2, "cpu")]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    report = {"few-shot": rows, "provenance": provenance(0)}
    path = arguments.out / f"fewshot-{'cuda' if gpu else 'cpu'}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
