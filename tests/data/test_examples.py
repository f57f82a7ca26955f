import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bruno.arrays import to_numpy
from bruno.data import Examples
from bruno.data.examples import concatenate, rescale_levels


@pytest.fixture
def examples():
    return Examples(torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 1, 2, 2, 2]), ("a", "b", "c"), ("x",))


def test_saved_examples_are_loaded(examples, tmp_path):
    examples.save(tmp_path / "e.npz")
    loaded = Examples.load(tmp_path / "e.npz")
    assert torch.equal(loaded.elements, examples.elements)
    assert (loaded.names, loaded.skipped, loaded.levels) == (("a", "b", "c"), ("x",), 0)


def test_two_processes_may_save_the_same_file_at_once(examples, tmp_path, monkeypatch):
    write, others = np.savez_compressed, iter([examples])

    def save_after_another_process(file, **arrays):
        for other in others:
            other.save(tmp_path / "e.npz")
        write(file, **arrays)

    monkeypatch.setattr(np, "savez_compressed", save_after_another_process)
    examples.save(tmp_path / "e.npz")
    assert len(Examples.load(tmp_path / "e.npz")) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["e.npz"]


def test_a_failed_save_leaves_no_file(examples, tmp_path, monkeypatch):
    def disk_is_full(file, **arrays):
        raise OSError("no space left on device")

    for function in ("savez", "savez_compressed"):
        monkeypatch.setattr(np, function, disk_is_full)
    with pytest.raises(OSError, match="no space"):
        examples.save(tmp_path / "e.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keep", [0, 10, 300, -30])
def test_a_damaged_file_is_named(examples, tmp_path, keep):
    path = tmp_path / "e.npz"
    examples.save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"e.npz: "):
        Examples.load(path)


def test_classes_with_too_few_elements_are_skipped_by_name(examples):
    kept = examples.with_at_least(2)
    assert kept.names == ("b", "c")
    assert kept.labels.tolist() == [0, 0, 1, 1, 1]
    assert kept.skipped == ("x", "a (only 1)")
    assert examples.with_at_least(4) is examples


def as_list(x: torch.Tensor) -> list:
    return list(x)


def as_arrays(x: torch.Tensor) -> list:
    return list(x.numpy())


@pytest.mark.parametrize("convert", [torch.Tensor.numpy, torch.Tensor.tolist, as_list, as_arrays])
def test_arrays_and_lists_are_accepted_like_tensors(examples, convert):
    rows = examples.elements.double()
    made = Examples(convert(rows), convert(examples.labels), list(examples.names))
    assert torch.equal(made.elements, rows)
    assert made.elements.dtype == torch.float64
    assert torch.equal(made.labels, examples.labels)
    assert (made.names, made.levels, made.is_images) == (examples.names, 0, False)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3)])
def test_lists_of_pil_images_are_accepted(mode, channels):
    pixels = torch.randint(0, 256, (3, 4, 5, channels), dtype=torch.uint8)
    images = [Image.fromarray(image.squeeze(-1).numpy(), mode) for image in pixels]
    made = Examples(images, [0, 1, 1], ("a", "b"))
    assert torch.equal(made.elements, pixels.movedim(3, 1))
    assert made.is_images


def test_read_only_arrays_and_small_integers_are_accepted():
    images = np.arange(8, dtype=np.uint8).reshape(2, 1, 2, 2)
    images.flags.writeable = False
    made = Examples(images[::-1], np.array([1, 0], np.uint8), ("a", "b"))
    assert made.elements.flatten().tolist() == [4, 5, 6, 7, 0, 1, 2, 3]
    assert made.labels.dtype == torch.long


def test_classes_are_selected_by_name_in_the_given_order(examples):
    chosen = examples.select(["c", "a"])
    assert chosen.names == ("c", "a")
    assert chosen.labels.tolist() == [1, 0, 0, 0]
    assert chosen.elements[:, 0].tolist() == [0, 6, 8, 10]
    with pytest.raises(ValueError, match=r"`classes` .*a, b, c; got 'd'"):
        examples.select(["a", "d"])


def test_classes_are_left_out_by_name(examples):
    rest = examples.without(["b", "d"])
    assert rest.names == ("a", "c")
    assert rest.elements[:, 0].tolist() == [0, 6, 8, 10]
    assert examples.without("abc") is None


@given(st.lists(st.integers(0, 4), max_size=20), st.permutations(range(5)), st.integers(0, 5))
def test_a_selection_of_classes_has_exactly_their_elements(labels, order, kept):
    names = "abcde"
    examples = Examples(torch.arange(len(labels)).double().view(-1, 1), torch.tensor(labels).long(), names)
    part = examples.of_classes(order[:kept])
    assert part.names == tuple(names[i] for i in order[:kept])
    found = zip(part.elements.flatten().tolist(), part.labels.tolist(), strict=True)
    expected = [(i, names[label]) for i, label in enumerate(labels) if label in order[:kept]]
    assert [(x, part.names[label]) for x, label in found] == expected


