import numpy as np
import pytest
import torch

from bruno.data import Examples


@pytest.fixture
def examples():
    return Examples(torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 1, 2, 2, 2]), ("a", "b", "c"), ("x",))


def test_what_is_saved_is_loaded(examples, tmp_path):
    examples.save(tmp_path / "e.npz")
    loaded = Examples.load(tmp_path / "e.npz")
    assert torch.equal(loaded.elements, examples.elements)
    assert (loaded.names, loaded.skipped, loaded.levels) == (("a", "b", "c"), ("x",), 0)


def test_two_may_save_the_same_file_at_once(examples, tmp_path, monkeypatch):
    write, other = np.savez_compressed, iter([examples])

    def meanwhile_another_saves(file, **arrays):
        for late in other:
            late.save(tmp_path / "e.npz")
        write(file, **arrays)

    monkeypatch.setattr(np, "savez_compressed", meanwhile_another_saves)
    examples.save(tmp_path / "e.npz")
    assert len(Examples.load(tmp_path / "e.npz")) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["e.npz"]


def test_a_save_that_fails_leaves_nothing(examples, tmp_path, monkeypatch):
    def disk_is_full(file, **arrays):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez_compressed", disk_is_full)
    with pytest.raises(OSError, match="no space"):
        examples.save(tmp_path / "e.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keep", [0, 10, 300, -30])
def test_a_damaged_file_is_named(examples, tmp_path, keep):
    path = tmp_path / "e.npz"
    examples.save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"e.npz: is no compact file of examples"):
        Examples.load(path)


def test_classes_with_too_few_elements_are_left_out_by_name(examples):
    kept = examples.with_at_least(2)
    assert kept.names == ("b", "c")
    assert kept.labels.tolist() == [0, 0, 1, 1, 1]
    assert kept.skipped == ("x", "a (only 1)")
    assert examples.with_at_least(4) is examples


@pytest.mark.parametrize(
    ("elements", "labels", "error", "message"),
    [
        (
            np.zeros((2, 3)),
            torch.tensor([0, 1]),
            TypeError,
            r"`elements` must be a torch.Tensor",
        ),
        (torch.zeros(2, 3), [0, 1], TypeError, r"`labels` must be a torch.Tensor; got list"),
        (
            torch.zeros(2, 3),
            torch.tensor([0.0, 1.0]),
            TypeError,
            r"`labels` must be integers",
        ),
        (torch.zeros(2, 3), torch.tensor([0, 2]), ValueError, r"`labels` must be from 0 to 1.*got 2"),
        (torch.zeros(2, 3), torch.tensor([-1, 1]), ValueError, r"`labels` must be from 0 to 1.*got -1"),
        (
            torch.zeros(2, 3),
            torch.tensor([0]),
            ValueError,
            r"one for each of 2 elements; got 1",
        ),
    ],
)
@pytest.mark.usefixtures("without_shape_checks")
def test_what_cannot_be_examples(elements, labels, error, message):
    with pytest.raises(error, match=message):
        Examples(elements, labels, ("a", "b"))
