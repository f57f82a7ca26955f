"""Summary of the outliers of a stream or batch, the most unusual first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from bruno.kinds import Kind, Rows
from bruno.reporting.figure import minus
from bruno.reporting.images import to_uint8
from bruno.reporting.outlier_plots import Outlier, outlier_chart, outlier_sheet
from bruno.reporting.results import Result
from bruno.reporting.summaries.base import joined, on_shown, short_names, summarise
from bruno.reporting.summaries.detection import TITLES, p_value
from bruno.tasks.attribution import UnusualColumn
from bruno.tasks.stream_summary import StreamSummary
from bruno.trained.outliers import Outliers

_MOST_UNUSUAL_COLUMN = (
    "Most unusual column: if its value is replaced by the expected one, given the set and the other columns, "
    "the row becomes most likely."
)


@summarise.register
def _(outcome: Outliers) -> Result:
    elements, summary = outcome.elements, outcome.summary
    shown = _shown(outcome)
    table = {
        "score": ["OOD" if one.out_of_distribution else one.verdict for one in shown],
        "p": [one.p.removeprefix("p ") for one in shown],
        "outlier": [one.name for one in shown],
        "set": [one.group for one in shown],
        "most unusual column": [one.column for one in shown],
    }
    table = {title: cells for title, cells in table.items() if any(cells)}
    note = joined(
        on_shown(len(shown), summary.outliers),
        "OOD: out-of-distribution." * any(one.out_of_distribution for one in shown),
        _MOST_UNUSUAL_COLUMN * any(bool(one.column) for one in shown),
    )
    return Result(
        f"{outcome.job}-outliers",
        f"{TITLES[outcome.job]}, the most unusual first",
        {
            "outliers": summary.outliers,
            "names": [one.name for one in elements],
            "sets": [one.group for one in elements],
            "positions": [one.position for one in elements],
            "judgements": [asdict(one.judgement) for one in elements],
            "columns": [None if column is None else column._asdict() for column in outcome.columns],
        },
        tuple(table),
        tuple(zip(*table.values(), strict=True)),
        note if shown else f"No outliers.{_nearest(summary)}",
        _picture(outcome, shown),
    )


def _shown(outcome: Outliers) -> list[Outlier]:
    """The outliers as pictures and tables show them."""
    elements, several = outcome.elements, len(outcome.summary.groups) > 1
    names = short_names([one.name for one in elements])
    return [
        Outlier(
            name,
            one.judgement.score,
            one.judgement.threshold,
            p_value(one.judgement),
            one.judgement.out_of_distribution,
            (one.group or "(no name)") if several else "",
            "" if column is None else _in_words(column, outcome.kind),
        )
        for name, one, column in zip(names, elements, outcome.columns, strict=True)
    ]


def _picture(outcome: Outliers, shown: Sequence[Outlier]) -> bytes:
    if not shown:
        return b""
    if not outcome.kind.is_images:
        return outlier_chart(shown)
    images = torch.stack([one.x.cpu() for one in outcome.elements])
    return outlier_sheet(shown, to_uint8(images, outcome.kind.levels))


def _in_words(unusual: UnusualColumn, kind: Kind) -> str:
    names = kind.columns if isinstance(kind, Rows) else ()
    name = names[unusual.column] if names else f"column {unusual.column + 1}"
    return f"{name} " + minus(f"{unusual.value:.4g} (expected {unusual.expected:.4g})")


def _nearest(summary: StreamSummary) -> str:
    """A sentence about the element that is nearest to being an outlier; empty if none was judged."""
    judged = [(name, one) for name, _, one in summary.latest if one.seen]
    if not judged:
        return ""
    name, one = min(judged, key=lambda named: (1.0 if named[1].p is None else named[1].p, named[1].score))
    p = f", {p_value(one)}" if one.p is not None else ""
    return f" The most unusual element is {name}: score {minus(f'{one.score:+.2f}')}{p}."
