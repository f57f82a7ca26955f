"""Reproduce results/omniglot/ from the published data: `make omniglot BRUNO_DATA=DIR`, on a GPU.

Trains two or three runs at a time with `bruno`, measures each model on the test characters (future pretrained
models also with weights rounded to 8 bits), and draws samples. A stopped run is resumed, and finished work
is not repeated. Pictures of Omniglot's characters stay in the run folders; results/ gets numbers, and
samples given synthetic characters of this project. The first run of each kind becomes a pretrained model. The
table goes into docs/omniglot.md.

One run does not keep a large GPU busy, two do. For both to run at the same time, start NVIDIA's MPS first
(`nvidia-cuda-mps-control -d`), as was done for the numbers in results/.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable, Iterator
from math import nan
from pathlib import Path

import experiments
from experiments import GAUSSIAN, ROOT, WEIGHTS, markdown, read_learning_curve
from safetensors import safe_open

from bruno.checkpoint import read_about
from bruno.reporting.plots import line_plot

RESULTS = ROOT / "results" / "omniglot"
PAGE = ROOT / "docs" / "omniglot.md"  # the page with the table
BUDGET = ["--minutes", "22.5"]
RUNS = {
    "omniglot": ["omniglot", *BUDGET],
    "omniglot-density": ["omniglot-density", *BUDGET],
    "omniglot-small": ["omniglot-small", *BUDGET],
    "omniglot-seed1": ["omniglot", *BUDGET, "--seed", "1"],
    "omniglot-density-seed1": ["omniglot-density", *BUDGET, "--seed", "1"],
    "omniglot-gaussian": ["omniglot", *BUDGET, *GAUSSIAN],
    "omniglot-density-gaussian": ["omniglot-density", *BUDGET, *GAUSSIAN],
    "omniglot-paper": ["omniglot-paper", "--steps", "5000"],
}
TOGETHER = (  # trained at the same time on one GPU
    ("omniglot", "omniglot-density", "omniglot-small"),
    ("omniglot-seed1", "omniglot-density-seed1"),
    ("omniglot-gaussian", "omniglot-density-gaussian"),
    ("omniglot-paper",),
)
ALL_CHARACTERS = ["--set", "data.split=trainval"]  # including validation: all choices are made
SHOWN = {
    "the paper's": "omniglot-paper",
    "ours": "omniglot-density",
}  # runs whose learning curves are compared
NOT_COPIED = ("samples", "toy-comparison")  # about pictures of Omniglot's characters, or not about a model
MAX_BITS = 2.5  # bits/dim at the top of the plot: the first steps are far above all others
ACCURACY = {f"{way}-way {shot}-shot": ".1f" for way in (5, 20) for shot in (1, 5)}  # columns and their format
MEASURED = {**ACCURACY, "bits/dim": ".3f", "first position": ".3f", "specks": ".1f"}
COLUMNS = {**MEASURED, "minutes": ".0f", "steps": ",.0f"}
ROWS = {  # rows of the table, each with its runs, which differ in their seed
    "density alone": ("omniglot-density", "omniglot-density-seed1"),
    "density alone, affine couplings": ("affine-density", "affine-density-seed1"),
    "density alone, affine couplings, Gaussian process": ("affine-density-gaussian",),
    "density alone, the paper's network and settings": ("omniglot-paper",),
    "both losses": ("omniglot", "omniglot-seed1"),
    "both losses, alone on the GPU": ("omniglot-alone",),
    "both losses, small model": ("omniglot-small",),
    "both losses, affine couplings": ("affine", "affine-seed1"),
    "both losses, affine couplings, Gaussian process": ("affine-gaussian",),
}
WAYS = {  # other ways to classify with the same weights: the file and the options of each
    "… without noise": ("few-shot-test-without-noise.json", ["--no-noise"]),
    "… 8 views": ("few-shot-test-views.json", ["--views"]),
    "… without noise, 8 views": ("few-shot-test-without-noise-views.json", ["--no-noise", "--views"]),
}
PUBLISHED = {  # rows of other papers, above the row of ours to compare with
    "density alone": {
        "*BRUNO* (2018)": [86.3, 95.6, 69.2, 87.7, 0.988, 1.007],
        "*Neural Statistician* (2017)": [98.1, 99.5, 93.2, 98.1],
    },
    "both losses": {
        "*BRUNO* (2018), fine-tuned": [97.1, 99.4, 91.3, 97.8],
        "*Matching Networks* (2016)": [98.1, 98.9, 93.8, 98.5],
        "*Prototypical Networks* (2017)": [98.8, 99.7, 96.0, 98.9],
        "*SNAIL* (2018)": [99.07, 99.78, 97.64, 99.36],
        "*MAML++* (2019)": [99.5, 99.9, 97.7, 99.3],
        "*TapNet* (2019)": [nan, nan, 98.07, 99.49],
    },
}
PRETRAINED = {  # how each was trained, for its card
    "omniglot": "trained as a density and, in the second half of the run, also to classify",
    "omniglot-small": "a fifth as large as `omniglot`, trained in the same way but with AdamW",
}
SHARING = {"omniglot": "two", "omniglot-small": "three"}  # runs on the GPU at the same time, for the cards
CARD = ROOT / "benchmarks" / "model-card.md"


def train(names: Iterable[str], folder: Path) -> None:
    """Train runs at the same time, and wait for all of them."""
    experiments.train({folder / name: [*RUNS[name], *ALL_CHARACTERS] for name in names})


def measurements(name: str, folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """The commands to run on a trained model, each with the file that it writes."""
    whole, rounded = (folder / name / f"{kind}.safetensors" for kind in ("model", "rounded"))
    of_whole, of_rounded = (model.with_suffix("") / "results" for model in (whole, rounded))
    yield rounded, ["export", str(whole), str(rounded), "--int8"]
    for model, results in [(whole, of_whole), (rounded, of_rounded)][: 2 if name in PRETRAINED else 1]:
        yield results / "bits-test.json", ["evaluate", str(model)]
        yield results / "few-shot-test.json", ["fewshot", str(model)]
    for file, options in WAYS.values():
        yield of_whole / file, ["fewshot", str(whole), *options]
    yield of_whole / "gain-by-position.json", ["inspect", str(whole), "--sets", "423"]
    yield of_rounded / "specks-test.json", ["specks", str(rounded)]
    rotated = of_whole / "few-shot-test-rotated-decoys-without-noise.json"
    yield rotated, ["fewshot", str(whole), "--no-noise", "--rotated-decoys"]
    yield of_whole / "samples.png", ["sample", str(whole), "--set-size", "20", "--samples", "6"]
    drawn = ["--data", "drawn", "--sets", "4", "--prefixes", "0-7", "--samples", "4"]
    yield of_rounded / "samples.png", ["sample", str(rounded), *drawn]
    if name in PRETRAINED:
        for job, kind in (("anomaly", "anomaly"), ("retrieve", "retrieval")):
            yield of_rounded / f"{kind}-quality-test.json", [job, "measure", str(rounded)]


def gather(name: str, folder: Path) -> None:
    """Copy a run's numbers, learning curve and samples given synthetic characters to results/."""
    run, to = folder / name, RESULTS / name
    (to / "rounded").mkdir(parents=True, exist_ok=True)
    for file in (run / "model" / "results").glob("*.json"):
        if file.stem not in NOT_COPIED:
            shutil.copy(file, to)
    for file in (run / "rounded" / "results").glob("*.json"):
        shutil.copy(file, to / "rounded")
    if name in PRETRAINED:
        shutil.copy(run / "rounded" / "results" / "samples.png", to / "drawn.png")
    experiments.write_learning_curve(run, to / "learning.json")


