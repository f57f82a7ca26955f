import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bruno.reporting.scores import (
    CLIPPED,
    OUT_OF_DISTRIBUTION,
    OUTLIER,
    binned,
    positions_in_sets,
    score_cells,
    score_rows,
    visible_range,
)

NONE = np.zeros(0)
SCORES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


def rows_of(groups, scores, thresholds, outliers=(), ood=()):
    every = range(len(scores))
    flagged, out = [i in outliers for i in every], [i in ood for i in every]
    return score_rows(groups, positions_in_sets(groups), scores, thresholds, flagged, out)


def test_rows_have_the_elements_of_their_set_in_order():
    rows = rows_of(["a", "b", "a", "b", "c"], [0.0, 1.0, 2.0, 3.0, 4.0], [1.0] * 5, outliers=[3])
    assert [row.name for row in rows] == ["b", "a", "c"]
    assert [row.score.tolist() for row in rows] == [[1, 3], [0, 2], [4]]
    assert rows[0].position.tolist() == [1, 2]
    assert rows[0].margin.tolist() == [0, 2]


@settings(max_examples=30)
@given(SCORES, st.data())
def test_inliers_and_thresholds_are_visible(scores, data):
    scores = np.array(scores)
    outlier = np.array(data.draw(st.lists(st.booleans(), min_size=len(scores), max_size=len(scores))))
    low, high = visible_range(scores, np.array([-3.0, math.nan]), outlier)
    assert low <= -3 <= high
    inside = (scores >= low) & (scores <= high)
    assert inside[~outlier].mean() >= 0.9 if (~outlier).any() else inside.any()


def test_only_scores_that_flatten_the_others_are_clipped():
    scores, outlier = np.array([1.0, 2.0, 3.0, -5.0]), np.array([False, False, False, True])
    assert -2 < visible_range(scores, NONE, outlier)[0] < 1
    scores[-1] = -2.5
    assert visible_range(scores, NONE, outlier)[0] == -2.5
    assert visible_range(np.array([math.nan, -math.inf]), NONE, outlier[:2]) == (-1, 1)


@settings(max_examples=30)
@given(SCORES, st.integers(1, 20))
def test_bins_keep_the_lowest_and_the_highest_value(values, most):
    values = np.array(values)
    bins = binned(np.arange(3, 3 + len(values)), values, most)
    assert len(bins.position) <= most
    assert (bins.low.min(), bins.high.max()) == (values.min(), values.max())
    assert (bins.low <= bins.median).all()
    assert (bins.median <= bins.high).all()
    if most >= len(values):
        assert bins.median.tolist() == values.tolist()
        assert bins.position.tolist() == list(range(3, 3 + len(values)))


def test_bins_leave_out_values_that_are_not_finite():
    bins = binned(np.arange(4), np.array([math.nan, 1.0, math.inf, 2.0]), 4)
    assert bins.median.tolist() == [1, 2]
    assert not len(binned(np.arange(2), np.full(2, math.nan), 4).median)


def test_a_cell_has_the_lowest_margin_and_the_strongest_mark():
    scores = [5.0, 1.0, 6.0, -7e3, 5.0, 9.0]
    rows = rows_of(["a"] * 4 + ["b"] * 2, scores, [1.0] * 5 + [math.nan], outliers=[1, 3], ood=[4])
    cells = score_cells(rows, most=2)
    assert (cells.first, cells.width, cells.has_thresholds) == (1, 2, True)
    assert cells.lowest[0].tolist() == [0, -7001]
    assert np.isnan(cells.lowest[1]).all()  # out-of-distribution, and without a threshold
    assert cells.mark.tolist() == [[OUTLIER, CLIPPED], [OUT_OF_DISTRIBUTION, 0]]
    assert cells.elements.tolist() == [[2, 2], [2, 0]]


def test_cells_have_scores_if_there_are_no_thresholds():
    cells = score_cells(rows_of(["a", "a"], [3.0, 4.0], [math.nan] * 2), most=1)
    assert not cells.has_thresholds
    assert cells.lowest.tolist() == [[3]]


@pytest.mark.parametrize("sets", [1, 20])
def test_every_element_is_in_a_cell(sets):
    groups = [f"{i % sets}" for i in range(997)]
    cells = score_cells(rows_of(groups, np.zeros(997), np.zeros(997)), most=7)
    assert cells.elements.sum() == 997
    assert cells.elements.shape[0] == sets
    assert cells.elements.shape[1] <= 7
