"""Image files: decoding, resizing, and folders or archives with one folder for each class."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from bruno import limits
from bruno.arrays import contrasting, image_to_array, transparent_luminance
from bruno.data.archives import READ_ERRORS, entries, is_hidden, reason
from bruno.data.drawings import normalise_drawing
from bruno.data.examples import Examples

_READABLE = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}
_UNREADABLE = {".heic", ".heif", ".avif", ".jxl", ".svg", ".pdf", ".dng", ".cr2", ".nef", ".psd"}

_OPAQUE = {".jpg", ".jpeg", ".bmp", ".pgm", ".ppm"}  # formats without transparency
_COLOUR_SAMPLE = 20  # images that show whether a folder has colours
_GREY = 8  # an image is grey if its channels differ by at most this on average, of 255

Size = int | tuple[int, int]  # a side, or (height, width)


def read_images(
    path: Path,
    *,
    size: Size | None = None,
    grey: bool = True,
    skip_bad: bool = False,
    drawings: bool = False,
    invert: bool | None = None,
    backdrop: str = "",
) -> Examples:
    """Read a folder, zip or tar of class folders of images; the name of a class is the path of its folder.

    Args:
        path: the folder or archive.
        size: resize to this side or (height, width), bilinear. By default all images must have one size.
        grey: one channel; otherwise three.
        skip_bad: skip images and folders that cannot be read, images that differ from the most common size,
            and the lost part of a damaged archive, instead of raising. `Examples.skipped` names them.
        drawings: normalise line drawings; see `normalise_drawing`.
        invert: for drawings: whether ink is darker than paper; detected by default.
        backdrop: "black" or "white", behind transparent pixels; by default what contrasts with each image.
    """
    read = partial(decode, size=size, grey=grey, drawings=drawings, invert=invert, backdrop=backdrop)
    images, problems = _decode_all(path, read, skip_bad)
    problems |= _size_problems(images)
    if problems and not skip_bad:
        name, problem = next(iter(problems.items()))
        raise ValueError(
            f"{path}: {name} cannot be used: {problem}. Correct it, or skip such images (`skip_bad`)."
        )
    names = sorted(images.keys() - problems)
    if not names:
        raise ValueError(
            f"{path}: must contain images in class folders, like {path.name}/CLASS/IMAGE.png; found none"
            + (f" but {len(problems)} unreadable." if problems else ".")
        )
    skip = 0 if path.is_dir() else _wrapper_depth(names)
    classes, labels = np.unique([_class_of(name, skip) for name in names], return_inverse=True)
    pixels = np.stack([images[name] for name in names])
    return Examples(pixels, labels, tuple(map(str, classes)), tuple(problems))


def decode(
    content: bytes,
    size: Size | None,
    grey: bool,
    *,
    drawings: bool = False,
    invert: bool | None = None,
    backdrop: str = "",
) -> NDArray[np.uint8]:
    """Decode an image file to uint8 (channels, height, width), resized if `size` is given.

    With `drawings`, the result is the grey image of `normalise_drawing`, which also takes `invert`. It always
    needs a backdrop that contrasts with the drawing, and then detects the polarity.

    Raises ValueError or OSError if the file is damaged.
    """
    try:
        with _opened(content) as image:
            if not drawings:
                return image_to_array(image, size, grey, backdrop)
            drawing: NDArray[np.uint8]
            [drawing] = normalise_drawings(image_to_array(image, None, True)[None], size, invert=invert)
            return drawing
    except UnidentifiedImageError as error:
        raise ValueError("it is not an image") from error
    except OSError:
        raise
    except READ_ERRORS as error:
        raise ValueError(reason(error)) from error


def normalise_drawings(
    images: NDArray[np.uint8], size: Size | None, *, invert: bool | None = None
) -> NDArray[np.uint8]:
    """Normalise line drawings (n, 1, height, width) to `size`, by default Omniglot's 28 × 28."""
    wanted = (size, size) if isinstance(size, int) else size or (28, 28)
    drawn: list[NDArray[np.uint8]] = [
        normalise_drawing(image, wanted, invert=invert)[None] for image in images[:, 0]
    ]
    return np.stack(drawn)


