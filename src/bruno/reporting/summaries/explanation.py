"""Summary of explanations."""

from __future__ import annotations

from bruno.arrays import to_numpy
from bruno.reporting.explanation_plots import contribution_bars, contribution_maps
from bruno.reporting.images import to_uint8
from bruno.reporting.results import Result
from bruno.reporting.summaries.base import short_names, summarise
from bruno.tasks.explanation import Explanation

_PICTURED = 8  # elements


@summarise.register
def _(outcome: Explanation) -> Result:
    names, first = short_names(outcome.names), slice(_PICTURED)
    if outcome.kind.is_images:
        images = to_uint8(outcome.x[first], outcome.kind.levels)
        picture = contribution_maps(names[first], images, to_numpy(outcome.maps[first]))
    else:
        bars = (to_numpy(part[first]) for part in (outcome.contributions, outcome.errors))
        picture = contribution_bars(names[first], outcome.features, *bars)
    rows = zip(names, outcome.scores.tolist(), outcome.lowest(), strict=True)
    return Result(
        "explanation",
        "Contributions to scores",
        {
            "names": outcome.names,
            "features": outcome.features,
            "scores": outcome.scores.tolist(),
            "baseline": outcome.baseline.tolist(),
            "contributions": outcome.contributions.tolist(),
            "errors": outcome.errors.tolist(),
        },
        ("element", "score", "lowest contributions"),
        tuple(
            (name, f"{score:+.2f}", ", ".join(f"{feature} {value:+.2f}" for feature, value in lowest))
            for name, score, lowest in rows
        ),
        "Shapley values, in nats: they add up to the score minus the mean score of draws from the set. "
        "Negative values make the element an outlier.",
        picture,
    )
