"""Damaged archives, and stamps of files."""

import gzip
import io
import os
import shutil
import tarfile
import tracemalloc
import warnings
import zipfile

import numpy as np
import pytest
from image_files import FILES, as_folder, as_idx, as_tar, as_zip, picture
from PIL import Image

from bruno import limits
from bruno.data import ElementReader, Examples, load_path
from bruno.data.archives import file_stamp
from bruno.data.formats import read_idx, read_npz
from bruno.data.images import decode, read_images


def plain(path):
    (path / "images.tar").write_bytes(gzip.decompress(as_tar(path, FILES).read_bytes()))
    return path / "images.tar"


def cut_between_members(path):
    """An interrupted download that ends where a member ends: every member looks complete."""
    path = plain(path)
    with tarfile.open(path) as archive:
        last = archive.getmembers()[-1].offset
    path.write_bytes(path.read_bytes()[:last])
    return path


def cut_within_a_member(path):
    path = cut_between_members(path)
    path.write_bytes(path.read_bytes()[:-500])
    return path


def damaged_header(path):
    path = plain(path)
    with tarfile.open(path) as archive:
        last = archive.getmembers()[-1].offset
    content = bytearray(path.read_bytes())
    content[last : last + 20] = b"x" * 20
    path.write_bytes(content)
    return path


def without_its_last_bytes(path):
    path = as_tar(path, FILES)
    path.write_bytes(path.read_bytes()[:-9])
    return path


def with_a_wrong_checksum(path):
    path = as_tar(path, FILES)
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("damage", "left"),
    [
        (cut_between_members, 2),
        (cut_within_a_member, 1),
        (damaged_header, 2),
        (without_its_last_bytes, 3),
        (with_a_wrong_checksum, 3),
    ],
)
def test_the_lost_part_of_a_damaged_tar_raises_or_is_skipped(damage, left, tmp_path):
    path = damage(tmp_path)
    with pytest.raises(ValueError, match=rf"{path.name}: .* cannot be used: "):
        read_images(path)
    examples = read_images(path, skip_bad=True)
    assert len(examples) == left
    assert examples.skipped[-1] == "the rest of the archive"


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "xz"])
def test_a_tar_may_have_any_compression(compression, tmp_path):
    with tarfile.open(plain(tmp_path)) as source, tarfile.open(tmp_path / "t", f"w:{compression}") as target:
        for member in source:
            target.addfile(member, source.extractfile(member))
    assert len(read_images(tmp_path / "t")) == 3


def bad_checksum(content: bytearray, entry: int, data: int) -> None:
    content[data] ^= 1


def encrypted(content: bytearray, entry: int, data: int) -> None:
    content[entry + 8] |= 1


def deflate64(content: bytearray, entry: int, data: int) -> None:
    content[entry + 10] = 9


@pytest.mark.parametrize(
    ("damage", "message"),
    [(bad_checksum, "Bad CRC"), (encrypted, "encrypted"), (deflate64, "compression method")],
)
def test_an_unreadable_member_of_a_zip_raises_or_is_skipped(damage, message, tmp_path):
    path = as_zip(tmp_path, FILES)
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = archive.infolist()[0]
    damage(content, content.index(b"PK\x01\x02"), content.index(FILES["cats/1.png"]) + 40)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"images.zip: {info.filename} cannot be used: .*{message}"):
        read_images(path)
    examples = read_images(path, skip_bad=True)
    assert len(examples) == 2
    assert examples.skipped == (info.filename,)


def test_the_stamp_of_a_folder_depends_on_its_files_and_not_on_its_location(tmp_path):
    path = as_folder(tmp_path / "a", FILES)
    first = file_stamp(path)
    moved = path.rename(tmp_path / "b")
    assert file_stamp(moved) == first
    (moved / "cats" / "1.png").write_bytes(b"longer than before, or shorter")
    changed = file_stamp(moved)
    (moved / "cats" / "2.png").rename(moved / "cats" / "3.png")
    renamed = file_stamp(moved)
    assert len({first, changed, renamed}) == 3


def test_the_stamp_of_a_file_changes_with_its_size_or_its_time(tmp_path):
    path = tmp_path / "file"
    path.write_text("one")
    first = file_stamp(path)
    path.write_text("three")
    longer = file_stamp(path)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
    assert len({first, longer, file_stamp(path)}) == 3


