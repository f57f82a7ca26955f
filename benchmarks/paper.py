"""Reproduce the paper's experiments on MNIST, Fashion-MNIST and CIFAR-10: `make paper BRUNO_DATA=DIR`.

Trains the models of `RUNS` on a GPU, measures each on test images, and draws the figures of the paper's
appendices E to H. A run that was stopped is resumed, and finished work is not repeated. Numbers and pictures
go to results/paper/, tables into docs/paper.md. The models of `PRETRAINED` become part of the package, with
their cards.

Omniglot has its own script: `make omniglot`.
"""

from __future__ import annotations

import argparse
import io
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import experiments
import paper_tables
from experiments import GAUSSIAN
from paper_tables import PRETRAINED, RESULTS
from PIL import Image

from bruno.trained.folders import results_folder

EVEN, ODD = "0,2,4,6,8", "1,3,5,7,9"
SEVEN = ["--set", 'data.classes=["0","1","3","4","6","7","9"]']  # trained on
UNSEEN = "2,5,8"  # by the runs of seven classes
MODEL = "model.safetensors"  # in the folder of a run
SETS = "--sets 20"  # of `bruno inspect`, whose parameters are shown; bits/dim by position are in bits.json
MOST_BYTES = 300_000  # of a PNG
IN_TABLES = ("bits", "bits-int8", "bits-int8-even", "few-shot", "outliers", "correlations")  # no pictures
MINUTES = {"cifar10": "25", "fashion-mnist": "25", "mnist": "25", "mnist-even": "25", "mnist-dense": "6"}


def settings(text: str) -> list[str]:
    """Options of `bruno train` from settings between spaces."""
    return [part for setting in text.split() for part in ("--set", setting)]


# Seven classes are few to generalise from: each counts four times, and every set is distorted as a whole.
TO_CLASSIFY = settings(
    "data.rotations=true train.mirror=true train.shift=1 train.slant=0.2 train.warp=0.05 train.fade=0.3 "
    "train.shared=true train.discriminative=1.0 train.onset=0.3 train.episodes=4 train.way=7 train.shot=1 "
    "train.queries=19 train.learning_rate=5e-4"
)
SMALL = {  # networks that are small enough to be part of the package
    "mnist": settings("flow.filters=40 flow.units=96"),
    "fashion-mnist": settings("flow.filters=40 flow.units=96"),
}
RUNS = {
    **{name: [name, "--minutes", minutes] for name, minutes in MINUTES.items()},
    **{f"{name}-gaussian": [name, "--minutes", minutes, *GAUSSIAN] for name, minutes in MINUTES.items()},
    **{f"{name}-small": [name, "--minutes", MINUTES[name], *changes] for name, changes in SMALL.items()},
}
for name in ("mnist", "fashion-mnist"):
    RUNS[f"{name}-seven"] = [name, "--minutes", "11", *SEVEN, *TO_CLASSIFY]
    RUNS[f"{name}-seven-density"] = [name, "--minutes", "5", *SEVEN]
# A model of characters, trained further on seven classes: minutes on a CPU.
TUNED = {
    f"{name}-seven-tuned": [
        *[
            "omniglot-small",
            "--data",
            name,
            "--steps",
            "150",
            "--way",
            "7",
            "--episodes",
            "2",
            "--trials",
            "0",
        ],
        *[*SEVEN, *settings("train.shared=true train.queries=5 train.restyle=0.0")],
    ]
    for name in ("mnist", "fashion-mnist")
}
TOGETHER = (  # trained at the same time on one GPU
    ("cifar10", "cifar10-gaussian"),
    ("fashion-mnist", "mnist", "mnist-even"),
    ("fashion-mnist-small", "mnist-small"),
    ("fashion-mnist-gaussian", "mnist-gaussian", "mnist-even-gaussian"),
    ("mnist-dense", "mnist-dense-gaussian"),
    ("mnist-seven", "fashion-mnist-seven", "mnist-seven-density", "fashion-mnist-seven-density"),
)


