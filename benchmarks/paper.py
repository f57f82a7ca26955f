"""Reproduce the paper's experiments on MNIST, Fashion-MNIST and CIFAR-10: `make paper BRUNO_DATA=DIR`.

Trains the models of `RUNS` on a GPU, measures each on test images, and draws the figures of the paper's
appendices E to H. A run that was stopped is resumed, and finished work is not repeated. Results and figures
go to results/paper/, the table into docs/paper.md.

Omniglot has its own script: `make omniglot`.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from math import nan
from pathlib import Path

import experiments
from experiments import ROOT, markdown, read_learning_curve, values

RESULTS = ROOT / "results" / "paper"
PAGE = ROOT / "docs" / "paper.md"  # the page with the table
GAUSSIAN = ["--set", "process.kind=gaussian"]
EVEN, ODD = "0,2,4,6,8", "1,3,5,7,9"
SEVEN = ["--set", 'data.classes=["0","1","3","4","6","7","9"]']  # trained on; the other three are unseen
UNSEEN = "2,5,8"
MINUTES = {"cifar10": "25", "fashion-mnist": "20", "mnist": "15", "mnist-even": "15", "mnist-dense": "6"}
RUNS = {
    **{name: [name, "--minutes", minutes] for name, minutes in MINUTES.items()},
    **{
        f"{preset}-gaussian": [preset, "--minutes", minutes, *GAUSSIAN] for preset, minutes in MINUTES.items()
    },
    "mnist-seven": ["mnist", "--minutes", "10", *SEVEN],
    "fashion-mnist-seven": ["fashion-mnist", "--minutes", "10", *SEVEN],
}
TOGETHER = (  # trained at the same time on one GPU
    ("cifar10",),
    ("cifar10-gaussian",),
    ("fashion-mnist", "mnist", "mnist-even"),
    ("fashion-mnist-gaussian", "mnist-gaussian", "mnist-even-gaussian"),
    ("mnist-dense", "mnist-dense-gaussian", "mnist-seven", "fashion-mnist-seven"),
)
LONG = ["--set-size", "500", "--prefixes", "480-500"]  # figures of the appendix: sets of 500 elements
COLUMNS = {"paper": ".3f", "bits/dim": ".3f", "first position": ".3f", "minutes": ".0f", "steps": ",.0f"}
ROWS = {  # rows of the table: the run, and the number published with the paper's code
    "MNIST, dense couplings": ("mnist-dense", 1.539),
    "… Gaussian process": ("mnist-dense-gaussian", 1.561),
    "MNIST, even digits": ("mnist-even", 1.045),
    "…  Gaussian process": ("mnist-even-gaussian", nan),
    "MNIST": ("mnist", nan),
    "…   Gaussian process": ("mnist-gaussian", nan),
    "Fashion-MNIST": ("fashion-mnist", 3.057),
    "…    Gaussian process": ("fashion-mnist-gaussian", 3.009),
    "CIFAR-10": ("cifar10", 3.651),
    "…     Gaussian process": ("cifar10-gaussian", nan),
}


def measurements(name: str, folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """The commands to run on a trained model, each with the file that it writes."""
    model, results = str(folder / name), folder / name / "results"
    yield folder / name / "half.safetensors", ["export", model, f"{model}/half.safetensors", "--half"]
    if name.endswith("-seven"):
        few_shot = ["fewshot", model, "--classes", UNSEEN, "--way", "3", "--trials", "200", "--no-noise"]
        yield results / f"few-shot-test-{UNSEEN.replace(',', '-')}-without-noise.json", few_shot
    if name.endswith("-seven") or name == "mnist-even":
        unseen = ODD if name == "mnist-even" else UNSEEN
        anomaly = ["anomaly", "measure", model, "--classes", unseen]
        yield results / f"anomaly-quality-test-{unseen.replace(',', '-')}.json", anomaly
    if name.startswith("mnist-even"):
        of_even = f"bits-test-{EVEN.replace(',', '-')}.json"
        yield results / of_even, ["evaluate", model, "--classes", EVEN, "--sets", "1000"]
    else:
        yield results / "bits-test.json", ["evaluate", model, "--sets", "1000"]
    yield results / "correlations.json", ["inspect", model]
    yield results / "samples-prior.png", ["sample", model, "--prior", "--samples", "64"]
    yield results / "samples.png", ["sample", model, "--set-size", "20", "--sets", "4", "--samples", "4"]
    yield results / "samples-repeats.png", ["repeat", model]


def bits(name: str) -> tuple[float, float]:
    """Bits/dim of a run: the mean over positions, and at the first."""
    [file] = (RESULTS / name).glob("bits-*.json")
    found = values(file)
    return found["mean"], found["first"]


def gather(name: str, folder: Path) -> None:
    """Copy a run's numbers, pictures and learning curve to results/."""
    run, to = folder / name, RESULTS / name
    to.mkdir(parents=True, exist_ok=True)
    for kind in ("*.json", "*.png"):
        for file in (run / "results").glob(kind):
            shutil.copy(file, to)
    experiments.write_learning_curve(run, to / "learning.json")


def table() -> str:
    """Markdown: bits/dim of every run that was measured, beside the paper's."""
    lines = [["", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    for title, (name, published) in ROWS.items():
        row = [published]
        if (RESULTS / name / "learning.json").is_file():
            last = read_learning_curve(RESULTS / name / "learning.json")[-1]
            row += [*bits(name), last["seconds"] / 60, last["index"]]
        lines.append([" ".join(title.split()), *experiments.cells([row], COLUMNS, ())])
    return markdown(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="the folder of the runs")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS), help="only these runs")
    parser.add_argument("--train-only", action="store_true", help="train, but do not measure")
    arguments = parser.parse_args()
    for together in TOGETHER:
        names = [name for name in together if name in arguments.only]
        experiments.train({arguments.folder / name: RUNS[name] for name in names})
        for name in [] if arguments.train_only else names:
            experiments.measure(measurements(name, arguments.folder))
            gather(name, arguments.folder)
    if not arguments.train_only:
        experiments.replace_table(PAGE, table())


if __name__ == "__main__":
    main()
