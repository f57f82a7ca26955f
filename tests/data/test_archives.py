"""Damaged archives, and stamps of files."""

import gzip
import os
import tarfile
import zipfile

import pytest
from image_files import FILES, as_folder, as_tar, as_zip

from bruno.data.archives import file_stamp
from bruno.data.images import read_images


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
