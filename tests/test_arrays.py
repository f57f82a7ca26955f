"""Arrays, lists and images become tensors of the same values."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from bruno.arrays import NumpyResult, as_tensor, image_to_array, to_numpy
from bruno.kinds import Images, Rows

NUMBERS = st.one_of(
    arrays.integer_dtypes(endianness="?"),
    arrays.unsigned_integer_dtypes(endianness="?", sizes=(8, 16, 32)),
    arrays.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
)
ANY_ARRAY = arrays.arrays(NUMBERS, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))


@given(ANY_ARRAY)
def test_arrays_of_any_type_and_byte_order_keep_their_values(array):
    np.testing.assert_array_equal(as_tensor(array).numpy(), array)


@given(ANY_ARRAY, st.data())
def test_arrays_with_any_strides_keep_their_values(array, data):
    view = array
    if array.ndim:
        step = data.draw(st.sampled_from([-2, -1, 1, 2]))
        view = array[::step].T
    view = view.view()
    view.flags.writeable = data.draw(st.booleans())
    np.testing.assert_array_equal(as_tensor(view).numpy(), view)


@given(ANY_ARRAY.filter(lambda array: array.ndim and len(array)))
def test_a_list_of_parts_is_stacked(array):
    tensor = as_tensor(array)
    assert torch.equal(as_tensor(list(array)).nan_to_num(), tensor.nan_to_num())
    assert torch.equal(as_tensor(list(tensor)).nan_to_num(), tensor.nan_to_num())


def test_a_tensor_is_returned_unchanged():
    x = torch.randn(3, requires_grad=True)
    assert as_tensor(x) is x


def test_a_column_of_a_table_with_several_types_is_read():
    table = np.array([(1, 2.5), (3, 4.5)], dtype=[("a", "i1"), ("b", "f8")])
    assert as_tensor(table["b"]).tolist() == [2.5, 4.5]


def test_anything_that_numpy_can_read_is_read():
    class Frame:
        def __array__(self, dtype=None, copy=None):
            return np.ones((2, 3))

    assert torch.equal(as_tensor(Frame()), torch.ones(2, 3, dtype=torch.double))


@pytest.mark.parametrize(
    ("wrong", "given"),
    [
        (None, "NoneType"),
        ("1", "str"),
        ({}, "dict"),
        ([1, None], "NoneType"),
        ([["a"]], "str"),
        (np.array(["a"]), "ndarray of <U1"),
        (np.array([None]), "ndarray of object"),
        (np.array([1j]), "ndarray of complex128"),
        (np.array(["2020"], dtype="M8[Y]"), "ndarray of datetime64"),
        (Image.new("L", (2, 2)), "<PIL"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_other_types_are_rejected_by_name(wrong, given):
    with pytest.raises(TypeError, match=f"`support` must .*got {given}"):
        as_tensor(wrong, "support")


def test_lists_are_of_one_shape_and_one_device():
    with pytest.raises(ValueError, match=r"`x` must be .*one shape; got \(2,\) and \(3,\)"):
        as_tensor([np.zeros(2), np.zeros(3)])
    with pytest.raises(ValueError, match=r"`x` must be .*one device; got elements on cpu and meta"):
        as_tensor([torch.zeros(2), torch.zeros(2, device="meta")])
    with pytest.raises(ValueError, match="`x` must hold at least one element; got an empty tuple"):
        as_tensor(())


def test_the_exif_orientation_is_applied_to_a_copy():
    image = Image.new("L", (4, 2))
    image.putpixel((0, 0), 255)
    image.getexif()[0x0112] = 6  # rotate clockwise to display
    array = image_to_array(image, None, grey=True)
    assert array.shape == (1, 4, 2)
    assert array[0, 0, 1] == 255
    assert image.size == (4, 2)


def test_16_bit_images_keep_their_range():
    image = Image.fromarray(np.full((2, 2), 65535, np.uint16))
    assert (image_to_array(image, None, grey=True) == 255).all()


def test_transparent_pixels_contrast_with_the_ink():
    image = Image.new("RGBA", (2, 1))
    image.putpixel((0, 0), (0, 0, 0, 255))
    assert image_to_array(image, None, grey=True).tolist() == [[[0, 255]]]


def test_images_of_unknown_scale_are_rejected():
    with pytest.raises(ValueError, match="`x` must be an image with 8 or 16 bits; got <PIL"):
        as_tensor(Image.new("F", (2, 2)), kind=Images((1, 2, 2)))


def test_images_without_pixels_are_rejected():
    with pytest.raises(ValueError, match=r"`x` .*got <PIL.*its size is 0 × 4"):
        as_tensor(Image.new("L", (0, 4)), kind=Images((1, 2, 2)))


def test_results_convert_to_arrays_by_field():
    @dataclass(frozen=True)
    class Ranking(NumpyResult):
        scores: torch.Tensor
        names: tuple[str, ...]

    result = Ranking(torch.ones(2, requires_grad=True) * 2, ("a", "b"))
    found = result.numpy()
    assert set(found) == {field.name for field in dataclasses.fields(result)}
    np.testing.assert_array_equal(found["scores"], [2, 2])
    assert found["names"] == ("a", "b")
    assert to_numpy(3) == 3


def test_results_in_results_named_tuples_and_dictionaries_are_converted():
    class Pair(NamedTuple):
        x: torch.Tensor
        name: str

    @dataclass(frozen=True)
    class Outcome(NumpyResult):
        by_name: dict
        parts: tuple

    @dataclass(frozen=True)
    class Score(NumpyResult):
        score: torch.Tensor

    score = Score(torch.ones(2, requires_grad=True))
    found = Outcome({"a": score}, (Pair(torch.zeros(1), "b"), 3)).numpy()
    np.testing.assert_array_equal(found["by_name"]["a"]["score"], [1, 1])
    assert isinstance(found["parts"][0]["x"], np.ndarray)
    assert found["parts"][0]["name"] == "b"
    assert found["parts"][1] == 3


def test_whole_numbers_of_a_list_are_numbers_of_rows():
    rows = [[1, 2], [3, 4]]
    parts = (rows, tuple(rows), [np.array(row) for row in rows], [torch.tensor(row) for row in rows])
    for given_rows in parts:
        found = as_tensor(given_rows, kind=Rows((2,)))
        assert found.dtype == torch.double
        assert found.tolist() == rows
        assert (
            as_tensor(given_rows).dtype == as_tensor(given_rows, kind=Images((1, 2, 2))).dtype == torch.long
        )
    assert as_tensor(np.array(rows), kind=Rows((2,))).dtype == torch.long  # rejected with a hint by models
    assert as_tensor([True, False], kind=Rows((2,))).dtype == torch.bool
