"""`bruno fewshot` and `bruno classify`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

from bruno.cli.opening import Opened, chosen_split, is_own, measured_on, open_model
from bruno.cli.options import (
    Checkpoint,
    DataDir,
    Device,
    Invert,
    ModelName,
    OtherData,
    Seed,
    SkipBad,
    Split,
    check_number,
    console,
    numbers,
    progress_bar,
    say_passed_over,
    short_names,
)
from bruno.data import ElementReader, Examples
from bruno.data.readers import is_hidden
from bruno.reporting.plots import accuracy_bars, likely_classes, to_uint8
from bruno.reporting.results import Result
from bruno.tasks.classification import classify as classify_elements
from bruno.tasks.classification import fit_temperature
from bruno.tasks.few_shot import FewShotResult, measure_few_shot, measure_pixels

_EPISODES = 600  # to fit a temperature to, at least
_SHOWN = 24  # elements in the picture, at most
_LIKELIEST = 5  # classes shown of each


def fewshot(
    run: ModelName,
    way: Annotated[
        str, typer.Option(help="Numbers of classes to choose from; 5,20 if left out and there are so many.")
    ] = "",
    shot: Annotated[str, typer.Option(help="Numbers of examples of each class.")] = "1,5",
    trials: Annotated[int, typer.Option(help="How many; in each, every class is asked once.")] = 20,
    threshold: Annotated[
        float | None, typer.Option(help="Use only latent dimensions with a correlation above this.")
    ] = None,
    noise: Annotated[
        bool, typer.Option(help="Dequantise with fresh noise, as the protocol has it, or with ½.")
    ] = True,
    rotations: Annotated[
        bool | None, typer.Option(help="Turned classes count as classes; as in training if left out.")
    ] = None,
    split: Split = None,
    data: OtherData = None,
    data_dir: DataDir = None,
    invert: Invert = None,
    checkpoint: Checkpoint = "last",
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Accuracy at n-shot k-way classification, beside the nearest pixels or columns on the same episodes."""
    if threshold is not None:
        check_number("--threshold", threshold, 0, 1)
    opened = open_model(run, checkpoint, device)
    data = opened.at_hand(data, data_dir)
    split = chosen_split(split, data)
    examples = opened.examples(split, data_dir, data, invert=invert, classes=2)
    rotated = opened.rotations if rotations is None else rotations
    most = len(examples.names)
    ways = numbers("--way", way) if way else tuple(sorted({min(5, most), min(20, most)}))
    shots = numbers("--shot", shot)
    for option, value, least in (("--way", min(ways), 2), ("--shot", min(shots), 1), ("--trials", trials, 1)):
        check_number(option, value, least)
    with progress_bar("images") as progress:
        ours = measure_few_shot(
            opened.model,
            examples,
            ways=ways,
            shots=shots,
            trials=trials,
            rotations=rotated,
            generator=torch.Generator().manual_seed(seed),
            threshold=threshold,
            noisy=noise,
            progress=progress,
        )
    raw, plain = ("pixels", examples) if opened.model.levels else ("columns", _on_one_scale(examples, opened))
    nearest = measure_pixels(
        plain,
        ways=ways,
        shots=shots,
        trials=trials,
        rotations=rotated,
        generator=torch.Generator().manual_seed(seed),
        device=opened.device,
    )
    rows = tuple(
        (f"{a.way}-way {a.shot}-shot", _per_cent(a), _per_cent(b), f"{100 / a.way:.1f}", f"{a.episodes:,}")
        for a, b in zip(ours, nearest, strict=True)
    )
    where = measured_on(split, data)
    variants = {}  # in a file's name: in a title
    if threshold is not None:
        variants[f"above-{threshold:g}"] = f"dimensions with a correlation above {threshold:g}"
    if not noise:
        variants["without-noise"] = "without noise"
    values = {
        "split": where,
        "rotations": rotated,
        "threshold": threshold,
        "noise": noise,
        "bruno": [asdict(result) for result in ours],
        raw: [asdict(result) for result in nearest],
    }
    columns = ("", "accuracy %", f"nearest {raw} %", "chance %", "episodes")
    note = (
        f"Mean of {trials} trials ± standard deviation from trial to trial, in the picture ± standard error."
    )
    shown = accuracy_bars({"BRUNO": ours, f"nearest {raw}": nearest})
    name = "-".join(["few-shot", where, *variants])
    title = ", ".join(["Few-shot classification", where, *variants.values()])
    opened.keep(Result(name, title, values, columns, rows, note, shown), seed)


