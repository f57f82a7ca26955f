import math

import pytest
import torch

from bruno.reporting.outlier_plots import Outlier, outlier_chart, outlier_sheet

ODD = Outlier(
    "$x_1$ & <b>, line 7", -6021.4, -3.0, "p ≈ 0.0017", False, "machine \t 1", "heat 92.1 (expected 60.3)"
)
BROKEN = Outlier("b" * 200, 5.0, None, "", True, "machine 2")


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def assert_readable(figure) -> None:
    """No text overlaps another or is cut off."""
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text()]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(0 <= box.x0 < box.x1 <= figure.bbox.width for box in boxes)
    assert all(0 <= box.y0 < box.y1 <= figure.bbox.height for box in boxes)


def test_a_chart_has_a_line_for_each_outlier_in_order(figures):
    outlier_chart([BROKEN, ODD])
    (figure,) = figures
    found = {text.get_text(): text.get_position()[1] for text in figure.axes[0].texts}
    lines = [
        ["1.", "machine 2", "out-of-distribution"],
        ["2.", "$x_1$ & <b>, line 7", "−6,021.4", "p ≈ 0.0017"],
    ]
    lines[1] += [r"machine \t 1", "heat 92.1 (expected 60.3)"]
    heights = [{found[text] for text in line} for line in lines]
    assert [len(one) for one in heights] == [1, 1]
    assert min(heights[0]) < min(heights[1])
    assert_readable(figure)


def test_columns_without_text_are_left_out(figures):
    outlier_chart([Outlier("a", -5.0, None, "", False), Outlier("b", -6.0, None, "", False)])
    assert texts(figures[0]) == ["1.", "2.", "element", "a", "b", "score", "−5.0", "−6.0"]


def test_bars_grow_with_the_distance_to_the_threshold(figures):
    depths = [0.5, 10.0, 5000.0]
    outlier_chart([Outlier("x", -3.0 - depth, -3.0, "", False) for depth in depths])
    bars = [patch.get_width() for patch in figures[0].axes[0].patches if patch.get_height()]
    assert bars == sorted(bars)
    assert bars[1] / bars[2] == pytest.approx(math.log1p(10) / math.log1p(5000))
    assert (BROKEN.depth, Outlier("x", -math.inf, 0.0, "", True).depth) == (0, 0)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 16, 40), (1, 40, 16)])
def test_a_sheet_has_the_images_in_order_with_rank_p_value_and_score(shape, figures):
    images = torch.stack([torch.full(shape, i, dtype=torch.uint8) for i in range(8)])
    outlier_sheet([BROKEN, *[ODD] * 7], images)
    (figure,) = figures
    assert [int(image.get_array().max()) for image in figure.axes[0].images] == list(range(8))
    shown = texts(figure)
    assert shown[:2] == ["1.", "out-of-distribution"]
    assert "2.  p ≈ 0.0017" in shown
    assert shown.count("score −6,021.4") == 7
    assert_readable(figure)


def test_a_name_does_not_break_inside_its_extension(figures):
    images = torch.zeros((28, 1, 28, 28), dtype=torch.uint8)
    names = [f"{'a' * length}.jpeg" for length in range(3, 31)]
    outlier_sheet([Outlier(name, -5.0, None, "", False) for name in names], images)
    shown = texts(figures[0])
    assert names[0] in shown
    assert ".jpeg" in shown
    assert sum(one.endswith(".jpeg") for one in shown) == len(names)


def test_a_sheet_needs_an_image_for_each_outlier():
    with pytest.raises(ValueError, match=r"`images` must have 2 values.*got 1"):
        outlier_sheet([ODD, ODD], torch.zeros((1, 1, 4, 4), dtype=torch.uint8))
