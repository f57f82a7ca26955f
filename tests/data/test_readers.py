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

from bruno.data.readers import decode, read_cifar10, read_csv, read_idx, read_images, read_npz


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
    assert read_images(dark).inverted().elements.unique().tolist() == [255]


@every_kind
def test_a_bad_image_is_named_or_counted(pack, tmp_path):
    path = pack(tmp_path, {**FILES, "dogs/broken.png": FILES["dogs/1.png"][:30]})
    with pytest.raises(ValueError, match=r"dogs/broken.png cannot be used"):
        read_images(path)
    examples = read_images(path, skip_bad=True)
    assert len(examples) == 3
    assert [name.removeprefix("wrapper/") for name in examples.skipped] == ["dogs/broken.png"]


def test_mixed_sizes_need_a_size(tmp_path):
    path = as_folder(tmp_path, {**FILES, "dogs/2.png": picture(1, (7, 7))})
    with pytest.raises(ValueError, match=r"dogs/2.png .* one size, \(4, 6\); got \(7, 7\). Set a size"):
        read_images(path)
    assert len(read_images(path, size=4)) == 4


def test_the_size_that_most_have_is_kept(tmp_path):
    path = as_folder(tmp_path, {**FILES, "a/first.png": picture(1, (7, 7))})
    examples = read_images(path, skip_bad=True)
    assert len(examples) == 3
    assert examples.skipped == ("a/first.png",)


