import io

import numpy as np
import pytest
import torch
from PIL import Image

from bruno import Bruno, FlowConfig, ModelConfig
from bruno.config import TrainConfig
from bruno.data import Examples, SetSampler, load_examples
from bruno.data.augmentation import (
    FILTERS,
    apply_affine,
    augment_sets,
    downsample,
    random_affines,
    random_contrast,
    random_mirror,
    random_shears,
    random_shift,
    widen_strokes,
)
from bruno.data.images import decode
from bruno.training import Trainer, train_steps


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def sets():
    return torch.randint(1, 256, (40, 3, 2, 5, 5), dtype=torch.uint8)


def test_a_set_is_mirrored_as_a_whole_or_not_at_all(sets):
    x = random_mirror(sets, seeded())
    same = (x == sets).flatten(1).all(1)
    flipped = (x == sets.flip(-1)).flatten(1).all(1)
    assert (same ^ flipped).all()
    assert 10 < same.sum() < 30


def test_an_image_moves_by_whole_pixels_and_zeros_fill_the_gap(sets):
    x = random_shift(sets, 1, seeded()).flatten(0, 1)
    seen = set()
    for image, original in zip(x, sets.flatten(0, 1), strict=True):
        padded = torch.nn.functional.pad(original, (1, 1, 1, 1))
        places = [
            (i, j) for i in range(3) for j in range(3) if torch.equal(image, padded[:, i : i + 5, j : j + 5])
        ]
        assert len(places) == 1
        seen |= set(places)
    assert len(seen) == 9


@pytest.mark.parametrize("fraction", [0.0, 0.3, torch.tensor(0.3)], ids=str)
def test_only_a_fraction_of_the_images_moves(fraction):
    x = torch.rand(100, 20, 1, 5, 5)
    moved = (random_shift(x, 1, seeded(), fraction) != x).flatten(2).any(2).float().mean()
    assert moved == pytest.approx(float(fraction) * 8 / 9, abs=0.04)  # one shift in nine is by 0 pixels


def test_a_warp_keeps_the_centre_the_background_and_the_greys():
    ring = torch.zeros(200, 1, 29, 29, dtype=torch.uint8)
    ring[..., 8:21, 8:21] = 16
    ring[..., 9:20, 9:20] = 0
    ring[..., 14, 14] = 16
    x = apply_affine(ring, random_affines(200, 0.1, seeded()))
    assert x.dtype == torch.uint8
    assert (x[..., 14, 14] == 16).all()  # the map has no translation
    assert x.max() == 16
    assert (x[..., 0, :] == 0).all()
    assert len(x.flatten(1).unique(dim=0)) == 200
    ink = x.float().mean((1, 2, 3)) / ring.float().mean((1, 2, 3))
    assert abs(ink.mean() - 1) < 0.2
    assert ink.std() > 0.05
    assert torch.equal(apply_affine(ring, random_affines(200, 0.0, seeded())), ring)


@pytest.mark.parametrize("sharp", [False, True])
def test_pixels_from_outside_are_zero_even_if_the_image_has_no_zeros(sharp):
    x = torch.full((1, 1, 6, 6), 100, dtype=torch.uint8)
    x[..., 2:4, 2:4] = 200
    moved = apply_affine(x, 2 * torch.eye(2).unsqueeze(0), sharp=sharp)
    assert moved[0, 0, 0, 0] == 0
    assert moved.max() <= 200


def test_a_warp_of_real_numbers_stays_in_their_range():
    x = torch.randn(15, 2, 8, 8)
    moved = apply_affine(x, random_affines(15, 0.2, seeded()))
    assert moved.dtype == x.dtype
    assert moved.shape == x.shape
    assert moved.max() <= x.max()
    assert not torch.equal(moved, moved.round())


def test_sets_are_unchanged_without_settings(sets):
    assert augment_sets(sets, (5, 5), seeded()) is sets


