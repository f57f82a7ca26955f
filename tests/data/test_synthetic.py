import numpy as np
import pytest
import torch

from bruno.data import load_examples
from bruno.data.synthetic import _rasterise, draw_characters


def test_drawings_of_a_character_differ():
    examples = draw_characters(5, 4, size=20)
    assert examples.elements.shape == (20, 1, 20, 20)
    assert examples.elements.dtype == torch.uint8
    assert examples.counts.tolist() == [4] * 5
    assert len({image.numpy().tobytes() for image in examples.elements}) == 20


def test_a_seed_determines_the_drawings():
    assert torch.equal(draw_characters(3, 2).elements, draw_characters(3, 2).elements)
    assert not torch.equal(draw_characters(3, 2).elements, draw_characters(3, 2, seed=1).elements)


def test_every_drawing_has_bright_ink_away_from_the_border():
    x = draw_characters().elements.float() / 255
    ink = x.mean((1, 2, 3))
    assert ink.min() > 0.01
    assert ink.max() < 0.25
    border = x[..., 0].mean() + x[..., -1].mean() + x[..., 0, :].mean() + x[..., -1, :].mean()
    assert border < 0.02
    assert 0.18 < (x > 0).float().mean() < 0.22  # Omniglot: 18.6 to 20.0 %, depending on the split
    assert 0.07 < ink.mean() < 0.1


def test_drawings_are_closest_to_those_of_the_same_character():
    x = draw_characters(20, 10).elements.flatten(1).float().view(20, 10, -1)
    blurred = torch.nn.functional.avg_pool2d(x.view(200, 1, 28, 28), 4).flatten(1).view(20, 10, -1)
    within = torch.cdist(blurred, blurred).mean()
    means = blurred.mean(1)
    across = torch.cdist(blurred.flatten(0, 1), means).view(20, 10, 20)
    own = across.diagonal(dim1=0, dim2=2)
    assert (across.argmin(2) == torch.arange(20).unsqueeze(1)).float().mean() > 0.8
    assert own.mean() < within


@pytest.mark.slow
def test_drawn_is_a_named_dataset():
    assert len(load_examples("drawn", "all").names) == 40
    seen, unseen = (set(load_examples("drawn", split).names) for split in ("trainval", "test"))
    assert (len(seen), len(unseen)) == (36, 4)
    assert not seen & unseen


def test_a_long_line_has_the_width_of_the_pen_everywhere():
    line = _rasterise([np.array([[0.1, 0.2], [0.9, 0.3]])], 105)
    assert (line[:, 20:85] > 0).sum(0).min() == 5  # no gaps between the dots
