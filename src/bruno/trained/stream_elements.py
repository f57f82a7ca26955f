"""The elements of streams and batches with their sets, from files, frames, arrays or iterators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

from bruno.arrays import ArrayLike, is_frame
from bruno.data import Element, ElementReader
from bruno.data.reader import collected
from bruno.files import check_regular
from bruno.trained.base import Source, are_paths
from bruno.trained.data import TrainedData


def grouped_elements(
    trained: TrainedData,
    source: Source | Iterable[Element] | Iterator[ArrayLike],
    reader: ElementReader,
    one_set: bool,
    invert: bool | None,
    name: str,
) -> Iterable[Element]:
    """Elements with their groups, from files, lines, frames or arrays; class folders of images are groups.

    If the model was trained on groups, each element of a file or frame must name its group. Arrays and lists
    of elements are one set, unless the elements name groups. An iterator is read one by one. Errors call the
    argument `name`.
    """
    if isinstance(source, Iterator):
        return _as_they_arrive(trained, source, reader, one_set, invert, name)
    if isinstance(source, list) and source and isinstance(source[0], Element):
        return source
    if is_frame(source):
        rows = reader.read_frame(source)
        return collected(rows if one_set else _with_groups(rows, reader, trained.group))
    if not are_paths(source):
        x, names, groups = trained.read(cast(Source, source), impute=False, invert=invert, name=name)
        return [Element(*one) for one in zip(names, x, groups, strict=True)]
    paths = [source] if isinstance(source, str | Path) else list(cast(Sequence[str], source))
    if not reader.skip_bad:
        for path in paths:
            _check_readable(path, reader)
    elements = reader.read(paths, class_folders=True)
    return elements if one_set else _with_groups(elements, reader, trained.group)


def _check_readable(path: str | Path, reader: ElementReader) -> None:
    """Raise an error if a stream cannot be read at all, before a calibration that may take a long time."""
    if not str(path) or not Path(path).exists():
        raise FileNotFoundError(f"{str(path) or 'an empty path'}: no such file or folder.")
    if Path(path).is_dir():
        for folder in reader.sets_in(Path(path)).values():
            reader.files(folder)
    else:
        check_regular(Path(path))


def _as_they_arrive(
    trained: TrainedData,
    source: Iterator[Element | ArrayLike],
    reader: ElementReader,
    one_set: bool,
    invert: bool | None,
    name: str,
) -> Iterator[Element]:
    """The elements of an iterator; arrays and PIL images get their positions as names."""
    count = 0
    for given in source:
        if isinstance(given, Element):
            found = [given] if one_set else list(_with_groups(iter([given]), reader, trained.group))
        else:
            x = trained.convert(given, invert=invert, name=name)
            found = [Element(str(count + i), one) for i, one in enumerate(x, start=1)]
        count += len(found)
        yield from found


def is_skipped_without_group(element: Element, reader: ElementReader) -> bool:
    """Whether to skip an element that names no group; raises if its table lacks the group column."""
    if reader.header and reader.group not in reader.header:
        raise ValueError(
            f"`group` must be a column, one of {', '.join(reader.header)}; got {reader.group!r}. Or judge "
            "all rows as one set (`one_set`)."
        )
    if reader.skip_bad:
        reader.skipped.append(element.name)
    return reader.skip_bad


def _with_groups(elements: Iterator[Element], reader: ElementReader, trained_on: str) -> Iterator[Element]:
    """The elements; raises if there is a group column and an element names no group in it.

    `trained_on` is the group column of the training, if there was one.
    """
    for element in elements:
        if reader.group and not element.group:
            if is_skipped_without_group(element, reader):
                continue
            reason = ", as the model was trained on sets" * bool(trained_on)
            raise ValueError(
                f"{element.name}: must name its set in column {reader.group!r}{reason}; got none. Name the "
                "column (`group`), or judge all rows as one set (`one_set`)."
            )
        yield element
