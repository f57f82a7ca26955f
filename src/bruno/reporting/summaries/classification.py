"""Summary of class probabilities."""

from __future__ import annotations

from bruno.reporting.element_plots import class_probabilities
from bruno.reporting.images import to_uint8
from bruno.reporting.results import Result
from bruno.reporting.summaries.base import short_names, summarise
from bruno.tasks.classification import Classification

_QUERIES = 24  # in a picture of class probabilities
_CLASSES = 5  # shown of each query


@summarise.register
def _(outcome: Classification) -> Result:
    names, likeliest = short_names(outcome.names), outcome.most_probable(_CLASSES)
    rows = []
    rejected = [False] * len(names) if outcome.none_of_these is None else outcome.none_of_these.tolist()
    for name, none, ((first, probability), *others) in zip(names, rejected, likeliest, strict=True):
        first = f"none of these; nearest {first}" if none else first
        rest = ", ".join(f"{other} {100 * p:.1f}" for other, p in others)
        rows.append((name, first, f"{100 * probability:.1f}", rest))
    shown = [f"the first {_QUERIES} of {len(rows)}"] * (len(rows) > _QUERIES)
    shown += [f"the {_CLASSES} most probable of {len(outcome.classes)} classes"] * (
        len(outcome.classes) > _CLASSES
    )
    images = to_uint8(outcome.queries[:_QUERIES], outcome.kind.levels) if outcome.kind.is_images else None
    return Result(
        "classification",
        "Class probabilities",
        {
            "classes": outcome.classes,
            "temperature": outcome.temperature,
            "support": outcome.support,
            "images": outcome.names,
            "probabilities": outcome.probabilities.tolist(),
            "p": None if outcome.p is None else outcome.p.tolist(),
            "none_of_these": rejected if outcome.p is not None else None,
        },
        (outcome.kind.noun, "class", "%", "or"),
        tuple(rows),
        f"In the picture: {', '.join(shown)}." if shown else "",
        class_probabilities(names[:_QUERIES], likeliest[:_QUERIES], images),
    )
