"""`bruno anomaly`."""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from torch import Tensor

from bruno.checkpoint import load, save
from bruno.cli.judging import along, of_a_batch
from bruno.cli.opening import Opened, chosen_split, is_own, length_of_sets, measured_on, open_model
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
    console_aside,
    progress_bar,
    refuse,
    say_passed_over,
)
from bruno.data import Element, Examples
from bruno.data.sampling import SetSampler
from bruno.model import Posterior
from bruno.reporting.plots import Measured, dots
from bruno.reporting.results import Result
from bruno.tasks.anomaly import Detector, Thresholds, calibrate, calibrate_batch, density_floor
from bruno.tasks.anomaly_benchmark import measure_anomaly
from bruno.training.run import StopSignal

T = TypeVar("T")

_RATE = 0.01  # of false alarms
_SETS = 500  # to calibrate on, or to measure on
_STRANGERS = 0.1  # their share of a stream that is made up
_LENGTH = 20  # of the sets that are calibrated or measured on
_FEW_CLASSES = 10  # to calibrate on: too few to tell what all others are like


def anomaly(
    run: ModelName,
    stream: Annotated[
        list[str] | None,
        typer.Argument(help="Images, folders of them, a CSV of rows, or - for lines of standard input."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            help=f"Of false alarms, {_RATE} if left out, calibrated on clean sets of classes that the run "
            "has not seen."
        ),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Flag scores below this, instead of calibrating.")
    ] = None,
    keep_out: Annotated[
        bool, typer.Option("--keep-out", help="What is flagged does not enter the evidence.")
    ] = False,
    typical: Annotated[
        Path | None, typer.Option(help="A folder (or CSV) of what is normal, seen before the stream begins.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="A file to go on from, if it is there, and to keep what is known in at the end."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line for programs; all else to standard error.")
    ] = False,
    batch: Annotated[
        bool, typer.Option("--batch", help="A finished batch: score each given all the others.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="How well it works on held-out classes, beside other methods.")
    ] = False,
    sets: Annotated[
        int | None, typer.Option(help=f"To calibrate on, or to measure on; {_SETS} if left out.")
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            help=f"Of these sets, {_LENGTH} if left out; what comes later in a stream is judged as the last."
        ),
    ] = None,
    split: Split = None,
    data: OtherData = None,
    data_dir: DataDir = None,
    invert: Invert = None,
    skip_bad: SkipBad = False,
    checkpoint: Checkpoint = "last",
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Which is the odd one out? Scores each element of a stream by log p(x | before it) − log p(x)."""
    stream = stream or []
    of_a_stream = {"--keep-out": keep_out, "--typical": typical, "--state": state, "--json": as_json}
    if measure:
        given = {"the stream": stream, "--batch": batch, "--threshold": threshold, "--rate": rate}
        refuse("`--measure` draws its own sets;", given | of_a_stream)
    if batch:
        refuse("`--batch` scores each given all others;", of_a_stream)
        refuse("`--batch` is calibrated on sets as long as itself;", {"--length": length})
    if threshold is not None:
        check_number("--threshold", threshold)
        given = {"--rate": rate, "--sets": sets, "--length": length, "--data": data if stream else None}
        refuse("`--threshold` leaves nothing to calibrate;", given)
    split = chosen_split(split, data, unused=bool(stream))
    rate = _RATE if rate is None else rate
    if not 0 < rate < 1:
        raise ValueError(f"`--rate` must be between 0 and 1, as 0.01 for one in a hundred; got {rate}.")
    sets, length = _SETS if sets is None else sets, _LENGTH if length is None else length
    check_number("--sets", sets, 1)
    check_number("--length", length, 2)
    _check_stream(stream, skip_bad, state, typical)
    opened = open_model(run, checkpoint, device)
    noise = torch.Generator(opened.device).manual_seed(seed)
    if measure:
        examples = opened.examples(split, data_dir, data, invert=invert, classes=2)
        where = measured_on(split, opened.at_hand(data, data_dir))
        opened.keep(_quality(opened, examples, sets, length, noise, where), seed)
        return

    def limits(fit: Callable[..., T], length: int) -> tuple[float | T, float]:
        """The threshold that is given, or what `fit` finds on clean sets; and what no likely row is below."""
        if threshold is not None:
            return threshold, -math.inf
        clean = _clean(opened, data_dir, data, invert)
        found = _calibrated(fit, opened, clean, rate, length, sets, noise)
        if opened.model.levels:  # of images unlike all that was learnt, the odd one out can still be told
            return found, -math.inf
        return found, density_floor(opened.model, SetSampler(clean, device=opened.device), generator=noise)

    reader = opened.reader(invert=invert, skip_bad=skip_bad)
    ended_by: BaseException | None = None
    with console_aside(as_json):
        elements: Iterable[Element]
        if stream:
            elements = reader.read_lines(sys.stdin) if stream == ["-"] else reader.read(stream)
        else:
            examples = opened.examples(split, data_dir, data, invert=invert, classes=2)
            elements = _made_up(SetSampler(examples, device=opened.device), noise)
        if batch:
            finished = list(elements)
            if len(finished) < 2:
                raise ValueError(f"`--batch` needs at least two elements; got {len(finished)}.")
            opened.warn_if_unlike(torch.stack([element.x for element in finished]))
            found = of_a_batch(opened, finished, *limits(calibrate_batch, len(finished)))
        else:
            earlier = _left_by_an_earlier_stream(opened, state, typical)
            # Read before what takes long, as it may be wrong; judged after it.
            usual = reader.read_all([typical])[0] if typical is not None and earlier is None else None
            limit, floor = limits(calibrate, length)
            detector = Detector(opened.model, limit, keep_out=keep_out, floor=floor)
            known = _used_to(detector, usual) if earlier is None else earlier
            with _terminated_as_interrupted():
                judged, known, ended_by = along(opened, detector, known, elements, as_json)
                if state:  # before anything is drawn: who terminates twice wants no picture
                    try:
                        with StopSignal():
                            save(known, state)
                        console.print(f"what is known is kept in {state}", soft_wrap=True)
                    except OSError as error:  # what was found is kept all the same
                        ended_by = error
            found = judged.result("anomaly", "Which is the odd one out?", "stream", "those before it")
        say_passed_over(reader)
        opened.keep(found, seed)
    if isinstance(ended_by, KeyboardInterrupt):
        raise typer.Exit(128 + (ended_by.args[0] if ended_by.args else signal.SIGINT))
    if ended_by:
        raise ended_by


def _check_stream(stream: list[str], skip_bad: bool, state: Path | None, typical: Path | None) -> None:
    """Before a model is opened and calibrated: is there anything to read, and a place for what is known?"""
    if state and not state.parent.is_dir():
        raise ValueError(f"`--state` must be in a folder that is there; there is no {state.parent}.")
    if state and (state.is_dir() or not os.access(state.parent, os.W_OK)):
        raise ValueError(f"`--state` must be a file that can be written; {state} cannot.")
    if typical is not None and not typical.exists():
        raise FileNotFoundError(f"`--typical` {typical}: there is no such file or folder.")
    for path in stream:
        if path == "-" and stream != ["-"]:
            raise ValueError(f"`-` must be the only stream; got {' '.join(stream)}.")
        if path != "-" and not skip_bad and not Path(path).exists():
            raise FileNotFoundError(f"{path}: there is no such file or folder.")


def _left_by_an_earlier_stream(opened: Opened, state: Path | None, typical: Path | None) -> Posterior | None:
    if not (state and state.is_file()):
        return None
    known = load(state, model=opened.model)
    aside = f"; {typical} was for its beginning" if typical is not None else ""
    console.print(f"goes on from {state}, after {known.evidence.count} elements{aside}", soft_wrap=True)
    return known


def _used_to(detector: Detector, typical: Tensor | None) -> Posterior:
    """What is known at the beginning of a stream: what is typical or, for want of that, nothing."""
    if typical is None:
        return detector.model.prior()
    known = detector.condition_on_typical(typical)
    if out_of_distribution := len(typical) - int(known.evidence.count):
        console.print(
            f"--typical: {out_of_distribution} of {len(typical)} unlike anything in any set did not count as seen.",
            soft_wrap=True,
        )
    return known


def _clean(opened: Opened, data_dir: Path | None, data: str | None, invert: bool | None) -> Examples:
    """What to calibrate on; `--invert` is about the stream, and about these if they are the user's too.

    That is what training has not seen. Of a table it may be two or three sets, which say little of others:
    then all sets are taken, since the small model of a table knows those it learnt from hardly better.
    """
    clean = opened.examples(opened.unseen, data_dir, data, invert=invert if is_own(data) else None)
    if data is not None or opened.model.levels or len(clean.names) >= _FEW_CLASSES:
        return clean
    every = opened.examples("all", data_dir)
    if len(every.names) == len(clean.names):
        return clean
    held_out = f"{len(clean.names)} of {len(every.names)} sets were held out"
    console.print(f"{held_out}, too few: all tell what is odd", soft_wrap=True)
    return every


def _calibrated(
    fit: Callable[..., T],
    opened: Opened,
    clean: Examples,
    rate: float,
    length: int,
    sets: int,
    generator: torch.Generator,
) -> T:
    """What `calibrate` or `calibrate_batch` finds on sets as long as that, or as there are."""
    sampler = SetSampler(clean, device=opened.device)
    if len(clean.names) < _FEW_CLASSES:
        console.print(
            f"what is odd is learnt from {len(clean.names)} class{'es' * (len(clean.names) > 1)} of "
            f"{len(clean)} elements: others may be judged far too strictly, or not enough (--data names "
            "another table or folder of more; --threshold sets a limit by hand).",
            soft_wrap=True,
        )
    length = length_of_sets(clean, length, least=2)
    with progress_bar("elements to calibrate on") as progress:
        limit = fit(
            opened.model,
            sampler,
            rate=rate,
            set_size=length,
            sets=sets,
            generator=generator,
            progress=progress,
        )
    if isinstance(limit, Thresholds):
        first, last = limit.by_count[0], limit.by_count[-1]
        console.print(f"odd is below {first:+.1f} after one element, {last:+.1f} after {len(limit.by_count)}")
    return limit


def _made_up(sampler: SetSampler, generator: torch.Generator) -> list[Element]:
    """A set of one class with a few strangers in it, for want of a stream."""
    sets = sampler.contaminated(1, min(4 * _LENGTH, sampler.min_count), _STRANGERS, generator)
    return [
        Element(f"{i}, of another class" if stranger else str(i), x)
        for i, (x, stranger) in enumerate(zip(sets.x[0], sets.outlier[0].tolist(), strict=True), start=1)
    ]


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, by which a service is stopped, counts as Ctrl-C: what is known is kept."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt(number)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _quality(
    opened: Opened, examples: Examples, sets: int, length: int, generator: torch.Generator, where: str
) -> Result:
    length = length_of_sets(examples, length, least=2)
    with progress_bar("sets") as progress:
        found = measure_anomaly(
            opened.model,
            examples,
            set_size=length,
            sets=sets,
            rotations=opened.rotations,
            generator=generator,
            progress=progress,
        )
    rows = tuple(
        (method, *(f"{q.area:.3f} / {q.average_precision:.3f}" for q in qualities))
        for method in found[0].qualities
        for qualities in [[part.qualities[method] for part in found]]
    )
    by_rate = {f"{100 * part.rate:.0f} % strangers": part.qualities.values() for part in found}
    columns = ("area under ROC / average precision", *by_rate)
    note = f"{sets} sets of {found[0].set_size} elements of {where}; in the picture ± standard errors."
    values = {"contamination": [asdict(part) for part in found]}
    areas = {name: [Measured(q.area, q.area_error) for q in some] for name, some in by_rate.items()}
    precisions = {
        name: [Measured(q.average_precision, q.average_precision_error) for q in some]
        for name, some in by_rate.items()
    }
    shown = dots(list(found[0].qualities), {"area under ROC": areas, "average precision": precisions})
    name, title = f"anomaly-quality-{where}", f"Finding strangers in sets, {where}"
    return Result(name, title, values, columns, rows, note, shown)
