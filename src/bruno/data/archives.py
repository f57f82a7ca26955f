"""Files of folders, zips and tars, read one at a time, and the errors that damaged files raise.

A damaged file raises when it is read, not when it is listed, so that a caller can skip it and continue.
"""

from __future__ import annotations

import csv
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

from PIL import Image

# Errors that Python and Pillow raise for damaged files. zipfile raises RuntimeError for an encrypted member
# and NotImplementedError, a subclass, for an unknown compression method; Pillow raises SyntaxError.
READ_ERRORS = (
    OSError,
    EOFError,
    RuntimeError,
    SyntaxError,
    struct.error,
    zlib.error,
    csv.Error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
    Image.DecompressionBombError,
)


class Entry(NamedTuple):
    """A file: its path inside the folder or archive, and a function that reads its content.

    Call `read` before the next entry is requested: it may need the open archive.
    """

    name: str
    read: Callable[[], bytes]


def entries(path: Path, wanted: Callable[[str], bool]) -> Iterator[Entry]:
    """Yield the files of a folder, zip or tar whose names are wanted.

    The files of a folder are sorted; those of an archive keep its order. A truncated or damaged tar ends with
    an entry for the lost part, whose `read` raises. Raises one of `READ_ERRORS` if `path` cannot be opened.
    """
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            name = file.relative_to(path).as_posix()
            if wanted(name):
                yield Entry(name, file.read_bytes)
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if not info.is_dir() and wanted(info.filename):
                    yield Entry(info.filename, partial(archive.read, info))
    else:
        yield from _tar_entries(path, wanted)


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is hidden, or metadata that macOS adds to archives."""
    return name.startswith((".", "__MACOSX"))


def file_stamp(path: Path) -> str:
    """Return a string that changes when the file, or any file below the folder, changes.

    It holds sizes, modification times and paths relative to `path`, so a file or folder may be moved.
    Raises FileNotFoundError if `path` does not exist.
    """
    if not path.exists() and not path.is_symlink():
        raise FileNotFoundError(f"{path}: no such file or folder.")
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    facts = ((file, file.stat() if file.exists() else file.lstat()) for file in files)  # dangling links
    return "\n".join(f"{file.relative_to(path)} {at.st_size} {at.st_mtime_ns}" for file, at in facts)


def reason(error: Exception) -> str:
    """Return the message of an error: its first line, without the full stop."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".:")


def _tar_entries(path: Path, wanted: Callable[[str], bool]) -> Iterator[Entry]:
    with _open_tar(path) as archive:
        try:
            for member in archive:
                if member.isfile() and wanted(member.name):
                    yield Entry(member.name, partial(_read_member, archive, member))
            _check_end(archive)
        except READ_ERRORS as error:
            damage = tarfile.ReadError(f"it is truncated or damaged: {reason(error)}")
            yield Entry("the rest of the archive", partial(_fail, damage))


def _open_tar(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path)
    except tarfile.TarError as error:  # its message lists every format that was tried
        raise tarfile.ReadError("it is not an archive") from error


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None  # None only for links and folders
    return file.read()


def _check_end(archive: tarfile.TarFile) -> None:
    """Raise unless the last member is followed by the zero bytes that end an archive, and nothing else.

    `tarfile` treats a damaged header and the end of the file as the end of the archive. Reading to the end
    also verifies the checksum of a compressed archive.
    """
    file, zeros = archive.fileobj, 0
    assert file is not None
    file.seek(archive.offset)
    while block := file.read(1 << 20):
        if block.count(0) < len(block):
            raise tarfile.ReadError("data after the last readable file")
        zeros += len(block)
    if zeros < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("its end is missing")


def _fail(error: Exception) -> NoReturn:
    raise error
