"""All that results/omniglot/ holds, from the published data on: `make omniglot BRUNO_DATA=DIR`, on a GPU.

Calls `bruno` to train, two runs at a time; then for one thing after the other: to measure on the test
characters, to do the same with weights rounded to half precision for what ships, to draw. A run that was
stopped goes on, and what is done is not done again. Pictures of Omniglot's own characters stay in the runs'
folder; what comes to results/ are numbers, and samples given characters that the project drew itself. The
first run of each kind ships.

Two runs keep a large GPU busy where one does not, if they may use it at the same moment: start NVIDIA's MPS
before (`nvidia-cuda-mps-control -d`), as was done for the numbers in results/.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from bruno.checkpoint import read_about
from bruno.reporting.plots import line_plot
from bruno.training.run import Run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "omniglot"
WEIGHTS = ROOT / "src" / "bruno" / "weights"
BUDGET = ["--minutes", "22"]
HARDWARE = "one NVIDIA H200, which two runs shared"  # for the cards of the models that ship
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
TOGETHER = (  # trained at the same time, on the same GPU
    ("omniglot", "omniglot-fewshot"),
    ("omniglot-seed1", "omniglot-fewshot-seed1"),
    ("omniglot-gaussian", "omniglot-fewshot-gaussian"),
    ("omniglot-paper",),
)
ALL_CHARACTERS = ["--set", "data.split=trainval"]  # once every choice is made
SHOWN = {"the paper's": "omniglot-paper", "ours": "omniglot"}  # of which learning curves are compared
LEFT_BEHIND = ("samples", "toy-comparison")  # about a picture that stays, about no model at all
POINTS = 100  # of a learning curve, at most
HIGHEST = 2.5  # bits/dim, of what is drawn of it: first steps tower above all the rest
ACCURACY = {f"{way}-way {shot}-shot": ".1f" for way in (5, 20) for shot in (1, 5)}  # how it is written
MEASURED = {**ACCURACY, "bits/dim": ".3f", "at the first": ".3f"}
COLUMNS = {**MEASURED, "minutes": ".0f", "steps": ",.0f"}
ROWS = {  # of the table: which runs are seeds of the same
    "density alone": ("omniglot", "omniglot-seed1"),
    "density alone, Gaussian process": ("omniglot-gaussian",),
    "density alone, the paper's network and settings": ("omniglot-paper",),
    "both losses": ("omniglot-fewshot", "omniglot-fewshot-seed1"),
    "both losses, Gaussian process": ("omniglot-fewshot-gaussian",),
}
PUBLISHED = {  # what to read above them
    "density alone": {"*BRUNO* (2018)": [86.3, 95.6, 69.2, 87.7, 0.988, 1.007]},
    "both losses": {
        "*BRUNO* (2018), fine-tuned": [97.1, 99.4, 91.3, 97.8],
        "*Matching Networks* (2016)": [98.1, 98.9, 93.8, 98.5],
        "*Prototypical Networks* (2017)": [98.8, 99.7, 96.0, 98.9],
    },
}
SHIPPED = {
    "omniglot": {"what": "trained as a density alone"},
    "omniglot-fewshot": {"what": "trained as a density, and from the middle on to tell classes apart too"},
}
CARD = ROOT / "benchmarks" / "model-card.md"


def train(names: Iterable[str], folder: Path) -> None:
    """Runs side by side, all of them to their end."""
    started = []
    for name in names:
        run = folder / name
        if not (run / "model.safetensors").exists():
            resume = ["--resume"] if Run(run).checkpoints else []
            started.append(_bruno("train", *RUNS[name], *ALL_CHARACTERS, "--out", str(run), *resume))
    failed = [process.args for process in started if process.wait()]
    if failed:
        raise SystemExit(f"this failed: {failed}")


def measurements(name: str, folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """What to do with a trained model, each with the file that it leaves: all it takes is the model's own."""
    whole, half = (folder / name / f"{kind}.safetensors" for kind in ("model", "half"))
    of_whole, of_half = (model.with_suffix("") / "results" for model in (whole, half))
    yield half, ["export", str(whole), str(half), "--half"]
    for model, results in [(whole, of_whole), (half, of_half)][: 2 if name in SHIPPED else 1]:
        yield results / "bits-test.json", ["evaluate", str(model)]
        yield results / "few-shot-test.json", ["fewshot", str(model)]
    yield of_whole / "few-shot-test-without-noise.json", ["fewshot", str(whole), "--no-noise"]
    yield of_whole / "gain-by-position.json", ["inspect", str(whole), "--sets", "423"]
    yield of_whole / "samples.png", ["sample", str(whole), "--length", "20", "--samples", "6"]
    ours = ["--data", "drawn", "--sets", "4", "--prefixes", "0-7", "--samples", "4"]
    yield of_half / "samples.png", ["sample", str(half), *ours]
    if name in SHIPPED:
        for job, kind in (("anomaly", "anomaly"), ("retrieve", "retrieval")):
            yield of_half / f"{kind}-quality-test.json", [job, str(half), "--measure"]


def gather(name: str, folder: Path) -> None:
    """A run's numbers, its learning curve and its samples given our own characters, to results/."""
    run, to = folder / name, RESULTS / name
    (to / "half").mkdir(parents=True, exist_ok=True)
    for file in (run / "model" / "results").glob("*.json"):
        if file.stem not in LEFT_BEHIND:
            shutil.copy(file, to)
    for file in (run / "half" / "results").glob("*.json"):
        shutil.copy(file, to / "half")
    shutil.copy(run / "half" / "results" / "samples.png", to / "drawn.png")
    made = json.dumps(read_about(run / "model.safetensors")["provenance"])
    lines = ",\n".join(map(json.dumps, learning_curve(Run(run).read_log())))
    (to / "learning.json").write_text(f'{{"provenance": {made},\n"points": [\n{lines}\n]}}\n')


