import pytest
import torch

from bruno import Bruno
from bruno.config import FlowConfig, ModelConfig
from bruno.data import Examples
from bruno.tasks.specks import has_speck, measure_specks


def picture(*rows):
    return torch.tensor([[255 * (square == "#") for square in row] for row in rows], dtype=torch.uint8)[None]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- one image --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows",
    [
        ("#....", ".....", "..###"),  # one pixel
        ("##...", ".....", "..###"),  # two side by side
        ("#....", ".#...", ".....", "..###"),  # two that touch at a corner
        ("....#", "##...", ".....", "#...."),  # three specks
    ],
)
def test_a_component_of_one_or_two_pixels_is_a_speck(rows):
    assert has_speck(picture(*rows))


@pytest.mark.parametrize(
    "rows",
    [
        (".....", "....."),
        ("###..", "....."),  # three in a row
        ("#....", ".#...", "..#.."),  # three on a diagonal
        ("##...", "#....", "....."),
        ("#.#..", ".#...", "....."),
    ],
)
def test_an_empty_image_and_larger_components_have_no_speck(rows):
    assert not has_speck(picture(*rows))


def test_pixels_up_to_the_threshold_are_not_bright():
    images = torch.zeros(2, 3, 1, 5, 5, dtype=torch.uint8)
    images[1, 2, 0, 2, 2] = 64
    assert not has_speck(images).any()
    images[1, 2, 0, 2, 2] = 65
    assert has_speck(images).tolist() == [[False] * 3, [False, False, True]]


def test_the_threshold_is_a_quarter_of_any_range():
    image = torch.zeros(1, 5, 5, dtype=torch.uint8)
    image[0, 2, 2] = 4  # of 16
    assert not has_speck(image, levels=17)
    image[0, 2, 2] = 5
    assert has_speck(image, levels=17)
    assert has_speck(image, levels=2)


def test_a_pixel_is_bright_in_any_channel():
    image = torch.zeros(3, 5, 5, dtype=torch.uint8)
    image[0, 2, 2] = image[1, 2, 3] = 255
    assert has_speck(image)
    image[2, 3, 3] = 255  # now a component of three
    assert not has_speck(image)


# --- samples ----------------------------------------------------------------------------------------------


def test_fractions_are_measured_on_the_samples_and_on_the_data(digits_model, unseen_digits):
    reports = []
    found = measure_specks(
        digits_model,
        unseen_digits,
        samples=40,
        given=3,
        generator=seeded(),
        progress=lambda *report: reports.append(report),
        batch_size=16,
    )
    assert found.images.shape == (40, 1, 8, 8)
    assert torch.equal(found.with_speck, has_speck(found.images, levels=17))
    share = found.with_speck.double().mean().item()
    assert found.share == pytest.approx(share)
    assert found.error == pytest.approx((share * (1 - share) / 39) ** 0.5)
    assert found.data_share == has_speck(unseen_digits.elements, levels=17).double().mean().item()
    assert (found.samples, found.given, found.data_images) == (40, 3, len(unseen_digits))
    assert reports == [(16, 40), (32, 40), (40, 40)]


def test_the_same_seed_gives_the_same_samples(digits_model, unseen_digits):
    def images(seed: int) -> torch.Tensor:
        return measure_specks(digits_model, unseen_digits, samples=4, generator=seeded(seed)).images

    assert torch.equal(images(1), images(1))
    assert not torch.equal(images(1), images(2))


def test_samples_are_conditioned_on_images_of_one_class():
    """An untrained model with correlations near 1: at temperature 0 a sample is the mean of its set."""
    process = {"correlation": 0.999, "kind": "gaussian"}
    flow = FlowConfig("dense", couplings=0)
    config = ModelConfig((1, 5, 5), pixels="logit", alpha=0.01, flow=flow, process=process)
    model = Bruno.from_config(config)
    images = torch.zeros(20, 1, 5, 5, dtype=torch.uint8)
    images[:10, 0, 2, 2] = 255  # a speck
    images[10:, 0, 2, 1:4] = 255  # a stroke
    examples = Examples(images, torch.arange(20) // 10, ("speck", "stroke"))
    model.initialise(images)
    found = measure_specks(model, examples, samples=200, temperature=0.0, generator=seeded())
    assert found.share == pytest.approx(0.5, abs=0.1)
    assert found.data_share == 0.5
    assert torch.equal(found.with_speck, found.images[:, 0, 2, 1] < 128)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 1}, r"`samples` .*2; got 1"),
        ({"given": 0}, r"`given` .*1 to .*got 0"),
        ({"given": 10**6}, r"`given` .*got 1000000"),
        ({"temperature": -1.0}, r"`temperature` .*0; got -1"),
        ({"batch_size": 0}, r"`batch_size` .*1; got 0"),
    ],
)
def test_impossible_settings_raise(digits_model, unseen_digits, settings, message):
    with pytest.raises(ValueError, match=message):
        measure_specks(digits_model, unseen_digits, **{"samples": 2, **settings}, generator=seeded())


def test_a_model_of_rows_raises():
    rows = Examples(torch.randn(8, 3), torch.arange(2).repeat(4), ("x", "y"))
    model = Bruno.from_config(ModelConfig((3,), levels=0, flow=FlowConfig("dense", couplings=1, units=4)))
    with pytest.raises(ValueError, match=r"`model` .*images; got .*rows"):
        measure_specks(model, rows, given=2, generator=seeded())
