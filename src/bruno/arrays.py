"""Conversion between tensors and numpy arrays, lists of arrays or tensors, and PIL images."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bruno.kinds import Images, Kind, Rows, rescale_levels

if TYPE_CHECKING:
    from PIL.Image import Image

    ArrayLike: TypeAlias = Tensor | NDArray[Any] | Image | Sequence[Any] | float
else:  # `as_tensor` reports a wrong type itself
    ArrayLike: TypeAlias = object

# Types that `as_tensor` takes besides tensors and images; signatures list them after a tensor type.
Arrays: TypeAlias = NDArray[Any] | Sequence[Any]


def as_tensor(
    x: ArrayLike, name: str = "x", *, device: torch.device | str | None = None, kind: Kind | None = None
) -> Tensor:
    """A tensor of the same values.

    A tensor is returned as it is, on its own device. Everything else goes to `device`: numpy arrays of any
    strides and byte order, objects with ``__array__``, numbers, PIL images, and lists or tuples of all of
    these, which are stacked along a new first axis. Whole numbers of a list become float64 for rows.

    Args:
        x: the values.
        name: the argument to name in an error.
        device: where to put the result, unless `x` is a tensor.
        kind: the elements that are expected. PIL images are converted to its channels, size and levels.

    >>> as_tensor(np.arange(6).reshape(2, 3)[::-1])
    tensor([[3, 4, 5],
            [0, 1, 2]])
    >>> as_tensor([np.zeros(2), torch.ones(2)]).tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """
    if isinstance(x, Tensor):
        return x
    if is_pil_image(x):
        return _pil_image_as_tensor(x, name, kind).to(device)
    if is_frame(x):
        raise TypeError(
            f"`{name}` must be a tensor, a numpy array, a PIL image or a list of these; got "
            f"{type(x).__name__}. Trained.read finds the columns of a frame by name; {name}.to_numpy() takes "
            "them as they are."
        )
    if isinstance(x, list | tuple) and not x:
        raise ValueError(f"`{name}` must hold at least one element; got an empty {type(x).__name__}.")
    if isinstance(x, list | tuple):
        tensor = _list_as_tensor(x, name, device, kind)
        return tensor.double() if isinstance(kind, Rows) and _is_whole(tensor) else tensor
    if isinstance(x, int | float) or hasattr(x, "__array__"):
        return torch.from_numpy(_numeric(np.asarray(x), name, type(x).__name__)).to(device)
    raise TypeError(
        f"`{name}` must be a tensor, a numpy array, a PIL image or a list of these; got {type(x).__name__}."
    )


def is_frame(value: object) -> bool:
    """Whether a value is a frame: of pandas, polars or pyarrow, none of which is imported."""
    return hasattr(value, "column_names") or (hasattr(value, "columns") and hasattr(value, "__getitem__"))


def as_real_tensor(x: ArrayLike, name: str, *, device: torch.device | str | None) -> Tensor:
    """`as_tensor` of real numbers: whole numbers of a list become float64, other integers are rejected."""
    tensor = as_tensor(x, name, device=device)
    if isinstance(x, list | tuple) and _is_whole(tensor):
        return tensor.double()
    if not tensor.is_floating_point():
        raise TypeError(f"`{name}` must be floating point; got {tensor.dtype}.{_conversion_hint(x, name)}")
    return tensor


def check_element_type(x: Tensor, kind: Kind, given: ArrayLike, name: str = "x") -> None:
    """Raise unless elements are numbers, and real numbers if they are rows; `given` is their source."""
    if x.dtype == torch.bool or x.is_complex():
        hint = f" Use {name} * {kind.levels - 1}." if kind.is_images and not x.is_complex() else ""
        raise TypeError(f"`{name}` must be integers or floating point; got {x.dtype}.{hint}")
    if not x.is_floating_point() and not kind.is_images:
        raise TypeError(
            f"`{name}` must be floating point for a model of rows; got {x.dtype}."
            f"{_conversion_hint(given, name)}"
        )


def _conversion_hint(x: ArrayLike, name: str) -> str:
    """How to convert integers to real numbers, as the end of an error; empty for a list."""
    if isinstance(x, Tensor):
        return f" Use {name}.double()."
    return f" Use {name}.astype(float)." if hasattr(x, "astype") else ""


def to_numpy(value: Any) -> Any:
    """Tensors as numpy arrays, detached and on the CPU; results as dictionaries; other values as they are.

    Tensors and results in tuples and dictionaries are converted, too. A named tuple becomes a dictionary.
    """
    if isinstance(value, NumpyResult):
        return value.numpy()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return fields_to_numpy(value)
    if isinstance(value, tuple):
        return tuple(map(to_numpy, value))
    return value.detach().cpu().numpy() if isinstance(value, Tensor) else value


def fields_to_numpy(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`to_numpy` of each field of a result, by name."""
    return {name: to_numpy(value) for name, value in fields.items()}