@pytest.mark.slow
def test_shears_preserve_area_and_vary_every_entry():
    maps = random_shears(4000, 0.2, seeded())
    torch.testing.assert_close(torch.linalg.det(maps), torch.ones(4000))
    torch.testing.assert_close(maps.mean(0), torch.eye(2), rtol=0, atol=0.05)
    assert (maps.std(0) > 0.15).all()
    assert (maps.std(0) < 0.25).all()
    assert torch.equal(random_shears(3, 0.0, seeded()), torch.eye(2).expand(3, 2, 2))


def test_a_set_is_slanted_as_a_whole_and_images_are_warped_independently():
    bar = torch.zeros(30, 4, 1, 21, 21, dtype=torch.uint8)
    bar[..., 4:17, 9:12] = 200

    def kinds(**strengths: torch.Tensor) -> list[int]:
        x = augment_sets(bar, (21, 21), seeded(), **strengths)
        return [len(images.flatten(1).unique(dim=0)) for images in x]

    some = torch.tensor(0.3)
    assert set(kinds(slant=some)) == {1}
    assert set(kinds(warp=some)) == {4}
    assert len(augment_sets(bar, (21, 21), seeded(), slant=some).flatten(1).unique(dim=0)) == 30
    # The map of an image is applied after that of its set: with strength 0 it changes nothing.
    both = augment_sets(bar, (21, 21), seeded(), slant=some, warp=torch.tensor(0.0))
    assert torch.equal(both, augment_sets(bar, (21, 21), seeded(), slant=some))


@pytest.mark.parametrize("size", [(28, 28), (10, 21), (300, 130)], ids=str)
def test_downsampling_agrees_with_the_file_readers(size):
    images = np.random.default_rng(0).integers(0, 2, (20, 105, 105), dtype=np.uint8) * 255
    images[10:, 30:60] = 0
    expected = []
    for image in images:
        Image.fromarray(image).save(file := io.BytesIO(), "png")
        expected.append(decode(file.getvalue(), size, grey=True))
    found = downsample(torch.from_numpy(images).unsqueeze(1), size)
    assert found.dtype == torch.uint8
    off = (found.int() - torch.from_numpy(np.stack(expected)).int()).abs()
    assert off.max() <= 1  # Pillow also rounds its weights
    assert off.float().mean() < 0.01


@pytest.mark.parametrize("name", ["bilinear", "box", "bicubic", "lanczos"])
def test_every_filter_agrees_with_pillow(name):
    images = np.random.default_rng(0).integers(0, 2, (20, 105, 105), dtype=np.uint8) * 255
    method = Image.Resampling[name.upper()]
    expected = np.stack([Image.fromarray(image).resize((28, 28), method) for image in images])
    filters = torch.full((20, 1), list(FILTERS).index(name))
    found = downsample(torch.from_numpy(images).unsqueeze(1), (28, 28), filters)[:, 0]
    off = (found.int() - torch.from_numpy(expected).int()).abs()
    assert off.max() <= 1
    assert off.float().mean() < 0.02


def test_filters_differ_in_sharpness_and_preserve_ink():
    line = torch.zeros(len(FILTERS), 1, 105, 105, dtype=torch.uint8)
    line[:, :, 20:85, 50:53] = 255
    small = downsample(line, (28, 28), torch.arange(len(FILTERS)).unsqueeze(1)).float()
    ink = small.sum((1, 2, 3)) / line.float().sum((1, 2, 3)) * (105 / 28) ** 2
    assert (ink - 1).abs().max() < 0.2  # clamped lobes add ink
    brightest = dict(zip(FILTERS, small.amax((1, 2, 3)).tolist(), strict=True))
    assert brightest["blurred"] < brightest["soft"] < brightest["bilinear"] < brightest["lanczos"]


