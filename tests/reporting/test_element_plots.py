import pytest
import torch

from bruno.reporting.element_plots import class_probabilities


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