def card(name: str) -> str:
    """The card of a pretrained model: how it was trained, its numbers and its limits."""
    whole, rounded = (cells([numbers(name, to)]) for to in (RESULTS / name, RESULTS / name / "rounded"))
    without_noise = cells([accuracy(RESULTS / name / "few-shot-test-without-noise.json")])
    lines = [
        ["on Omniglot's test characters", "float32", rounding(name), "float32, without noise"],
        ["---"] * 4,
        *zip(MEASURED, whole, rounded, without_noise, strict=False),
    ]
    minutes = numbers(name, RESULTS / name)[-2]
    about = {"title": name, "numbers": markdown(lines), "minutes": f"{minutes:.1f}", "steps": whole[-1]}
    about["commit"] = read_about(WEIGHTS / f"{name}.safetensors")["provenance"]["commit"]
    about["hardware"] = f"one NVIDIA H200, which {SHARING[name]} runs shared"
    about |= {"training": PRETRAINED[name], "rounding": rounding(name)}
    return CARD.read_text().format(**about)


def rounding(name: str) -> str:
    """How the weights of a pretrained model are stored."""
    with safe_open(WEIGHTS / f"{name}.safetensors", "pt") as file:
        kinds = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
    return "8 bits" if "I8" in kinds else "half precision"


