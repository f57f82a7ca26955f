import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from bruno.reporting.timelines import MAX_SETS, STRIP, score_timeline

IMAGE = torch.zeros((1, 4, 4), dtype=torch.uint8)


def draw(scores, *, outliers=(), ood=(), threshold=-3.0, **options) -> bytes:
    """A timeline of scores, with outliers and out-of-distribution elements at these indices."""
    every = range(len(scores))
    flagged = [i in outliers or i in ood for i in every]
    return score_timeline(scores, [threshold] * len(scores), flagged, [i in ood for i in every], **options)


def lines(axes) -> dict[str, np.ndarray]:
    """Points of the marks by name in the legend."""
    return {line.get_label(): line.get_xydata() for line in axes.lines if line.get_label()[0] != "_"}


def test_missing_values_raise():
    with pytest.raises(ValueError, match=r"`flagged` must have 2 values.*got 1"):
        score_timeline([1.0, 2.0], [None, None], [False], [False, False])
    with pytest.raises(ValueError, match=r"`groups` must have 2 values.*got 3"):
        draw([1.0, 2.0], groups=["a"] * 3)


def test_a_timeline_marks_outliers_and_out_of_distribution_elements(figures):
    draw([0.0, 5.0, -9.0, -1e9], outliers=[2], ood=[3], positions=[11, 12, 13, 14])
    (axes,) = figures[-1].axes
    marks = lines(axes)
    assert marks["outlier"].tolist() == [[13, -9]]
    assert marks["out-of-distribution"][:, 0].tolist() == [14]
    assert marks["threshold"][:, 0].tolist() == [11, 12, 13, 14]
    assert axes.get_ylim()[0] > -20  # the extreme score is not drawn to scale
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("element of the stream", "score (nats)")


def test_a_spike_is_clipped_marked_and_named_by_its_score(figures):
    scores = [4.0, 5.0] * 20
    draw([*scores, -6021.0, -10.0], outliers=[40, 41])
    (axes,) = figures[-1].axes
    marks = lines(axes)
    assert marks["outlier, off the scale"][:, 0].tolist() == [41]
    assert marks["outlier"].tolist() == [[42, -10]]
    low, high = axes.get_ylim()
    assert low < marks["outlier, off the scale"][0, 1] < -10
    assert high - low < 50  # inliers are not flat
    assert [text.get_text() for text in axes.texts] == ["−6,021"]


@pytest.mark.parametrize("scores", [[5.0, 4.0, -1e9], [5.0, -math.inf, -math.inf]])
def test_out_of_distribution_marks_are_not_above_the_threshold(scores, figures):
    draw(scores, ood=[2])
    assert lines(figures[-1].axes[0])["out-of-distribution"][0, 1] <= -3.0


def test_a_stream_of_out_of_distribution_elements_is_drawn(figures):
    draw([-1e9] * 2, ood=[0, 1], threshold=None)
    assert list(lines(figures[-1].axes[0])) == ["out-of-distribution"]


@pytest.mark.parametrize("count", [1, 2, 60])
def test_positions_in_a_stream_are_whole_numbers(count, figures):
    draw([1.0] * count, threshold=None)
    (axes,) = figures[-1].axes
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert axes.get_legend() is None


def test_images_are_above_the_timeline_with_their_positions(figures):
    draw([1.0] * 20, outliers={}, threshold=0.0)
    inliers = dict.fromkeys(range(3, 3 + STRIP), IMAGE)
    score_timeline([1.0] * 20, [0.0] * 20, [False] * 20, [False] * 20, outliers={2: IMAGE}, inliers=inliers)
    *strips, axes = figures[-1].axes
    texts = [[text.get_text() for text in strip.texts] for strip in strips]
    assert texts == [["2", "outliers"], [*map(str, inliers), "inliers"]]
    names = [strip.texts[-1].get_window_extent() for strip in strips]
    assert all(box.x0 >= 0 for box in names)
    above = min(strip.get_window_extent().y0 for strip in strips)
    assert axes.get_window_extent().y1 <= axes.get_legend().get_window_extent().y0 < above


def test_every_outlier_of_a_long_stream_is_marked(figures):
    scores = np.random.default_rng(0).normal(10, 1, 100_000)
    outliers = set(range(5, 100_000, 2_500))
    draw(np.where(np.isin(np.arange(100_000), list(outliers)), -4.0, scores), outliers=outliers)
    (axes,) = figures[-1].axes
    marks = lines(axes)
    assert marks["outlier"][:, 0].tolist() == [i + 1 for i in sorted(outliers)]
    assert len(marks["median and range"]) <= 400
    assert marks["median and range"][:, 1] == pytest.approx(10, abs=0.5)


def test_few_sets_have_a_plot_each_with_most_outliers_first(figures):
    groups = ["a", "b", "c"] * 4  # interleaved, as in a stream
    draw([1.0, -4.0, 2.0] * 4, outliers=[1, 4, 8], groups=groups, xlabel="element of its set")
    panels = figures[-1].axes
    assert [axes.get_title("left") for axes in panels] == ["b", "c", "a"]
    assert [axes.get_title("right") for axes in panels] == [
        "2 of 4 outliers",
        "1 of 4 outliers",
        "0 of 4 outliers",
    ]
    assert lines(panels[0])["outlier"][:, 0].tolist() == [1, 2]  # by position in the set
    assert len({axes.get_ylim() for axes in panels}) == 1


@pytest.mark.parametrize(("sets", "rows"), [(13, 10), (201, 2)])
def test_many_sets_are_rows_of_a_heat_map(sets, rows, figures):
    groups = [f"machine number {i}" for i in range(sets) for _ in range(rows)]
    draw([5.0] * (sets * rows - 1) + [-4.0], outliers=[sets * rows - 1], groups=groups)
    axes = figures[-1].axes[0]
    shown = min(sets, MAX_SETS)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [f"machine number {i}" for i in [sets - 1, *range(sets - 1)][:shown]]
    assert [text.get_text() for text in axes.texts] == [f"1 of {rows}"] + [f"0 of {rows}"] * (shown - 1)
    *_, marks = axes.images
    assert np.argwhere(~np.ma.getmaskarray(marks.get_array())).tolist() == [[0, rows - 1]]
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert not any(a.overlaps(b) for a, b in pairwise(boxes))
    assert all(box.x0 >= 0 for box in boxes)


def test_consecutive_sets_stay_in_the_order_of_time(figures):
    groups = [f"rows {i}" for i in range(201) for _ in range(2)]
    draw([5.0] * 401 + [-4.0], outliers=[401], groups=groups, in_order=True)
    labels = [label.get_text() for label in figures[-1].axes[0].get_yticklabels()]
    assert labels == [f"rows {i}" for i in [*range(MAX_SETS - 1), 200]]  # the set with the outlier, too


def test_names_of_sets_are_drawn_as_they_are(figures, recwarn):
    names = ["$x_1^2$ _price_", "a\tb", "x" * 100, "\N{CJK UNIFIED IDEOGRAPH-4E2D}", ""]
    draw([1.0] * 10, groups=names * 2)
    titles = [axes.get_title("left") for axes in figures[-1].axes]
    assert titles[:2] == ["$x_1^2$ _price_", "a\\tb"]
    assert titles[-1] == "(no name)"
    assert len(titles[2]) == 60
    assert not recwarn.list
