"""`bruno anomaly watch`, `keyed`, `batch`, `accept` and `measure`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bruno.cli.anomaly_options import (
    DecisionOptions,
    ReportOptions,
    SetOptions,
    StoreOptions,
    StreamDecisionOptions,
    SyntheticOptions,
)
from bruno.cli.options import DataOptions, ModelOptions, ReadingOptions, Rotations, check_number
from bruno.cli.output import console, progress_bar, show, show_all, to_stderr

if TYPE_CHECKING:
    from bruno.tasks.anomaly import Judgement
    from bruno.tasks.detector import Detector
    from bruno.trained import Trained

_SETS, _SET_SIZE = 500, 20
_NAMED = 2  # columns or patches that a line names

_SOURCES = "Images, folders of them, a CSV, or - for standard input; synthetic data by default."


def watch(
    model: ModelOptions,
    decisions: StreamDecisionOptions,
    sets: SetOptions,
    synthetic: SyntheticOptions,
    files: ReadingOptions,
    report: ReportOptions,
    stream: Annotated[list[str] | None, typer.Argument(metavar="STREAM", help=_SOURCES)] = None,
    typical: Annotated[
        Path | None, typer.Option(help="A folder or CSV of typical elements, seen before the stream.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="A file to resume from, if it exists, and to save the state to.")
    ] = None,
) -> None:
    """Flag outliers in a stream: each element is scored by log p(x | those before it) − log p(x)."""
    with to_stderr(report.as_json):
        trained = model.open()
        elements = _elements(trained, stream, files, sets, synthetic, model.seed)
        with progress_bar("elements to calibrate on") as progress:
            watched = trained.watch(
                elements,
                _detector(trained, decisions, files, model.seed, progress),
                typical=typical,
                state=state,
                within=decisions.within,
                explain=report.explain,
                **sets.sets,
                **files.reading,
            )
        _run(trained, watched, report.as_json, model.seed)


def keyed(
    model: ModelOptions,
    decisions: StreamDecisionOptions,
    sets: SetOptions,
    files: ReadingOptions,
    keys: StoreOptions,
    report: ReportOptions,
    stream: Annotated[
        list[str], typer.Argument(metavar="STREAM", help="Tables, or - alone for lines of standard input.")
    ],
) -> None:
    """Flag outliers in the rows of many keys: each key has a set of its own, which a store keeps."""
    if "-" in stream and stream != ["-"]:
        raise ValueError(f"`-` must be the only stream; got {' '.join(stream)}.")
    with to_stderr(report.as_json):
        trained = model.open()
        with progress_bar("elements to calibrate on") as progress:
            watched = trained.watch_keys(
                _lines() if stream == ["-"] else stream,
                keys.store,
                _detector(trained, decisions, files, model.seed, progress),
                within=decisions.within,
                explain=report.explain,
                **keys.given,
                **sets.sets,
                **files.reading,
            )
        _run(trained, watched, report.as_json, model.seed)


def _detector(
    trained: Trained, decisions: StreamDecisionOptions, files: ReadingOptions, seed: int, progress: Any
) -> Callable[[], Detector]:
    """Makes the detector of a stream, which is calibrated once all other arguments are valid."""
    return partial(
        trained.detector, seed=seed, progress=progress, **files.reading, **decisions.stream_decision
    )


def _run(trained: Trained, watched: Any, as_json: bool, seed: int) -> None:
    """Print each judgement; results are saved and shown even if the stream is interrupted."""
    from bruno.signals import StopSignal

    ended_by: BaseException | None = None
    try:
        with StopSignal(interrupt=True), watched:
            for element, judgement in watched:
                _print(element.name, element.group, judgement, as_json)
    except (KeyboardInterrupt, OSError, ValueError) as error:
        if not watched.summary.count:
            raise
        ended_by = error
    if watched.summary.count:
        explained = [found] if (found := watched.explanation) is not None else []
        show_all(trained, [watched, watched.outliers, *explained], seed)
    else:
        console.print("no new rows")
    if isinstance(ended_by, KeyboardInterrupt):
        raise typer.Exit(128 + (ended_by.args[0] if ended_by.args else signal.SIGINT))
    if ended_by:
        raise ended_by


def batch(
    model: ModelOptions,
    decisions: DecisionOptions,
    sets: SetOptions,
    synthetic: SyntheticOptions,
    files: ReadingOptions,
    report: ReportOptions,
    batch: Annotated[list[str] | None, typer.Argument(metavar="ELEMENTS", help=_SOURCES)] = None,
    false_discovery_rate: Annotated[
        float | None,
        typer.Option(
            help="Flag by Benjamini–Hochberg at this expected fraction of clean elements among the flagged "
            "ones of a set; estimated p-values do not guarantee it."
        ),
    ] = None,
) -> None:
    """Flag outliers in a complete batch: each element is scored given all others of its set."""
    with to_stderr(report.as_json):
        trained = model.open()
        with progress_bar("elements to calibrate on") as progress:
            outcome = trained.judge_batch(
                _elements(trained, batch, files, sets, synthetic, model.seed),
                false_discovery_rate=false_discovery_rate,
                explain=report.explain,
                seed=model.seed,
                progress=progress,
                **decisions.decision,
                **sets.sets,
                **files.reading,
            )
        explained = [outcome.explanation] if outcome.explanation is not None else []
        show_all(trained, [outcome, outcome.outliers, *explained], model.seed)
        if report.as_json:
            for one in outcome.judgements:
                _print_json(*one)


def accept(
    model: ModelOptions,
    names: Annotated[
        list[str], typer.Argument(metavar="NAMES", help="Elements, as the stream or the table named them.")
    ],
    state: Annotated[
        Path | None, typer.Option(help="The file that `bruno anomaly watch --state` saved.")
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="The database of `bruno anomaly keyed`; it must not be in use."),
    ] = None,
) -> None:
    """Add elements that were flagged by mistake to their sets, in the state of a stream."""
    if (state is None) == (store is None):
        raise ValueError("`--state` or `--store` must name the states; give one of them.")
    trained = model.open()
    if store is not None:
        left = trained.accept_in_store(names, store)
    else:
        assert state is not None
        left = len(trained.accept(names, state).excluded)
    plural = "s" * (len(names) > 1)
    console.print(f"accepted {len(names)} element{plural}; {left} remain excluded", soft_wrap=True)


def measure(
    model: ModelOptions,
    data: DataOptions,
    sets: Annotated[int, typer.Option(help="Contaminated sets to measure on.")] = _SETS,
    set_size: Annotated[int, typer.Option(help="Elements in a set.")] = _SET_SIZE,
    rotations: Rotations = None,
) -> None:
    """Measure how well outliers are found in contaminated sets, compared with other methods."""
    check_number("--sets", sets, 2)
    check_number("--set-size", set_size, 2)
    trained = model.open()
    with progress_bar("sets") as progress:
        outcome = trained.measure_anomaly(
            sets=sets,
            set_size=set_size,
            rotations=rotations,
            seed=model.seed,
            progress=progress,
            **data.selection,
        )
    show(trained, outcome, model.seed)


def _elements(
    trained: Trained,
    stream: list[str] | None,
    files: ReadingOptions,
    sets: SetOptions,
    synthetic: SyntheticOptions,
    seed: int,
) -> Any:
    """Paths, lines of standard input, or synthetic elements."""
    if not stream:
        return trained.synthetic_stream(seed=seed, **synthetic.synthetic)
    synthetic.reject()
    if "-" not in stream:
        return stream
    if stream != ["-"]:
        raise ValueError(f"`-` must be the only stream; got {' '.join(stream)}.")
    return trained.reader(**files.reading, group=sets.group).read_lines(sys.stdin)


def _lines() -> Any:
    """Standard input, as a file of its own: a thread that waits for it must not hold up the exit."""
    try:
        number = sys.stdin.fileno()
    except (OSError, ValueError):  # not a file: in a test
        return sys.stdin
    return open(number, encoding="utf-8", errors="surrogateescape", closefd=False)


def _print(name: str, group: str, judgement: Judgement, as_json: bool) -> None:
    if as_json:
        _print_json(name, group, judgement)
        return
    from bruno.reporting.figure import minus
    from bruno.reporting.summaries import p_value, verdict

    score = minus(f"{judgement.score:+10.2f}")
    line = f"{score}  {p_value(judgement):>11}  {name}  {verdict(judgement)}".rstrip()
    if judgement.contributions:
        lowest = sorted(judgement.contributions.items(), key=lambda one: one[1])[:_NAMED]
        line += ": " + "; ".join(f"{feature} {minus(f'{value:+.2f}')}" for feature, value in lowest)
    console.print(line, highlight=False, soft_wrap=True)


def _print_json(name: str, group: str, judgement: Judgement) -> None:
    """Print the judgement of an element as one JSON object on one line."""
    from dataclasses import asdict

    from bruno.reporting.results import finite

    values = asdict(judgement)
    if judgement.contributions is None:
        del values["contributions"]
    print(json.dumps(finite({"element": name, "group": group, **values}), allow_nan=False), flush=True)