def test_a_dangling_link_or_a_folder_named_like_an_image_is_named_or_counted(tmp_path):
    path = as_folder(tmp_path / "link", FILES)
    (path / "cats" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(ValueError, match=r"cats/gone.png cannot be used: .*No such file"):
        read_images(path)
    assert read_images(path, skip_bad=True).skipped == ("cats/gone.png",)
    path = as_folder(tmp_path / "folder", FILES)
    (path / "dogs" / "x.png").mkdir()
    with pytest.raises(ValueError, match=r"dogs/x.png cannot be used: .*directory"):
        read_images(path)
    assert read_images(path, skip_bad=True).skipped == ("dogs/x.png",)


@every_kind
def test_hidden_files_are_not_there(pack, tmp_path):
    hidden = {"dogs/._1.png": b"macOS", "dogs/.ipynb_checkpoints/1.png": picture(1), "__MACOSX/a/1.png": b""}
    assert read_images(pack(tmp_path, {**FILES, **hidden})).names == ("cats", "dogs")


def test_images_in_no_class_folder_are_refused_in_a_folder_and_an_archive_alike(tmp_path):
    loose = {"1.png": picture(1), "2.png": picture(2)}
    with zipfile.ZipFile(tmp_path / "loose.zip", "w") as archive:
        for name, content in loose.items():
            archive.writestr(name, content)
    for path in (as_folder(tmp_path / "a", loose), tmp_path / "loose.zip", as_tar(tmp_path, loose)):
        with pytest.raises(ValueError, match=r"no images in class folders were found"):
            read_images(path)


@pytest.mark.parametrize(("ink", "paper"), [(255, 0), (0, 255)])
def test_what_is_transparent_is_the_paper_under_the_ink(ink, paper):
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[1:3, 1:3] = (ink, ink, ink, 255)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    read = decode(file.getvalue(), None, grey=True)[0]
    assert (read[1:3, 1:3] == ink).all()
    assert (read[0] == paper).all()


def test_a_photo_is_turned_as_its_camera_was():
    image, exif, file = Image.new("L", (6, 4)), Image.Exif(), io.BytesIO()
    exif[0x0112] = 6  # which lies on its side
    image.save(file, "PNG", exif=exif)
    assert decode(file.getvalue(), None, grey=True).shape == (1, 6, 4)


def test_16_bits_are_scaled_to_8(tmp_path):
    values = np.array([[0, 257, 32896, 65535]], np.uint16)
    (tmp_path / "a").mkdir()
    for kind in ("png", "tiff"):
        Image.fromarray(values).save(tmp_path / "a" / f"1.{kind}")
    (tmp_path / "a" / "1.pgm").write_bytes(b"P5 4 1 65535 " + values.byteswap().tobytes())
    assert read_images(tmp_path).elements[:, 0, 0].tolist() == [[0, 1, 128, 255]] * 3
    Image.fromarray(values.astype(np.float32)).save(tmp_path / "a" / "2.tiff")
    with pytest.raises(ValueError, match=r"2.tiff cannot be used: its pixels have 32 bits, and no scale"):
        read_images(tmp_path)


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
        nothing = self.files(tmp_path, np.zeros((0, 3, 2), np.uint8), np.zeros(0, np.uint8))
        with pytest.raises(ValueError, match=r"images.gz: must hold at least one image; it is empty"):
            read_idx(*nothing)
        few = self.files(tmp_path, np.zeros((4, 3, 2), np.uint8), labels=np.zeros(3, np.uint8))
        with pytest.raises(ValueError, match=r"labels.gz: must label the 4 images of images.gz; has 3"):
            read_idx(*few)


class TestCifar:
    def archive(self, path, batch=None, **replaced):
        content = {b"data": np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072), b"labels": [1, 0]}
        files = {f"data_batch_{i}": content for i in range(1, 6)}
        files |= {"test_batch": batch or content, "batches.meta": {b"label_names": [b"cat", b"dog"]}}
        pickles = {name: pickle.dumps(content, protocol=2) for name, content in files.items()}
        return as_tar(path, {f"cifar/{name}": content for name, content in (pickles | replaced).items()})

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

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (pickle.dumps({b"labels": [1, 0]}), r"there is no b'data' in it"),
            (pickle.dumps({b"data": np.zeros((2, 3072), np.uint8)}), r"there is no b'labels' in it"),
            (pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}), r"`labels` must be one"),
            (b"\x80\x02X\x01\x00\x00\x00\xff.", r"codec can't decode"),
            (b"", r"Ran out of input"),
        ],
    )
    def test_a_bad_batch_is_an_error_that_names_the_file(self, tmp_path, content, message):
        path = self.archive(tmp_path, test_batch=content)
        with pytest.raises(ValueError, match=rf"images.tar.gz: is not the python version .*{message}"):
            read_cifar10(path, train=False)

    def test_a_bad_archive_is_one_line(self, tmp_path):
        path = self.archive(tmp_path)
        whole = path.read_bytes()
        for content in (b"not a tar", whole[:200], whole[:-9]):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"images.tar.gz: is not the python version") as error:
                read_cifar10(path, train=False)
            assert "\n" not in str(error.value)


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
        assert read_npz(tmp_path / "r.npz").elements.dtype == torch.float64
        np.savez(tmp_path / "bad.npz", pictures=images)
        with pytest.raises(ValueError, match=r"must hold `images` or `rows`, and `labels`; has pictures"):
            read_npz(tmp_path / "bad.npz")

    def refused(self, path, **arrays) -> str:
        np.savez(path / "a.npz", **arrays)
        with pytest.raises(ValueError, match=r"a.npz: ") as error:
            read_npz(path / "a.npz")
        return str(error.value)

    def test_npz_labels_may_be_a_column(self, tmp_path):
        np.savez(tmp_path / "a.npz", images=np.zeros((3, 4, 5), np.uint8), labels=[[0], [1], [1]])
        assert read_npz(tmp_path / "a.npz").labels.tolist() == [0, 1, 1]

    def test_npz_channels_come_first_or_last(self, tmp_path):
        images = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
        np.savez(tmp_path / "last.npz", images=images, labels=[0, 1])
        np.savez(tmp_path / "first.npz", images=images.transpose(0, 3, 1, 2), labels=[0, 1])
        last, first = read_npz(tmp_path / "last.npz"), read_npz(tmp_path / "first.npz")
        assert torch.equal(last.elements, first.elements)
        assert last.shape == (3, 4, 5)
        np.savez(tmp_path / "flat.npz", images=np.zeros((2, 3, 5), np.uint8), labels=[0, 1])
        assert read_npz(tmp_path / "flat.npz").shape == (1, 3, 5)
        for shape in ((2, 3, 5, 3), (2, 4, 5, 6)):
            assert "must not be mistakable" in self.refused(
                tmp_path, images=np.zeros(shape, np.uint8), labels=[0, 1]
            )

    def test_npz_that_cannot_be_used_is_named(self, tmp_path):
        images = np.zeros((3, 4, 5), np.uint8)
        assert "one for each element" in self.refused(tmp_path, images=images, labels=[0, 1])
        assert "one for each element" in self.refused(tmp_path, images=images, labels=[[0, 1]] * 3)
        assert "there must be some" in self.refused(tmp_path, images=images[:0], labels=[])
        assert "must be uint8" in self.refused(tmp_path, images=images / 255, labels=[0, 1, 2])
        assert "`rows` must be numbers" in self.refused(tmp_path, rows=[["a", "b"]], labels=[0])
        assert "`rows` must be numbers" in self.refused(tmp_path, rows=[1.0, 2.0], labels=[0, 1])
        assert "`rows` must be finite" in self.refused(tmp_path, rows=[[1e39]], labels=[0])
        with (tmp_path / "a.npz").open("wb") as file:
            np.save(file, images)
        with pytest.raises(ValueError, match=r"a.npz: cannot be read as npz: it is one array, an .npy"):
            read_npz(tmp_path / "a.npz")

    @pytest.mark.parametrize("line", ["m1,1,2,3", "m1,1", "m1,1,1e39", "m1,nan,1", "m1,1,"])
    def test_csv_rows_are_as_long_as_the_header_and_finite_in_float32(self, tmp_path, line):
        path = tmp_path / "t.csv"
        path.write_text(f"machine,a,b\nm1,1,2\n\n{line}\n")
        with pytest.raises(ValueError, match=r"t.csv: line 4 cannot be used"):
            read_csv(path, "machine")
        examples = read_csv(path, "machine", skip_bad=True)
        assert examples.skipped == ("line 4",)
        assert examples.elements.tolist() == [[1, 2]]

    def test_csv_as_excel_writes_it(self, tmp_path):
        path = tmp_path / "t.csv"
        path.write_text("machine,a\r\nm1,1\r\n", encoding="utf-8-sig")
        assert read_csv(path, "machine").names == ("m1",)
        path.write_text("Gerät,a\nm1,1\n", encoding="latin-1")
        with pytest.raises(ValueError, match=r"t.csv: must be text in UTF-8; save it as that"):
            read_csv(path, "Gerät")
        path.write_text("machine,a\nm1,1\x00\n" + "9" * 200_000)
        with pytest.raises(ValueError, match=r"t.csv: line \d cannot be"):
            read_csv(path, "machine")
        path.write_text("machine\nm1\n")
        with pytest.raises(ValueError, match=r"t.csv: must have columns of numbers beside 'machine'"):
            read_csv(path, "machine")

    def test_csv(self, tmp_path):
        path = tmp_path / "t.csv"
        path.write_text("machine,a,b\nm1,1,2.5\nm2,3,4\nm1,5,6\n")
        examples = read_csv(path, "machine")
        assert examples.names == ("m1", "m2")
        assert examples.elements.tolist() == [[1, 2.5], [3, 4], [5, 6]]
        with pytest.raises(ValueError, match=r"`group` must be a column, one of machine, a, b; got 'plant'"):
            read_csv(path, "plant")
        path.write_text("machine,time,a,b\nm1,noon,1,2\nm2,night,3,4\n")
        assert read_csv(path, "machine", columns=("b", "a")).elements.tolist() == [[2, 1], [4, 3]]
        with pytest.raises(ValueError, match=r"t.csv: columns must be c, in any order; 'c' is not among"):
            read_csv(path, "machine", columns=("c",))
        with pytest.raises(ValueError, match=r"'time' must be a number.*name the columns that are numbers"):
            read_csv(path, "machine")
        path.write_text("machine,a,a\nm1,1,2\n")
        with pytest.raises(ValueError, match=r"columns must have different names; 'a' is there twice"):
            read_csv(path, "machine")
        path.write_text("machine,a\nm1,1\nm1,oops\nm2,2\n")
        with pytest.raises(ValueError, match=r"line 3 cannot be used: 'a' must be a number; it is 'oops'"):
            read_csv(path, "machine")
        assert read_csv(path, "machine", skip_bad=True).skipped == ("line 3",)
