import pickle

import numpy as np
import pytest
from image_files import as_tar
from PIL import Image

from bruno.data import load_examples
from bruno.data.cifar import (
    CIFAR10_CLASSES,
    read_cifar10_binary,
    read_cifar10_python,
    read_cifar10_sheets,
)

PIXELS = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)


class TestBinary:
    def archive(self, path, **replaced):
        records = np.concatenate([np.array([[1], [0]], np.uint8), PIXELS], 1).tobytes()
        files = {f"data_batch_{i}.bin": records for i in range(1, 6)}
        files |= {"test_batch.bin": records, "batches.meta.txt": b"cat\ndog\n\n"}
        return as_tar(path, {f"cifar/{name}": content for name, content in (files | replaced).items()})

    def test_all_batches_of_a_split_are_read(self, tmp_path):
        path = self.archive(tmp_path)
        train, test = read_cifar10_binary(path, train=True), read_cifar10_binary(path, train=False)
        assert train.elements.shape == (10, 3, 32, 32)
        assert test.labels.tolist() == [1, 0]
        assert test.names == ("cat", "dog")
        assert np.array_equal(test.elements.numpy().reshape(2, 3072), PIXELS)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"\x01" + bytes(3071), r"3072.*3073"),
            (b"", r"at least one"),
            (b"\x07" + bytes(3072), r"`labels` .*7"),
        ],
    )
    def test_a_bad_batch_raises_with_the_path_of_the_file(self, tmp_path, content, message):
        path = self.archive(tmp_path, **{"test_batch.bin": content})
        with pytest.raises(ValueError, match=rf"images.tar.gz: .*binary version of CIFAR-10.*{message}"):
            read_cifar10_binary(path, train=False)

    def test_a_missing_batch_is_named(self, tmp_path):
        path = as_tar(tmp_path, {"cifar/batches.meta.txt": b"cat"})
        with pytest.raises(ValueError, match=r"test_batch.bin"):
            read_cifar10_binary(path, train=False)


class TestSheets:
    def sheets(self, folder, rows=1):
        folder.mkdir(exist_ok=True)
        for part in ("train", "test"):
            for index, name in enumerate(CIFAR10_CLASSES):
                tiles = np.arange(3 * rows)[:, None, None, None] + np.full((3 * rows, 32, 32, 3), 10 * index)
                grid = tiles.reshape(rows, 3, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(32 * rows, 96, 3)
                Image.fromarray(grid.astype(np.uint8)).save(folder / f"{part}-{name}.webp", lossless=True)

    def test_tiles_are_read_row_by_row(self, tmp_path):
        self.sheets(tmp_path, rows=2)
        examples = read_cifar10_sheets([tmp_path / "train-airplane.webp", tmp_path / "train-bird.webp"])
        assert examples.names == ("airplane", "bird")
        assert examples.labels.tolist() == [0] * 6 + [1] * 6
        assert examples.elements[:, 0, 0, 0].tolist() == [*range(6), *range(20, 26)]
        assert (examples.elements == examples.elements[:, :1, :1, :1]).all()

    def test_sheets_replace_a_missing_archive(self, tmp_path, monkeypatch):
        monkeypatch.setenv("BRUNO_CACHE", str(tmp_path / "cache"))
        self.sheets(tmp_path / "cifar10")
        train, test = (load_examples("cifar10", split, data_dir=tmp_path) for split in ("train", "test"))
        assert train.names == test.names == CIFAR10_CLASSES
        assert train.counts.tolist() == [3] * 10

    def test_other_sizes_are_rejected(self, tmp_path):
        Image.new("RGB", (64, 40)).save(tmp_path / "train-cat.webp")
        with pytest.raises(ValueError, match=r"train-cat.webp: .*32 × 32 pixels; got 40 × 64"):
            read_cifar10_sheets([tmp_path / "train-cat.webp"])
        (tmp_path / "train-dog.webp").write_bytes(b"no image")
        with pytest.raises(ValueError, match=r"train-dog.webp: .*it is not an image"):
            read_cifar10_sheets([tmp_path / "train-dog.webp"])


class TestPython:
    def archive(self, path, batch=None, **replaced):
        content = {b"data": PIXELS, b"labels": [1, 0]}
        files = {f"data_batch_{i}": content for i in range(1, 6)}
        files |= {"test_batch": batch or content, "batches.meta": {b"label_names": [b"cat", b"dog"]}}
        pickles = {name: pickle.dumps(content, protocol=2) for name, content in files.items()}
        return as_tar(path, {f"cifar/{name}": content for name, content in (pickles | replaced).items()})

    def test_all_batches_of_a_split_are_read(self, tmp_path):
        path = self.archive(tmp_path)
        train, test = read_cifar10_python(path, train=True), read_cifar10_python(path, train=False)
        assert train.elements.shape == (10, 3, 32, 32)
        assert test.labels.tolist() == [1, 0]
        assert test.names == ("cat", "dog")

    def test_only_arrays_are_unpickled(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return eval, ("1 / 0",)  # never called

        with pytest.raises(ValueError, match=r"refused to unpickle (__builtin__|builtins).eval"):
            read_cifar10_python(self.archive(tmp_path, {b"data": Evil()}), train=False)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (pickle.dumps({b"labels": [1, 0]}), r"b'data' is missing"),
            (pickle.dumps({b"data": np.zeros((2, 3072), np.uint8)}), r"b'labels' is missing"),
            (
                pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}),
                r"`labels` .*2 elements; got 1",
            ),
            (b"\x80\x02X\x01\x00\x00\x00\xff.", r"codec can't decode"),
            (b"", r"Ran out of input"),
        ],
    )
    def test_a_bad_batch_raises_with_the_path_of_the_file(self, tmp_path, content, message):
        path = self.archive(tmp_path, test_batch=content)
        with pytest.raises(ValueError, match=rf"images.tar.gz: .*CIFAR-10.*{message}"):
            read_cifar10_python(path, train=False)

    def test_the_message_about_a_bad_archive_has_one_line(self, tmp_path):
        path = self.archive(tmp_path)
        whole = path.read_bytes()
        for content in (b"not a tar", whole[:200], whole[:-9]):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"images.tar.gz: .*CIFAR-10") as error:
                read_cifar10_python(path, train=False)
            assert "\n" not in str(error.value)