class NumpyResult:
    """Mixin for dataclasses with tensors, or with results that have tensors."""

    def numpy(self) -> dict[str, Any]:
        """The fields by name, tensors as numpy arrays: detached and on the CPU."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return fields_to_numpy({field.name: getattr(self, field.name) for field in fields})


def image_to_array(
    image: Image, size: int | tuple[int, int] | None, grey: bool, backdrop: str = ""
) -> NDArray[np.uint8]:
    """The pixels of a PIL image, (channels, height, width), in 8 bits.

    The EXIF orientation is applied. Transparent pixels become `backdrop`, "black" or "white"; by default
    whichever contrasts more with the drawing. `size` is the height and width to resize to, or one number for
    both.
    """
    from PIL import Image as pil  # noqa: N813
    from PIL import ImageOps

    if not min(image.size):
        raise ValueError(f"it must have pixels; its size is {image.width} × {image.height}")
    upright = _with_8_bits(ImageOps.exif_transpose(image), image.format)
    image = _opaque(upright, backdrop).convert("L" if grey else "RGB")
    if size is not None:
        height, width = (size, size) if isinstance(size, int) else size
        image = image.resize((width, height), pil.Resampling.BILINEAR)
    array = np.asarray(image)
    return array[None] if grey else np.ascontiguousarray(array.transpose(2, 0, 1))


def named_image_to_array(
    image: Image, size: int | tuple[int, int] | None, grey: bool, name: str, backdrop: str = ""
) -> NDArray[np.uint8]:
    """`image_to_array` of an argument; errors call it `name`."""
    try:
        return image_to_array(image, size, grey, backdrop)
    except ValueError as error:
        raise ValueError(f"`{name}` must be an image with 8 or 16 bits; got {image!r}: {error}.") from error


def image_as_tensor(
    image: Image,
    size: int | tuple[int, int] | None,
    grey: bool,
    levels: int,
    name: str = "image",
    backdrop: str = "",
) -> Tensor:
    """The pixels of a PIL image, (channels, height, width), as integers below `levels`: `image_to_array`."""
    array = named_image_to_array(image, size, grey, name, backdrop)
    return rescale_levels(torch.from_numpy(array.copy()), 256, levels)


def is_pil_image(x: Any) -> TypeGuard[Image]:
    """Whether `x` is a PIL image. Does not import PIL."""
    pil = sys.modules.get("PIL.Image")
    return pil is not None and isinstance(x, pil.Image)


def _pil_image_as_tensor(image: Image, name: str, kind: Kind | None) -> Tensor:
    if not isinstance(kind, Images):
        raise TypeError(f"`{name}` must not be a PIL image where images are not expected; got {image!r}.")
    return image_as_tensor(image, kind.size, kind.is_grey, kind.levels, name)


def _list_as_tensor(
    x: Sequence[Any], name: str, device: torch.device | str | None, kind: Kind | None
) -> Tensor:
    if any(not isinstance(part, int | float) for part in x):
        return _stacked([as_tensor(part, name, device=device, kind=kind) for part in x], name)
    return torch.from_numpy(_numeric(np.asarray(x), name, type(x).__name__)).to(device)


def _is_whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _stacked(parts: list[Tensor], name: str) -> Tensor:
    first = parts[0]
    for part in parts:
        if part.shape != first.shape:
            raise ValueError(
                f"`{name}` must be a list of elements of one shape; got {tuple(first.shape)} and "
                f"{tuple(part.shape)}."
            )
        if part.device != first.device:
            raise ValueError(
                f"`{name}` must be a list on one device; got elements on {first.device} and {part.device}."
            )
    return torch.stack(parts)


def _numeric(array: NDArray[Any], name: str, given: str) -> NDArray[Any]:
    """An array whose memory torch can share: native byte order, writable, strides that torch supports."""
    if array.dtype.kind not in "biuf":
        raise TypeError(f"`{name}` must hold real numbers; got {given} of {array.dtype}.")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:  # torch supports few operations on these
        array = array.astype(np.int64)
    if array.dtype == np.longdouble:
        array = array.astype(np.float64)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    strides = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    shareable = array.flags.writeable and strides
    return array if shareable else array.copy()


def _with_8_bits(image: Image, file_format: str | None) -> Image:
    """16-bit grey values rescaled to 8 bits; Pillow would clip them at 255."""
    from PIL import Image as pil  # noqa: N813

    if image.mode.startswith("I;16") or (image.mode == "I" and file_format in ("PNG", "PPM")):
        return pil.fromarray(np.round(np.asarray(image) / 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("its pixels have 32 bits, and their scale is unknown. Save it with 8 or 16 bits")
    return image


def transparent_luminance(image: Image) -> float | None:
    """The mean luminance of the drawing in an image with transparent pixels; None if it has none."""
    if not image.has_transparency_data:
        return None
    drawn = image.convert("RGBA")
    opacity = np.asarray(drawn.getchannel("A"))
    return _mean_luminance(drawn) if opacity.any() and opacity.min() < 255 else None


def contrasting(luminance: float) -> str:
    """The backdrop that contrasts more with a drawing."""
    return "black" if luminance > 127 else "white"


def _opaque(image: Image, backdrop: str) -> Image:
    """The image with a backdrop behind transparent pixels."""
    from PIL import Image as pil  # noqa: N813

    if not image.has_transparency_data:
        return image
    drawn = image if image.mode == "RGBA" else image.convert("RGBA")
    paper = pil.new("RGBA", drawn.size, backdrop or contrasting(_mean_luminance(drawn)))
    return pil.alpha_composite(paper, drawn)


def _mean_luminance(image: Image) -> float:
    """The mean luminance of an RGBA image, weighted by opacity; row by row, which saves memory."""
    luminance, alpha = np.asarray(image.convert("L")), np.asarray(image.getchannel("A"))
    ink = sum(
        int(np.dot(*(part.astype(np.int64) for part in row))) for row in zip(luminance, alpha, strict=True)
    )
    return ink / max(1, int(alpha.sum(dtype=np.int64)))
