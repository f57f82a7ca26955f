"""`bruno report`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bruno.cli.opening import folder_of
from bruno.cli.options import ModelName, console
from bruno.files import atomic_write
from bruno.reporting.plots import learning_curve
from bruno.reporting.results import Result, page, read_results
from bruno.training.run import Run


def report(
    run: ModelName,
    out: Annotated[
        Path | None, typer.Option(help="The page; report.html beside the results if left out.")
    ] = None,
) -> None:
    """Gather all results of a run, and its learning curve, into one page that needs nothing else."""
    folder = folder_of(run)
    if not folder.is_dir():
        there = f"there is no {run}" if folder == Path(run) else f"{run} has none yet"
        raise ValueError(f"`run` must have results; {there}.")
    results, log = read_results(folder), Run(folder).read_log()
    if not results and not log:
        raise ValueError(f"`run` must be a run with a log or results; {run} has neither.")
    path = out or folder / "report.html"
    if not path.parent.is_dir() or path.is_dir():
        raise ValueError(f"`--out` must be a file in a folder that is there; got {path}.")
    sections = [*_dated(results, Run(folder)), *([curve_of(log)] if log else [])]
    with atomic_write(path) as beside:
        beside.write_text(page(folder.name, lead_of(folder), sections), "utf-8")
    console.print(f"written: {path}", soft_wrap=True)


def _dated(results: list[Result], run: Run) -> list[Result]:
    """With a word on those of a model that the run no longer has, as it was trained further since."""
    kept = ["last"] * bool(run.checkpoints) + ["best"] * run.best.is_file()
    models = {"", *(run.model(which).fingerprint() for which in kept)}
    old = "Of an earlier checkpoint: measure again to have it of the last one."
    return [
        replace(result, note=f"{old} {result.note}") if kept and result.model not in models else result
        for result in results
    ]


def curve_of(log: list[dict[str, Any]]) -> Result:
    """The learning curve of a run."""
    last = log[-1]
    return Result(
        "learning-curve",
        "Learning curve",
        {"steps": last["index"], "seconds": last["seconds"]},
        note=f"{last['index']:,} steps in {last['seconds']:.0f} s.",
        picture=learning_curve(log),
    )


def lead_of(run: Path) -> str:
    """What a run is, in a line."""
    try:
        recipe = Run(run).recipe
    except ValueError:  # results of no run, as those of the study
        return ""
    parts = (Path(recipe.data.name).name, f"{recipe.process.kind} process", f"{recipe.flow.kind} flow")
    return ", ".join((*parts, f"seed {recipe.train.seed}"))
