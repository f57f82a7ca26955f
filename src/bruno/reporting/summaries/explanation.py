"""Summary of explanations."""

from __future__ import annotations

from collections.abc import Sequence

from bruno.arrays import to_numpy
from bruno.reporting.explanation_plots import contribution_bars, contribution_maps, patch_score_maps
from bruno.reporting.figure import minus
from bruno.reporting.images import to_uint8
from bruno.reporting.results import Result
from bruno.reporting.summaries.base import joined, on_shown, short_names, summarise
from bruno.tasks.batch_criteria import PatchGrid
from bruno.tasks.explanation import Explanation, PatchExplanation

_PICTURED = 8  # elements
_SHAPLEY = (
    "Shapley values, in nats: they add up to the score minus the mean score of draws from the set. The lower "
    "a contribution, the more it makes the element an outlier."
)
_COLUMNS = (
    "Columns that agree share a contribution, so the lowest is not always that of the most unusual column."
)
_PATCHES = (
    "The score of a patch is minus its distance to the second-nearest image, divided by the distance of the "
    "most unusual patch of a typical image. The lowest is the score of the image."
)


@summarise.register
def _(outcome: Explanation) -> Result:
    names, first = short_names(outcome.names), slice(_PICTURED)
    if outcome.kind.is_images:
        images = to_uint8(outcome.x[first], outcome.kind.levels)
        picture = contribution_maps(names[first], images, to_numpy(outcome.maps[first]))
        down, across = outcome.grid
        features = f"There are {down} × {across} patches; row 1 is at the top."
    else:
        bars = (to_numpy(part[first]) for part in (outcome.contributions, outcome.errors))
        picture, features = contribution_bars(names[first], outcome.features, *bars), _COLUMNS
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
        _rows(names, outcome.scores.tolist(), outcome.lowest()),
        joined(on_shown(len(names), outcome.outliers), _SHAPLEY, features),
        picture,
    )


@summarise.register
def _(outcome: PatchExplanation) -> Result:
    names, first = short_names(outcome.names), slice(_PICTURED)
    images = to_uint8(outcome.x[first], outcome.kind.levels)
    grid = PatchGrid.of(*outcome.kind.size)
    places, size, step = (f"{down} × {across}" for down, across in (grid.places, grid.size, grid.step))
    return Result(
        "explanation",
        "Scores of patches",
        {
            "names": outcome.names,
            "features": outcome.features,
            "scores": outcome.scores.tolist(),
            "patches": outcome.maps.flatten(1).tolist(),
        },
        ("element", "score", "lowest patches"),
        _rows(names, outcome.scores.tolist(), outcome.lowest()),
        joined(
            on_shown(len(names), outcome.outliers),
            _PATCHES,
            f"There are {places} patches of {size} pixels, {step} pixels apart; row 1 is at the top.",
        ),
        patch_score_maps(names[first], images, to_numpy(outcome.maps[first])),
    )


def _rows(
    names: Sequence[str], scores: Sequence[float], lowest: Sequence[Sequence[tuple[str, float]]]
) -> tuple[tuple[str, str, str], ...]:
    """Cells of a table with the name, the score and the lowest features of each element."""
    return tuple(
        (
            name,
            minus(f"{score:+.2f}"),
            "; ".join(f"{feature} {minus(f'{value:+.2f}')}" for feature, value in low),
        )
        for name, score, low in zip(names, scores, lowest, strict=True)
    )