def test_strokes_widen_by_the_radius_on_each_side():
    point = torch.zeros(4, 1, 11, 11, dtype=torch.uint8)
    point[..., 5, 5] = 200
    wide = widen_strokes(point, torch.arange(4))
    assert wide.dtype == torch.uint8
    assert torch.equal(wide[0], point[0])
    assert (wide[:, 0, 5] > 0).sum(1).tolist() == [1, 3, 5, 7]
    assert (wide[:, 0, :, 5] > 0).sum(1).tolist() == [1, 3, 5, 7]
    assert (wide > 0).sum((1, 2, 3)).tolist() == [1, 5, 21, 37]  # octagons, not squares


def test_contrast_of_chosen_images_changes_and_their_background_stays():
    x = torch.zeros(40, 1, 6, 6, dtype=torch.uint8)
    x[..., 2, :], x[..., 3, :] = 255, 100
    chosen = torch.arange(40) < 20
    changed = random_contrast(x, chosen, seeded())
    assert torch.equal(changed[20:], x[20:])
    assert (changed[..., 0, :] == 0).all()
    bright, middle = changed[:20, 0, 2, 0].float(), changed[:20, 0, 3, 0].float()
    assert bright.min() >= 0.6 * 255 - 1
    assert len(bright.unique()) > 15
    assert len((middle / bright).unique()) > 15


@pytest.mark.slow
def test_the_given_fraction_of_images_is_restyled():
    strokes = torch.zeros(60, 5, 1, 84, 84, dtype=torch.uint8)
    strokes[..., 20:60, 36:40] = 255
    plain = augment_sets(strokes, (28, 28), seeded())

    def changed(fraction: float) -> int:
        x = augment_sets(strokes, (28, 28), seeded(), restyle=torch.tensor(fraction))
        return int((x != plain).flatten(2).any(2).sum())

    assert changed(0.0) == 0
    assert 110 < changed(0.5) < 190
    assert changed(1.0) > 295  # now and then a restyled image has the published style


