"""File formats of arrays: idx (MNIST, Fashion-MNIST) and npz."""

from __future__ import annotations

import gzip
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bruno import limits
from bruno.data.archives import READ_ERRORS, read_arrays, reason
from bruno.data.columns import MAX_NUMBER
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
    missing: bool = False,
    drawings: bool = False,
    invert: bool | None = None,
) -> Examples:
    """Read an npz with `labels` (n,) and either `rows` (n, dim) or `images`, uint8.

    `rows` may be NaN if `missing`; `columns` (dim,) may give their names.

    Images are (n, height, width), (n, height, width, channels) or (n, channels, height, width). They are
    resized and converted like those of `read_images`, or normalised as `drawings`; by default they keep their
    size and channels.
    """
    arrays = _load_npz(path)
    are_rows = "rows" in arrays
    elements = (
        _check_rows(path, arrays["rows"], missing) if are_rows else _channels_first(path, arrays["images"])
    )
    n, labels = len(elements), arrays["labels"]
    if not n or labels.shape not in ((n,), (n, 1)):
        raise ValueError(
            f"{path}: `labels` must have one entry for each element, at least one; "
            f"got labels of shape {labels.shape} for {n} elements."
        )
    names, classes = np.unique(labels.reshape(n), return_inverse=True)
    if not are_rows:
        elements = fit_all(elements, None if drawings else size, drawings or grey)
        elements = normalise_drawings(elements, size, invert=invert) if drawings else elements
    columns = tuple(map(str, arrays.get("columns", ()))) if are_rows else ()
    if columns and len(columns) != elements.shape[1]:
        raise ValueError(f"{path}: `columns` must name {elements.shape[1]} columns; got {len(columns)}.")
    return Examples(elements, classes, tuple(map(str, names)), columns=columns)


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


def _check_rows(path: Path, rows: NDArray[Any], missing: bool) -> NDArray[Any]:
    """Return float64 (n, dim): a model standardises rows before it rounds them to float32."""
    if rows.ndim != 2 or rows.dtype.kind not in "fiub":
        raise ValueError(f"{path}: `rows` must be numbers (n, dim); got {rows.dtype} {rows.shape}.")
    numbers = rows.astype(np.float64)
    bad = ~(np.abs(numbers) <= MAX_NUMBER)  # also rejects NaN
    if missing:
        bad &= ~np.isnan(numbers) | np.isnan(numbers).all(1, keepdims=True)
    if bad.any():
        raise ValueError(f"{path}: `rows` must be finite and below {MAX_NUMBER:.1e}; got {numbers[bad][0]}.")
    return numbers


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