def test_a_dangling_link_has_a_stamp_and_a_missing_file_has_none(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert file_stamp(tmp_path / "link")
    with pytest.raises(FileNotFoundError, match=r"nowhere: no such file"):
        file_stamp(tmp_path / "nowhere")


# --- links and unreadable folders ---------------------------------------------------------------------


def test_links_to_folders_and_files_are_followed(tmp_path):
    elsewhere = as_folder(tmp_path / "elsewhere", {"birds/1.png": picture(40), "loose.png": picture(50)})
    path = as_folder(tmp_path / "images", FILES)
    (path / "birds").symlink_to(elsewhere / "birds")
    (path / "cats" / "3.png").symlink_to(elsewhere / "loose.png")
    examples = read_images(path)
    assert examples.names == ("birds", "cats", "dogs")
    assert examples.counts.tolist() == [1, 3, 1]
    before = file_stamp(path)
    (elsewhere / "birds" / "2.png").write_bytes(picture(60))
    assert file_stamp(path) != before


@pytest.mark.parametrize("target", ["images", "images/cats", "nowhere"])
def test_a_loop_or_a_broken_link_is_an_error_or_is_skipped_by_name(tmp_path, target):
    path = as_folder(tmp_path / "images", FILES)
    (path / "cats" / "link").symlink_to(tmp_path / target)
    with pytest.raises(ValueError, match=r"images: cats/link cannot be used: "):
        read_images(path)
    examples = read_images(path, skip_bad=True)
    assert len(examples) == 3
    assert examples.skipped == ("cats/link",)
    assert file_stamp(path)


def test_an_unreadable_folder_is_an_error_or_is_skipped_by_name(tmp_path, monkeypatch):
    def denied(folder, listdir=os.listdir):
        if str(folder).endswith("cats"):  # tests may run as root, which is never denied
            raise PermissionError(13, "Permission denied", str(folder))
        return listdir(folder)

    path = as_folder(tmp_path / "images", FILES)
    monkeypatch.setattr("os.listdir", denied)
    with pytest.raises(ValueError, match=r"images: cats cannot be used: .*Permission denied"):
        read_images(path)
    examples = read_images(path, skip_bad=True)
    assert examples.names == ("dogs",)
    assert examples.skipped == ("cats",)


# --- sizes that a file declares -----------------------------------------------------------------------


def zip_of(path, name, declared):
    """A zip of one member with a size in its directory that it does not have."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, b"x")
        archive.infolist()[0].file_size = declared
    return path


def tar_of(path, name, declared, kind=tarfile.REGTYPE):
    info = tarfile.TarInfo(name)
    info.size, info.type = declared, kind
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    return path


@pytest.mark.parametrize("declared", [2**28 + 1, 2**32 - 2, 2**43])
def test_a_member_that_declares_too_many_bytes_is_not_read(tmp_path, declared):
    path = tar_of(tmp_path / "a.tar", "a/1.png", declared)
    with pytest.raises(
        ValueError, match=r"a/1.png cannot be used: .*at most 256.0 MiB; got .*BRUNO_MAX_FILE"
    ):
        read_images(path)
    if declared < 2**32:
        path = zip_of(tmp_path / "a.zip", "a/1.png", declared)
        with pytest.raises(
            ValueError, match=r"a/1.png cannot be used: .*at most 256.0 MiB; got .*BRUNO_MAX_FILE"
        ):
            read_images(path)


@pytest.fixture
def traced_memory():
    """A function that returns the largest amount of memory in use since the start of the test, in bytes."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize("declared", [2**33, 2**43, 2**70])
def test_a_tar_header_that_declares_terabytes_is_an_error(tmp_path, traced_memory, kind, declared):
    with pytest.raises(ValueError, match=r"a.tar"):
        read_images(tar_of(tmp_path / "a.tar", "a/1.png", declared, kind))
    assert traced_memory() < 2**26


def npz_of(path, name, shape, dtype="|u1"):
    """An npz whose array has a header without its values, compressed."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"shape": shape, "fortran_order": False, "descr": dtype})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}.npy", header.getvalue())
        archive.writestr("labels.npy", header.getvalue())
    return path


@pytest.mark.parametrize("shape", [(2**40,), (2**62, 2**62), (2**20, 1000, 1000), (-1, 4)])
def test_an_npz_that_declares_terabytes_is_an_error(tmp_path, shape):
    with pytest.raises(ValueError, match=r"a.npz: .*images"):
        read_npz(npz_of(tmp_path / "a.npz", "images", shape))
    with pytest.raises(ValueError, match=r"a.npz: .*elements"):
        Examples.load(npz_of(tmp_path / "a.npz", "elements", shape))


def test_arrays_and_images_above_the_limit_of_memory_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setenv("BRUNO_MAX_MEMORY", "1000")
    np.savez_compressed(tmp_path / "a.npz", images=np.zeros((2, 30, 30), np.uint8), labels=[0, 1])
    with pytest.raises(ValueError, match=r"a.npz: .*its arrays must .*BRUNO_MAX_MEMORY .*default 4294967296"):
        read_npz(tmp_path / "a.npz")
    path = as_folder(tmp_path / "images", {f"a/{i}.png": picture(i, (30, 30)) for i in range(4)})
    with pytest.raises(ValueError, match=r"images: .*images must .*BRUNO_MAX_MEMORY"):
        read_images(path)
    (tmp_path / "images.gz").write_bytes(as_idx(np.zeros((4, 30, 30), np.uint8)))
    with pytest.raises(ValueError, match=r"images.gz: .*array must .*BRUNO_MAX_MEMORY"):
        read_idx(tmp_path / "images.gz", tmp_path / "images.gz")


def test_an_idx_file_that_holds_more_than_it_declares_is_read_no_further(tmp_path, traced_memory):
    small = np.zeros((1, 2, 2), np.uint8)
    content = gzip.decompress(as_idx(small)) + bytes(10**7)
    (tmp_path / "images.gz").write_bytes(gzip.compress(content))
    tracemalloc.reset_peak()
    with pytest.raises(ValueError, match=r"images.gz: .*1×2×2 bytes; got more"):
        read_idx(tmp_path / "images.gz", tmp_path / "images.gz")
    assert traced_memory() < 2**22 + len(content)


def test_an_image_with_too_many_pixels_is_not_decoded():
    file = io.BytesIO()
    Image.new("1", (8000, 8000)).save(file, "PNG")
    with pytest.raises(ValueError, match=r"at most 50,000,000 pixels; got 64,000,000.*BRUNO_MAX_PIXELS"):
        decode(file.getvalue(), 28, grey=True)


def test_a_limit_can_be_changed_and_its_value_is_checked(monkeypatch):
    monkeypatch.setenv("BRUNO_MAX_PIXELS", "10")
    with pytest.raises(ValueError, match=r"at most 10 pixels; got 24 .*default 50000000"):
        decode(picture(1), None, grey=True)
    monkeypatch.setenv("BRUNO_MAX_PIXELS", "１０")
    with pytest.raises(ValueError, match=r"`BRUNO_MAX_PIXELS` .*got '１０'"):
        limits.PIXELS.check(1, "it")


@pytest.mark.parametrize("pack", [as_zip, as_tar])
def test_two_files_of_one_name_in_an_archive_are_an_error(tmp_path, pack):
    path = pack(tmp_path, FILES)
    if pack is as_zip:
        with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            archive.writestr("wrapper/cats/1.png", picture(99))
    else:
        path.write_bytes(gzip.decompress(path.read_bytes()))
        with tarfile.open(path, "a") as archive:
            info = tarfile.TarInfo("cats/1.png")
            info.size = len(picture(99))
            archive.addfile(info, io.BytesIO(picture(99)))
    with pytest.raises(ValueError, match=r"cats/1.png cannot be used: .*two files of this name"):
        read_images(path)


# --- files that are not regular -----------------------------------------------------------------------


def test_a_named_pipe_is_not_read(tmp_path):
    path = as_folder(tmp_path / "images", FILES)
    os.mkfifo(path / "cats" / "3.png")
    with pytest.raises(ValueError, match=r"cats/3.png cannot be used: .*regular file; got a named pipe"):
        read_images(path)
    assert read_images(path, skip_bad=True).skipped == ("cats/3.png",)
    images, rows = ElementReader((1, 4, 6), 256), ElementReader((2,), 0)
    for reader, name in ((images, "x.png"), (rows, "x.csv")):
        os.mkfifo(tmp_path / name)
        for source in ([tmp_path / name], [tmp_path]):
            with pytest.raises(ValueError, match=rf"{name}.*regular file; got a named pipe"):
                list(reader.read(source))
    for name in ("x.csv", "x.npz", "x.zip", "x"):
        (tmp_path / name).unlink(missing_ok=True)
        os.mkfifo(tmp_path / name)
        with pytest.raises(ValueError, match=r"regular file; got a named pipe"):
            load_path(tmp_path / name, group="g")
        with pytest.raises(ValueError, match=r"regular file; got a named pipe"):
            Examples.load(tmp_path / name)
    with pytest.raises(ValueError, match=r"regular file; got a device"):
        load_path(tmp_path.__class__("/dev/zero"))


# --- stamps -------------------------------------------------------------------------------------------


def test_the_stamp_changes_if_the_content_changes_and_size_and_time_do_not(tmp_path):
    path = tmp_path / "file"
    path.write_text("one")
    first, status = file_stamp(path), path.stat()
    other = tmp_path / "other"
    other.write_text("two")
    shutil.copyfile(other, path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file_stamp(path) != first