class Measurement(NamedTuple):
    """A command on a model: it writes the result `result`, which is kept as `kept` in results/paper/."""

    kept: str
    result: str
    command: str


def after_20(sets: int) -> Measurement:
    """Samples after each of 20 images, of several classes."""
    size = "--set-size 20 --prefixes 0-20 --samples 4"
    return Measurement("samples-20", "samples", f"sample MODEL --sets {sets} {size}")


def after_500(classes: str = "") -> Measurement:
    """Samples after 480 to 500 images of a class, for two classes."""
    size = "--sets 2 --set-size 500 --prefixes 480-500 --samples 4"
    return Measurement("samples-500", "samples", f"sample MODEL {size} {classes}")


def repeated(options: str = "") -> Measurement:
    """Samples after the same image was seen up to 500 times, and their spread."""
    repeats = "--set-size 1 --repeats 1,2,5,10,20,100,500"
    return Measurement("repeats", "samples-repeats", f"repeat MODEL {repeats} {options}")


def stream(inlier: str, outlier: str) -> Measurement:
    """Scores in a stream of one digit with some of another."""
    digits = f"--classes {inlier},{outlier} --set-class {inlier}"
    return Measurement(
        f"stream-{inlier}-{outlier}", "anomaly", f"anomaly watch MODEL --threshold 0 --count-all {digits}"
    )


PRIOR = Measurement("samples-prior", "samples-prior", "sample MODEL --prior --samples 64")
DRAWN = "--data drawn"  # pictures of Omniglot's characters are not published
FIGURES = {
    "omniglot": [
        repeated(DRAWN),
        PRIOR,
        Measurement("toy-comparison", "toy-comparison", f"inspect MODEL {SETS} {DRAWN}"),
    ],
    "cifar10": [after_20(4), after_500(), repeated(), PRIOR],
    "fashion-mnist": [after_20(8), PRIOR],
    "mnist-even": [
        after_500("--classes 1,4"),
        repeated("--classes 1"),
        PRIOR,
        stream("1", "7"),
        stream("9", "5"),
    ],
    "mnist-dense": [after_20(10)],
    "mnist": [after_20(10), PRIOR],
}
INSPECTED = {"omniglot": DRAWN, "cifar10": "", "mnist-dense": "", "mnist": "", "fashion-mnist": ""}


def few_shot(data: str, options: str = "") -> Measurement:
    """Accuracy on the unseen classes."""
    name = f"few-shot-{data}-{UNSEEN.replace(',', '-')}-without-noise"
    episodes = f"--classes {UNSEEN} --way 3 --trials 200 --no-noise --no-rotations"
    return Measurement("few-shot", name, f"fewshot MODEL {episodes} {options}")


def outliers(classes: str) -> Measurement:
    """How well outliers are found in sets of classes that the model was not trained on."""
    name = f"anomaly-quality-test-{classes.replace(',', '-')}"
    return Measurement(
        "outliers", name, f"anomaly measure MODEL --sets 100 --classes {classes} --no-rotations"
    )


def even_bits(kept: str) -> Measurement:
    """Bits/dim of the even digits."""
    return Measurement(kept, f"bits-test-{EVEN.replace(',', '-')}", f"evaluate MODEL --classes {EVEN}")


def measurements(name: str) -> Iterator[Measurement]:
    """What to measure on a model."""
    if name == "omniglot":
        yield few_shot("mnist-test", "--data mnist")
    elif "-seven" in name:
        yield few_shot("test")
        if name not in TUNED:
            yield outliers(UNSEEN)
    elif name.startswith("mnist-even"):
        yield even_bits("bits")
    else:
        yield Measurement("bits", "bits-test", "evaluate MODEL")
    if name == "mnist-even":
        yield outliers(ODD)
    if name in INSPECTED:
        for result in ("correlations", "degrees-of-freedom"):
            yield Measurement(result, result, f"inspect MODEL {SETS} {INSPECTED[name]}")
    yield from FIGURES.get(name, [])


