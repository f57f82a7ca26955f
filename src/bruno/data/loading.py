"""Load named datasets and user files, with a cache of parsed examples."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bruno.checks import check_choice
from bruno.data.archives import file_stamp
from bruno.data.datasets import DATASETS, SPLITS, Dataset, split_by_class, split_dataset
from bruno.data.examples import Examples
from bruno.data.formats import read_npz
from bruno.data.images import Size, normalise_drawings, read_images
from bruno.data.published import (
    UNCHECKED,
    cache_dir,
    check_published,
    fetch,
    find,
    locate,
    locate_compact,
    locate_local_form,
)
from bruno.data.table_format import TableFormat
from bruno.data.tables import is_table, read_table
from bruno.files import check_regular

_FORMAT = 7  # version of the cached files and of how files are parsed: increase it to ignore older caches
_PLACEHOLDERS = ("FILE.csv", "FOLDER")  # in presets, for user data


def load_examples(
    name: str,
    split: str = "train",
    *,
    data_dir: str | Path | None = None,
    size: int | None = None,
    original: bool = False,
    grey: bool = True,
    group: str = "",
    columns: Sequence[str] = (),
    table_format: str = "",
    missing: bool = False,
    skip_bad: bool = False,
    min_count: int = 1,
    download: bool = True,
    drawings: bool = False,
    invert: bool | None = None,
    backdrop: str = "",
) -> Examples:
    """Load a split of a named dataset, or of a folder, archive, npz or table given by its path.

    Args:
        name: one of `DATASETS`, or a path.
        split: "train", "validation", "trainval" (both), "test", or "all". Where models are tested on unseen
            classes, the splits have different classes.
        data_dir: the folder to search before ~/.cache/bruno, which has the downloads; by default $BRUNO_DATA.
        size: for user images: resize to this height and width.
        original: return images in their published size instead.
        grey: for user images: one channel; otherwise three.
        group: for a table: the column that names the set of a row; without one, consecutive rows are a set.
        columns: for a table: the columns to read, in this order; by default all that are numbers.
        table_format: for a table: words for the known parts of its format, as "semicolon decimal-comma".
        missing: for a table: read missing cells as NaN.
        skip_bad: for user files: skip elements that cannot be read; `Examples.skipped` names them.
        min_count: with skip_bad, also skip classes with fewer elements. Other classes keep their split.
        download: download missing files.
        drawings: normalise line drawings, `original` ones too; see `bruno.data.drawings.normalise_drawing`.
        invert: for drawings: whether ink is darker than paper; detected by default.
        backdrop: "black" or "white", behind transparent pixels; by default what contrasts with each image.
    """
    _check_part(name, split, size)
    check_source(name, group, columns, table_format, "name")
    if name in DATASETS:
        part = _named(name, split, data_dir, download, original)
        return _normalised(part, invert) if drawings else part
    examples = load_path(
        name,
        size=None if original else size,
        grey=grey,
        group=group,
        columns=columns,
        table_format=table_format,
        missing=missing,
        skip_bad=skip_bad,
        drawings=drawings,
        invert=invert,
        backdrop=backdrop,
    )
    return _part_of(examples, split, min_count if skip_bad else None)


def _check_part(name: str, split: str, size: int | None) -> None:
    if not name:
        raise ValueError(f"`name` must be one of {', '.join(DATASETS)}, or a path; got {name!r}.")
    check_choice("split", split, SPLITS)
    if name in DATASETS and size:
        raise ValueError(f"`size` must be omitted for {name}, which has a fixed size; got {size}.")


def _named(name: str, split: str, data_dir: str | Path | None, download: bool, original: bool) -> Examples:
    """A split of a named dataset."""
    parsed = _parsed(name, DATASETS[name], data_dir, download, original)
    return parsed if split == "all" else split_dataset(name, parsed, split)


def _part_of(examples: Examples, split: str, min_count: int | None) -> Examples:
    """A split of user data, without classes of fewer than `min_count` elements."""
    part = examples if split == "all" else split_by_class(examples, split)
    if min_count is None:
        return part
    skipped = examples.with_at_least(min_count).skipped  # the same for all splits: reported once
    return replace(part.with_at_least(min_count), skipped=skipped)


def load_path(
    path: str | Path,
    *,
    size: Size | None = None,
    grey: bool = True,
    group: str = "",
    columns: Sequence[str] = (),
    table_format: str = "",
    prefer: str = "",
    missing: bool = False,
    skip_bad: bool = False,
    drawings: bool = False,
    invert: bool | None = None,
    backdrop: str = "",
) -> Examples:
    """Load all examples of a folder, archive, npz or table; for the arguments see `load_examples`.

    `prefer` is the format of similar tables, which is chosen if several formats fit a table equally well.

    Parsed examples are cached, and parsed again when a file or an argument changes. An npz is not cached: it
    is as fast to read as the cache.
    """
    path = Path(path)
    check_source(path, group, columns, table_format, "path")
    kind = path.suffix.lower()
    images: dict[str, Any] = {"size": size, "grey": grey, "drawings": drawings, "invert": invert}
    if kind == ".npz":
        return read_npz(path, columns=columns, missing=missing, skip_bad=skip_bad, **images)
    if is_table(path) and not path.is_dir():
        return _cached(
            f"{path.resolve()} {group!r} {tuple(columns)} {skip_bad} {table_format} {prefer} {missing}",
            file_stamp(path),
            lambda: read_table(
                path,
                group,
                columns=columns,
                skip_bad=skip_bad,
                table_format=table_format,
                prefer=prefer,
                missing=missing,
            ),
        )
    return _cached(
        f"{path.resolve()} {size} {grey} {skip_bad}"
        + f" drawings {invert}" * drawings
        + f" on {backdrop}" * bool(backdrop),
        file_stamp(path),
        lambda: read_images(path, skip_bad=skip_bad, backdrop=backdrop, **images),
    )


def check_source(
    data: str | Path,
    group: str = "",
    columns: Sequence[str] = (),
    table_format: str = "",
    argument: str = "data",
) -> None:
    """Raise unless data are a known dataset or an existing path, and a table if they are described as one.

    Errors call the data `argument`.
    """
    path = Path(data)
    if data not in DATASETS:
        if not path.exists():
            known = f"one of {', '.join(DATASETS)}, or " * isinstance(data, str)
            hint = ", a placeholder. Name your own data" * (path.name in _PLACEHOLDERS)
            raise ValueError(f"`{argument}` must be {known}an existing path; got {str(data)!r}{hint}.")
        if not path.is_dir():
            check_regular(path)
        if path.suffix.lower() == ".npz":
            described = {"group": group, "table_format": table_format}
            if name := next(filter(described.get, described), ""):
                raise ValueError(
                    f"`{name}` must be omitted for {data}: the `labels` of an npz name its groups; got "
                    f"{described[name]!r}."
                )
            return
        if is_table(path) and not path.is_dir():
            try:
                TableFormat.parse(table_format, "table_format")
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            return
    given = {"group": group, "columns": tuple(columns), "table_format": table_format}
    for name, value in given.items():
        if value:
            raise ValueError(f"`{name}` must be omitted for {data}, which is not a table; got {value!r}.")


def _normalised(examples: Examples, invert: bool | None) -> Examples:
    """Grey examples of 256 levels, normalised as drawings of the same size; raises for other examples."""
    if len(examples.shape) != 3 or examples.shape[0] != 1 or examples.levels != 256:
        raise ValueError(
            f"`drawings` must be omitted for elements other than grey images; got {examples.shape}."
        )
    size = (examples.shape[1], examples.shape[2])
    drawn = normalise_drawings(examples.elements.numpy(), size, invert=invert)
    return replace(examples, elements=torch.from_numpy(drawn))


def _parsed(
    name: str, source: Dataset, data_dir: str | Path | None, download: bool, original: bool
) -> Examples:
    read = (source.read_original if original else None) or source.read
    larger = read is source.read_original
    if compact := locate_compact(name, data_dir, larger):
        try:
            return Examples.load(compact)
        except ValueError as error:
            files = ", ".join(remote.path for remote in source.files) or "the package"
            raise ValueError(f"{error} Move or rename it to read {name} from {files} instead.") from error
    if not source.files:
        return read([])
    local = locate_local_form(name, data_dir)
    if local and not all(locate(name, data_dir).values()):
        form, paths = local
        return _cached(f"{name} {larger}", _stamp(paths), lambda: form.read(paths))
    paths = [
        find(remote.path, data_dir) or fetch(name, remote, data_dir, download) for remote in source.files
    ]
    unchecked = bool(os.environ.get(UNCHECKED))

    def parse() -> Examples:
        for path, remote in zip(paths, source.files, strict=True):
            if not unchecked:
                check_published(path, remote)
        return read(paths)

    # Unchecked examples have their own cache, which is not used once files are to be checked.
    return _cached(f"{name} {larger}" + " unchecked" * unchecked, _stamp(paths), parse)


def _stamp(paths: list[Path]) -> str:
    """A text that changes with the files."""
    return "".join(f"{path.resolve()} {file_stamp(path)}" for path in paths)


def _cached(key: str, stamp: str, parse: Callable[[], Examples]) -> Examples:
    """Return the cached examples of a key and stamp, or parse and cache them. Also works without a cache.

    Deletes examples that were cached for the same key with another stamp.
    """
    name, version = (
        hashlib.sha256(f"{_FORMAT}{text}".encode(errors="surrogatepass")).hexdigest()[:16]
        for text in (key, stamp)
    )
    path = cache_dir() / "parsed" / f"{name}-{version}.npz"
    if path.is_file():
        try:
            return Examples.load(path)
        except ValueError:  # damaged: parse again
            pass
    examples = parse()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        examples.save(path)
        for old in path.parent.glob(f"{name}-*.npz"):
            if old != path:
                old.unlink(missing_ok=True)
    except OSError:
        pass
    return examples
