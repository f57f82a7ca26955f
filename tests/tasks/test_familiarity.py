import re
from pathlib import Path

import pytest
import torch
from PIL import Image

import bruno
from bruno import Bruno, FlowConfig, ModelConfig
from bruno.data.augmentation import downsample
from bruno.tasks.familiarity import Familiarity

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    """Dark images of 8×8 pixels; about one pixel in ten is bright."""
    generator = torch.Generator().manual_seed(0)
    bright = torch.rand((200, 1, 8, 8), generator=generator) < 0.1
    return torch.where(bright, 230, 5).to(torch.uint8)


@pytest.fixture(scope="module")
def familiarity(images) -> Familiarity:
    """Familiarity of a model that records the grey values of its training data."""
    flow = FlowConfig("dense", couplings=2, units=8)
    model = Bruno.from_config(ModelConfig((1, 8, 8), pixels="gaussianise", flow=flow))
    model.initialise(images, torch.Generator().manual_seed(0))
    return Familiarity(model)


def test_training_images_are_familiar(familiarity, images):
    assert familiarity.check(images) == ""
    assert familiarity.check(images.view(4, 50, 1, 8, 8)) == ""
    assert familiarity.check(images[0]) == ""


def test_arrays_lists_and_pil_images_are_checked_like_tensors(familiarity, images):
    dark, mixed = images[:20], images[:20].clone()
    mixed[3] = 255
    for x in (dark, mixed, 255 - dark):
        forms = (x.numpy(), list(x), list(x.numpy()), [Image.fromarray(image[0].numpy()) for image in x])
        for form in (*forms, x.tolist()):
            assert familiarity.check(form) == familiarity.check(x)
            assert familiarity.too_bright(form) == familiarity.too_bright(x)
    with pytest.raises(ValueError, match=r"`images` .*got \(8, 8\)"):
        familiarity.check(images[0, 0].numpy())


def test_inverted_images_are_unfamiliar_by_their_brightness(familiarity, images):
    assert re.search(r"brightness 88%.*1[12]%", familiarity.check(255 - images))  # shares are smoothed


def test_a_single_bright_image_is_too_bright(familiarity, images):
    mixed = images.clone()
    mixed[3] = 255
    assert "1 of 200 images, such as number 4," in familiarity.check(mixed)
    assert "100%" in familiarity.too_bright(mixed[3])
    assert familiarity.too_bright(images[0]) == ""
    assert familiarity.too_bright(torch.zeros_like(images[0])) == ""


def test_unlikely_images_of_the_right_brightness_are_unfamiliar(digits_model, unseen_digits):
    familiarity = Familiarity(digits_model)
    assert familiarity.check(unseen_digits.elements) == ""
    shuffled = unseen_digits.elements.flatten(1)[:, torch.randperm(64)].view(-1, 1, 8, 8)
    assert "bits/dim" in familiarity.check(shuffled)


def test_images_as_likely_as_held_out_images_are_familiar(digits_model, unseen_digits):
    rare = unseen_digits.elements.roll(2, dims=3)
    assert "samples of the model at most" in Familiarity(digits_model).check(rare)
    held_out = Familiarity(digits_model).measure(rare[::2])
    familiarity = Familiarity(digits_model, held_out)
    assert familiarity.check(rare[1::2]) == ""
    assert f"held-out images at most {held_out['most']:.1f}" in familiarity.check(16 - rare)
    # Held-out images that are likelier than samples do not make the check stricter.
    usual = Familiarity(digits_model, {"median": 0.1, "most": 0.2})
    assert usual.check(unseen_digits.elements) == ""


@pytest.mark.parametrize("kept", [None, "text", [1.0], {}, {"median": 1.0}, {"median": "a", "most": 2.0}])
def test_kept_numbers_that_are_not_valid_are_ignored(digits_model, unseen_digits, kept):
    noise = torch.randint(17, (20, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert "samples of the model" in Familiarity(digits_model, kept).check(noise)


def test_images_may_be_inverted_if_that_would_make_them_familiar(
    familiarity, digits_model, unseen_digits, images
):
    digits = Familiarity(digits_model)  # does not record the brightness of its training images
    assert digits.may_be_inverted(16 - unseen_digits.elements)
    shuffled = unseen_digits.elements.flatten(1)[:, torch.randperm(64)].view(-1, 1, 8, 8)
    assert not digits.may_be_inverted(shuffled)
    assert familiarity.may_be_inverted(255 - images)


def test_images_of_another_size_are_reduced_to_that_of_the_model(digits_model):
    familiarity = Familiarity(digits_model)
    noise = torch.randint(17, (20, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    enlarged = noise.repeat_interleave(2, -1).repeat_interleave(2, -2)
    reason = familiarity.check(enlarged)
    assert "bits/dim" in reason
    assert reason == familiarity.check(downsample(enlarged, (8, 8)))


@pytest.fixture(scope="module")
def omniglot():
    """The pretrained model; its `familiarity` is estimated once."""
    return bruno.open("omniglot", device="cpu")


@pytest.mark.parametrize(
    "folder", ["known/a", pytest.param("known/b", marks=pytest.mark.long), "new", "stream"]
)
def test_characters_of_many_strokes_are_familiar(omniglot, folder):
    assert omniglot.familiarity.check(omniglot.read(EXAMPLES / folder).x) == ""


def test_samples_are_drawn_once(digits_model, unseen_digits, monkeypatch):
    familiarity, drawn, decode = Familiarity(digits_model), [], digits_model.decode_samples
    monkeypatch.setitem(vars(digits_model), "decode_samples", lambda z: (drawn.append(z), decode(z))[1])
    for _ in range(3):
        familiarity.check(unseen_digits.elements)
    assert len(drawn) == 1


def test_rows_are_always_familiar():
    model = Bruno.from_config(ModelConfig((3,), levels=0, flow=FlowConfig("dense", couplings=0)))
    assert Familiarity(model).check(torch.full((4, 3), 1e9)) == ""
    assert Familiarity(model).too_bright(torch.full((3,), 1e9)) == ""