def test_restyling_needs_images_larger_than_those_of_the_model():
    images = torch.zeros((40, 1, 8, 8), dtype=torch.uint8)
    sampler = SetSampler(Examples(images, torch.arange(40) // 10, tuple("abcd")))
    model = Bruno.from_config(ModelConfig((1, 8, 8), flow=FlowConfig("dense", couplings=2, units=8)))
    with pytest.raises(ValueError, match=r"`train.restyle` .*got 0.5.*`data.original`"):
        Trainer(model, sampler, TrainConfig(set_size=5, restyle=0.5))


def test_images_are_not_blurred_before_they_are_downsampled():
    bar = torch.zeros(40, 5, 1, 84, 84, dtype=torch.uint8)
    bar[..., 20:60, 36:48] = 255
    large = apply_affine(bar.flatten(0, 1), random_affines(200, 0.2, seeded()), sharp=True)
    assert large.unique().tolist() == [0, 255]
    small = augment_sets(bar, (28, 28), seeded(), shift=1, slant=torch.tensor(0.2), warp=torch.tensor(0.1))
    assert small.shape == (40, 5, 1, 28, 28)
    ink = 9 * small.float().sum((-3, -2, -1)) / bar.float().sum((-3, -2, -1))
    assert abs(ink.mean() - 1) < 0.05


@pytest.mark.parametrize("times", [1, 3], ids=str)
def test_a_shift_is_in_pixels_of_the_result(times):
    square = torch.zeros(40, 5, 1, 28 * times, 28 * times, dtype=torch.uint8)
    square[..., 9 * times : 18 * times, 9 * times : 18 * times] = 255
    columns = augment_sets(square, (28, 28), seeded(), shift=1).float().sum((-3, -2))
    middles = (columns * torch.arange(28)).sum(-1) / columns.sum(-1)
    expected = torch.arange(-times, times + 1) / times + 13
    torch.testing.assert_close((times * middles).round().unique(), times * expected)


@pytest.mark.slow
def test_a_trainer_accepts_images_larger_than_those_of_its_model():
    large = torch.randint(0, 256, (40, 1, 24, 24), dtype=torch.uint8)
    labels, names = torch.arange(40) // 10, tuple("abcd")
    flow = FlowConfig("dense", couplings=2, units=16)

    def bits(images: torch.Tensor, **settings: float) -> list[float]:
        torch.manual_seed(0)
        model = Bruno.from_config(ModelConfig((1, 8, 8), flow=flow))
        plan = TrainConfig(steps=3, batch=4, set_size=5, **settings)
        return [s.bits_per_dim for s in train_steps(model, SetSampler(Examples(images, labels, names)), plan)]

    assert bits(large) == bits(downsample(large, (8, 8)))
    assert bits(large, shift=2, slant=0.1) != bits(downsample(large, (8, 8)), shift=2, slant=0.1)


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 7, 8), (1, 8, 7), (64,)], ids=str)
def test_a_trainer_rejects_elements_that_do_not_fit_its_model(shape):
    images = torch.zeros((40, *shape), dtype=torch.uint8)
    sampler = SetSampler(Examples(images, torch.arange(40) // 10, tuple("abcd")))
    model = Bruno.from_config(ModelConfig((1, 8, 8), flow=FlowConfig("dense", couplings=2, units=8)))
    with pytest.raises(ValueError, match=r"model's shape \(1, 8, 8\), or larger images; got \("):
        Trainer(model, sampler, TrainConfig(set_size=5))


def test_support_and_query_of_a_class_are_mirrored_together():
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


def test_every_kind_of_augmentation_changes_the_training():
    examples = load_examples("digits")
    config = ModelConfig((1, 8, 8), levels=17, flow=FlowConfig("dense", couplings=2, units=16))
    plan = {"steps": 3, "batch": 4, "set_size": 5, "discriminative": 0.1, "episodes": 2, "way": 3}
    bits = []
    for settings in ({}, {"mirror": True}, {"shift": 1}, {"slant": 0.1}, {"warp": 0.1}):
        torch.manual_seed(0)
        model = Bruno.from_config(config)
        bits.append(
            [
                s.bits_per_dim
                for s in train_steps(model, SetSampler(examples), TrainConfig(**plan, **settings))
            ]
        )
    assert len({tuple(losses) for losses in bits}) == 5


@pytest.mark.parametrize("name", ["slant", "warp"])
def test_slants_and_warps_fade_to_zero_at_the_end_of_a_run(name):
    labels = torch.arange(40) // 10
    examples = Examples(
        torch.rand(40, 1, 8, 8), labels, tuple("abcd")
    )  # real numbers: no dequantisation noise
    config = ModelConfig((1, 8, 8), levels=0, flow=FlowConfig("dense", couplings=2, units=16))

    def bits(strength: float, progress: float) -> float:
        torch.manual_seed(0)
        plan = TrainConfig(batch=4, set_size=5, **{name: strength})
        return (
            Trainer(Bruno.from_config(config), SetSampler(examples), plan)
            .advance(1, progress)[0]
            .bits_per_dim
        )

    assert bits(0.3, 1.0) == pytest.approx(bits(0.0, 1.0), rel=1e-4)
    early, late = (abs(bits(0.3, progress) - bits(0.0, progress)) for progress in (0.01, 0.99))
    assert early > 10 * late > 0


@pytest.mark.parametrize(
    "settings", [{"shift": 1}, {"mirror": True}, {"slant": 0.1}, {"warp": 0.1}, {"restyle": 0.1}], ids=str
)
def test_augmentation_is_rejected_for_rows(settings):
    rows = Examples(torch.randn(20, 4), torch.arange(20) // 10, ("a", "b"))
    model = Bruno.from_config(ModelConfig((4,), levels=0, flow=FlowConfig("dense", couplings=2, units=8)))
    with pytest.raises(ValueError, match=r"`train.mirror`, `train.shift`, .* are for images"):
        Trainer(model, SetSampler(rows), TrainConfig(**settings, set_size=5))