def classify(
    run: ModelName,
    images: Annotated[list[Path], typer.Argument(help="What to classify: files, or folders of them.")],
    support: Annotated[
        Path,
        typer.Option(
            help="A few examples of each class: folders of them in a folder, or a CSV as in training."
        ),
    ],
    prior: Annotated[
        str,
        typer.Option(help="How common each class is, by order of name, as 0.9,0.1; equal if left out."),
    ] = "",
    temperature: Annotated[
        float, typer.Option(help="What log-probabilities are divided by; above 1 for less sure of itself.")
    ] = 1.0,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit the temperature on classes that the run has not seen.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(help="To calibrate on, not on the run's data: a named set, or class folders."),
    ] = None,
    data_dir: DataDir = None,
    invert: Invert = None,
    skip_bad: SkipBad = False,
    checkpoint: Checkpoint = "last",
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Which of your classes is it? Probabilities from a few examples of each."""
    check_number("--temperature", temperature, 1e-6)
    if calibrate and temperature != 1.0:
        raise ValueError(f"`--calibrate` finds a temperature; leave out --temperature {temperature}.")
    if data and not calibrate:
        raise ValueError("`--data` is to calibrate on; leave it out, or add --calibrate.")
    opened = open_model(run, checkpoint, device)
    reader = opened.reader(invert=invert, skip_bad=skip_bad)
    classes, sets = _classes_and_sets(opened, reader, support, invert)
    shares = _shares(prior, len(classes)) if prior else None
    queries, names = reader.read_all(images)
    say_passed_over(reader)
    opened.warn_if_unlike(torch.cat(sets), queries)
    if calibrate:
        own = invert if is_own(data) else None
        known = opened.examples(opened.unseen, data_dir, data, invert=own, classes=2)
        temperature = _fitted(known, opened, sets, seed)
    found = classify_elements(
        opened.model, sets, queries.to(opened.device), prior=shares, temperature=temperature
    )
    likeliest = [_likeliest(classes, probabilities) for probabilities in found.probabilities]
    shown_names = short_names(names)
    rows = tuple((name, *_in_words(some)) for name, some in zip(shown_names, likeliest, strict=True))
    values = {"classes": classes, "temperature": temperature, "support": [len(some) for some in sets]}
    values |= {"images": names, "probabilities": found.probabilities.tolist()}
    columns = ("image" if opened.model.levels else "row", "class", "%", "or")
    shown = likely_classes(
        [row[0] for row in rows[:_SHOWN]],
        likeliest[:_SHOWN],
        to_uint8(queries[:_SHOWN], opened.model.levels) if opened.model.levels else None,
    )
    part = [f"the first {_SHOWN} of {len(rows)}"] * (len(rows) > _SHOWN)
    part += [f"the likeliest {_LIKELIEST} of {len(classes)} classes"] * (len(classes) > _LIKELIEST)
    note = f"In the picture: {', '.join(part)}." if part else ""
    opened.keep(Result("classification", "Which class is it?", values, columns, rows, note, shown), seed)


def _classes_and_sets(
    opened: Opened, reader: ElementReader, support: Path, invert: bool | None
) -> tuple[list[str], list[Tensor]]:
    """The names of the classes, and some examples of each."""
    if support.is_file():
        known = opened.examples(opened.unseen, None, str(support), invert=invert)
        if len(known.names) < 2:
            raise ValueError(f"`--support` must name at least two classes; {support} has one.")
        sets = [known.elements[known.labels == i] for i in range(len(known.names))]
        return list(known.names), [some.to(opened.device) for some in sets]
    inside = sorted(support.iterdir()) if support.is_dir() else []
    folders = [path for path in inside if path.is_dir() and not is_hidden(path.name)]
    if len(folders) < 2:
        raise ValueError(
            f"`--support` must be a folder of at least two class folders; {support} "
            + (f"has {len(folders)}." if support.exists() else "does not exist.")
        )
    return [folder.name for folder in folders], [
        reader.read_all([folder])[0].to(opened.device) for folder in folders
    ]


def _on_one_scale(rows: Examples, opened: Opened) -> Examples:
    """Rows whose columns count alike: as they come, the one with the largest numbers would decide alone."""
    return replace(rows, elements=opened.model.preprocessing(rows.elements.to(opened.device))[0].cpu())


def _shares(text: str, classes: int) -> list[float]:
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        raise ValueError(f"`--prior` takes numbers, as 0.9,0.1; got {text!r}.") from None
    if len(shares) != classes:
        raise ValueError(f"`--prior` must be one number for each of {classes} classes; got {len(shares)}.")
    return shares


def _likeliest(classes: list[str], probabilities: Tensor) -> list[tuple[str, float]]:
    """The most probable classes of one element, in that order."""
    top = probabilities.topk(min(_LIKELIEST, len(classes)))
    return [(classes[i], value) for i, value in zip(top.indices.tolist(), top.values.tolist(), strict=True)]


def _in_words(likeliest: list[tuple[str, float]]) -> tuple[str, str, str]:
    """The class, its probability in per cent, and what else it could be."""
    (first, share), *others = [(name, f"{100 * p:.1f}") for name, p in likeliest]
    return first, share, ", ".join(map(" ".join, others))


def _fitted(examples: Examples, opened: Opened, sets: list[Tensor], seed: int) -> float:
    """The temperature for so many classes and examples of each as the user has."""
    way, shot = min(len(sets), len(examples.names)), min(len(some) for some in sets)
    found = fit_temperature(
        opened.model,
        examples,
        way=way,
        shot=min(shot, int(examples.counts.min()) - 1),
        trials=max(2, _EPISODES // (len(examples.names) * (4 if opened.rotations else 1))),
        rotations=opened.rotations,
        generator=torch.Generator().manual_seed(seed),
    )
    console.print(
        f"temperature {found.temperature:.2f}, from {found.episodes} episodes with {found.mistakes} mistakes"
    )
    return found.temperature


def _per_cent(result: FewShotResult) -> str:
    return f"{100 * result.accuracy:.1f} ± {100 * result.spread:.1f}"
