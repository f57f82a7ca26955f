"""CIFAR-10 in three forms: the published binary and Python versions, and sheets of tiles."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bruno.data.archives import entries, reason
from bruno.data.examples import Examples
from bruno.data.images import decode
from bruno.files import read_regular

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_SIDE = 32  # height and width of a tile


def read_cifar10_binary(path: Path, train: bool) -> Examples:
    """Read the binary version of CIFAR-10: a tar.gz of records, each a label and 3 × 32 × 32 bytes."""
    batches = [f"data_batch_{i}.bin" for i in range(1, 6)] if train else ["test_batch.bin"]
    try:
        contents = _contents(path, [*batches, "batches.meta.txt"])
        names = tuple(contents["batches.meta.txt"].decode("ascii").split())
        records = [
            np.frombuffer(contents[batch], np.uint8).reshape(-1, 1 + _PIXELS).copy() for batch in batches
        ]
        joined = np.concatenate(records)
        if not len(joined):
            raise ValueError("it must contain at least one image")
        return Examples(joined[:, 1:].reshape(-1, *_SHAPE), joined[:, 0].astype(np.int64), names)
    except Exception as error:
        raise ValueError(
            f"{path}: must be the binary version of CIFAR-10; it is not, or is damaged: {reason(error)}."
        ) from error


def read_cifar10_python(path: Path, train: bool) -> Examples:
    """Read the Python version of CIFAR-10, a tar.gz of pickles; only numpy arrays are unpickled."""
    batches = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
    try:
        contents = {
            name: _ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
            for name, content in _contents(path, [*batches, "batches.meta"]).items()
        }
        names = tuple(label.decode() for label in contents["batches.meta"][b"label_names"])
        data = [contents[batch][b"data"] for batch in batches]
        labels = [label for batch in batches for label in contents[batch][b"labels"]]
        pixels = np.concatenate(data, dtype=np.uint8, casting="safe").reshape(-1, *_SHAPE)
        return Examples(pixels, labels, names)
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(
            f"{path}: must be the Python version of CIFAR-10; it is not, or is damaged: {reason(error)}."
        ) from error


def read_cifar10_sheets(paths: Sequence[Path]) -> Examples:
    """Read one lossless image for each class, SPLIT-CLASS.webp; its tiles of 32 × 32 pixels are the elements.

    Tiles are in rows from the top, from left to right.
    """
    sheets = [_tiles(path) for path in paths]
    labels = np.repeat(np.arange(len(paths)), [len(tiles) for tiles in sheets])
    names = tuple(path.stem.partition("-")[2] for path in paths)
    return Examples(np.concatenate(sheets), labels, names)


def _tiles(path: Path) -> NDArray[np.uint8]:
    """The tiles of a sheet, (n, 3, 32, 32)."""
    try:
        sheet = decode(read_regular(path), None, grey=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as an image: {reason(error)}.") from error
    _, height, width = sheet.shape
    if height % _SIDE or width % _SIDE:
        raise ValueError(
            f"{path}: must consist of tiles of {_SIDE} × {_SIDE} pixels; got {height} × {width} pixels."
        )
    grid = sheet.reshape(3, height // _SIDE, _SIDE, width // _SIDE, _SIDE)
    return grid.transpose(1, 3, 0, 2, 4).reshape(-1, *_SHAPE)


def _contents(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """The content of the files with these names, in any folder of an archive."""
    return {_file_name(name): read() for name, read in entries(path, lambda name: _file_name(name) in names)}


def _file_name(name: str) -> str:
    return PurePosixPath(name).name


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles numpy arrays and rejects every other class."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"refused to unpickle {module}.{name}")
