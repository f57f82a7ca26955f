"""Files: atomic writes, and reads of regular files only."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import platform
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch import Tensor, contiguous_format, uint8

from bruno import limits

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` at the end: a crash leaves the old file or the new one.

    A power cut does too, as the contents are synced to disk first. The temporary name is unique, so several
    processes may write the same file at once. Temporary files of killed processes are deleted.

    Raises ValueError if `path` is a folder, a device or a named pipe, which must not be replaced.
    """
    if path.exists() and not path.is_symlink():
        check_regular(path)
    _delete_abandoned(path)
    beside = path.with_name(f".{path.name}.{_machine()}-{os.getpid()}-{uuid4().hex[:8]}")
    try:
        try:  # here, as other libraries raise other errors than PermissionError
            beside.touch()
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error  # of the same class
        yield beside
        with beside.open("rb+") as written:
            os.fsync(written.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _delete_abandoned(path: Path) -> None:
    """Delete temporary files for `path` from processes of this machine that are no longer running."""
    for other in path.parent.glob(f".{glob.escape(path.name)}.*"):
        owner = re.fullmatch(rf"{_machine()}-([0-9]+)-[0-9a-f]{{8}}", other.name[len(path.name) + 2 :])
        if owner and not _is_running(int(owner[1])):
            other.unlink(missing_ok=True)


def _machine() -> str:
    """A short hash of the name of this machine, as processes of other machines may share the folder."""
    return hashlib.sha256(platform.node().encode(errors="surrogatepass")).hexdigest()[:8]


def _is_running(process: int) -> bool:
    if os.name != "posix":  # there, signal 0 is not a test
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True


def check_regular(path: Path) -> int:
    """Raise ValueError unless `path` is a regular file; return its size in bytes.

    A named pipe would block, and a device has no end. A missing file raises FileNotFoundError.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise ValueError(
            f"{path}: must be a regular file; got {kind}. Standard input is read where `-` is accepted."
        )
    return status.st_size


def check_replaceable(path: Path, start: bytes, kind: str) -> None:
    """Raise ValueError unless `path` is new, or a file of the kind that will replace it.

    Args:
        path: the file to write.
        start: a pattern of the first 256 bytes of files of this kind.
        kind: name of this kind of file in messages.
    """
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"`out` must be a file in an existing folder; got {path}.")
    if not path.exists() or check_regular(path) == 0:
        return
    with path.open("rb") as file:
        if not re.match(start, file.read(256), re.DOTALL):
            raise ValueError(
                f"`out` must be a new file or {kind}; {path} is another file. Choose another name."
            )


def read_regular(path: Path) -> bytes:
    """The content of a regular file of at most `limits.FILE`."""
    limits.FILE.check(check_regular(path), "it")
    return path.read_bytes()


def inside(folder: Path, name: str) -> Path:
    """The path of a file or folder in `folder`; raises ValueError if a link leads out of it.

    A run folder may come from someone else, and a link in it must not let a command read or write elsewhere.
    """
    path = folder / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise ValueError(
            f"{path}: must be within {folder}; got a link to {os.path.realpath(path)}. "
            "Replace the link by a copy."
        )
    return path


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; every problem is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def raw_bytes(tensor: Tensor) -> bytes:
    """The values of a tensor in order, as bytes, for any type and strides."""
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=contiguous_format)
    return flat.view(uint8).numpy().tobytes()
