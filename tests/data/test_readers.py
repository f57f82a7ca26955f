import gzip
import io
import pickle
import struct
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from bruno.data.readers import read_cifar10, read_csv, read_idx, read_images, read_npz


def picture(value: int, size=(6, 4), mode="L") -> bytes:
    file = io.BytesIO()
    Image.new(mode, size, value if mode == "L" else (value, 0, 255)).save(file, "PNG")
    return file.getvalue()


FILES = {"cats/1.png": picture(10), "cats/2.png": picture(20), "dogs/1.png": picture(30)}


def as_folder(path, files):
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def as_zip(path, files):
    path = path / "images.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"wrapper/{name}", content)
    return path


def as_tar(path, files):
    path = path / "images.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


every_kind = pytest.mark.parametrize("pack", [as_folder, as_zip, as_tar])


@every_kind
def test_class_folders(pack, tmp_path):
    examples = read_images(pack(tmp_path, FILES))
    assert examples.names == ("cats", "dogs")
    assert examples.labels.tolist() == [0, 0, 1]
    assert examples.elements.shape == (3, 1, 4, 6)
    assert examples.elements[:, 0, 0, 0].tolist() == [10, 20, 30]


def test_size_colour_and_ink(tmp_path):
    path = as_folder(tmp_path, {"a/1.png": picture(40, (9, 9), "RGB")})
    assert read_images(path, size=5, grey=False).elements[0, :, 2, 2].tolist() == [40, 0, 255]
    assert read_images(path, size=(3, 2)).shape == (1, 3, 2)
    dark = as_folder(tmp_path / "dark", {"a/1.png": picture(0)})
    assert read_images(dark, invert=True).elements.unique().tolist() == [255]


@every_kind
def test_a_bad_image_is_named_or_counted(pack, tmp_path):
    path = pack(tmp_path, {**FILES, "dogs/broken.png": FILES["dogs/1.png"][:30]})
    with pytest.raises(ValueError, match=r"dogs/broken.png cannot be used"):
        read_images(path)
    examples = read_images(path, skip_bad=True)
    assert len(examples) == 3
    assert examples.skipped == ("dogs/broken.png",)


def test_mixed_sizes_need_a_size(tmp_path):
    path = as_folder(tmp_path, {**FILES, "dogs/2.png": picture(1, (7, 7))})
    with pytest.raises(ValueError, match=r"dogs/2.png .* one size, \(4, 6\); got \(7, 7\). Set a size"):
        read_images(path)
    assert len(read_images(path, size=4)) == 4


def test_nothing_to_read(tmp_path):
    with pytest.raises(ValueError, match=r"no images in class folders were found"):
        read_images(tmp_path)
    (tmp_path / "cut.zip").write_bytes(as_zip(tmp_path, FILES).read_bytes()[:100])
    with pytest.raises(
        ValueError, match=r"cut.zip: must be a folder, zip or tar of class folders, an .npz or a .csv"
    ):
        read_images(tmp_path / "cut.zip")


def idx(array: np.ndarray) -> bytes:
    return gzip.compress(
        struct.pack(f">{array.ndim + 1}I", 0x800 + array.ndim, *array.shape) + array.tobytes()
    )


