import gzip

import numpy as np
import pytest
import torch
from image_files import as_idx

from bruno.data.formats import read_idx, read_npz
from bruno.data.loading import load_path


class TestIdx:
    def files(self, path, images=None, labels=None):
        images = np.arange(24, dtype=np.uint8).reshape(4, 3, 2) if images is None else images
        (path / "images.gz").write_bytes(as_idx(images))
        labels = np.array([1, 0, 2, 1], np.uint8) if labels is None else labels
        (path / "labels.gz").write_bytes(as_idx(labels))
        return path / "images.gz", path / "labels.gz"

    def test_pixels_and_labels_are_read(self, tmp_path):
        examples = read_idx(*self.files(tmp_path))
        assert examples.elements.shape == (4, 1, 3, 2)
        assert examples.elements[1].flatten().tolist() == [6, 7, 8, 9, 10, 11]
        assert examples.counts.tolist() == [1, 2, 1]

    def test_a_bad_file_is_named(self, tmp_path):
        images, labels = self.files(tmp_path)
        with pytest.raises(ValueError, match=r"labels.gz: must be an idx file of 3 dimensions"):
            read_idx(labels, labels)
        short = gzip.compress(gzip.decompress(images.read_bytes())[:-5])
        (tmp_path / "short.gz").write_bytes(short)
        with pytest.raises(ValueError, match=r"short.gz: .*4×3×2 bytes; got 19"):
            read_idx(tmp_path / "short.gz", labels)
        (tmp_path / "half.gz").write_bytes(images.read_bytes()[:20])
        with pytest.raises(ValueError, match=r"half.gz: must be a gzipped idx file"):
            read_idx(tmp_path / "half.gz", labels)
        (tmp_path / "empty.gz").write_bytes(b"")
        with pytest.raises(ValueError, match=r"empty.gz: must be a gzipped idx file"):
            read_idx(tmp_path / "empty.gz", labels)
        nothing = self.files(tmp_path, np.zeros((0, 3, 2), np.uint8), np.zeros(0, np.uint8))
        with pytest.raises(ValueError, match=r"images.gz: .*at least one image; got none"):
            read_idx(*nothing)
        few = self.files(tmp_path, np.zeros((4, 3, 2), np.uint8), labels=np.zeros(3, np.uint8))
        with pytest.raises(ValueError, match=r"labels.gz: .*the 4 images of images.gz; got 3"):
            read_idx(*few)


