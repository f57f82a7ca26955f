"""All that results/omniglot/ holds, from the published data on: `make omniglot BRUNO_DATA=DIR`, on a GPU.

Calls `bruno` for one thing after the other: to train, to measure on the test characters, to do the same with
weights rounded to half precision for what ships, to draw. A run that was stopped goes on, and what is done is
not done again. Pictures of Omniglot's own characters stay in the runs' folder; what comes to results/ are
numbers, and samples given characters that the project drew itself. The first run of each kind ships.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from bruno.figures import curves
from bruno.runs import Run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "omniglot"
WEIGHTS = ROOT / "src" / "bruno" / "weights"
BUDGET = ["--minutes", "20"]
GAUSSIAN = ["--set", "process.kind=gaussian"]
RUNS = {
    "omniglot": ["omniglot", *BUDGET],
    "omniglot-fewshot": ["omniglot-fewshot", *BUDGET],
    "omniglot-seed1": ["omniglot", *BUDGET, "--seed", "1"],
    "omniglot-fewshot-seed1": ["omniglot-fewshot", *BUDGET, "--seed", "1"],
    "omniglot-gaussian": ["omniglot", *BUDGET, *GAUSSIAN],
    "omniglot-fewshot-gaussian": ["omniglot-fewshot", *BUDGET, *GAUSSIAN],
    "omniglot-paper": ["omniglot-paper", "--steps", "5000"],
}
ALL_CHARACTERS = ["--set", "data.split=trainval"]  # once every choice is made
SHOWN = {"paper": "omniglot-paper", "squeeze-first": "omniglot"}  # of which learning curves are compared
POINTS = 200  # of a learning curve
MEASURED = (*(f"{way}-way {shot}-shot" for way in (5, 20) for shot in (1, 5)), "bits/dim", "at the first")
SHIPPED = {
    "omniglot": {"what": "trained as a density alone"},
    "omniglot-fewshot": {"what": "trained as a density and to tell classes apart, both from the start"},
}
CARD = ROOT / "benchmarks" / "model-card.md"


def commands(name: str, folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """What to do for a run, each with the file that it leaves."""
    run, half = folder / name, folder / name / "half.safetensors"
    resume = ["--resume"] if Run(run).checkpoints else []
    yield run / "model.safetensors", ["train", *RUNS[name], *ALL_CHARACTERS, "--out", str(run), *resume]
    yield half, ["export", str(run), str(half), "--half"]
    for model in (run, half) if name in SHIPPED else (run,):
        results = model.with_suffix("") / "results"
        yield results / "bits-test.json", ["evaluate", str(model)]
        yield results / "few-shot-test.json", ["fewshot", str(model)]
    yield run / "results" / "few-shot-test-without-noise.json", ["fewshot", str(run), "--no-noise"]
    yield run / "results" / "gain-by-position.json", ["inspect", str(run), "--sets", "423"]
    yield run / "results" / "samples.png", ["sample", str(run), "--length", "20", "--samples", "6"]
    ours = ["--data", "drawn", "--sets", "4", "--prefixes", "0-7", "--samples", "4"]
    yield run / "half" / "results" / "samples.png", ["sample", str(half), *ours]
    if name in SHIPPED:
        for job, kind in (("anomaly", "anomaly"), ("retrieve", "retrieval")):
            yield run / "half" / "results" / f"{kind}-quality.json", [job, str(half), "--measure"]


def gather(name: str, folder: Path) -> None:
    """A run's numbers, its learning curve and its samples given our own characters, to results/."""
    run, to = folder / name, RESULTS / name
    (to / "half").mkdir(parents=True, exist_ok=True)
    for file in (run / "results").glob("*.json"):
        shutil.copy(file, to)
    for file in (run / "half" / "results").glob("*.json"):
        shutil.copy(file, to / "half")
    shutil.copy(run / "half" / "results" / "samples.png", to / "drawn.png")
    log = Run(run).read_log()
    keys = ("index", "seconds", "bits_per_dim", "accuracy", "elements_per_second", "memory")
    some = [*log[: -1 : max(1, len(log) // POINTS)], log[-1]]
    thinned = [{key: line[key] for key in keys} for line in some]
    (to / "learning.json").write_text("[\n" + ",\n".join(map(json.dumps, thinned)) + "\n]\n")


def ship(name: str, folder: Path) -> None:
    """A run's model into the package, with the card that says what it is."""
    WEIGHTS.mkdir(exist_ok=True)
    shutil.copy(folder / name / "half.safetensors", WEIGHTS / f"{name}.safetensors")
    numbers = {kind: row(name, RESULTS / name / part) for kind, part in (("float32", ""), ("half", "half"))}
    lines = [[key, *(str(found[key]) for found in numbers.values())] for key in MEASURED]
    cells = [["on Omniglot's test characters", *numbers], ["---"] * 3, *lines]
    about = {"title": name, "numbers": _markdown(cells), **row(name, RESULTS / name), **SHIPPED[name]}
    (WEIGHTS / f"{name}.md").write_text(CARD.read_text().format(**about))


def row(name: str, to: Path) -> dict[str, str]:
    """A run's numbers as a line of the README's table, from its results or those of its rounded weights."""
    bits = json.loads((to / "bits-test.json").read_text())["values"]
    last = json.loads((RESULTS / name / "learning.json").read_text())[-1]
    return {
        "": name,
        **accuracy(to / "few-shot-test.json"),
        "bits/dim": f"{bits['mean']:.3f}",
        "at the first": f"{bits['first']:.3f}",
        "minutes": f"{last['seconds'] / 60:.0f}",
        "steps": f"{last['index']:,}",
    }


def accuracy(file: Path) -> dict[str, str]:
    """At each few-shot setting, in per cent."""
    found = json.loads(file.read_text())["values"]["bruno"]
    return {f"{r['way']}-way {r['shot']}-shot": f"{100 * r['accuracy']:.1f}" for r in found}


def table() -> str:
    """Every run that is there, in Markdown; below each its accuracy where images are given no noise."""
    rows = []
    for to in (RESULTS / name for name in RUNS if (RESULTS / name).is_dir()):
        rows.append(row(to.name, to))
        rows.append({"": "… without noise", **accuracy(to / "few-shot-test-without-noise.json")})
    lines = ([found.get(key, "") for key in rows[0]] for found in rows)
    return _markdown([list(rows[0]), ["---"] * len(rows[0]), *lines])


def _markdown(lines: Iterable[Iterable[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw_learning() -> None:
    """The paper's model and ours, by steps and by minutes."""
    logs = {
        label: json.loads((RESULTS / name / "learning.json").read_text())
        for label, name in SHOWN.items()
        if (RESULTS / name / "learning.json").is_file()
    }
    for x, scale in (("steps", ("index", 1.0)), ("minutes", ("seconds", 60.0))):
        lines = {
            label: ([line[scale[0]] / scale[1] for line in log], [line["bits_per_dim"] for line in log])
            for label, log in logs.items()
        }
        (RESULTS / f"learning-by-{x}.png").write_bytes(
            curves(lines, x, "bits/dim in training", logarithmic="x")
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/omniglot"), help="where the runs go")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS), help="these runs")
    arguments = parser.parse_args()
    for name in arguments.only:
        for left, command in commands(name, arguments.folder):
            if not left.exists():
                print("bruno", *command, flush=True)
                subprocess.run([sys.executable, "-m", "bruno", *command], check=True)
        gather(name, arguments.folder)
        if name in SHIPPED:
            ship(name, arguments.folder)
    draw_learning()
    print(table())


if __name__ == "__main__":
    main()
