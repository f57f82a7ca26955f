import pytest
import torch

from bruno.data.synthetic_tiles import DEFECTS, simulate_tiles


def test_the_first_tiles_of_each_class_have_the_defects_in_turn():
    examples, defect = simulate_tiles(3, 10, defects=5, size=16)
    assert examples.elements.shape == (30, 3, 16, 16)
    assert examples.elements.dtype == torch.uint8
    assert defect.view(3, 10).tolist() == [[1, 2, 3, 4, 1, 0, 0, 0, 0, 0]] * 3
    assert len(DEFECTS) == 5


@pytest.mark.parametrize("any_phase", [False, True])
def test_clean_tiles_are_closest_to_those_of_their_class(any_phase):
    x = simulate_tiles(6, 8, any_phase=any_phase).examples.elements.flatten(1).float()
    distance = torch.cdist(x, x).fill_diagonal_(torch.inf)
    nearest = distance.argmin(1) // 8
    assert (nearest == torch.arange(48) // 8).float().mean() > 0.95


def test_a_seed_determines_the_tiles():
    first, again, other = (simulate_tiles(2, 3, seed=seed).examples.elements for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_defects_must_be_at_most_the_tiles():
    with pytest.raises(ValueError, match=r"`defects`.*got 4"):
        simulate_tiles(2, 3, defects=4)
