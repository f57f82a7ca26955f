"""Results as one HTML page that needs no other file."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bruno.extras import imports_of
from bruno.files import atomic_write, check_replaceable
from bruno.reporting.plots import learning_curve
from bruno.reporting.results import Result, mark_outdated, read_results

if TYPE_CHECKING:
    from bruno.config import Recipe
    from bruno.training.run import Run

_LEARNING_CURVE = "learning-curve"
_LONG = 12  # rows; longer tables are collapsed


def page(title: str, lead: str, results: Sequence[Result]) -> str:
    """HTML with a section per result: title, note, picture, table and provenance."""
    with imports_of("plots", "pages of results"):
        from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("bruno.reporting"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    sections = [
        {
            "result": result,
            "picture": base64.b64encode(result.picture).decode(),
            "provenance": _provenance_line(result.provenance),
        }
        for result in results
    ]
    template = environment.get_template("report.html.j2")
    return template.render(title=title, lead=lead, sections=sections, long=_LONG)


def write_page(path: Path | str, title: str, lead: str, results: Sequence[Result]) -> Path:
    """Write a `page` to a file atomically; return its path."""
    path = Path(path)
    text = page(title, lead, results)
    with atomic_write(path) as file:
        # File names may contain bytes that are not UTF-8.
        file.write_bytes(text.encode("utf-8", errors="replace"))
    return path


def report(folder: Path | str, out: Path | str | None = None) -> Path:
    """Write the results and the learning curve of a run folder as one page; return its path.

    Args:
        folder: a run folder, or any folder with results.
        out: file to write; report.html in the folder if None.

    Raises:
        ValueError: if there is nothing to report, or no folder to write to.
    """
    from bruno.training.run import Run

    folder = Path(folder)
    path = folder / "report.html" if out is None else Path(out)
    if not folder.is_dir():
        raise ValueError(f"`folder` must be a run folder; {folder} does not exist.")
    check_replaceable(path, rb"\s*(?i:<!doctype html|<html)", "an HTML page")
    run = Run(folder)
    results, log = mark_outdated(read_results(folder), _fingerprints(run)), run.read_log()
    if not results and not log:
        raise ValueError(f"`folder` must be a run folder with a log or results; {folder} has neither.")
    if log:  # replaces a learning curve written earlier
        others = [result for result in results if result.name != _LEARNING_CURVE]
        results = [*others, learning_curve_result(log)]
    try:
        lead = describe_recipe(run.recipe)
    except ValueError:  # results without a run, such as those of the stability study
        lead = ""
    return write_page(path, folder.resolve().name, lead, results)


def learning_curve_result(log: Sequence[Mapping[str, Any]]) -> Result:
    """The learning curve of a run as a result.

    Args:
        log: entries of the run's log, at least one.
    """
    steps, seconds = log[-1]["index"], log[-1]["seconds"]
    return Result(
        _LEARNING_CURVE,
        "Learning curve",
        {"steps": steps, "seconds": seconds},
        note=f"{steps:,} steps in {seconds:,.0f} s.",
        picture=learning_curve(log),
    )


def describe_recipe(recipe: Recipe) -> str:
    """Data, process, flow and seed of a recipe in one line."""
    data = Path(recipe.data.name).name
    kinds = f"{recipe.process.kind} process, {recipe.flow.kind} flow"
    return f"{data}, {kinds}, seed {recipe.train.seed}"


def _fingerprints(run: Run) -> set[str]:
    """Fingerprints of the last and the best checkpoint, if the run has them."""
    names = ["last"] * bool(run.checkpoints) + ["best"] * run.best.is_file()
    return {run.model(name).fingerprint() for name in names}


def _provenance_line(provenance: Mapping[str, Any]) -> str:
    """Command, commit, seed, hardware and versions, if known."""
    hardware, packages = (
        part if isinstance(part := provenance.get(name), dict) else {} for name in ("hardware", "packages")
    )
    facts = [
        ("", provenance.get("command")),
        ("commit ", provenance.get("commit")),
        ("seed ", provenance.get("seed")),
        ("", hardware.get("gpu") or hardware.get("cpu")),
        *((f"{name} ", version) for name, version in packages.items()),
    ]
    return " · ".join(f"{label}{fact}" for label, fact in facts if fact is not None)
