import math

import pytest
import torch

from bruno.reporting.element_plots import STRIP, class_probabilities, score_timeline

IMAGE = torch.zeros((1, 4, 4), dtype=torch.uint8)


def timeline_axes(figures):
    return figures[-1].axes[-1]


def drawn(axes) -> dict[str, list[float]]:
    """Positions of the marks by name in the legend."""
    return {line.get_label(): line.get_xdata().tolist() for line in axes.lines if line.get_label()[0] != "_"}


def test_shortened_class_names_still_differ(decode):
    def shown(name: str) -> bytes:
        return class_probabilities(["image.png"], [[(name, 0.9), ("$price$ of_it", 0.1)]])

    assert shown("character number 1 of an alphabet") != shown("character number 1 of the alphabets")
    assert shown("a" * 30 + "1") != shown("a" * 30 + "2")
    assert decode(shown("a" * 30)).size == decode(shown("a")).size


def test_classes_are_beside_their_image():
    probabilities = [[("cat", 0.7), ("dog", 0.3)]] * 2
    dark, bright = (torch.full((2, 3, 4, 4), level, dtype=torch.uint8) for level in (0, 250))
    with_dark = class_probabilities(["a", "b"], probabilities, dark)
    assert with_dark != class_probabilities(["a", "b"], probabilities, bright)
    assert with_dark != class_probabilities(["a", "b"], probabilities)


@pytest.mark.parametrize("images", [None, torch.zeros((5, 1, 4, 4), dtype=torch.uint8)])
def test_titles_of_elements_do_not_overlap(images, figures):
    titles = [f"folder/of/new/images/element number {i}.png" for i in range(5)]
    class_probabilities(titles, [[("a class with a long name", 0.7), ("dog", 0.3)]] * 5, images)
    (figure,) = figures
    boxes = [axes._left_title.get_window_extent() for axes in figure.axes if axes.get_title("left")]
    assert len(boxes) == 5
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(0 <= box.x0 < box.x1 <= figure.bbox.width for box in boxes)


def test_missing_values_raise():
    with pytest.raises(ValueError, match=r"`probabilities` must have 2 values.*got 1"):
        class_probabilities(["x", "y"], [[("class", 1.0)]])
    with pytest.raises(ValueError, match=r"`flagged` must have 2 values.*got 1"):
        score_timeline([1.0, 2.0], [None, None], [False], [False, False])


def test_a_timeline_marks_outliers_and_out_of_distribution_elements(figures):
    flagged, beyond = [False, False, True, True], [False, False, False, True]
    score_timeline([0.0, 5.0, -9.0, -1e9], [None, -3.0, -3.0, -3.0], flagged, beyond, first=11)
    axes = timeline_axes(figures)
    marks = drawn(axes)
    assert marks["outlier"] == [13]
    assert marks["out-of-distribution"] == [14]
    assert marks["threshold"] == [11, 12, 13, 14]
    assert axes.get_ylim()[0] > -20  # the extreme score is not drawn to scale
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("element of the stream", "score (nats)")


@pytest.mark.parametrize("scores", [[5.0, 4.0, -1e9], [5.0, -math.inf, -math.inf]])
def test_out_of_distribution_marks_are_not_above_the_threshold(scores, figures):
    score_timeline(scores, [-3.0] * 3, [False, False, True], [False, False, True])
    (mark,) = (line for line in timeline_axes(figures).lines if line.get_label() == "out-of-distribution")
    assert mark.get_ydata().tolist() == [-3.0]


def test_a_stream_of_out_of_distribution_elements_is_drawn(figures):
    score_timeline([-1e9] * 2, [None] * 2, [True] * 2, [True] * 2)
    assert list(drawn(timeline_axes(figures))) == ["out-of-distribution"]


@pytest.mark.parametrize("count", [1, 2, 60])
def test_positions_in_a_stream_are_whole_numbers(count, figures):
    score_timeline([1.0] * count, [None] * count, [False] * count, [False] * count)
    axes = timeline_axes(figures)
    assert all(float(tick).is_integer() for tick in axes.get_xticks())
    assert axes.get_legend() is None


def test_images_are_above_the_timeline_with_their_positions(figures):
    inliers = dict.fromkeys(range(3, 3 + STRIP), IMAGE)
    score_timeline([1.0] * 20, [0.0] * 20, [False] * 20, [False] * 20, outliers={2: IMAGE}, inliers=inliers)
    *strips, axes = figures[0].axes
    texts = [[text.get_text() for text in strip.texts] for strip in strips]
    assert texts == [["2", "outliers"], [*map(str, inliers), "inliers"]]
    names = [strip.texts[-1].get_window_extent() for strip in strips]
    assert all(box.x0 >= 0 for box in names)
    above = min(strip.get_window_extent().y0 for strip in strips)
    assert axes.get_window_extent().y1 <= axes.get_legend().get_window_extent().y0 < above
