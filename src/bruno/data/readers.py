"""Readers of files as they are published: archives and folders of images, idx, CIFAR-10, npz, CSV.

Each gives `Examples`. A file that cannot be what it should be is a ValueError that names it; with
``skip_bad`` a bad image is left out and counted instead.
"""

from __future__ import annotations

import csv
import gzip
import io
import pickle
import struct
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from bruno.data.examples import Examples

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}
BROKEN = (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, struct.error)


def read_images(
    path: Path,
    *,
    size: int | tuple[int, int] | None = None,
    grey: bool = True,
    invert: bool = False,
    skip_bad: bool = False,
) -> Examples:
    """A folder, zip or tar of class folders of images; a class is named by its path.

    Args:
        path: the folder or archive.
        size: resize to this height and width (bilinear); left out, all images must have one size.
        grey: one channel, else three.
        invert: 255 − pixel, where ink is dark and should be bright.
        skip_bad: leave out images that will not open instead of raising.
    """
    arrays: list[NDArray[np.uint8]] = []
    classes, skipped = [], []
    for name, content in _files(path):
        try:
            array = decode(content, size, grey)
            if arrays and array.shape != arrays[0].shape:
                raise ValueError(
                    f"all images must have one size, {arrays[0].shape[1:]}; got {array.shape[1:]}. Set a size"
                )
        except (*BROKEN, ValueError, Image.DecompressionBombError) as error:
            if not skip_bad:
                raise ValueError(f"{path}: {name} cannot be used: {error}.") from error
            skipped.append(name)
            continue
        arrays.append(255 - array if invert else array)
        classes.append(str(PurePosixPath(name).parent))
    if not arrays:
        raise ValueError(f"{path}: no images in class folders were found, as {path.name}/CLASS/IMAGE.png.")
    names = sorted(set(classes))
    index = {name: i for i, name in enumerate(names)}
    labels = torch.tensor([index[name] for name in classes])
    return Examples(torch.from_numpy(np.stack(arrays)), labels, tuple(names), tuple(skipped))


def read_idx(images: Path, labels: Path) -> Examples:
    """A pair of gzipped idx files, as MNIST and Fashion-MNIST are published."""
    pixels, classes = _idx(images, 3), _idx(labels, 1)
    if len(pixels) != len(classes):
        raise ValueError(
            f"{labels}: must label the {len(pixels)} images of {images.name}; has {len(classes)}."
        )
    names = tuple(str(i) for i in range(int(classes.max()) + 1))
    return Examples(torch.from_numpy(pixels).unsqueeze(1), torch.from_numpy(classes).long(), names)


def read_cifar10(path: Path, train: bool) -> Examples:
    """The python version of CIFAR-10, a tar.gz of pickles, read by an unpickler that knows arrays only."""
    wanted = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
    batches, names = [], None
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                name = PurePosixPath(member.name).name
                file = archive.extractfile(member) if name in (*wanted, "batches.meta") else None
                if file is None:
                    continue
                content = _ArraysOnly(io.BytesIO(file.read()), encoding="bytes").load()
                if name == "batches.meta":
                    names = tuple(label.decode() for label in content[b"label_names"])
                else:
                    batches.append((name, content))
    except (*BROKEN, pickle.UnpicklingError, KeyError) as error:
        raise ValueError(f"{path}: is not the python version of CIFAR-10: {error}.") from error
    if len(batches) != len(wanted) or names is None:
        raise ValueError(
            f"{path}: must hold {', '.join(wanted)} and batches.meta; found {len(batches)} batches."
        )
    batches.sort(key=lambda pair: pair[0])
    pixels = np.concatenate([content[b"data"] for _, content in batches]).reshape(-1, 3, 32, 32)
    labels = torch.tensor([label for _, content in batches for label in content[b"labels"]])
    return Examples(torch.from_numpy(pixels), labels, names)


