import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from bruno.data.drawings import normalise_drawing
from bruno.data.synthetic import draw_characters

FILTERS = [Image.Resampling[name] for name in ("BILINEAR", "BICUBIC", "BOX", "LANCZOS", "HAMMING")]


@pytest.fixture(scope="module")
def drawings() -> np.ndarray:
    """Forty drawings of Omniglot's size and pen, bright ink: (40, 105, 105)."""
    drawn = draw_characters(20, 2, size=105, seed=1).elements[:, 0].numpy()
    return np.where(drawn > 127, 255, 0).astype(np.uint8)


def reduced(images: np.ndarray, filter: Image.Resampling = Image.Resampling.BILINEAR) -> np.ndarray:
    return np.stack([np.asarray(Image.fromarray(image).resize((28, 28), filter)) for image in images])


def normalised(images: np.ndarray, **options) -> np.ndarray:
    return np.stack([normalise_drawing(image, **options) for image in images])


def difference(a: np.ndarray, b: np.ndarray) -> float:
    """Mean absolute difference as a fraction of the mean ink of b."""
    return float(np.abs(a.astype(float) - b).mean() / b.mean())


def sharpness(images: np.ndarray) -> float:
    """Mean brightness of the ink: 1 for a binary image, less the more strokes are blurred."""
    x = images / 255
    return float((x**2).sum() / x.sum())


def line(width: int, side: int = 105, ends=((30, 25), (75, 80))) -> np.ndarray:
    image = Image.new("L", (side, side))
    ImageDraw.Draw(image).line(ends, fill=255, width=width)
    return np.asarray(image)


def test_drawings_with_the_pen_and_frame_of_omniglot_are_only_reduced(drawings):
    same = (normalised(drawings) == reduced(drawings)).all((1, 2))
    assert same.mean() > 0.8
    assert difference(normalised(drawings)[same], reduced(drawings)[same]) == 0


@pytest.mark.parametrize("filter", FILTERS, ids=lambda filter: filter.name)
def test_the_filter_that_made_a_small_image_hardly_matters(drawings, filter):
    small, wanted = reduced(drawings, filter), normalised(drawings)
    assert difference(normalised(small), wanted) < 0.12
    assert sharpness(normalised(small)) == pytest.approx(sharpness(reduced(drawings)), rel=0.04)
    if filter.name != "BILINEAR":
        assert sharpness(small) > 1.08 * sharpness(reduced(drawings))


def test_dark_ink_on_bright_paper_becomes_bright_ink(drawings):
    assert (normalised(255 - drawings) == normalised(drawings)).all()


def test_a_given_polarity_is_not_questioned():
    filled = np.full((40, 40), 255, np.uint8)
    filled[3:37, 3:37] = 0  # more ink than paper
    assert normalise_drawing(filled, invert=True).mean() < 128
    assert (normalise_drawing(filled, invert=True) == normalise_drawing(255 - filled, invert=False)).all()


@pytest.mark.parametrize("contrast", [0.2, 0.5, 1.0])
def test_contrast_does_not_matter(drawings, contrast):
    faint = (255 - contrast * drawings[:10]).round().astype(np.uint8)
    assert (normalised(faint) == normalised(drawings[:10])).all()


def test_uneven_light_and_noise_hardly_matter(drawings):
    random = np.random.default_rng(0)
    light = np.linspace(110, 240, 105)[:, None] + np.linspace(0, 10, 105)
    photos = light * (1 - 0.6 * drawings[:10] / 255) + random.normal(0, 3, (10, 105, 105))
    photos = np.clip(photos, 0, 255).round().astype(np.uint8)
    assert difference(normalised(photos), normalised(drawings[:10])) < 0.1


@pytest.mark.parametrize("width", [1, 2, 3, 8, 12, 18])
def test_every_pen_gives_the_stroke_of_one_pen(width):
    assert difference(normalise_drawing(line(width)), normalise_drawing(line(5))) < 0.35
    ink = normalise_drawing(line(width)).mean() / normalise_drawing(line(5)).mean()
    assert 0.8 < ink < 1.25


@pytest.mark.parametrize("scale", [0.3, 2.0, 5.0])
def test_ink_is_scaled_and_moved_into_the_frame_of_omniglot(scale):
    small = Image.fromarray(line(5)).resize((round(105 * scale),) * 2)
    page = Image.new("L", (max(640, small.width), 480))
    page.paste(small, (0, 20))
    found = np.argwhere(normalise_drawing(np.asarray(page)) > 100) * 105 / 28
    extent, centre = np.ptp(found, 0) + 105 / 28, (found.min(0) + found.max(0)) / 2
    assert 40 < extent.max() < 95
    assert ((centre > 35) & (centre < 65)).all()
    assert extent[0] == pytest.approx(extent[1] * 55 / 45, rel=0.35)  # the aspect ratio stays


def test_a_blank_image_stays_blank():
    assert normalise_drawing(np.full((50, 60), 240, np.uint8)).max() == 0
    assert normalise_drawing(np.zeros((28, 28), np.uint8)).max() == 0
    noise = np.random.default_rng(0).integers(200, 210, (28, 28)).astype(np.uint8)
    assert normalise_drawing(noise).max() < 16


@pytest.mark.parametrize("shape", [(1, 1), (1, 50), (3, 2), (400, 7)])
def test_any_size_gives_an_image(shape):
    image = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    assert normalise_drawing(image, (28, 28)).shape == (28, 28)
    assert normalise_drawing(image, (14, 20)).shape == (14, 20)


def test_a_blurred_photograph_of_a_thick_marker_is_a_thin_line():
    marker = Image.fromarray(255 - line(60, 600, ((120, 150), (480, 450)))).filter(
        ImageFilter.GaussianBlur(8)
    )
    thin = normalise_drawing(255 - line(28, 600, ((120, 150), (480, 450))))
    assert difference(normalise_drawing(np.asarray(marker)), thin) < 0.35


@pytest.mark.parametrize(
    ("side", "width", "noise", "most"),
    [
        (210, 1, 0, 0.5),
        (400, 1, 0, 0.5),
        (640, 2, 0, 0.5),
        (1000, 2, 0, 0.5),
        (200, 3, 20, 0.2),
        (200, 3, 30, 0.7),
    ],
)
def test_thin_strokes_of_a_large_image_are_kept(side, width, noise, most):
    image = Image.new("L", (side, side), 255)
    points = [(0.3, 0.2), (0.7, 0.25), (0.35, 0.8), (0.7, 0.75), (0.3, 0.5)]  # strokes that cross
    ImageDraw.Draw(image).line([(side * x, side * y) for x, y in points], fill=0, width=width)
    small = Image.new("L", (105, 105), 255)
    ImageDraw.Draw(small).line([(105 * x, 105 * y) for x, y in points], fill=0, width=3)
    noisy = 200 - 0.6 * (255 - np.asarray(image)) + np.random.default_rng(0).normal(0, noise, image.size)
    found = normalise_drawing(noisy.clip(0, 255).astype(np.uint8))
    assert difference(found, normalise_drawing(np.asarray(small))) < most