def learning_curve(log: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A log in some points, evenly on a logarithmic axis, each with the means since the one before it."""
    ends = sorted({round(len(log) ** (i / POINTS)) for i in range(POINTS + 1)})
    for begin, end in zip([0, *ends], ends, strict=False):
        point = {key: log[end - 1][key] for key in ("index", "seconds", "memory")}
        for key in ("bits_per_dim", "accuracy", "elements_per_second"):
            known = [line[key] for line in log[begin:end] if line[key] is not None]
            point[key] = mean(known) if known else None
        yield point


def ship(name: str, folder: Path) -> None:
    """A run's model into the package, with the card that says what it is."""
    WEIGHTS.mkdir(exist_ok=True)
    shutil.copy(folder / name / "half.safetensors", WEIGHTS / f"{name}.safetensors")
    whole, rounded = (cells([numbers(name, to)]) for to in (RESULTS / name, RESULTS / name / "half"))
    quiet = cells([accuracy(RESULTS / name / "few-shot-test-without-noise.json")])
    lines = [
        ["on Omniglot's test characters", "float32", "half precision", "float32, without noise"],
        ["---"] * 4,
        *zip(MEASURED, whole, rounded, quiet, strict=False),
    ]
    about = {"title": name, "numbers": _markdown(lines), "minutes": whole[-2], "steps": whole[-1]}
    about["commit"] = read_about(folder / name / "half.safetensors")["provenance"]["commit"]
    (WEIGHTS / f"{name}.md").write_text(CARD.read_text().format(**about, hardware=HARDWARE, **SHIPPED[name]))


def numbers(name: str, to: Path) -> list[float]:
    """A run's line of the table, from its results or those of its rounded weights."""
    bits = json.loads((to / "bits-test.json").read_text())["values"]
    last = learnt(name)[-1]
    found = accuracy(to / "few-shot-test.json")
    return [*found, bits["mean"], bits["first"], last["seconds"] / 60, last["index"]]


def learnt(name: str) -> list[dict[str, Any]]:
    """A run's learning curve."""
    points: list[dict[str, Any]] = json.loads((RESULTS / name / "learning.json").read_text())["points"]
    return points


def accuracy(file: Path) -> list[float]:
    """At each few-shot setting, in per cent."""
    return [100 * found["accuracy"] for found in json.loads(file.read_text())["values"]["bruno"]]


def cells(runs: list[list[float]]) -> list[str]:
    """The mean of some runs as a line of the table; of what is measured also half the way between them."""
    line = []
    for (column, digits), values in zip(COLUMNS.items(), zip(*runs, strict=True), strict=False):
        spread = f" ± {(max(values) - min(values)) / 2:{digits}}" * (len(runs) > 1 and column in MEASURED)
        line.append(f"{mean(values):{digits}}{spread}")
    return line + [""] * (len(COLUMNS) - len(line))


def table() -> str:
    """Published numbers, every run that was measured, and its accuracy without noise, in Markdown."""
    lines = [["", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    for title, names in ROWS.items():
        lines += [[work, *cells([found])] for work, found in PUBLISHED.get(title, {}).items()]
        if there := [RESULTS / name for name in names if (RESULTS / name / "few-shot-test.json").is_file()]:
            quiet = [accuracy(to / "few-shot-test-without-noise.json") for to in there]
            lines += [[title, *cells([numbers(to.name, to) for to in there])]]
            lines += [["… without noise", *cells(quiet)]]
    return _markdown(lines)


def _markdown(lines: Iterable[Iterable[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw_learning() -> None:
    """The paper's model and ours, by steps and by minutes: those since the first few, which are compiled."""
    logs = {
        label: learnt(name) for label, name in SHOWN.items() if (RESULTS / name / "learning.json").is_file()
    }
    for x, label in (("steps", "steps"), ("minutes", "minutes, compiling not counted")):
        lines = {}
        for name, (first, *rest) in logs.items():
            minutes = [(line["seconds"] - first["seconds"]) / 60 for line in rest]
            steps = [line["index"] for line in rest]
            lines[name] = (minutes if x == "minutes" else steps, [line["bits_per_dim"] for line in rest])
        picture = line_plot(lines, label, "bits/dim in training", log="x", ymax=HIGHEST)
        (RESULTS / f"learning-by-{x}.png").write_bytes(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/omniglot"), help="where the runs go")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS), help="these runs")
    parser.add_argument("--train-only", action="store_true", help="to measure another time, or elsewhere")
    arguments = parser.parse_args()
    for together in TOGETHER:
        names = [name for name in together if name in arguments.only]
        train(names, arguments.folder)
        for name in [] if arguments.train_only else names:
            for left, command in measurements(name, arguments.folder):
                if not left.exists() and _bruno(*command).wait():
                    raise SystemExit(f"this failed: {command}")
            gather(name, arguments.folder)
            if name in SHIPPED:
                ship(name, arguments.folder)
    if not arguments.train_only:
        draw_learning()
        print(table())


def _bruno(*command: str) -> subprocess.Popen[bytes]:
    print("bruno", *command, flush=True)
    return subprocess.Popen([sys.executable, "-m", "bruno", *command])


if __name__ == "__main__":
    main()
