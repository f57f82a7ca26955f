import numpy as np
import pytest
import torch

from bruno.reporting.images import grid, prefix_grid


def test_a_grid_has_every_image_in_its_place():
    images = torch.arange(1, 6, dtype=torch.uint8).view(5, 1, 1, 1).expand(5, 3, 2, 4)
    picture = grid(images, columns=3, padding=1, background=99)
    assert picture.dtype == np.uint8
    assert picture.shape == (1 + 2 * 3, 1 + 3 * 5, 3)
    for i in range(6):
        row, column = divmod(i, 3)
        cell = picture[1 + 3 * row : 3 + 3 * row, 1 + 5 * column : 5 + 5 * column]
        assert (cell == (i + 1 if i < 5 else 99)).all()
    assert (picture[0] == 99).all()
    assert (picture[:, 0] == 99).all()
    assert (picture[3] == 99).all()
    assert (picture[:, 5] == 99).all()


def test_a_grid_keeps_an_image_upright():
    image = torch.arange(24, dtype=torch.uint8).view(1, 3, 2, 4)
    assert (grid(image, columns=1, padding=0) == image[0].permute(1, 2, 0).numpy()).all()


def test_a_prefix_grid_has_the_inputs_on_top_and_a_column_for_each_prefix():
    inputs = torch.tensor([10, 20], dtype=torch.uint8).view(2, 1, 1, 1)
    samples = torch.arange(1, 7, dtype=torch.uint8).view(3, 2, 1, 1, 1)
    picture = prefix_grid(inputs, samples, padding=0, background=0)[..., 0]
    assert picture.tolist() == [[0, 10, 20], [1, 3, 5], [2, 4, 6]]
    without_prior = prefix_grid(inputs, samples[1:], padding=0)[..., 0]
    assert without_prior.tolist() == [[10, 20], [3, 5], [4, 6]]


IMAGES = torch.zeros((3, 1, 8, 8), dtype=torch.uint8)
CELLS = torch.zeros((2, 4, 1, 8, 8), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: grid(IMAGES[:0], 2), r"`images` .*1 or 3 channels; got \(0,"),
        (lambda: grid(IMAGES.expand(3, 2, 8, 8), 2), r"`images` .*1 or 3 channels; got \(3, 2, 8, 8\)"),
        (lambda: grid(IMAGES, 0), r"`columns` .*1 .*`padding` 0; got 0 and 2"),
        (lambda: prefix_grid(IMAGES, CELLS), r"`samples` .* 3 inputs .*got \(2, 4, 1, 8, 8\)"),
    ],
)
def test_invalid_arguments_raise(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