def measure(name: str, model: str, wanted: Iterable[Measurement]) -> None:
    """Run the commands on a model whose results are not kept yet, and keep them."""
    to, done = RESULTS / name, []
    to.mkdir(parents=True, exist_ok=True)
    for kept, result, command in wanted:
        if (to / f"{kept}.json").is_file():
            continue
        words = [model if word == "MODEL" else word for word in command.split()]
        if words not in done:  # one command may write several results
            experiments.run(*words)
            done.append(words)
        keep(results_folder(model) / "results" / f"{result}.json", to / f"{kept}.json")


def keep(result: Path, to: Path) -> None:
    """Copy a result and its picture; photographs become WebP, which takes a tenth of the space."""
    shutil.copy(result, to)
    picture = result.with_suffix(".png")
    if not picture.is_file() or to.stem in IN_TABLES:
        return
    if picture.stat().st_size <= MOST_BYTES:
        shutil.copy(picture, to.with_suffix(".png"))
        return
    with Image.open(io.BytesIO(picture.read_bytes())) as image:
        image.convert("RGB").save(to.with_suffix(".webp"), quality=90, method=6)


def measured_int8(run: Path) -> Path:
    """The model of a run with weights in 8 bits, as it is published; its bits/dim are measured too."""
    small = run / "int8.safetensors"
    if not small.is_file():
        experiments.run("export", str(run / MODEL), str(small), "--int8")
    wanted = [Measurement("bits-int8", "bits-test", "evaluate MODEL")]
    if run.name == "mnist-small":  # how much harder are even digits?
        wanted.append(even_bits("bits-int8-even"))
    measure(run.name, str(small), wanted)
    return small


def tuned(name: str, folder: Path) -> str:
    """The path of a pretrained model that is trained further; it is trained if it is not there."""
    model = folder / name / MODEL
    if not model.is_file():
        experiments.run("finetune", *TUNED[name], "--no-verdict", "--out", str(model.parent))
    return str(model)


def study(folder: Path) -> None:
    """Train both processes under stress, with the paper's network."""
    if not (RESULTS / "study.json").is_file():
        size = ["--full-size", "--steps", "1000"]
        experiments.run("study", "--data", "fashion-mnist", *size, "--out", str(folder / "study"))
        keep(folder / "study" / "results" / "study-fashion-mnist.json", RESULTS / "study.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = [*RUNS, *TUNED, "omniglot", "study"]
    parser.add_argument("--folder", type=Path, default=Path("runs/paper"), help="the folder of the runs")
    parser.add_argument("--only", nargs="*", choices=every, default=every, help="only these")
    parser.add_argument("--train-only", action="store_true", help="train, but do not measure")
    parser.add_argument("--measure-only", action="store_true", help="measure the runs that are there")
    arguments = parser.parse_args()
    for together in TOGETHER:
        runs = {arguments.folder / name: RUNS[name] for name in together if name in arguments.only}
        if not arguments.measure_only:
            experiments.train(runs)
        for run in runs:
            if (run / MODEL).is_file() and not arguments.train_only:
                measure(run.name, str(run / MODEL), measurements(run.name))
                experiments.write_learning_curve(run, RESULTS / run.name / "learning.json")
    if arguments.train_only:
        return
    for name in TUNED.keys() & {*arguments.only}:
        measure(name, tuned(name, arguments.folder), measurements(name))
    if "omniglot" in arguments.only:
        measure("omniglot", "omniglot", measurements("omniglot"))
    if "study" in arguments.only:
        study(arguments.folder)
    for name, run_name in PRETRAINED.items():
        if run_name in arguments.only and (arguments.folder / run_name / MODEL).is_file():
            small = measured_int8(arguments.folder / run_name)
            experiments.add_to_package(name, small, paper_tables.card)
    paper_tables.write_pictures()
    paper_tables.write_tables()


if __name__ == "__main__":
    main()
