"""Summaries of retrieval."""

from __future__ import annotations

from dataclasses import asdict

from bruno.reporting.figure import minus
from bruno.reporting.images import contact_sheet, to_uint8
from bruno.reporting.plots import Measured, dot_plot, ranking_plot
from bruno.reporting.results import Result
from bruno.reporting.summaries.base import short_names, summarise
from bruno.tasks.retrieval import RetrievalQuality
from bruno.trained.retrieval import RetrievalEvaluation, Retrieved

_RANKS = 60  # rows of a picture


@summarise.register
def _(outcome: Retrieved) -> Result:
    if outcome.found is None:
        picture = ranking_plot(short_names(outcome.names)[:_RANKS], outcome.scores[:_RANKS])
        note = f"In the picture: the best {_RANKS}. " * (len(outcome.names) > _RANKS)
    else:
        query, found = (to_uint8(x, outcome.kind.levels) for x in (outcome.query, outcome.found))
        picture = contact_sheet(query, found, outcome.scores)
        note = "Top: the query. Below: the best matches, with rank and score in nats. "
    ranked = zip(outcome.names, outcome.scores, strict=True)
    return Result(
        "retrieval",
        "Best matches",
        {"collection": outcome.collection, "names": outcome.names, "scores": outcome.scores},
        ("rank", "score", "element"),
        tuple((str(i), minus(f"{score:+.1f}"), name) for i, (name, score) in enumerate(ranked, start=1)),
        f"{note}A score of at most 0 means that the query does not make the element more likely.",
        picture,
    )


@summarise.register
def _(outcome: RetrievalEvaluation) -> Result:
    found = outcome.results
    methods, at = list(found[0].qualities), list(next(iter(found[0].qualities.values())).precision)
    by_shots = {f"{part.shots} example{'s' * (part.shots != 1)}": part.qualities for part in found}
    panels = {
        "mean average precision": {
            name: [Measured(q[m].average_precision, q[m].average_precision_error) for m in methods]
            for name, q in by_shots.items()
        }
    }
    for k in at:
        panels[f"precision at {k}"] = {
            name: [Measured(q[m].precision[k], q[m].precision_error[k]) for m in methods]
            for name, q in by_shots.items()
        }
    rows = [(m, *(_precisions(q[m]) for q in by_shots.values())) for m in methods]
    return Result(
        f"retrieval-quality-{outcome.data}",
        f"Finding the rest of a class, on {outcome.data}",
        {"by_shots": [asdict(part) for part in found]},
        (f"mean average precision (precision at {', '.join(map(str, at))})", *by_shots),
        (*rows, ("chance", *(f"{part.chance:.3f}" for part in found))),
        f"{found[0].queries} queries in a collection of {found[0].collection} elements of {outcome.data}; "
        "in the picture ± standard error.",
        dot_plot(methods, panels),
    )


def _precisions(quality: RetrievalQuality) -> str:
    at = ", ".join(f"{value:.2f}" for value in quality.precision.values())
    return f"{quality.average_precision:.3f} ({at})"
