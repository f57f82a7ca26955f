import numpy as np
import pytest
import torch

from bruno.reporting.images import contact_sheet, grid, png, prefix_grid, prefix_sheet, to_uint8

IMAGES = torch.zeros((3, 1, 8, 8), dtype=torch.uint8)
CELLS = torch.zeros((2, 4, 1, 8, 8), dtype=torch.uint8)


def test_grey_values_span_the_visible_range():
    images = torch.tensor([0, 8, 16], dtype=torch.uint8).view(3, 1, 1, 1)
    assert to_uint8(images, 17).flatten().tolist() == [0, 128, 255]
    images = torch.arange(256).to(torch.uint8).view(-1, 1, 1, 1)
    assert torch.equal(to_uint8(images, 256), images)


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


def test_a_prefix_grid_has_the_inputs_on_top_and_a_column_per_prefix():
    inputs = torch.tensor([10, 20], dtype=torch.uint8).view(2, 1, 1, 1)
    samples = torch.arange(1, 7, dtype=torch.uint8).view(3, 2, 1, 1, 1)
    picture = prefix_grid(inputs, samples, padding=0, background=0)[..., 0]
    assert picture.tolist() == [[0, 10, 20], [1, 3, 5], [2, 4, 6]]
    without_prior = prefix_grid(inputs, samples[1:], padding=0)[..., 0]
    assert without_prior.tolist() == [[10, 20], [3, 5], [4, 6]]


def test_a_png_keeps_every_pixel_a_square(decode):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 100, 1), np.uint8)
    image = decode(png(pixels))
    assert image.size == (1000, 50)
    assert np.array_equal(np.asarray(image)[5::10, 5::10], pixels[..., 0])
    assert decode(png(np.zeros((4, 2000, 3), np.uint8))).size == (2000, 4)


def test_a_prefix_sheet_shows_samples_below_the_number_seen(decode):
    images = np.random.default_rng(0).integers(0, 256, (3, 14, 1, 28, 28), np.uint8)
    sets = [(some[:2], some[2:].unflatten(0, (3, 4))) for some in torch.from_numpy(images)]
    image = np.asarray(decode(prefix_sheet(sets[:1], (0, 1, 20))))
    assert image.shape[2] == 3
    # Every sample is in its column, pixel by pixel, counted from the bottom right corner.
    factor = 1000 // (1 + 5 * 29 + 2)
    for column in range(3):
        for row in range(4):
            down = image.shape[0] - 12 - factor * (4 - row) * 29
            right = image.shape[1] - 12 - factor * ((3 - column) * 29)
            cell = image[down : down + 28 * factor : factor, right : right + 28 * factor : factor]
            assert np.array_equal(cell[..., 0], sets[0][1][column, row, 0].numpy())
    # The header above the columns has their numbers and nothing else.
    header = image[:21]
    inked = (header < 128).any(0).any(1)
    assert inked[-29 * factor - 13 :].any()
    assert not inked[-12:].any()
    assert not np.array_equal(image, np.asarray(decode(prefix_sheet(sets[:1], (0, 1, 21)))))


def test_a_prefix_sheet_leaves_no_empty_corner(decode):
    images = torch.zeros((3, 14, 1, 28, 28), dtype=torch.uint8)
    sets = [(some[:2], some[2:].unflatten(0, (3, 4))) for some in images]
    side_by_side = decode(prefix_sheet(sets, (0, 1, 2)))
    assert side_by_side.width > side_by_side.height
    wide = [(a.repeat(4, 1, 1, 1), b.repeat(3, 1, 1, 1, 1)[:8]) for a, b in sets]
    stacked = decode(prefix_sheet(wide, range(8)))
    assert stacked.height > stacked.width