class TestIdx:
    def files(self, path, images=None, labels=None):
        images = np.arange(24, dtype=np.uint8).reshape(4, 3, 2) if images is None else images
        (path / "images.gz").write_bytes(idx(images))
        (path / "labels.gz").write_bytes(idx(np.array([1, 0, 2, 1], np.uint8) if labels is None else labels))
        return path / "images.gz", path / "labels.gz"

    def test_pixels_and_labels(self, tmp_path):
        examples = read_idx(*self.files(tmp_path))
        assert examples.elements.shape == (4, 1, 3, 2)
        assert examples.elements[1].flatten().tolist() == [6, 7, 8, 9, 10, 11]
        assert examples.counts.tolist() == [1, 2, 1]

    def test_broken_files_are_named(self, tmp_path):
        images, labels = self.files(tmp_path)
        with pytest.raises(ValueError, match=r"labels.gz: must be an idx file of 3 dimensions"):
            read_idx(labels, labels)
        short = gzip.compress(gzip.decompress(images.read_bytes())[:-5])
        (tmp_path / "short.gz").write_bytes(short)
        with pytest.raises(ValueError, match=r"short.gz: must hold 4×3×2 bytes; has 19. It is cut short"):
            read_idx(tmp_path / "short.gz", labels)
        (tmp_path / "half.gz").write_bytes(images.read_bytes()[:20])
        with pytest.raises(ValueError, match=r"half.gz: is not a gzipped idx file, or is cut short"):
            read_idx(tmp_path / "half.gz", labels)
        (tmp_path / "empty.gz").write_bytes(b"")
        with pytest.raises(ValueError, match=r"empty.gz: is not a gzipped idx file"):
            read_idx(tmp_path / "empty.gz", labels)
        few = self.files(tmp_path, labels=np.zeros(3, np.uint8))
        with pytest.raises(ValueError, match=r"labels.gz: must label the 4 images of images.gz; has 3"):
            read_idx(*few)


class TestCifar:
    def archive(self, path, batch=None):
        content = {b"data": np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072), b"labels": [1, 0]}
        files = {f"data_batch_{i}": content for i in range(1, 6)}
        files |= {"test_batch": batch or content, "batches.meta": {b"label_names": [b"cat", b"dog"]}}
        return as_tar(path, {f"cifar/{n}": pickle.dumps(c, protocol=2) for n, c in files.items()})

    def test_batches(self, tmp_path):
        path = self.archive(tmp_path)
        train, test = read_cifar10(path, train=True), read_cifar10(path, train=False)
        assert train.elements.shape == (10, 3, 32, 32)
        assert test.labels.tolist() == [1, 0]
        assert test.names == ("cat", "dog")

    def test_a_pickle_that_asks_for_more_than_arrays_is_refused(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return print, ("never printed",)

        with pytest.raises(ValueError, match=r"it asks for builtins.print|it asks for __builtin__.print"):
            read_cifar10(self.archive(tmp_path, {b"data": Evil()}), train=False)


class TestTables:
    def test_npz(self, tmp_path):
        images = np.zeros((3, 4, 5), np.uint8)
        np.savez(tmp_path / "a.npz", images=images, labels=["x", "y", "x"])
        examples = read_npz(tmp_path / "a.npz")
        assert examples.shape == (1, 4, 5)
        assert examples.names == ("x", "y")
        np.savez(tmp_path / "c.npz", images=np.zeros((3, 4, 5, 3), np.uint8), labels=[0, 1, 2])
        assert read_npz(tmp_path / "c.npz").shape == (3, 4, 5)
        np.savez(tmp_path / "r.npz", rows=np.ones((3, 2)), labels=[0, 1, 1])
        assert read_npz(tmp_path / "r.npz").elements.dtype == torch.float32
        np.savez(tmp_path / "bad.npz", pictures=images)
        with pytest.raises(ValueError, match=r"must hold `images` or `rows`, and `labels`; has pictures"):
            read_npz(tmp_path / "bad.npz")

    def test_csv(self, tmp_path):
        path = tmp_path / "t.csv"
        path.write_text("machine,a,b\nm1,1,2.5\nm2,3,4\nm1,5,6\n")
        examples = read_csv(path, "machine")
        assert examples.names == ("m1", "m2")
        assert examples.elements.tolist() == [[1, 2.5], [3, 4], [5, 6]]
        with pytest.raises(ValueError, match=r"`group` must be a column, one of machine, a, b; got 'plant'"):
            read_csv(path, "plant")
        path.write_text("machine,a\nm1,1\nm1,oops\nm2,2\n")
        with pytest.raises(ValueError, match=r"line 3 is not numbers throughout"):
            read_csv(path, "machine")
        assert read_csv(path, "machine", skip_bad=True).skipped == ("line 3",)
