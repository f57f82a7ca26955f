"""Summary of class probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from bruno.reporting.element_plots import classification_matrix
from bruno.reporting.images import to_uint8
from bruno.reporting.results import Result
from bruno.reporting.summaries.base import short_names, summarise
from bruno.tasks.classification import Classification

_QUERIES, _COLUMNS = 40, 30  # of a picture of class probabilities
_CLASSES = 5  # of each query in the table


@summarise.register
def _(outcome: Classification) -> Result:
    names, likeliest = short_names(outcome.names), outcome.most_probable(_CLASSES)
    rows = []
    rejected = [False] * len(names) if outcome.none_of_these is None else outcome.none_of_these.tolist()
    for name, none, ((first, probability), *others) in zip(names, rejected, likeliest, strict=True):
        first = f"none of these; nearest {first}" if none else first
        rest = ", ".join(f"{other} {100 * p:.1f}" for other, p in others if p >= 0.0005)
        rows.append((name, first, f"{100 * probability:.1f}", rest))
    shown = [f"the {_QUERIES} least certain of {len(rows):,} queries"] * (len(rows) > _QUERIES)
    shown += [f"the {_COLUMNS - 1} most probable of {len(outcome.classes):,} classes"] * (
        len(outcome.classes) > _COLUMNS
    )
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
        f"In the picture: {', and '.join(shown)}." if shown else "",
        _picture(outcome, names),
    )


def _picture(outcome: Classification, names: list[str]) -> bytes:
    """The matrix of the least certain queries and the most probable classes."""
    queries = _least_certain(outcome, _QUERIES)
    probabilities, columns = outcome.probabilities[queries].cpu(), list(range(len(outcome.classes)))
    classes, examples = list(outcome.classes), list(outcome.examples)
    if len(columns) > _COLUMNS:
        best = probabilities.sum(0).topk(_COLUMNS - 1).indices.sort().values
        rest = 1 - probabilities[:, best].sum(1, keepdim=True)
        probabilities, columns = torch.cat([probabilities[:, best], rest.clamp(min=0)], 1), best.tolist()
        classes = [*(classes[i] for i in columns), f"{len(classes) - len(columns)} others"]
        examples = [*(examples[i] for i in columns), outcome.queries[:0].cpu()] if examples else []
    pictured, levels = outcome.kind.is_images, outcome.kind.levels
    none, p = outcome.none_of_these, outcome.p
    return classification_matrix(
        [names[i] for i in queries],
        classes,
        probabilities,
        images=to_uint8(outcome.queries[queries], levels) if pictured else None,
        support=[to_uint8(some, levels) for some in examples] if pictured and examples else None,
        none_of_these=None if none is None else none[queries].tolist(),
        largest_p=None if p is None else p[queries].amax(1).tolist(),
    )


def _least_certain(outcome: Classification, most: int) -> list[int]:
    """Queries that belong to no class and the queries with the least probable labels, in their order."""
    certainty: Tensor = outcome.probabilities.amax(1).cpu()
    if outcome.none_of_these is not None:
        certainty = certainty - outcome.none_of_these.cpu().to(certainty)
    return sorted(certainty.argsort(stable=True)[:most].tolist())
