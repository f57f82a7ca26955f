"""Files of named datasets: where they are, their download, and a check of their published content."""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bruno import limits
from bruno.data.archives import READ_ERRORS
from bruno.data.datasets import DATASETS, LocalForm, RemoteFile
from bruno.extras import imports_of
from bruno.files import check_regular

_log = logging.getLogger(__name__)

UNCHECKED = "BRUNO_UNCHECKED_DATA"  # environment variable: read published files whatever their checksums


class MissingDataError(FileNotFoundError):
    """Files of a dataset are missing and could not be downloaded; the message names them and their folder."""


@dataclass(frozen=True)
class DatasetStatus:
    """What a named dataset is, and whether its files are on this machine.

    Attributes:
        name: one of `DATASETS`.
        title: what it is.
        state: "available", "missing", or "built in" if it needs no files.
        places: if it is available, the folders of its files, or the one file that `Examples.save` wrote.
        missing: where to put each missing file, and its addresses.
    """

    name: str
    title: str
    state: str
    places: tuple[Path, ...]
    missing: Mapping[Path, tuple[str, ...]]


def dataset_status(data_dir: str | Path | None = None) -> list[DatasetStatus]:
    """Return the state of each named dataset, in the order of `DATASETS`.

    Args:
        data_dir: the folder to search before ~/.cache/bruno; $BRUNO_DATA by default.
    """
    return [_status(name, data_dir) for name in DATASETS]


def _status(name: str, data_dir: str | Path | None) -> DatasetStatus:
    dataset = DATASETS[name]
    files, compact = locate(name, data_dir), locate_compact(name, data_dir)
    local = locate_local_form(name, data_dir)
    found = [path for path in (*files.values(), *(local[1] if local else ())) if path]
    missing = {
        expected_path(remote, data_dir): remote.mirrors
        for remote in dataset.files
        if not (files[remote.path] or compact or local)
    }
    places = (compact,) if compact else tuple(sorted({path.parent for path in found}))
    state = "missing" if missing else "available" if files or compact else "built in"
    return DatasetStatus(name, dataset.title, state, () if missing else places, missing)


def locate(name: str, data_dir: str | Path | None = None) -> dict[str, Path | None]:
    """Return the path of each file of a named dataset, None for missing ones."""
    return {remote.path: find(remote.path, data_dir) for remote in DATASETS[name].files}


def locate_compact(name: str, data_dir: str | Path | None = None, original: bool = False) -> Path | None:
    """Return the path of NAME.npz, a dataset saved by `Examples.save`, which is preferred to published files.

    With `original`, NAME-original.npz, with images at their published size.
    """
    return find(f"{name}-original.npz" if original else f"{name}.npz", data_dir)


def is_available(name: str, data_dir: str | Path | None = None) -> bool:
    """Whether a named dataset can be read without a download."""
    return (
        locate_compact(name, data_dir) is not None
        or all(locate(name, data_dir).values())
        or locate_local_form(name, data_dir) is not None
    )


def locate_local_form(name: str, data_dir: str | Path | None = None) -> tuple[LocalForm, list[Path]] | None:
    """Return the first complete local form of a named dataset, with the paths of its files."""
    for form in DATASETS[name].local_forms:
        paths = [found for path in form.paths if (found := find(path, data_dir))]
        if len(paths) == len(form.paths):
            return form, paths
    return None


def expected_path(remote: RemoteFile, data_dir: str | Path | None = None) -> Path:
    """Return the path at which to put a published file by hand: below data_dir, $BRUNO_DATA or the cache."""
    return _folders(data_dir)[0] / remote.path


def cache_dir() -> Path:
    """Return $BRUNO_CACHE, or ~/.cache/bruno."""
    return Path(os.environ.get("BRUNO_CACHE") or Path.home() / ".cache" / "bruno")


def fetch(name: str, remote: RemoteFile, data_dir: str | Path | None, download: bool) -> Path:
    """Download a published file into the cache, and return its path; raises if no mirror has it."""
    problems = ["download is disabled"]
    if download:
        with imports_of("data", "downloads"):
            import pooch  # type: ignore[import-untyped]  # only needed to download

        target = cache_dir() / remote.path  # never write into a user's data folder
        _log.info("downloading %s into %s", remote.path, target.parent)
        problems = []
        for url in remote.mirrors:
            try:
                with _warnings_only(pooch.get_logger()):  # it prints by default
                    return Path(pooch.retrieve(url, f"sha256:{remote.sha256}", target.name, target.parent))
            except Exception as error:
                problems.append(f"{url}: {_cause(error)}")
    raise MissingDataError(
        f"{name} needs {remote.path} (SHA-256 {remote.sha256[:12]}…), which is missing: put it at "
        f"{expected_path(remote, data_dir)}, or name another folder (`data_dir` or $BRUNO_DATA). "
        + "; ".join(problems)
    )


@contextmanager
def _warnings_only(logger: logging.Logger) -> Iterator[None]:
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def check_published(path: Path, remote: RemoteFile) -> None:
    """Raise an error unless a file has the published content; otherwise, results are not comparable."""
    check_regular(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != remote.sha256 and not (
        remote.content_sha256 and _content_digest(path) == remote.content_sha256
    ):
        raise ValueError(
            f"{path}: must have the published content, SHA-256 {remote.sha256[:12]}…; got {digest[:12]}…. "
            f"Delete it to download it again, or set {UNCHECKED}=1 to read it as it is."
        )


def _content_digest(path: Path) -> str:
    """SHA-256 of the decompressed content of a .gz; empty if it cannot be decompressed within the limit."""
    digest, amount = hashlib.sha256(), 0
    try:
        with gzip.open(path) as file:
            while (part := file.read(1 << 20)) and amount <= limits.MEMORY.value:
                digest.update(part)
                amount += len(part)
    except READ_ERRORS:
        return ""
    return digest.hexdigest()


def _folders(data_dir: str | Path | None) -> list[Path]:
    if data_dir is not None and not Path(data_dir).is_dir():
        raise ValueError(f"`data_dir` must be an existing folder; got {str(data_dir)!r}.")
    chosen = data_dir or os.environ.get("BRUNO_DATA")
    return [Path(chosen), cache_dir()] if chosen else [cache_dir()]


def find(file: str, data_dir: str | Path | None) -> Path | None:
    """Return the path of a file below the first folder that has it, None if it is missing."""
    return next((folder / file for folder in _folders(data_dir) if (folder / file).is_file()), None)


def _cause(error: BaseException) -> str:
    """Return the message of the root cause, without those of the library layers that wrap it."""
    while error.__context__:
        error = error.__context__
    return " ".join(str(error).split())