def numbers(name: str, results: Path) -> list[float]:
    """A run's row of the table, from the results in a folder: its own, or those of rounded weights."""
    bits = json.loads((results / "bits-test.json").read_text())["values"]
    last = read_learning_curve(RESULTS / name / "learning.json")[-1]
    found = accuracy(results / "few-shot-test.json")
    return [*found, bits["mean"], bits["first"], specks(name), last["seconds"] / 60, last["index"]]


def accuracy(file: Path) -> list[float]:
    """Accuracy at each few-shot setting, in per cent."""
    return [100 * found["accuracy"] for found in json.loads(file.read_text())["values"]["bruno"]]


def specks(name: str) -> float:
    """The percentage of a run's samples with a speck, measured with rounded weights; NaN if it was not."""
    file = RESULTS / name / "rounded" / "specks-test.json"
    return 100 * json.loads(file.read_text())["values"]["share"] if file.is_file() else nan


def cells(runs: list[list[float]]) -> list[str]:
    """The mean of runs as a row of the table; measured columns also get half the range."""
    return experiments.cells(runs, COLUMNS, MEASURED)


def table() -> str:
    """Markdown: published numbers, and every measured run with its accuracy in other ways."""
    lines = [["", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    for title, names in ROWS.items():
        lines += [[work, *cells([found])] for work, found in PUBLISHED.get(title, {}).items()]
        folders = [RESULTS / name for name in names if (RESULTS / name / "few-shot-test.json").is_file()]
        if folders:
            lines += [[title, *cells([numbers(to.name, to) for to in folders])]]
        for way, (file, _) in WAYS.items():
            found = [accuracy(to / file) for to in folders if (to / file).is_file()]
            lines += [[way, *cells(found)]] if found else []
    return markdown(lines)


def write_table() -> None:
    """Replace the table in docs/omniglot.md."""
    experiments.replace_table(PAGE, table())


def plot_learning() -> None:
    """Plot the paper's model and ours by steps and by minutes, without the first steps, which compile."""
    logs = {
        label: read_learning_curve(RESULTS / name / "learning.json")
        for label, name in SHOWN.items()
        if (RESULTS / name / "learning.json").is_file()
    }
    for x, label in (("steps", "steps"), ("minutes", "minutes without compilation")):
        lines = {}
        for name, (first, *rest) in logs.items():
            minutes = [(line["seconds"] - first["seconds"]) / 60 for line in rest]
            steps = [line["index"] for line in rest]
            lines[name] = (minutes if x == "minutes" else steps, [line["bits_per_dim"] for line in rest])
        picture = line_plot(lines, label, "bits/dim in training", log="x", ymax=MAX_BITS)
        (RESULTS / f"learning-by-{x}.png").write_bytes(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/omniglot"), help="the folder of the runs")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS), help="only these runs")
    parser.add_argument("--train-only", action="store_true", help="train, but do not measure")
    arguments = parser.parse_args()
    for together in TOGETHER:
        names = [name for name in together if name in arguments.only]
        train(names, arguments.folder)
        for name in [] if arguments.train_only else names:
            experiments.measure(measurements(name, arguments.folder))
            gather(name, arguments.folder)
            if name in PRETRAINED:
                experiments.add_to_package(name, arguments.folder / name / "rounded.safetensors", card)
    if not arguments.train_only:
        plot_learning()
        write_table()


if __name__ == "__main__":
    main()