def common_backdrop(path: Path) -> str:
    """The backdrop that contrasts more with most transparent images of class folders; "" if there are none.

    Chosen for each image, it would split a class whose brightness varies.
    """
    found = []
    with suppress(*READ_ERRORS, ValueError):  # of a damaged archive, which is reported when it is read
        for name, read in entries(path, _is_in_class_folder):
            if PurePosixPath(name).suffix.lower() in _OPAQUE:
                continue
            with suppress(*READ_ERRORS, ValueError), _opened(read()) as image:
                found.append(transparent_luminance(image))
    luminances = [luminance for luminance in found if luminance is not None]
    return contrasting(float(np.median(luminances))) if luminances else ""


def has_colour(path: Path) -> bool:
    """Whether most of the first images of a folder or archive of class folders have colours."""
    found = []
    for _, read in islice(entries(path, _is_in_class_folder), _COLOUR_SAMPLE):
        with suppress(*READ_ERRORS, ValueError):
            found.append(float(np.ptp(decode(read(), 16, False).astype(np.int16), axis=0).mean()) > _GREY)
    return sum(found) > len(found) / 2


def fit_all(images: NDArray[np.uint8], size: Size | None, grey: bool | None) -> NDArray[np.uint8]:
    """Resize images (n, channels, height, width) and convert their channels; by default unchanged."""
    channels, height, width = images.shape[1:]
    wanted = (size, size) if isinstance(size, int) else size or (height, width)
    grey = channels == 1 if grey is None else grey
    if wanted == (height, width) and grey == (channels == 1):
        return images
    arrays = np.moveaxis(images, 1, 3)
    opened = (Image.fromarray(array[:, :, 0] if channels == 1 else array) for array in arrays)
    return np.stack([image_to_array(image, wanted, grey) for image in opened])


def is_image(name: str) -> bool:
    """Whether the name is that of a readable image file, neither hidden nor in a hidden folder."""
    path = PurePosixPath(name)
    return path.suffix.lower() in _READABLE and not any(map(is_hidden, path.parts))


def is_unreadable_image(name: str) -> bool:
    """Whether the name is that of an image in an unsupported format, such as a phone's HEIC."""
    return PurePosixPath(name).suffix.lower() in _UNREADABLE and not is_hidden(name)


def _opened(content: bytes) -> Image.Image:
    """An image whose pixels are not decoded yet; raises ValueError if there are too many."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is lower
        image = Image.open(io.BytesIO(content))
    limits.PIXELS.check(image.width * image.height, "it")
    return image


def _decode_all(
    path: Path, read_image: Callable[[bytes], NDArray[np.uint8]], skip_bad: bool
) -> tuple[dict[str, NDArray[np.uint8]], dict[str, str]]:
    """Return the images and the problems, by file name; stops at the first problem unless `skip_bad`."""
    images: dict[str, NDArray[np.uint8]] = {}
    problems: dict[str, str] = {}
    amount = 0
    try:
        for name, read in entries(path, _is_in_class_folder):
            limits.MEMORY.check(amount, f"{path}: the images")
            try:
                images[name] = read_image(read())
                amount += images[name].nbytes
            except (*READ_ERRORS, ValueError) as error:
                problems[name] = reason(error)
                if not skip_bad:
                    break
    except READ_ERRORS as error:
        raise ValueError(
            f"{path}: must be a folder, zip or tar of class folders, an .npz or a .csv; it is none of these, "
            f"or truncated: {reason(error)}."
        ) from error
    return images, problems


def _is_in_class_folder(name: str) -> bool:
    return is_image(name) and len(PurePosixPath(name).parts) > 1


def _size_problems(images: dict[str, NDArray[np.uint8]]) -> dict[str, str]:
    """Return a problem for each image that differs from the most common size."""
    if not images:
        return {}
    [(common, _)] = Counter(image.shape for image in images.values()).most_common(1)
    return {
        name: f"all images must have one size, {common[1:]}; got {image.shape[1:]}. "
        "Set a size (`size`, without `original`)"
        for name, image in images.items()
        if image.shape != common
    }


def _wrapper_depth(names: Iterable[str]) -> int:
    """Return 1 if the archive has a single top folder around all class folders, else 0."""
    paths = [PurePosixPath(name).parts for name in names]
    return int(len({parts[0] for parts in paths}) == 1 and all(len(parts) > 2 for parts in paths))


def _class_of(name: str, skip: int) -> str:
    return "/".join(PurePosixPath(name).parts[skip:-1])
