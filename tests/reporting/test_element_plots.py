import pytest
import torch

from bruno.kinds import Rows
from bruno.reporting.element_plots import classification_matrix
from bruno.reporting.summaries import summarise
from bruno.tasks import Classification, classify

PROBABILITIES = torch.tensor([[0.9, 0.0996, 0.0004], [0.2, 0.3, 0.5]])
CLASSES = ["cat", "dog", "cow"]


def images(n: int, channels: int = 1, grey: int = 0) -> torch.Tensor:
    return torch.full((n, channels, 4, 4), grey, dtype=torch.uint8)


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts if text.get_text()]


def frames(figure) -> list[tuple[float, float]]:
    """Centres of the framed cells."""
    boxes = [patch for patch in figure.axes[0].patches if patch.get_linewidth() > 1]
    return [(box.get_x() + box.get_width() / 2, box.get_y() + box.get_height() / 2) for box in boxes]


def place(figure, text: str) -> tuple[float, float]:
    """Centre of a text."""
    (found,) = (one for one in figure.axes[0].texts if one.get_text() == text)
    return found.get_position()


def test_cells_have_probabilities_in_per_cent_and_zeros_are_empty(figures):
    classification_matrix(["a", "b"], CLASSES, PROBABILITIES)
    (figure,) = figures
    assert texts(figure)[:9] == [*CLASSES, "a", "90.0", "10.0", "b", "20.0", "30.0"]
    assert frames(figure) == [pytest.approx(place(figure, "90.0")), pytest.approx(place(figure, "50.0"))]
    assert place(figure, "90.0")[0] == place(figure, "cat")[0]
    assert place(figure, "90.0")[1] == place(figure, "a")[1]


def test_none_of_these_is_a_column_and_a_decision(figures):
    classification_matrix(
        ["a", "b"], CLASSES, PROBABILITIES, none_of_these=[False, True], largest_p=[0.43, 0.002]
    )
    (figure,) = figures
    assert frames(figure) == [pytest.approx(place(figure, "90.0")), pytest.approx(place(figure, "0.002"))]
    assert place(figure, "0.43")[0] == place(figure, "none of\nthese (p)")[0]


@pytest.mark.parametrize("channels", [1, 3])
def test_support_is_above_its_column_and_queries_beside_their_row(channels, figures):
    support = [images(n, channels, n) for n in (1, 2, 30)]
    queries = torch.cat([images(1, channels, 200), images(1, channels, 201)])
    classification_matrix(["a", "b"], CLASSES, PROBABILITIES, images=queries, support=support)
    (figure,) = figures
    shown: dict[int, list] = {}
    for image in figure.axes[0].images:
        shown.setdefault(int(image.get_array().max()), []).append(image.get_extent())
    top = min(place(figure, name)[1] for name in CLASSES)
    for n, name in ((1, "cat"), (2, "dog"), (30, "cow")):
        extents = shown[n]
        assert len(extents) == min(n, 6)
        assert all(bottom < top for _, _, bottom, _ in extents)
        assert all(abs((left + right) / 2 - place(figure, name)[0]) < 0.5 for left, right, *_ in extents)
    for grey, name in ((200, "a"), (201, "b")):
        ((_, right, bottom, up),) = shown[grey]
        assert (bottom + up) / 2 == pytest.approx(place(figure, name)[1], abs=0.01)
        assert right < place(figure, "cat")[0]


@pytest.mark.parametrize("classes", [2, 5, 24])
@pytest.mark.parametrize("pictured", [True, False])
def test_texts_of_a_matrix_do_not_overlap(classes, pictured, figures):
    names = [f"$class$ with_a long name number {i}" for i in range(classes)]
    queries = [f"folder of new images, element number {i}.png" for i in range(3)]
    given = {"images": images(3), "support": [images(5)] * classes} if pictured else {}
    probabilities = torch.full((3, classes), 1 / classes)
    classification_matrix(queries, names, probabilities, none_of_these=[False] * 3, **given)
    (figure,) = figures
    boxes = [text.get_window_extent() for text in figure.axes[0].texts if text.get_text()]
    assert len(boxes) == 3 + classes + 3 * classes + 2
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(0 <= box.x0 < box.x1 <= figure.bbox.width for box in boxes)
    assert all(0 <= box.y0 < box.y1 <= figure.bbox.height for box in boxes)


def test_missing_values_raise():
    with pytest.raises(ValueError, match=r"`probabilities` must have 3 values.*got 2"):
        classification_matrix(["x", "y", "z"], CLASSES, PROBABILITIES)
    with pytest.raises(ValueError, match=r"`support` must have 3 values.*got 1"):
        classification_matrix(["x", "y"], CLASSES, PROBABILITIES, support=[images(1)])


@pytest.mark.slow
def test_a_summary_shows_the_least_certain_queries_and_the_rest_of_the_classes(figures):
    probabilities = (5 * torch.randn((50, 35), generator=torch.Generator().manual_seed(0))).softmax(1)
    certainty = probabilities.amax(1).tolist()
    found = Classification(
        probabilities,
        probabilities.log(),
        probabilities.log(),
        torch.zeros(50, 35),
        probabilities.argmax(1),
        classes=tuple(f"class {i}" for i in range(35)),
        names=tuple(f"query {i}" for i in range(50)),
        support=(1,) * 35,
        temperature=1.0,
        queries=torch.zeros(50, 2),
        kind=Rows((2,)),
    )
    result = summarise(found)
    (figure,) = figures
    shown = [text for text in texts(figure) if text.startswith("query")]
    assert len(shown) == 40
    assert max(certainty[int(name[6:])] for name in shown) <= sorted(certainty)[39]
    assert len([text for text in texts(figure) if text.startswith("class")]) == 29
    assert "6 others" in texts(figure)
    assert "40 least certain of 50" in result.note


def test_a_classification_keeps_a_few_support_elements(digits_model, unseen_digits):
    support = {"a": unseen_digits.elements[:2], "b": unseen_digits.elements[2:30]}
    found = classify(digits_model, support, unseen_digits.elements[:1])
    assert [len(some) for some in found.examples] == [2, 9]
    assert (found.numpy()["examples"][1] == unseen_digits.elements[2:11].numpy()).all()
