"""Elements of requests: PNG images, as bytes or in base64, and arrays; checked before they are decoded."""

from __future__ import annotations

import base64
import binascii
import io
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from bruno.data.archives import READ_ERRORS
from bruno.serving.settings import Limits, RequestError, quoted
from bruno.streams.rows import complete_rows
from bruno.trained import Trained

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SIZE = slice(16, 24)  # of width and height in a PNG
_NAMED = 20  # columns that an error names
_DATA_URL = "data:image/png;base64,"


def read_images(trained: Trained, given: Sequence[Any], limits: Limits, name: str) -> Tensor:
    """Images of a request as a tensor (n, *shape).

    Args:
        trained: the model, which may normalise drawings.
        given: for each image, a PNG as bytes or as text in base64, or nested lists of numbers.
        limits: the limits of the service.
        name: the field to name in an error.

    Raises:
        RequestError: 422 if an image does not fit the model, 413 if it or their number is too large.
    """
    _check_some(given, limits, name)
    return torch.cat([_image(trained, one, limits, f"{name}[{i}]") for i, one in enumerate(given)])


def read_rows(trained: Trained, given: Sequence[Any], limits: Limits, name: str) -> Tensor:
    """Rows of a request as a tensor (n, dim), from lists of numbers, or from objects with column names.

    Null, or a column that an object does not have, is a missing number, if the model can impute it.

    Raises:
        RequestError: 422 if a row does not fit the model, 413 if there are too many.
    """
    _check_some(given, limits, name)
    model = trained.model
    given = [
        _in_order(trained, one, f"{name}[{i}]") if isinstance(one, dict) else one
        for i, one in enumerate(given)
    ]
    rows = _numbers(given)
    if rows is None or rows.shape != (len(given), model.dim):
        raise RequestError(422, f"`{name}` must be rows of {model.dim} numbers; got {quoted(given[0])}.")
    rows = rows.astype(np.float64)
    try:
        complete_rows(rows, model.imputer is not None, name)
    except ValueError as error:
        raise RequestError(422, str(error)) from error
    return torch.from_numpy(rows)


def _in_order(trained: Trained, row: dict[str, Any], name: str) -> list[Any]:
    """The values of an object in the order of the model's columns, None where it has none."""
    columns = trained.columns
    if not columns:
        raise RequestError(422, f"`{name}` must be a list: the columns of this model have no names.")
    for column in row:
        if column not in columns:
            known = ", ".join(map(repr, columns[:_NAMED])) + ", …" * (len(columns) > _NAMED)
            raise RequestError(422, f"`{name}` must have only the columns {known}; got {quoted(column)}.")
    if trained.model.imputer is None:
        for column in columns:
            if column not in row:
                raise RequestError(422, f"`{name}` must have the column {column!r}; it is missing.")
    return [row.get(column) for column in columns]


def _check_some(given: Sequence[Any], limits: Limits, name: str) -> None:
    if not given:
        raise RequestError(422, f"`{name}` must hold at least one element; got none.")
    check_number_of(len(given), limits, name)


def check_number_of(elements: int, limits: Limits, name: str) -> None:
    """Raise 413 if a request has too many elements."""
    if elements > limits.elements:
        raise RequestError(
            413, f"`{name}` must have at most {limits.elements} elements; got {elements}. Send them in parts."
        )


def _numbers(given: Any) -> NDArray[Any] | None:
    """Nested lists of numbers as an array, null as NaN; None if they are something else, such as NaN."""
    if _has_booleans(given):
        return None
    try:
        array = np.asarray(given)
    except ValueError:  # of different lengths
        return None
    if array.dtype.kind == "f" and np.isnan(array).any():
        return None
    if array.dtype == object:
        if not all(one is None or (type(one) in (int, float) and one == one) for one in array.flat):
            return None
        try:
            array = array.astype(np.float64)
        except OverflowError:  # an integer beyond all floats
            return None
    return array if array.dtype.kind in "iuf" else None


def _has_booleans(given: Any) -> bool:
    """Whether nested lists contain true or false, which numpy would take as numbers."""
    if not isinstance(given, list):
        return isinstance(given, bool)
    kinds = set(map(type, given))
    return bool in kinds or (list in kinds and any(map(_has_booleans, given)))


def _image(trained: Trained, given: Any, limits: Limits, name: str) -> Tensor:
    if isinstance(given, bytes):
        return _png(trained, given, limits, name)
    if isinstance(given, str):
        try:
            content = base64.b64decode(given.removeprefix(_DATA_URL), validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(422, f"`{name}` must be a PNG in base64; got other text.") from error
        return _png(trained, content, limits, name)
    pixels = _numbers(given)
    if pixels is None or pixels.dtype.kind not in "iu" or pixels.ndim not in (2, 3):
        raise RequestError(
            422,
            f"`{name}` must be a PNG in base64, or pixels as nested lists of whole numbers; got "
            f"{quoted(given)}.",
        )
    try:
        found = trained.convert(pixels, name=name)
    except (ValueError, TypeError) as error:
        raise RequestError(422, str(error)) from error
    if len(found) != 1:  # a list of grey images looks like an image with channels
        raise RequestError(
            422, f"`{name}` must be one image; got {len(found)}. List each one as an element of its own."
        )
    return found


def _png(trained: Trained, content: bytes, limits: Limits, name: str) -> Tensor:
    """The image in a PNG; other formats are not decoded."""
    if content.startswith(_SIGNATURE) and len(content) >= _SIZE.stop:
        width, height = struct.unpack(">II", content[_SIZE])
        if width * height > limits.pixels:
            raise RequestError(
                413, f"`{name}` must have at most {limits.pixels} pixels; got {width * height}. Resize it."
            )
    try:
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            return trained.convert([image])
    except (*READ_ERRORS, ValueError) as error:
        raise RequestError(422, f"`{name}` must be a PNG; it cannot be decoded.") from error
