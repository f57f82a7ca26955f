import pytest
import torch

from bruno import Bruno, FlowConfig, ModelConfig
from bruno.augmentation import augmented_sets, mirrored, shifted
from bruno.config import TrainConfig
from bruno.data import Examples, load_examples
from bruno.sequences import SetSampler
from bruno.training import Trainer, train


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def sets():
    return torch.randint(1, 256, (40, 3, 2, 5, 5), dtype=torch.uint8)


def test_a_set_is_mirrored_as_a_whole_or_not_at_all(sets):
    x = mirrored(sets, seeded())
    same = (x == sets).flatten(1).all(1)
    flipped = (x == sets.flip(-1)).flatten(1).all(1)
    assert (same ^ flipped).all()
    assert 10 < same.sum() < 30


def test_an_image_is_moved_by_whole_pixels_and_paper_comes_in(sets):
    x = shifted(sets, 1, seeded()).flatten(0, 1)
    seen = set()
    for image, original in zip(x, sets.flatten(0, 1), strict=True):
        padded = torch.nn.functional.pad(original, (1, 1, 1, 1))
        places = [
            (i, j) for i in range(3) for j in range(3) if torch.equal(image, padded[:, i : i + 5, j : j + 5])
        ]
        assert len(places) == 1
        seen |= set(places)
    assert len(seen) == 9


def test_nothing_asked_for_is_nothing_done(sets):
    assert augmented_sets(sets, mirror=False, shift=0, generator=seeded()) is sets


def test_support_and_query_of_a_class_are_mirrored_alike():
    image = torch.zeros(1, 4, 4, dtype=torch.uint8)
    image[:, :, 0] = 9
    examples = Examples(image.expand(60, 1, 4, 4).clone(), torch.arange(60) // 6, tuple("abcdefghij"))
    model = Bruno.from_config(ModelConfig((1, 4, 4), flow=FlowConfig("dense", couplings=2, units=8)))
    config = TrainConfig(
        generative=0.0, discriminative=1.0, episodes=6, way=5, shot=2, queries=3, mirror=True
    )
    _, tasks = Trainer(model, SetSampler(examples), config)._draw()
    left = tasks[..., 0, 0, 0] > 8
    assert left.shape == (6, 5, 5)
    assert 25 < left.sum() < 125
    assert torch.equal(left, left[:, :, :1].expand(6, 5, 5))


def test_training_sees_mirrored_and_moved_images():
    examples = load_examples("digits")
    config = ModelConfig((1, 8, 8), levels=17, flow=FlowConfig("dense", couplings=2, units=16))
    plan = {"steps": 3, "batch": 4, "length": 5, "discriminative": 0.1, "episodes": 2, "way": 3}
    bits = []
    for settings in ({}, {"mirror": True}, {"shift": 1}):
        torch.manual_seed(0)
        model = Bruno.from_config(config)
        bits.append(
            [s.bits_per_dim for s in train(model, SetSampler(examples), TrainConfig(**plan, **settings))]
        )
    assert bits[0] != bits[1] != bits[2] != bits[0]


def test_rows_are_neither_mirrored_nor_moved():
    rows = Examples(torch.randn(20, 4), torch.arange(20) // 10, ("a", "b"))
    model = Bruno.from_config(ModelConfig((4,), levels=0, flow=FlowConfig("dense", couplings=2, units=8)))
    with pytest.raises(ValueError, match=r"`train.mirror` and `train.shift` are for images"):
        Trainer(model, SetSampler(rows), TrainConfig(shift=1, length=5))
