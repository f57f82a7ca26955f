"""What is lost of a damaged archive is never lost in silence."""

import gzip
import tarfile
import zipfile

import pytest
from test_readers import FILES, as_tar, as_zip

from bruno.data.readers import read_images


def plain(path):
    (path / "images.tar").write_bytes(gzip.decompress(as_tar(path, FILES).read_bytes()))
    return path / "images.tar"


def cut_between_members(path):
    """As a download that stops where a file begins: nothing in it looks broken."""
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


def with_a_wrong_check_sum(path):
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
        (with_a_wrong_check_sum, 3),
    ],
)
def test_a_damaged_tar_is_an_error_or_counted(damage, left, tmp_path):
    path = damage(tmp_path)
    with pytest.raises(ValueError, match=rf"{path.name}: .* cannot be used: "):
        read_images(path)
    examples = read_images(path, skip_bad=True)
    assert len(examples) == left
    assert examples.skipped[-1] == "the rest of the archive"


@pytest.mark.parametrize("compression", ["", "gz", "bz2", "xz"])
def test_a_tar_may_be_compressed_in_any_way(compression, tmp_path):
    with tarfile.open(plain(tmp_path)) as source, tarfile.open(tmp_path / "t", f"w:{compression}") as target:
        for member in source:
            target.addfile(member, source.extractfile(member))
    assert len(read_images(tmp_path / "t")) == 3


def bad_check_sum(content: bytearray, entry: int, data: int) -> None:
    content[data] ^= 1


def encrypted(content: bytearray, entry: int, data: int) -> None:
    content[entry + 8] |= 1


def deflate64(content: bytearray, entry: int, data: int) -> None:
    content[entry + 10] = 9


@pytest.mark.parametrize(
    ("damage", "message"),
    [(bad_check_sum, "Bad CRC"), (encrypted, "encrypted"), (deflate64, "compression method")],
)
def test_a_zip_member_that_cannot_be_read_is_named_or_counted(damage, message, tmp_path):
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
