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
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from bruno.data.archives import READ_ERRORS, entries, reason
from bruno.data.examples import Examples, column_positions

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}
_UNREADABLE = {".heic", ".heif", ".avif", ".jxl", ".svg", ".pdf", ".dng", ".cr2", ".nef", ".psd"}
LARGEST = float(np.finfo(np.float32).max)  # of a number in a table: its square is finite in float64


def read_images(
    path: Path,
    *,
    size: int | tuple[int, int] | None = None,
    grey: bool = True,
    skip_bad: bool = False,
) -> Examples:
    """A folder, zip or tar of class folders of images; a class is named by its path.

    Args:
        path: the folder or archive.
        size: resize to this height and width (bilinear); left out, all images must have one size.
        grey: one channel, else three.
        skip_bad: leave out images that will not open or are not of the size that most have, and what is lost
            of a damaged archive, instead of raising.
    """
    images: dict[str, NDArray[np.uint8]] = {}
    problems: dict[str, str] = {}
    try:
        for name, read in entries(path, _is_image_of_a_class):
            try:
                images[name] = decode(read(), size, grey)
            except (*READ_ERRORS, ValueError) as error:
                problems[name] = reason(error)
                if not skip_bad:
                    break
    except READ_ERRORS as error:
        raise ValueError(
            f"{path}: must be a folder, zip or tar of class folders, an .npz or a .csv; it is none of "
            f"these, or is cut short: {reason(error)}."
        ) from error
    problems |= _of_another_size(images)
    if problems and not skip_bad:
        name, problem = next(iter(problems.items()))
        raise ValueError(f"{path}: {name} cannot be used: {problem}.")
    names = sorted(images.keys() - problems)
    if not names:
        raise ValueError(
            f"{path}: no images in class folders were found, as {path.name}/CLASS/IMAGE.png"
            + (f"; {len(problems)} could not be read." if problems else ".")
        )
    skip = 0 if path.is_dir() else _wrappers(names)
    classes, labels = np.unique([_class_of(name, skip) for name in names], return_inverse=True)
    pixels = np.stack([images[name] for name in names])
    return Examples(
        torch.from_numpy(pixels),
        torch.from_numpy(labels).long(),
        tuple(map(str, classes)),
        tuple(problems),
    )


def read_idx(images: Path, labels: Path) -> Examples:
    """A pair of gzipped idx files, as MNIST and Fashion-MNIST are published."""
    pixels, classes = _idx(images, 3), _idx(labels, 1)
    if len(pixels) != len(classes):
        raise ValueError(
            f"{labels}: must label the {len(pixels)} images of {images.name}; has {len(classes)}."
        )
    if not len(pixels):
        raise ValueError(f"{images}: must hold at least one image; it is empty.")
    names = tuple(str(i) for i in range(int(classes.max()) + 1))
    return Examples(torch.from_numpy(pixels).unsqueeze(1), torch.from_numpy(classes).long(), names)


def read_cifar10(path: Path, train: bool) -> Examples:
    """The python version of CIFAR-10, a tar.gz of pickles, read by an unpickler that knows arrays only."""
    batches = [f"data_batch_{i}" for i in range(1, 6)] if train else ["test_batch"]
    contents: dict[str, dict[bytes, Any]] = {}
    try:
        for name, read in entries(path, lambda name: _base(name) in (*batches, "batches.meta")):
            contents[_base(name)] = _ArraysOnly(io.BytesIO(read()), encoding="bytes").load()
        names = tuple(label.decode() for label in contents["batches.meta"][b"label_names"])
        data = [contents[batch][b"data"] for batch in batches]
        labels = [label for batch in batches for label in contents[batch][b"labels"]]
        pixels = np.concatenate(data, dtype=np.uint8, casting="safe").reshape(-1, 3, 32, 32)
        return Examples(torch.from_numpy(pixels), torch.tensor(labels), names)
    except Exception as error:  # a damaged pickle raises whatever it happens to run into
        raise ValueError(
            f"{path}: is not the python version of CIFAR-10, or is damaged: {reason(error)}."
        ) from error