@given(st.integers(2, 300), st.integers(0, 300))
def test_more_levels_and_back_is_the_identity(levels, more):
    pixels = torch.arange(levels)
    rescaled = rescale_levels(pixels, levels, levels + more)
    assert (rescaled.min(), rescaled.max()) == (0, levels + more - 1)
    assert (rescaled.long().diff() > 0).all()
    assert torch.equal(rescale_levels(rescaled, levels + more, levels).long(), pixels)


def test_images_are_rescaled_and_inverted_and_rows_are_not():
    pixels = np.array([0, 8, 16], np.uint8).reshape(3, 1, 1, 1)
    images = Examples(pixels, [0, 0, 0], ["a"], levels=17)
    assert images.with_levels(256).elements.flatten().tolist() == [0, 128, 255]
    assert images.with_levels(256).levels == 256
    assert images.inverted().elements.flatten().tolist() == [16, 8, 0]
    rows = Examples(torch.zeros(3, 2), [0, 0, 0], ["a"])
    assert rows.with_levels(256) is rows
    with pytest.raises(ValueError, match=r"`invert` .*rows"):
        rows.inverted()


def test_joined_examples_keep_their_classes_separate(examples):
    joined = concatenate([examples, examples.select(["b"])])
    assert joined.names == ("a", "b", "c", "b")
    assert joined.labels.tolist() == [0, 1, 1, 2, 2, 2, 3, 3]
    assert joined.skipped == ("x", "x")


def test_positions_are_listed_by_class():
    examples = Examples(torch.arange(5.0).view(5, 1), [2, 0, 2, 0, 2], "abc")
    assert [members.tolist() for members in examples.by_class()] == [[1, 3], [], [0, 2, 4]]
    assert examples.at(examples.by_class()[2]).elements.flatten().tolist() == [0, 2, 4]


def test_parts_of_a_table_keep_its_format_and_its_columns():
    about = {"columns": ("heat",), "ignored": ("note (text)",), "table_format": "semicolon"}
    table = Examples(torch.zeros(4, 1), [0, 0, 1, 1], "ab", **about)
    for part in (concatenate([table, table]), table.at(torch.tensor([0, 2])), table.select(["b"])):
        assert {name: getattr(part, name) for name in about} == about


@pytest.mark.parametrize(
    ("elements", "labels", "error", "message"),
    [
        ("text", [0, 1], TypeError, r"`elements` .*got str"),
        ([torch.zeros(2), torch.zeros(3)], [0, 1], ValueError, r"`elements` .*got \(2,\) and \(3,\)"),
        ([[1.0], [1.0, 2.0]], [0, 1], ValueError, r"`elements` .*got \(1,\) and \(2,\)"),
        (torch.zeros(2, 3), ["a", "b"], TypeError, r"`labels` .*got str"),
        (torch.zeros(2, 3), [0.0, 1.0], TypeError, r"`labels` must be integers.*float64"),
        (torch.zeros(2, 3), torch.tensor([[0, 1]]), TypeError, r"`labels` .*\(1, 2\)"),
        (torch.zeros(2, 3), torch.tensor([0, 2]), ValueError, r"`labels` .*from 0 to 1.*got 2"),
        (torch.zeros(2, 3), torch.tensor([-1, 1]), ValueError, r"`labels` .*from 0 to 1.*got -1"),
        (torch.zeros(2, 3), torch.tensor([0]), ValueError, r"`labels` .*2 elements; got 1"),
    ],
)
def test_bad_elements_or_labels_are_named(elements, labels, error, message):
    with pytest.raises(error, match=message):
        Examples(elements, labels, ("a", "b"))


@pytest.mark.parametrize("keep", [[2], [0, -1]])
def test_classes_that_do_not_exist_are_named(keep):
    examples = Examples(torch.zeros(2, 3), [0, 1], ("a", "b"))
    with pytest.raises(ValueError, match=rf"`keep` .*from 0 to 1; got {keep[-1]}"):
        examples.of_classes(keep)


def test_a_class_is_selected_only_once(examples):
    with pytest.raises(ValueError, match=r"`classes` must all differ; got 'a' twice"):
        examples.select(["a", "b", "a"])
    with pytest.raises(ValueError, match=r"`keep` must all differ; got 1 twice"):
        examples.of_classes(iter([1, 1]))


def test_examples_convert_to_arrays():
    examples = Examples([[1.0, 2.0], [3.0, 4.0]], [1, 0], ("a", "b"))
    found = to_numpy(examples)
    np.testing.assert_array_equal(found["elements"], [[1, 2], [3, 4]])
    assert found["labels"].tolist() == [1, 0]
    assert found["names"] == ("a", "b")
    again = Examples(**found)
    assert torch.equal(again.elements, examples.elements)
