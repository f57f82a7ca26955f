import pytest
import torch

from bruno import Bruno, FlowConfig, ModelConfig
from bruno.augmentation import augmented_sets, mirrored, shifted, warped
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


def test_a_warp_keeps_the_middle_the_paper_and_the_greys():
    ring = torch.zeros(200, 1, 29, 29, dtype=torch.uint8)
    ring[..., 8:21, 8:21] = 16
    ring[..., 9:20, 9:20] = 0
    ring[..., 14, 14] = 16
    x = warped(ring, 0.1, seeded())
    assert x.dtype == torch.uint8
    assert (x[..., 14, 14] == 16).all()  # the map has no translation
    assert x.max() == 16
    assert (x[..., 0, :] == 0).all()
    assert len(x.flatten(1).unique(dim=0)) == 200
    ink = x.float().mean((1, 2, 3)) / ring.float().mean((1, 2, 3))
    assert abs(ink.mean() - 1) < 0.2
    assert ink.std() > 0.05
    assert torch.equal(warped(ring, 0.0, seeded()), ring)


def test_a_warp_of_real_numbers_stays_in_their_range():
    x = torch.randn(5, 3, 2, 8, 8)
    moved = warped(x, 0.2, seeded())
    assert moved.dtype == x.dtype
    assert moved.shape == x.shape
    assert moved.max() <= x.max()
    assert not torch.equal(moved, moved.round())


def test_nothing_asked_for_is_nothing_done(sets):
    assert augmented_sets(sets, mirror=False, shift=0, warp=None, generator=seeded()) is sets


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


def test_training_sees_mirrored_moved_and_warped_images():
    examples = load_examples("digits")
    config = ModelConfig((1, 8, 8), levels=17, flow=FlowConfig("dense", couplings=2, units=16))
    plan = {"steps": 3, "batch": 4, "length": 5, "discriminative": 0.1, "episodes": 2, "way": 3}
    bits = []
    for settings in ({}, {"mirror": True}, {"shift": 1}, {"warp": 0.1}):
        torch.manual_seed(0)
        model = Bruno.from_config(config)
        bits.append(
            [s.bits_per_dim for s in train(model, SetSampler(examples), TrainConfig(**plan, **settings))]
        )
    assert len({tuple(losses) for losses in bits}) == 4


def test_a_warp_fades_until_images_are_as_they_are():
    labels = torch.arange(40) // 10
    examples = Examples(torch.rand(40, 1, 8, 8), labels, tuple("abcd"))  # real numbers: no noise is added
    config = ModelConfig((1, 8, 8), levels=0, flow=FlowConfig("dense", couplings=2, units=16))

    def bits(warp: float, progress: float) -> float:
        torch.manual_seed(0)
        plan = TrainConfig(batch=4, length=5, warp=warp)
        return (
            Trainer(Bruno.from_config(config), SetSampler(examples), plan)
            .advance(1, progress)[0]
            .bits_per_dim
        )

    assert bits(0.3, 1.0) == pytest.approx(bits(0.0, 1.0), rel=1e-4)
    early, late = (abs(bits(0.3, progress) - bits(0.0, progress)) for progress in (0.01, 0.99))
    assert early > 10 * late > 0


@pytest.mark.parametrize("settings", [{"shift": 1}, {"mirror": True}, {"warp": 0.1}], ids=str)
def test_rows_are_neither_mirrored_nor_moved(settings):
    rows = Examples(torch.randn(20, 4), torch.arange(20) // 10, ("a", "b"))
    model = Bruno.from_config(ModelConfig((4,), levels=0, flow=FlowConfig("dense", couplings=2, units=8)))
    with pytest.raises(ValueError, match=r"`train.mirror`, `train.shift` and `train.warp` are for images"):
        Trainer(model, SetSampler(rows), TrainConfig(**settings, length=5))
