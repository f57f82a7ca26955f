"""File formats of arrays: idx (MNIST, Fashion-MNIST) and npz."""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bruno import limits
from bruno.data.archives import READ_ERRORS, read_arrays, reason
from bruno.data.columns import MAX_NUMBER, column_positions, usable_rows
from bruno.data.examples import Examples
from bruno.data.images import Size, fit_all, normalise_drawings
from bruno.files import check_regular


def read_idx(images: Path, labels: Path) -> Examples:
    """Read a pair of gzipped idx files, the format of MNIST and Fashion-MNIST."""
    pixels, classes = _read_idx_array(images, 3), _read_idx_array(labels, 1)
    if len(pixels) != len(classes):
        raise ValueError(
            f"{labels}: must have a label for each of the {len(pixels)} images of {images.name}; "
            f"got {len(classes)}."
        )
    if not len(pixels):
        raise ValueError(f"{images}: must contain at least one image; got none.")
    names = tuple(str(i) for i in range(int(classes.max()) + 1))
    return Examples(pixels[:, None], classes, names)


def read_npz(
    path: Path,
    *,
    size: Size | None = None,
    grey: bool | None = None,
    columns: Sequence[str] = (),
    missing: bool = False,
    skip_bad: bool = False,
    drawings: bool = False,
    invert: bool | None = None,
) -> Examples:
    """Read an npz with `labels` (n,) and either `rows` (n, dim) or `images`, uint8.

    `rows` may be NaN if `missing`. The array `columns` (dim,) may give their names, by which the argument
    `columns` selects some; without names, the argument gives the names of all. With `skip_bad`, rows that
    cannot be used are skipped.

    Images are (n, height, width), (n, height, width, channels) or (n, channels, height, width). They are
    resized and converted like those of `read_images`, or normalised as `drawings`; by default they keep their
    size and channels.
    """
    arrays = _load_npz(path)
    if "rows" in arrays:
        return _rows_of(path, arrays, columns, missing, skip_bad)
    if columns:
        raise ValueError(f"`columns` must be omitted for {path}, which has images; got {tuple(columns)}.")
    elements, (classes, names) = _channels_first(path, arrays["images"]), _classes(path, arrays)
    elements = fit_all(elements, None if drawings else size, drawings or grey)
    elements = normalise_drawings(elements, size, invert=invert) if drawings else elements
    return Examples(elements, classes, names)


def _rows_of(
    path: Path, arrays: dict[str, NDArray[Any]], wanted: Sequence[str], missing: bool, skip_bad: bool
) -> Examples:
    """The rows of an npz, of all columns or the wanted ones."""
    rows = _as_numbers(path, arrays["rows"])
    classes, names = _classes(path, arrays)
    columns = tuple(map(str, arrays.get("columns", wanted)))
    if columns and len(columns) != rows.shape[1]:
        raise ValueError(f"{path}: `columns` must name {rows.shape[1]} columns; got {len(columns)}.")
    if wanted:
        rows, columns = rows[:, column_positions(wanted, columns)], tuple(wanted)
    bad = ~usable_rows(rows, missing)
    if bad.any() and not skip_bad:
        row = int(bad.argmax())
        value = next(value for value in rows[row].tolist() if not abs(value) <= MAX_NUMBER)
        raise ValueError(
            f"{path}: `rows` must be finite and below {MAX_NUMBER:.1e}; got {value} in row {row + 1}. "
            "Correct it, or skip such rows (`skip_bad`)."
        )
    if bad.all():
        raise ValueError(f"{path}: `rows` must have at least one row that can be used; got none.")
    kept, inverse = np.unique(classes[~bad], return_inverse=True)
    return Examples(
        rows[~bad],
        inverse,
        tuple(names[i] for i in kept),
        columns=columns,
        skipped=tuple(f"row {i + 1}" for i in np.flatnonzero(bad)),
    )


def _classes(path: Path, arrays: dict[str, NDArray[Any]]) -> tuple[NDArray[Any], tuple[str, ...]]:
    """The class of each element, and the names of the classes."""
    n, labels = len(arrays["rows" if "rows" in arrays else "images"]), arrays["labels"]
    if not n or labels.shape not in ((n,), (n, 1)):
        raise ValueError(
            f"{path}: `labels` must have one entry for each element, at least one; "
            f"got labels of shape {labels.shape} for {n} elements."
        )
    names, classes = np.unique(labels.reshape(n), return_inverse=True)
    return classes, tuple(map(str, names))


def _load_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return `labels` and `rows` or `images`."""
    try:
        arrays = read_arrays(path, ("images", "rows", "labels", "columns"))
    except (*READ_ERRORS, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as npz: {reason(error)}.") from error
    if "labels" not in arrays or not arrays.keys() & {"images", "rows"}:
        found = ", ".join(arrays)
        raise ValueError(f"{path}: must contain `images` or `rows`, and `labels`; got {found}.")
    return arrays


def _as_numbers(path: Path, rows: NDArray[Any]) -> NDArray[np.float64]:
    """Return float64 (n, dim): a model standardises rows before it rounds them to float32."""
    if rows.ndim != 2 or rows.dtype.kind not in "fiub":
        raise ValueError(f"{path}: `rows` must be numbers (n, dim); got {rows.dtype} {rows.shape}.")
    return rows.astype(np.float64)


def _channels_first(path: Path, images: NDArray[Any]) -> NDArray[Any]:
    """Return uint8 (n, channels, height, width); the axis of length 1 or 3 holds the channels."""
    if images.ndim == 3 and images.dtype == np.uint8:
        return images[:, None]
    first, last = (images.ndim == 4 and images.shape[axis] in (1, 3) for axis in (1, -1))
    if images.dtype != np.uint8 or first == last:
        raise ValueError(
            f"{path}: `images` must be uint8, (n, height, width), or with 1 or 3 channels first or last: "
            "(n, height, width, channels) or (n, channels, height, width); "
            f"got {images.dtype} {images.shape}."
        )
    return np.ascontiguousarray(images if first else images.transpose(0, 3, 1, 2))


def _read_idx_array(path: Path, dimensions: int) -> NDArray[np.uint8]:
    expected = 0x800 + dimensions  # 0x08 for unsigned bytes, then the number of dimensions
    check_regular(path)
    shape: tuple[int, ...] = ()
    try:
        with gzip.open(path) as file:
            (magic,) = struct.unpack(">I", file.read(4))
            if magic == expected:
                shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
                limits.MEMORY.check(math.prod(shape), f"{path}: the array")
                content = file.read(math.prod(shape) + 1)
    except READ_ERRORS as error:
        raise ValueError(
            f"{path}: must be a gzipped idx file; it is not, or is truncated: {reason(error)}."
        ) from error
    if magic != expected:
        raise ValueError(
            f"{path}: must be an idx file of {dimensions} dimensions (magic number {expected}); got {magic}."
        )
    if len(content) != math.prod(shape):
        found = "more" if len(content) > math.prod(shape) else f"{len(content)}. It is truncated"
        raise ValueError(f"{path}: must contain {'×'.join(map(str, shape))} bytes; got {found}.")
    return np.frombuffer(content, np.uint8).reshape(shape)
