"""The tables, the pictures that compare runs, and the cards of benchmarks/paper.py, from results/paper/."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from math import nan
from typing import Any

import experiments
from experiments import ROOT, WEIGHTS, markdown, read_learning_curve, values

from bruno.checkpoint import read_about
from bruno.reporting.plots import line_plot

RESULTS = ROOT / "results" / "paper"
PAGE = ROOT / "docs" / "paper.md"
CARD = ROOT / "benchmarks" / "image-model-card.md"
PRETRAINED = {  # pretrained models, and the runs they come from
    "mnist": "mnist-small",
    "fashion-mnist": "fashion-mnist-small",
    "cifar10": "cifar10",
}
BITS = {"paper": ".3f", "bits/dim": ".3f", "first position": ".3f", "minutes": ".0f", "steps": ",.0f"}
ROWS = {  # rows of the table of bits/dim: the run, and the number published with the paper's code
    "MNIST, dense couplings": ("mnist-dense", 1.539),
    "MNIST, dense couplings, Gaussian process": ("mnist-dense-gaussian", 1.561),
    "MNIST, even digits": ("mnist-even", 1.045),
    "MNIST, even digits, Gaussian process": ("mnist-even-gaussian", nan),
    "MNIST": ("mnist", nan),
    "MNIST, Gaussian process": ("mnist-gaussian", nan),
    "MNIST, small model": ("mnist-small", nan),
    "Fashion-MNIST": ("fashion-mnist", 3.057),
    "Fashion-MNIST, Gaussian process": ("fashion-mnist-gaussian", 3.009),
    "Fashion-MNIST, small model": ("fashion-mnist-small", nan),
    "CIFAR-10": ("cifar10", 3.651),
    "CIFAR-10, Gaussian process": ("cifar10-gaussian", nan),
}
CLASSIFIERS = {  # rows of the few-shot table: the runs of MNIST and of Fashion-MNIST
    "both losses, seven classes": ("mnist-seven", "fashion-mnist-seven"),
    "density alone, seven classes": ("mnist-seven-density", "fashion-mnist-seven-density"),
    "`omniglot-small`, fine-tuned on seven classes": ("mnist-seven-tuned", "fashion-mnist-seven-tuned"),
    "`omniglot`, not trained on digits": ("omniglot", ""),
}
DETECTORS = {  # columns of the table of outliers: what, and the run
    "MNIST, odd digits": "mnist-even",
    "MNIST, digits 2, 5, 8": "mnist-seven-density",
    "MNIST, digits 2, 5, 8, both losses": "mnist-seven",
    "Fashion-MNIST, classes 2, 5, 8": "fashion-mnist-seven-density",
    "Fashion-MNIST, classes 2, 5, 8, both losses": "fashion-mnist-seven",
}
HARDWARE = "one NVIDIA H200, which four runs shared"  # for the cards
RATE = 0.05  # of the outliers in the table
LEARNING = {"mnist-dense": 2.5, "mnist-even": 2.0, "mnist": 2.0, "fashion-mnist": 4.0, "cifar10": 5.0}
CORRELATED = {
    "omniglot": "Omniglot",
    "cifar10": "CIFAR-10",
    "mnist-dense": "MNIST, dense couplings",
    "mnist": "MNIST",
}
ABOUT = {  # for the cards
    "mnist": {
        "subject": "handwritten digits, 28 × 28 pixels with 256 grey levels",
        "data": "MNIST (LeCun, Cortes, Burges 1998), the 60,000 training images. Ink is bright on black.",
        "limits": "It expects digits that are centred and scaled as in MNIST.",
        "licence": "MNIST is published under CC BY-SA 3.0.",
    },
    "fashion-mnist": {
        "subject": "articles of clothing, 28 × 28 pixels with 256 grey levels",
        "data": "Fashion-MNIST (Xiao, Rasul, Vollgraf 2017), the 60,000 training images.",
        "limits": "It expects single articles, bright on black, centred and scaled as in Fashion-MNIST.",
        "licence": "Fashion-MNIST is published under the MIT licence.",
    },
    "cifar10": {
        "subject": "small colour photographs, 32 × 32 pixels",
        "data": "CIFAR-10 (Krizhevsky 2009), the 50,000 training images, also mirrored.",
        "limits": "Its samples have the colours and textures of photographs, but rarely show objects. They "
        "hardly depend on the set: conditioning gains less than 0.001 bits/dim.",
        "licence": "CIFAR-10 is published without a licence, for research.",
    },
}


# --- bits/dim --------------------------------------------------------------------------------------------


def training(name: str) -> list[float]:
    """Minutes and steps of a run."""
    last = read_learning_curve(RESULTS / name / "learning.json")[-1]
    return [last["seconds"] / 60, last["index"]]


def bits(name: str, file: str = "bits") -> list[float]:
    """Bits/dim of a run: the mean over positions, and at the first."""
    found = values(RESULTS / name / f"{file}.json")
    return [found["mean"], found["first"]]


def bits_table() -> str:
    """Markdown: bits/dim of every run that was measured, beside the paper's."""
    lines = [["bits/dim, test", *BITS], ["---"] * (1 + len(BITS))]
    for title, (name, published) in ROWS.items():
        if (RESULTS / name / "bits.json").is_file():
            row = [published, *bits(name), *training(name)]
            lines.append([title, *experiments.cells([row], BITS, ())])
    return markdown(lines)