def read_npz(path: Path) -> Examples:
    """An npz with `images` (n, height, width[, channels]) uint8, or `rows` (n, dim), and `labels`."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (*BROKEN, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as npz: {error}.") from error
    if "labels" not in arrays or not {"images", "rows"} & set(arrays):
        raise ValueError(
            f"{path}: must hold `images` or `rows`, and `labels`; has {', '.join(arrays) or 'nothing'}."
        )
    names, labels = np.unique(arrays["labels"], return_inverse=True)
    if "rows" in arrays:
        elements = torch.from_numpy(arrays["rows"]).float()
    else:
        images = arrays["images"]
        if images.dtype != np.uint8 or images.ndim not in (3, 4):
            raise ValueError(
                f"{path}: `images` must be uint8, (n, height, width) or (n, height, width, channels); "
                f"got {images.dtype} {images.shape}."
            )
        images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        elements = torch.from_numpy(np.ascontiguousarray(images))
    return Examples(elements, torch.from_numpy(labels).long(), tuple(map(str, names)))


def read_csv(path: Path, group: str, *, skip_bad: bool = False) -> Examples:
    """A table with a header: rows of the same value in the `group` column are a set, the others numbers."""
    rows, groups, skipped = [], [], []
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        columns = [name for name in reader.fieldnames or () if name != group]
        if group not in (reader.fieldnames or ()):
            raise ValueError(f"{path}: `group` must be a column, one of {', '.join(columns)}; got {group!r}.")
        for record in reader:
            try:
                row = [float(record[name]) for name in columns]
                if not np.isfinite(row).all():
                    raise ValueError("not finite")
            except (TypeError, ValueError) as error:
                if not skip_bad:
                    raise ValueError(
                        f"{path}: line {reader.line_num} is not numbers throughout: {error}."
                    ) from error
                skipped.append(f"line {reader.line_num}")
                continue
            rows.append(row)
            groups.append(record[group])
    if not rows:
        raise ValueError(f"{path}: must hold at least one row of numbers.")
    names, labels = np.unique(groups, return_inverse=True)
    return Examples(
        torch.tensor(rows), torch.from_numpy(labels).long(), tuple(map(str, names)), tuple(skipped)
    )


def _files(path: Path) -> Iterator[tuple[str, bytes]]:
    """The images of a folder or archive by their path inside, in a fixed order."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in _IMAGES and p.parent != path)
        yield from ((p.relative_to(path).as_posix(), p.read_bytes()) for p in files)
        return
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = sorted(filter(is_image, archive.namelist()))
                skip = _wrappers(names)
                yield from ((_inside(name, skip), archive.read(name)) for name in names)
        else:
            with tarfile.open(path) as bundle:
                members = {m.name: m for m in bundle if m.isfile() and is_image(m.name)}
                skip = _wrappers(members)
                for name in sorted(members):
                    file = bundle.extractfile(members[name])
                    assert file is not None
                    yield _inside(name, skip), file.read()
    except (*BROKEN, zipfile.zlib.error) as error:  # type: ignore[attr-defined]
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{path}: must be a folder, zip or tar of class folders, an .npz or a .csv; it is none of "
            f"these, or is cut short: {reason}."
        ) from error


def is_image(name: str) -> bool:
    """Whether a file of this name is one, and not what an archiver left beside it."""
    path = PurePosixPath(name)
    return path.suffix.lower() in _IMAGES and not path.name.startswith(".") and "__MACOSX" not in path.parts


def _wrappers(names: Iterable[str]) -> int:
    """1 where an archive wraps a folder around all of its class folders, else 0."""
    paths = [PurePosixPath(name).parts for name in names]
    return int(len({parts[0] for parts in paths}) == 1 and all(len(parts) > 2 for parts in paths))


def _inside(name: str, skip: int) -> str:
    return "/".join(PurePosixPath(name).parts[skip:])


def decode(content: bytes, size: int | tuple[int, int] | None, grey: bool) -> NDArray[np.uint8]:
    """An image file as (channels, height, width), uint8."""
    try:
        opened = Image.open(io.BytesIO(content))
    except UnidentifiedImageError as error:
        raise ValueError("it is not an image") from error
    with opened as file:
        image = file.convert("L" if grey else "RGB")
        if size is not None:
            height, width = (size, size) if isinstance(size, int) else size
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        array = np.asarray(image)
    return array[None] if grey else array.transpose(2, 0, 1)


def _idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    expected = 0x800 + dimensions  # unsigned bytes, so many axes
    try:
        with gzip.open(path) as file:
            content = file.read()
        (magic,) = struct.unpack(">I", content[:4])
        shape = struct.unpack(f">{dimensions}I", content[4 : 4 * dimensions + 4]) if magic == expected else ()
    except (*BROKEN, gzip.zlib.error) as error:  # type: ignore[attr-defined]
        raise ValueError(f"{path}: is not a gzipped idx file, or is cut short: {error}.") from error
    if magic != expected:
        raise ValueError(
            f"{path}: must be an idx file of {dimensions} dimensions; its magic number is {magic}."
        )
    pixels = np.frombuffer(content, np.uint8, offset=4 * dimensions + 4)
    if pixels.size != np.prod(shape, dtype=np.int64):
        raise ValueError(
            f"{path}: must hold {'×'.join(map(str, shape))} bytes; has {pixels.size}. It is cut short."
        )
    return pixels.reshape(shape).copy()


class _ArraysOnly(pickle.Unpickler):
    """Rebuilds numpy arrays and nothing else, whatever a file asks for."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }:
            return super().find_class(module.replace("numpy.core", "numpy._core"), name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")