@pytest.mark.parametrize("channels", [1, 3])
def test_a_contact_sheet_has_the_query_above_and_the_found_images_by_rank(decode, channels):
    images = torch.arange(10, 200, 10, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, channels, 20, 20)
    query, found = images[:2], images[4:]
    sheet = np.asarray(decode(contact_sheet(query, found, [1.0] * len(found), columns=4)))
    # Images are uniform and far larger than letters: their grey values by rows of the sheet, in order.
    seen = []
    for row in sheet[..., 0]:
        values, counts = np.unique_counts(row)
        shown = [int(v) for v, n in zip(values, counts, strict=True) if n > 100 and v < 200]
        if shown and (not seen or seen[-1] != shown):
            seen.append(shown)
    shown = [rows for rows in seen if rows != [60]]  # frames
    assert shown == [[10, 20], [50, 60, 70, 80], [90, 100, 110, 120], [130, 140, 150, 160], [170, 180, 190]]


def test_a_contact_sheet_shows_rank_and_score_below_each_image(decode):
    images = torch.zeros((3, 1, 20, 20), dtype=torch.uint8)
    sheet, other = (
        np.asarray(decode(contact_sheet(images, images, [3.0, 2.0, last]))).astype(int)
        for last in (-41.5, -47.5)
    )
    down, right = np.nonzero((sheet != other).any(2))
    assert len(down)
    assert down.min() > sheet.shape[0] - 40  # in the last line,
    assert right.min() > sheet.shape[1] * 2 / 3  # below the third image
    columns = np.nonzero((sheet[-26:-12] < 128).any(2).any(0))[0]
    assert columns.max() < sheet.shape[1] - 8  # nothing is cut off


def test_a_contact_sheet_may_have_more_images_in_the_query_than_found(decode):
    few, many = IMAGES[:1], IMAGES.expand(3, 1, 8, 8).repeat(4, 1, 1, 1)
    sheet = decode(contact_sheet(many, few, [2.0], columns=6))
    assert sheet.size == decode(contact_sheet(many, many[:6], [2.0] * 6, columns=6)).size
    assert decode(contact_sheet(many, many[:0], [])).width == decode(contact_sheet(many, few, [2.0])).width


def test_a_contact_sheet_of_many_images_is_bounded_and_one_image_is_small(decode):
    few, many = torch.zeros((20, 1, 8, 8), dtype=torch.uint8), torch.zeros((300, 1, 8, 8), dtype=torch.uint8)
    largest = decode(contact_sheet(few, many[:200], [1.0] * 200))
    assert decode(contact_sheet(many, many, [1.0] * 300)).size == largest.size
    assert max(decode(contact_sheet(few[:1], few[:1], [1.0])).size) < 600


def test_scores_of_at_most_zero_are_pale(decode):
    images = torch.full((1, 1, 20, 20), 255, dtype=torch.uint8)
    above, below = (np.asarray(decode(contact_sheet(images, images, [score])))[-28:] for score in (8.8, -8.8))
    assert above.min() < below.min()


def test_scores_wider_than_small_images_do_not_overlap(decode):
    images = torch.zeros((30, 1, 2, 90), dtype=torch.uint8)
    narrow, wide = (
        decode(contact_sheet(images[:1], images, [score] * 30, columns=10)).width
        for score in (1.0, -123456789.0)
    )
    assert wide > narrow


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: grid(IMAGES[:0], 2), r"`images` .*1 or 3 channels; got .*\(0,"),
        (lambda: grid(IMAGES.expand(3, 2, 8, 8), 2), r"`images` .*1 or 3 channels; got .*\(3, 2, 8, 8\)"),
        (lambda: grid(IMAGES, 0), r"`columns` must be at least 1, and `padding` .*got 0 and 2"),
        (lambda: prefix_grid(IMAGES, CELLS), r"`samples` .*each of the 3 inputs.*got \(2, 4, 1, 8, 8\)"),
        (lambda: contact_sheet(IMAGES, IMAGES, [1.0]), r"`scores` must have 3 values.*got 1"),
    ],
)
def test_wrong_arguments_raise(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()
