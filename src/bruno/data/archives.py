"""Files of folders, zips and tars, read one at a time, and the errors that damaged files raise.

A damaged file raises when it is read, not when it is listed, so that a caller can skip it and continue.
"""

from __future__ import annotations

import csv
import errno
import io
import lzma
import math
import os
import stat
import struct
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image

from bruno import limits
from bruno.files import check_regular, read_regular

# Errors that Python and Pillow raise for damaged files. zipfile raises RuntimeError for an encrypted member
# and NotImplementedError, a subclass, for an unknown compression method; Pillow raises SyntaxError. A damaged
# size raises MemoryError or OverflowError.
READ_ERRORS = (
    OSError,
    EOFError,
    MemoryError,
    OverflowError,
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


_EXTENDED = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_MAX_EXTENDED_HEADER = 2**20  # bytes


class Entry(NamedTuple):
    """A file: its path inside the folder or archive, and a function that reads its content.

    Call `read` before the next entry is requested: it may need the open archive.
    """

    name: str
    read: Callable[[], bytes]


def entries(path: Path, wanted: Callable[[str], bool]) -> Iterator[Entry]:
    """Yield the files of a folder, zip or tar for whose names `wanted` is true.

    The files of a folder are sorted; those of an archive keep its order. Links in a folder are followed.
    Anything that cannot be read is an entry whose `read` raises: an unreadable folder, a broken link, a link
    to a folder that contains it, a second file of the same name in an archive, or the lost part of a
    truncated or damaged tar. Raises one of `READ_ERRORS` or ValueError if `path` cannot be opened.
    """
    if path.is_dir():
        for file, problem in _files_below(path):
            name = file.relative_to(path).as_posix()
            if problem is not None:
                yield Entry(name, partial(_fail, problem))
            elif wanted(name):
                yield Entry(name, partial(read_regular, file))
        return
    check_regular(path)
    seen: set[str] = set()
    for entry in _zip_entries(path, wanted) if zipfile.is_zipfile(path) else _tar_entries(path, wanted):
        if entry.name in seen:
            entry = Entry(entry.name, partial(_fail, ValueError("the archive has two files of this name")))
        seen.add(entry.name)
        yield entry


def read_arrays(path: Path, wanted: Collection[str]) -> dict[str, NDArray[Any]]:
    """Read the wanted arrays that an npz contains, at least one. Nothing is unpickled.

    The sizes that the file declares are checked before memory is allocated: all arrays together must be
    within `limits.MEMORY`. Raises one of `READ_ERRORS` or ValueError if the file is damaged.
    """
    check_regular(path)
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            single = file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX
        raise ValueError("it is a single array, an .npy; use np.savez" if single else "it is not a zip file")
    arrays: dict[str, NDArray[Any]] = {}
    with zipfile.ZipFile(path) as archive:
        members = [(info.filename.removesuffix(".npy"), info) for info in archive.infolist()]
        found = [(name, info) for name, info in members if name in wanted]
        if not found:
            names = ", ".join(f"`{name}`" for name in wanted)
            others = ", ".join(name for name, _ in members[:8]) or "nothing"
            raise ValueError(f"it must contain some of {names}; got {others}")
        if len(dict(found)) < len(found):
            raise ValueError("it has two arrays of the same name")
        limits.MEMORY.check(sum(info.file_size for _, info in found), "its arrays")
        for name, info in found:
            arrays[name] = _parse_array(archive.read(info), name)
    return arrays


class ArrayWriter:
    """Writes an npz; large arrays in parts. A context manager."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._archive.close()

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Write a small array."""
        with self.parts(name, array.shape, array.dtype) as write:
            write(array)

    @contextmanager
    def parts(
        self, name: str, shape: tuple[int, ...], kind: np.dtype[Any]
    ) -> Iterator[Callable[[NDArray[Any]], object]]:
        """A context manager whose function writes the next values of an array of this shape, in C order."""
        header = {"descr": npy.dtype_to_descr(kind), "fortran_order": False, "shape": shape}
        with self._archive.open(f"{name}.npy", "w", force_zip64=True) as file:
            npy.write_array_header_1_0(file, header)
            yield lambda values: file.write(np.ascontiguousarray(values, kind).tobytes())


def _parse_array(content: bytes, name: str) -> NDArray[Any]:
    """The array of an .npy file, without copying its values."""
    file = io.BytesIO(content)
    try:
        version = npy.read_magic(file)
        read_header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, fortran_order, dtype = read_header(file)
    except Exception as error:  # numpy parses the header as Python, which can raise anything
        raise ValueError(f"{name} must have a header of version 1.0 or 2.0; got {reason(error)}") from error
    if dtype.hasobject:
        raise ValueError(f"{name} must hold numbers or text; got Python objects")
    values = content[file.tell() :]
    if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(values):
        raise ValueError(f"{name} must have {shape} values of {dtype}; got {len(values)} bytes")
    if not dtype.itemsize:  # empty text
        return np.zeros(shape, dtype)
    if dtype.kind == "U" and np.frombuffer(values, dtype.byteorder + "u4").max(initial=0) > sys.maxunicode:
        raise ValueError(f"{name} must be text; got numbers that are not characters")
    return np.frombuffer(values, dtype).reshape(shape, order="F" if fortran_order else "C")


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is hidden, or metadata that macOS adds to archives."""
    return name.startswith((".", "__MACOSX"))


def file_stamp(path: Path) -> str:
    """Return a string that changes when the file, or any file below the folder, changes.

    It holds sizes, times and paths relative to `path`, so a file or folder may be moved. Programs can set the
    time of modification at will, so it also holds the time of the last change of the metadata, which only the
    system sets. Raises FileNotFoundError if `path` does not exist.
    """
    if not path.exists() and not path.is_symlink():
        raise FileNotFoundError(f"{path}: no such file or folder.")
    return "\n".join(
        f"{file.relative_to(path)} {problem or _stamp(file.stat())}"
        for file, problem in _files_below(path)
        if problem or not file.is_dir()  # moving a folder changes its time
    )


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def reason(error: Exception) -> str:
    """Return the message of an error: its first line, without the full stop."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".:")


def _files_below(folder: Path) -> Iterator[tuple[Path, OSError | None]]:
    """Yield the folder, and all files and folders below it, sorted; with an error if one cannot be read.

    Links are followed. Hidden files and folders are left out.
    """
    pending: list[tuple[Path, frozenset[tuple[int, int]]]] = [(folder, frozenset())]
    while pending:
        path, above = pending.pop()
        try:
            status = path.stat()
            yield path, None
            if not stat.S_ISDIR(status.st_mode):
                continue
            identity = (status.st_dev, status.st_ino)
            if identity in above:
                raise OSError(errno.ELOOP, "it is a link to a folder that contains it", str(path))
            names = sorted(name for name in os.listdir(path) if not is_hidden(name))
        except OSError as error:
            yield path, error
            continue
        inside = above | {identity}
        pending += [(path / name, inside) for name in reversed(names)]


def _zip_entries(path: Path, wanted: Callable[[str], bool]) -> Iterator[Entry]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.filename.endswith("/") and wanted(info.filename):
                yield Entry(info.filename, partial(_read_zipped, archive, info))


def _read_zipped(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    limits.FILE.check(info.file_size, "it")
    return archive.read(info)  # at most `file_size` bytes


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
        return tarfile.open(path, tarinfo=_Member)
    except tarfile.TarError as error:  # its message lists every format that was tried
        raise tarfile.ReadError("it is not an archive") from error


def _read_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    limits.FILE.check(member.size, "it")
    file = archive.extractfile(member)
    assert file is not None  # None only for links and folders
    return file.read()


class _Member(tarfile.TarInfo):
    """A member of a tar whose extended header, which `tarfile` reads into memory, has a sane size."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """Check a header before its content is read. All versions of Python call this for every header."""
        if self.size < 0 or (self.type in _EXTENDED and self.size > _MAX_EXTENDED_HEADER):
            raise tarfile.HeaderError(f"one of its headers is damaged: it claims {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc, no-any-return]


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
        raise tarfile.ReadError("the end of the archive is missing")


def _fail(error: Exception) -> NoReturn:
    raise error