class TestNpz:
    def test_images_and_rows_are_read(self, tmp_path):
        images = np.zeros((3, 4, 5), np.uint8)
        np.savez(tmp_path / "a.npz", images=images, labels=["x", "y", "x"])
        examples = read_npz(tmp_path / "a.npz")
        assert examples.shape == (1, 4, 5)
        assert examples.names == ("x", "y")
        np.savez(tmp_path / "c.npz", images=np.zeros((3, 4, 5, 3), np.uint8), labels=[0, 1, 2])
        assert read_npz(tmp_path / "c.npz").shape == (3, 4, 5)
        np.savez(tmp_path / "r.npz", rows=np.ones((3, 2)), labels=[0, 1, 1])
        assert read_npz(tmp_path / "r.npz").elements.dtype == torch.float64
        np.savez(tmp_path / "bad.npz", pictures=images)
        with pytest.raises(ValueError, match=r"bad.npz: .*`images`, `rows`, `labels`, .*; got pictures"):
            read_npz(tmp_path / "bad.npz")

    def error_for(self, path, **arrays) -> str:
        np.savez(path / "a.npz", **arrays)
        with pytest.raises(ValueError, match=r"a.npz: ") as error:
            read_npz(path / "a.npz")
        return str(error.value)

    def test_columns_of_rows_are_selected_by_name(self, tmp_path):
        rows = np.arange(6.0).reshape(2, 3)
        np.savez(tmp_path / "named.npz", rows=rows, labels=["a", "b"], columns=["x", "y", "z"])
        found = load_path(tmp_path / "named.npz", columns=["z", "x"])
        assert found.columns == ("z", "x")
        assert found.elements.tolist() == [[2, 0], [5, 3]]
        with pytest.raises(ValueError, match=r"'w' is missing from x, y, z"):
            load_path(tmp_path / "named.npz", columns=["w"])
        np.savez(tmp_path / "plain.npz", rows=rows, labels=["a", "b"])
        assert load_path(tmp_path / "plain.npz", columns=["p", "q", "r"]).columns == ("p", "q", "r")
        with pytest.raises(ValueError, match=r"`columns` must name 3 columns; got 1"):
            load_path(tmp_path / "plain.npz", columns=["p"])
        np.savez(tmp_path / "images.npz", images=np.zeros((2, 4, 5), np.uint8), labels=[0, 1])
        with pytest.raises(ValueError, match=r"`columns` must be omitted .*images"):
            load_path(tmp_path / "images.npz", columns=["p"])

    def test_bad_rows_are_skipped_on_request(self, tmp_path):
        rows = [[1.0, 2.0], [np.nan, 2.0], [np.inf, 2.0], [3.0, 4.0]]
        np.savez(tmp_path / "a.npz", rows=rows, labels=["a", "b", "c", "c"])
        with pytest.raises(ValueError, match=r"got nan in row 2.*`skip_bad`"):
            load_path(tmp_path / "a.npz")
        found = load_path(tmp_path / "a.npz", skip_bad=True)
        assert found.elements.tolist() == [[1, 2], [3, 4]]
        assert (found.names, found.labels.tolist()) == (("a", "c"), [0, 1])
        assert found.skipped == ("row 2", "row 3")
        assert load_path(tmp_path / "a.npz", skip_bad=True, missing=True).names == ("a", "b", "c")
        np.savez(tmp_path / "a.npz", rows=rows[1:3], labels=["b", "c"])
        with pytest.raises(ValueError, match=r"at least one row that can be used"):
            load_path(tmp_path / "a.npz", skip_bad=True)

    @pytest.mark.parametrize("argument", ["group", "table_format"])
    def test_the_labels_name_the_groups(self, tmp_path, argument):
        np.savez(tmp_path / "a.npz", rows=np.ones((3, 2)), labels=[0, 1, 1])
        with pytest.raises(ValueError, match=rf"`{argument}` must be omitted .*a.npz.*got 'header'"):
            load_path(tmp_path / "a.npz", **{argument: "header"})

    def test_labels_may_be_a_column(self, tmp_path):
        np.savez(tmp_path / "a.npz", images=np.zeros((3, 4, 5), np.uint8), labels=[[0], [1], [1]])
        assert read_npz(tmp_path / "a.npz").labels.tolist() == [0, 1, 1]

    def test_channels_are_first_or_last_and_never_ambiguous(self, tmp_path):
        images = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
        np.savez(tmp_path / "last.npz", images=images, labels=[0, 1])
        np.savez(tmp_path / "first.npz", images=images.transpose(0, 3, 1, 2), labels=[0, 1])
        last, first = read_npz(tmp_path / "last.npz"), read_npz(tmp_path / "first.npz")
        assert torch.equal(last.elements, first.elements)
        assert last.shape == (3, 4, 5)
        np.savez(tmp_path / "flat.npz", images=np.zeros((2, 3, 5), np.uint8), labels=[0, 1])
        assert read_npz(tmp_path / "flat.npz").shape == (1, 3, 5)
        for shape in ((2, 3, 5, 3), (2, 4, 5, 6)):
            message = self.error_for(tmp_path, images=np.zeros(shape, np.uint8), labels=[0, 1])
            assert f"got uint8 {shape}" in message

    def test_a_bad_npz_is_named(self, tmp_path):
        images = np.zeros((3, 4, 5), np.uint8)
        assert "shape (2,) for 3 elements" in self.error_for(tmp_path, images=images, labels=[0, 1])
        assert "shape (3, 2) for 3 elements" in self.error_for(tmp_path, images=images, labels=[[0, 1]] * 3)
        assert "shape (0,) for 0 elements" in self.error_for(tmp_path, images=images[:0], labels=[])
        assert "got float64 (3, 4, 5)" in self.error_for(tmp_path, images=images / 255, labels=[0, 1, 2])
        assert "got <U1 (1, 2)" in self.error_for(tmp_path, rows=[["a", "b"]], labels=[0])
        assert "got float64 (2,)" in self.error_for(tmp_path, rows=[1.0, 2.0], labels=[0, 1])
        assert "got 1e+39" in self.error_for(tmp_path, rows=[[1.0, 1e39]], labels=[0])
        assert "got nan" in self.error_for(tmp_path, rows=[[np.nan, 1.0]], labels=[0])
        with (tmp_path / "a.npz").open("wb") as file:
            np.save(file, images)
        with pytest.raises(ValueError, match=r"a.npz: .*an .npy"):
            read_npz(tmp_path / "a.npz")
