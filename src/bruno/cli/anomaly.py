"""`bruno anomaly watch`, `bruno anomaly batch` and `bruno anomaly measure`."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bruno.cli.options import DataOptions, ModelOptions, ReadingOptions, check_number, reject
from bruno.cli.output import console, progress_bar, show, to_stderr

if TYPE_CHECKING:
    from bruno.tasks.anomaly import Judgement
    from bruno.trained import Trained

_RATE, _SETS, _SET_SIZE = 0.01, 500, 20

_SOURCES = "Images, folders of them, a CSV, or - for standard input; synthetic data by default."


@dataclass(frozen=True)
class CalibrationOptions:
    """How thresholds are calibrated."""

    rate: Annotated[
        float | None,
        typer.Option(
            help=f"False-alarm rate, {_RATE} by default, calibrated on clean sets of unseen classes."
        ),
    ] = None
    threshold: Annotated[
        float | None, typer.Option(help="Flag scores below this, instead of calibrating.")
    ] = None
    sets: Annotated[int | None, typer.Option(help=f"Clean sets to calibrate on; {_SETS} by default.")] = None
    data: Annotated[
        str | None,
        typer.Option(
            help="Calibrate on this instead of the model's data: a dataset, class folders, or a CSV."
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.threshold is not None:
            check_number("--threshold", self.threshold)
            others = {"--rate": self.rate, "--sets": self.sets, "--data": self.data}
            reject("`--threshold` leaves nothing to calibrate;", others)
        if self.rate is not None and not 0 < self.rate < 1:
            raise ValueError(f"`--rate` must be between 0 and 1, such as 0.01 for 1 %; got {self.rate}.")
        check_number("--sets", _SETS if self.sets is None else self.sets, 1)

    @property
    def calibration(self) -> dict[str, Any]:
        """The arguments of a detector."""
        return {
            "rate": _RATE if self.rate is None else self.rate,
            "threshold": self.threshold,
            "sets": _SETS if self.sets is None else self.sets,
            "data": self.data,
        }


def watch(
    model: ModelOptions,
    calibration: CalibrationOptions,
    files: ReadingOptions,
    stream: Annotated[list[str] | None, typer.Argument(metavar="STREAM", help=_SOURCES)] = None,
    set_size: Annotated[
        int | None,
        typer.Option(
            help=f"Size of the clean sets, {_SET_SIZE} by default; later elements use the last threshold."
        ),
    ] = None,
    keep_out: Annotated[bool, typer.Option("--keep-out", help="Exclude outliers from the evidence.")] = False,
    typical: Annotated[
        Path | None, typer.Option(help="A folder or CSV of typical elements, seen before the stream.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="A file to resume from, if it exists, and to save the state to.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line; everything else on standard error.")
    ] = False,
) -> None:
    """Flag outliers in a stream: each element is scored by log p(x | those before it) − log p(x)."""
    if calibration.threshold is not None:
        reject("`--threshold` leaves nothing to calibrate;", {"--set-size": set_size})
    check_number("--set-size", _SET_SIZE if set_size is None else set_size, 2)
    with to_stderr(as_json):
        trained = model.open()
        with progress_bar("elements to calibrate on") as progress:
            detector = partial(
                trained.detector,
                keep_out=keep_out,
                set_size=set_size or _SET_SIZE,
                invert=files.invert,
                seed=model.seed,
                progress=progress,
                **calibration.calibration,
            )
            elements = _elements(trained, stream, files, model.seed)
            watched = trained.watch(elements, detector, typical=typical, state=state, **files.reading)
        _run(trained, watched, as_json, model.seed)


def _run(trained: Trained, watched: Any, as_json: bool, seed: int) -> None:
    """Print each judgement; results are saved and shown even if the stream is interrupted."""
    from bruno.signals import StopSignal

    ended_by: BaseException | None = None
    try:
        with StopSignal(interrupt=True), watched:
            for element, judgement in watched:
                _print(element.name, judgement, as_json)
    except (KeyboardInterrupt, OSError, ValueError) as error:
        if not watched.summary.count:
            raise
        ended_by = error
    show(trained, watched, seed)
    if isinstance(ended_by, KeyboardInterrupt):
        raise typer.Exit(128 + (ended_by.args[0] if ended_by.args else signal.SIGINT))
    if ended_by:
        raise ended_by


def batch(
    model: ModelOptions,
    calibration: CalibrationOptions,
    files: ReadingOptions,
    elements: Annotated[list[str] | None, typer.Argument(metavar="ELEMENTS", help=_SOURCES)] = None,
) -> None:
    """Flag outliers in a complete batch: each element is scored given all others, as one set."""
    trained = model.open()
    with progress_bar("elements to calibrate on") as progress:
        outcome = trained.judge_batch(
            _elements(trained, elements, files, model.seed),
            seed=model.seed,
            progress=progress,
            **calibration.calibration,
            **files.reading,
        )
    show(trained, outcome, model.seed)


def measure(
    model: ModelOptions,
    data: DataOptions,
    sets: Annotated[int, typer.Option(help="Contaminated sets to measure on.")] = _SETS,
    set_size: Annotated[int, typer.Option(help="Elements in a set.")] = _SET_SIZE,
) -> None:
    """Measure how well outliers are found in contaminated sets, compared with other methods."""
    check_number("--sets", sets, 2)
    check_number("--set-size", set_size, 2)
    trained = model.open()
    with progress_bar("sets") as progress:
        outcome = trained.measure_anomaly(
            sets=sets, set_size=set_size, seed=model.seed, progress=progress, **data.selection
        )
    show(trained, outcome, model.seed)


def _elements(trained: Trained, stream: list[str] | None, files: ReadingOptions, seed: int) -> Any:
    """Paths, lines of standard input, or a synthetic stream."""
    if not stream:
        return trained.synthetic_stream(seed=seed)
    if "-" not in stream:
        return stream
    if stream != ["-"]:
        raise ValueError(f"`-` must be the only stream; got {' '.join(stream)}.")
    return trained.reader(**files.reading).read_lines(sys.stdin)


def _print(name: str, judgement: Judgement, as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        print(json.dumps({"element": name, **asdict(judgement)}), flush=True)
        return
    from bruno.reporting.summaries import verdict

    line = f"{judgement.score:+10.2f}  {name}  {verdict(judgement)}".rstrip()
    console.print(line, highlight=False, soft_wrap=True)
