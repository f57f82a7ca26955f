"""Summaries of outliers in streams and batches."""

from __future__ import annotations

from dataclasses import asdict, replace

from bruno.kinds import Kind
from bruno.reporting.element_plots import STRIP, score_timeline
from bruno.reporting.images import to_uint8
from bruno.reporting.plots import (
    Measured,
    dot_plot,
)
from bruno.reporting.results import Result
from bruno.reporting.summaries.base import short_names, summarise
from bruno.tasks.anomaly import Judgement, StreamSummary
from bruno.trained.detection import AnomalyEvaluation, BatchJudgement
from bruno.trained.watch import Watch

_LOWEST = 20  # scores of a batch in its table


@summarise.register
def _(outcome: Watch) -> Result:
    return _timeline(
        "anomaly", "Outliers in a stream", outcome.summary, outcome.kind, "stream", "those before it"
    )


@summarise.register
def _(outcome: BatchJudgement) -> Result:
    result = _timeline(
        "anomaly-batch", "Outliers in a batch", outcome.summary, outcome.kind, "batch", "all others"
    )
    lowest = sorted(outcome.summary.latest, key=lambda one: (not one[1].out_of_distribution, one[1].score))[
        :_LOWEST
    ]
    names = short_names([name for name, _ in lowest])
    rows = tuple(
        (f"{judgement.score:+.2f}", name, verdict(judgement))
        for name, (_, judgement) in zip(names, lowest, strict=True)
    )
    return replace(result, columns=("score", "lowest scores", ""), rows=rows)


def verdict(judgement: Judgement) -> str:
    """A judgement in words; empty for an inlier."""
    return "outlier" * judgement.outlier + ", out-of-distribution" * judgement.out_of_distribution


def _timeline(name: str, title: str, summary: StreamSummary, kind: Kind, what: str, given: str) -> Result:
    found = f"{summary.outliers} of {summary.count} are outliers"
    if summary.out_of_distribution:
        found += f", {summary.out_of_distribution} of them out-of-distribution and excluded from the evidence"
    shown = f" The {STRIP} lowest are shown." * (summary.outliers > STRIP and kind.is_images)
    judged = [judgement for _, judgement in summary.latest]
    scores, thresholds = [one.score for one in judged], [one.threshold for one in judged]
    images = {
        group: {one.position: to_uint8(one.x, kind.levels) for one in some} if kind.is_images else {}
        for group, some in (("outliers", summary.lowest_outliers), ("inliers", summary.highest_inliers))
    }
    return Result(
        name,
        title,
        {
            "elements": summary.count,
            "outliers": summary.outliers,
            "out_of_distribution": summary.out_of_distribution,
            "names": [name for name, _ in summary.latest],
            "scores": scores,
            "thresholds": thresholds,
        },
        note=f"{found}.{shown} The score is log p(x | {given}) − log p(x), in nats.",
        picture=score_timeline(
            scores,
            thresholds,
            [one.outlier for one in judged],
            [one.out_of_distribution for one in judged],
            first=summary.first_position,
            xlabel=f"element of the {what}",
            **images,
        ),
    )


@summarise.register
def _(outcome: AnomalyEvaluation) -> Result:
    found = outcome.contaminations
    by_rate = {f"{100 * part.rate:.0f} % outliers": part.qualities for part in found}
    methods = list(found[0].qualities)
    panels = {
        "area under ROC": {
            rate: [Measured(q[m].area, q[m].area_error) for m in methods] for rate, q in by_rate.items()
        },
        "average precision": {
            rate: [Measured(q[m].average_precision, q[m].average_precision_error) for m in methods]
            for rate, q in by_rate.items()
        },
    }
    return Result(
        f"anomaly-quality-{outcome.data}",
        f"Finding outliers in sets, on {outcome.data}",
        {"contamination": [asdict(part) for part in found]},
        ("area under ROC / average precision", *by_rate),
        tuple(
            (m, *(f"{q[m].area:.3f} / {q[m].average_precision:.3f}" for q in by_rate.values()))
            for m in methods
        ),
        f"{found[0].sets} sets of {found[0].set_size} elements of {outcome.data}; "
        "in the picture ± standard error.",
        dot_plot(methods, panels),
    )