# --- few-shot classification -----------------------------------------------------------------------------


def accuracies(name: str, method: str = "bruno") -> list[str]:
    """Accuracy ± standard error at 1 and 5 shots, in per cent; empty where a run was not measured."""
    file = RESULTS / name / "few-shot.json"
    if not name or not file.is_file():
        return ["", ""]
    found = values(file)[method]
    return [f"{100 * f['accuracy']:.1f} ± {100 * f['spread'] / f['trials'] ** 0.5:.1f}" for f in found]


def few_shot_table() -> str:
    """Markdown: 3-way accuracy on classes that were not trained on."""
    columns = [f"{data}, {shot}-shot" for data in ("MNIST", "Fashion-MNIST") for shot in (1, 5)]
    lines = [["3-way accuracy, %", *columns], ["---"] * 5]
    for title, (mnist, fashion) in CLASSIFIERS.items():
        lines.append([title, *accuracies(mnist), *accuracies(fashion)])
    pixels = ([accuracies(run, "pixels") for run in runs] for runs in zip(*CLASSIFIERS.values(), strict=True))
    lines.append(["nearest pixels", *chain.from_iterable(max(found, key=any) for found in pixels)])
    return markdown([line for line in lines if any(line[1:])])


# --- outliers --------------------------------------------------------------------------------------------


def qualities(name: str) -> dict[str, dict[str, float]]:
    """The quality of every method, in sets with 5 % outliers; empty if a run was not measured."""
    file = RESULTS / name / "outliers.json"
    found = values(file)["contamination"] if file.is_file() else []
    return next((part["qualities"] for part in found if part["rate"] == RATE), {})


def outlier_table() -> str:
    """Markdown: area under ROC and average precision of every method."""
    measured = [qualities(name) for name in DETECTORS.values()]
    lines = [["5 % outliers: area under ROC / average precision", *DETECTORS], ["---"] * (1 + len(DETECTORS))]
    for method in dict.fromkeys(method for found in measured for method in found):
        lines.append([method, *(_quality(found.get(method)) for found in measured)])
    return markdown(lines)


def _quality(found: dict[str, float] | None) -> str:
    if found is None:
        return ""
    area, precision = (
        f"{found[name]:.3f} ± {found[f'{name}_error']:.3f}" for name in ("area", "average_precision")
    )
    return f"{area} / {precision}"


# --- pictures --------------------------------------------------------------------------------------------


def learning_picture(name: str, ymax: float) -> bytes:
    """Bits/dim in training by step, with both processes."""
    lines = {}
    for label, run in (("Student-t", name), ("Gaussian", f"{name}-gaussian")):
        if (RESULTS / run / "learning.json").is_file():
            points = read_learning_curve(RESULTS / run / "learning.json")[1:]
            lines[label] = [p["index"] for p in points], [p["bits_per_dim"] for p in points]
    return line_plot(lines, "steps", "bits/dim in training", log="x", ymax=ymax)


def correlation_picture() -> bytes:
    """Number of dimensions above a correlation, for three models."""
    lines = {}
    for name, title in CORRELATED.items():
        if (RESULTS / name / "correlations.json").is_file():
            found = values(RESULTS / name / "correlations.json")
            pairs = [(t, n) for t, n in zip(found["thresholds"], found["dimensions"], strict=True) if n]
            lines[title] = [t for t, _ in pairs], [n for _, n in pairs]
    return line_plot(lines, "correlation above", "dimensions", log="xy")


def write_pictures() -> None:
    """Draw the pictures that compare runs."""
    for name, ymax in LEARNING.items():
        if (RESULTS / name / "learning.json").is_file():
            (RESULTS / f"learning-{name}.png").write_bytes(learning_picture(name, ymax))
    (RESULTS / "correlations.png").write_bytes(correlation_picture())


# --- the page and the cards ------------------------------------------------------------------------------


def tables() -> list[str]:
    """The tables of docs/paper.md."""
    return [bits_table(), few_shot_table(), outlier_table()]


def write_tables() -> None:
    """Replace the tables in docs/paper.md."""
    for table in tables():
        experiments.replace_table(PAGE, table)


def card(name: str) -> str:
    """The card of a pretrained model: how it was trained, its numbers and its limits."""
    run, about = PRETRAINED[name], read_about(WEIGHTS / f"{name}.safetensors")
    made: dict[str, Any] = about["provenance"]
    columns = {"float32": bits(run), "8 bits": bits(run, "bits-int8")}
    if run != name:
        columns["the larger network of the preset"] = bits(name)
    rows = zip(("bits/dim", "first position"), *columns.values(), strict=True)
    lines: list[Iterable[str]] = [["", *columns], ["---"] * (1 + len(columns))]
    lines += [[title, *(f"{value:.3f}" for value in found)] for title, *found in rows]
    minutes, steps = training(run)
    return CARD.read_text().format(
        title=name,
        numbers=markdown(lines),
        command=re.sub(r" --(out|data-dir|save-every) \S+| --(no-)?verdict", "", made["command"]),
        commit=made["commit"],
        minutes=f"{minutes:.0f}",
        steps=f"{steps:,.0f}",
        hardware=HARDWARE,
        **ABOUT[name],
    )