def read_npz(path: Path, *, size: int | tuple[int, int] | None = None, grey: bool | None = None) -> Examples:
    """An npz with `labels` (n,) and either `rows` (n, dim) or `images`, uint8.

    Images are (n, height, width), (n, height, width, channels) or (n, channels, height, width). They are
    resized and made grey, or not, as those of `read_images`; left out, they stay as they are.
    """
    try:
        with path.open("rb") as file:
            held = np.load(file, allow_pickle=False)
            if isinstance(held, np.ndarray):
                raise ValueError("it is one array, an .npy; save with np.savez(FILE, images=…, labels=…)")
            arrays = {name: held[name] for name in ("images", "rows", "labels") if name in held}
    except (*READ_ERRORS, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as npz: {reason(error)}.") from error
    if "labels" not in arrays or len(arrays) == 1:
        found = ", ".join(held) or "nothing"
        raise ValueError(f"{path}: must hold `images` or `rows`, and `labels`; has {found}.")
    if "rows" in arrays:
        elements = _rows(path, arrays["rows"])
    else:
        elements = _all_fitted(_images(path, arrays["images"]), size, grey)
    n, labels = len(elements), arrays["labels"]
    if not n or labels.shape not in ((n,), (n, 1)):
        raise ValueError(
            f"{path}: `labels` must be one for each element, of which there must be some; "
            f"got labels {labels.shape} for {n}."
        )
    names, classes = np.unique(labels.reshape(n), return_inverse=True)
    return Examples(elements, torch.from_numpy(classes).long(), tuple(map(str, names)))


def _rows(path: Path, rows: NDArray[Any]) -> Tensor:
    """float64 (n, dim): a model brings them to a scale before it shortens them."""
    if rows.ndim != 2 or rows.dtype.kind not in "fiub":
        raise ValueError(f"{path}: `rows` must be numbers, (n, dim); got {rows.dtype} {rows.shape}.")
    elements = torch.from_numpy(rows.astype(np.float64))
    if not (elements.abs() <= LARGEST).all():
        raise ValueError(f"{path}: `rows` must be finite and below {LARGEST:.1e}; some are not.")
    return elements


def _images(path: Path, images: NDArray[Any]) -> Tensor:
    """uint8 (n, channels, height, width); the axis of 1 or 3 is that of the channels."""
    if images.ndim == 3 and images.dtype == np.uint8:
        return torch.from_numpy(images).unsqueeze(1)
    first, last = (images.ndim == 4 and images.shape[axis] in (1, 3) for axis in (1, -1))
    if images.dtype != np.uint8 or first == last:
        raise ValueError(
            f"{path}: `images` must be uint8, (n, height, width), or with 1 or 3 channels "
            f"(n, height, width, channels) or (n, channels, height, width), which must not be "
            f"mistakable for one another; got {images.dtype} {images.shape}."
        )
    return torch.from_numpy(np.ascontiguousarray(images if first else images.transpose(0, 3, 1, 2)))


def _all_fitted(images: Tensor, size: int | tuple[int, int] | None, grey: bool | None) -> Tensor:
    """(n, channels, height, width), each `_fitted`; nothing to do is done at once."""
    channels, height, width = images.shape[1:]
    wanted = (size, size) if isinstance(size, int) else size or (height, width)
    grey = channels == 1 if grey is None else grey
    if wanted == (height, width) and grey == (channels == 1):
        return images
    arrays = images.movedim(1, 3).numpy()
    pictures = (Image.fromarray(array[:, :, 0] if channels == 1 else array) for array in arrays)
    return torch.from_numpy(np.stack([_fitted(picture, wanted, grey) for picture in pictures]))


def read_csv(path: Path, group: str, *, columns: Sequence[str] = (), skip_bad: bool = False) -> Examples:
    """A table with a header: rows of the same value in the `group` column are a set, the others numbers.

    Of the others only `columns` are read, in that order, if some are named.
    """
    rows, groups, skipped = [], [], []
    try:
        with open_text(path) as file:
            table = csv.reader(file)
            header = next(table, [])
            if group not in header:
                apart = " Columns are separated by commas." if len(header) == 1 else ""
                raise ValueError(
                    f"{path}: `group` must be a column, one of {', '.join(header)}; got {group!r}. "
                    f"Name it (`data.group`).{apart}"
                )
            if len(header) == 1:
                raise ValueError(f"{path}: must have columns of numbers beside {group!r}; there is none.")
            try:
                (place,) = column_positions([group], header)
                others = column_positions(columns or [name for name in header if name != group], header)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            for cells in filter(None, table):  # blank lines are none
                try:
                    row = parse_numbers(cells, header, others)
                except ValueError as error:
                    if not skip_bad:
                        raise ValueError(
                            f"{path}: line {table.line_num} cannot be used: {error}. Mend it, leave such "
                            "lines out (--skip-bad, `data.skip_bad`), or name the columns that are numbers "
                            "(`data.columns`)."
                        ) from error
                    skipped.append(f"line {table.line_num}")
                    continue
                rows.append(row)
                groups.append(cells[place])
    except csv.Error as error:
        raise ValueError(f"{path}: line {table.line_num} cannot be read as CSV: {error}.") from error
    if not rows:
        raise ValueError(f"{path}: must hold at least one row of numbers.")
    names, labels = np.unique(groups, return_inverse=True)
    return Examples(
        torch.tensor(rows, dtype=torch.double),
        torch.from_numpy(labels).long(),
        tuple(map(str, names)),
        tuple(skipped),
        columns=tuple(header[i] for i in others),
    )


def parse_numbers(cells: Sequence[str], header: Sequence[str], places: Iterable[int]) -> list[float]:
    """Of the cells in some places of a line: finite numbers, whose squares are finite too."""
    if len(cells) != len(header):
        raise ValueError(f"it must have {len(header)} cells; it has {len(cells)}: {','.join(cells)}")
    row: list[float] = []
    for name, cell in ((header[place], cells[place]) for place in places):
        try:
            row.append(float(cell))
        except ValueError:
            raise ValueError(f"{name!r} must be a number; it is {cell!r}") from None
        if not abs(row[-1]) <= LARGEST:
            raise ValueError(f"{name!r} must be finite and below {LARGEST:.1e}; it is {cell}")
    return row


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """A file of text, with or without the mark that Excel puts before UTF-8; a ValueError if it is none."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield file
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {reason(error)}.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: must be text in UTF-8; save it as that. {error}.") from error


def is_image(name: str) -> bool:
    """Whether a file of this name is one, and neither hidden nor what an archiver left beside it."""
    path = PurePosixPath(name)
    return path.suffix.lower() in _IMAGES and not any(map(is_hidden, path.parts))


def is_unreadable_image(name: str) -> bool:
    """Whether a file of this name is an image of a kind that is not read here, as telephones take them."""
    return PurePosixPath(name).suffix.lower() in _UNREADABLE and not is_hidden(name)


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is not meant to be seen, or was left by an archiver."""
    return name.startswith((".", "__MACOSX"))


def _is_image_of_a_class(name: str) -> bool:
    return is_image(name) and len(PurePosixPath(name).parts) > 1


def _of_another_size(images: dict[str, NDArray[np.uint8]]) -> dict[str, str]:
    """What is wrong with the images that are not of the size that most have."""
    if not images:
        return {}
    [(most, _)] = Counter(image.shape for image in images.values()).most_common(1)
    return {
        name: f"all images must have one size, {most[1:]}; got {image.shape[1:]}. "
        "Set a size (`data.size`, without `data.original`)"
        for name, image in images.items()
        if image.shape != most
    }


def _wrappers(names: Iterable[str]) -> int:
    """1 where an archive wraps a folder around all of its class folders, else 0."""
    paths = [PurePosixPath(name).parts for name in names]
    return int(len({parts[0] for parts in paths}) == 1 and all(len(parts) > 2 for parts in paths))


def _class_of(name: str, skip: int) -> str:
    return "/".join(PurePosixPath(name).parts[skip:-1])


def _base(name: str) -> str:
    return PurePosixPath(name).name


def decode(content: bytes, size: int | tuple[int, int] | None, grey: bool) -> NDArray[np.uint8]:
    """An image file as (channels, height, width), uint8."""
    try:
        opened = Image.open(io.BytesIO(content))
    except UnidentifiedImageError as error:
        raise ValueError("it is not an image") from error
    with opened as file:
        ImageOps.exif_transpose(file, in_place=True)  # as the camera was held
        return _fitted(_opaque(_with_8_bits(file)), size, grey)


def _fitted(image: Image.Image, size: int | tuple[int, int] | None, grey: bool) -> NDArray[np.uint8]:
    """An image of this size and as many channels as wanted, (channels, height, width)."""
    image = image.convert("L" if grey else "RGB")
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    array = np.asarray(image)
    return array[None] if grey else array.transpose(2, 0, 1)


def _with_8_bits(image: Image.Image) -> Image.Image:
    """16-bit grey values on the scale of 8 bits; Pillow itself would cut them off at 255."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray(np.round(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels have 32 bits, and no scale that is known. Save it with 8 or 16 bits")
    return image


def _opaque(image: Image.Image) -> Image.Image:
    """What is transparent becomes paper: black or white, whichever is further from what is drawn on it."""
    if not image.has_transparency_data:
        return image
    drawn = image.convert("RGBA")
    luminance, alpha = np.asarray(drawn.convert("L"), float), np.asarray(drawn.getchannel("A"), float)
    ink = (luminance * alpha).sum() / max(1.0, alpha.sum())
    paper = Image.new("RGBA", drawn.size, "black" if ink > 127 else "white")
    return Image.alpha_composite(paper, drawn)


def _idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    expected = 0x800 + dimensions  # unsigned bytes, so many axes
    try:
        with gzip.open(path) as file:
            content = file.read()
        (magic,) = struct.unpack(">I", content[:4])
        shape = struct.unpack(f">{dimensions}I", content[4 : 4 * dimensions + 4]) if magic == expected else ()
    except READ_ERRORS as error:
        raise ValueError(f"{path}: is not a gzipped idx file, or is cut short: {reason(error)}.") from error
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
