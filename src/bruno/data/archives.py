"""The files of folders, zips and tars, one after the other, and what may be wrong with them.

A fault of a file is raised when that file is read, so that whoever reads can leave it out and go on.
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

# What Python and Pillow raise when a file is not what it should be. A RuntimeError is zipfile's word for an
# encrypted member (NotImplementedError, a kind of it, for a compression it lacks), a SyntaxError Pillow's.
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
    """A file: its path inside the folder or archive, and a function that reads it, to be called in turn."""

    name: str
    read: Callable[[], bytes]


def entries(path: Path, wanted: Callable[[str], bool]) -> Iterator[Entry]:
    """The files of a folder, zip or tar whose names are wanted, in the order in which they lie there.

    Where a tar is cut short or damaged, a last entry stands for what is lost: reading it raises. Raises one
    of `READ_ERRORS` if it cannot be opened.
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
        yield from _of_tar(path, wanted)


def reason(error: Exception) -> str:
    """What an error says, on one line and without its full stop."""
    if isinstance(error, KeyError):
        return f"there is no {error} in it"
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".:")


def _of_tar(path: Path, wanted: Callable[[str], bool]) -> Iterator[Entry]:
    with _opened_tar(path) as archive:
        try:
            for member in archive:
                if member.isfile() and wanted(member.name):
                    yield Entry(member.name, partial(_content, archive, member))
            _check_end(archive)
        except READ_ERRORS as error:
            damage = tarfile.ReadError(f"it is cut short or damaged: {reason(error)}")
            yield Entry("the rest of the archive", partial(_fail, damage))


def _opened_tar(path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(path)
    except tarfile.TarError as error:  # which lists all that was tried, line by line
        raise tarfile.ReadError("it does not begin as an archive does") from error


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(member)
    assert file is not None  # only links and folders have none
    return file.read()


def _check_end(archive: tarfile.TarFile) -> None:
    """Raise unless zero bytes alone follow the last member, as many as end an archive.

    `tarfile` takes a damaged header, and the end of the file, for the end of the archive. Reading to the end
    also has the check sum of a compressed archive compared.
    """
    file, zeros = archive.fileobj, 0
    assert file is not None
    file.seek(archive.offset)
    while block := file.read(1 << 20):
        if block.count(0) < len(block):
            raise tarfile.ReadError("there is data that belongs to no file")
        zeros += len(block)
    if zeros < tarfile.BLOCKSIZE:
        raise tarfile.ReadError("its end is missing")


def _fail(error: Exception) -> NoReturn:
    raise error
