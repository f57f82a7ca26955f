"""Conversion between HTTP and the service: bodies to requests, answers to JSON or PNG, errors to one line."""

from __future__ import annotations

import base64
import hashlib
from functools import lru_cache
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from bruno.reporting.images import grid, png, to_uint8
from bruno.serving.guard import BODY, refusal
from bruno.serving.settings import RequestError, quoted

_LONGEST = 200  # characters of ids and keys
_COLUMNS = 8  # samples in a row of a picture
PNG = "image/png"

_Schema = TypeVar("_Schema", bound=BaseModel)


def parse(request: Request, schema: type[_Schema], **query: Any) -> _Schema:
    """The request in a body: JSON, or one element as a PNG with the other fields in the query."""
    body: bytes = request.scope[BODY]
    try:
        if is_png(request):
            given = {name: value for name, value in query.items() if value is not None}
            return schema.model_validate({"elements": [body], **given})
        if any(value is not None for value in query.values()):
            names = ", ".join(name for name, value in query.items() if value is not None)
            raise RequestError(422, f"`{names}` must be in the JSON body, not in the query.")
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise RequestError(422, _first_problem(error)) from error


def query_of(request: Request) -> QueryParams:
    """The query of a request; short queries are cached, as most requests have the same one."""
    raw = request.scope["query_string"]
    return _kept_query(raw) if len(raw) <= _LONGEST else QueryParams(raw)


_kept_query = lru_cache(maxsize=1000)(QueryParams)


def is_png(request: Request) -> bool:
    """Whether the body is an image."""
    return request.headers.get("content-type", "").split(";")[0].strip().lower() == PNG


def _first_problem(error: ValidationError) -> str:
    """The first problem of a request, on one line: the field, the rule and the value."""
    problem = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in problem["loc"]) or "the body"
    more = f" ({error.error_count() - 1} more)" * (error.error_count() > 1)
    return f"`{place}`: {problem['msg']}; got {quoted(problem.get('input'))}{more}."


def key_and_digest(request: Request, *what: str) -> tuple[str, bytes]:
    """The idempotency key of a request, and a digest that identifies the request."""
    key = request.headers.get("idempotency-key", "")
    if not (0 < len(key) <= _LONGEST and key.isascii() and key.isprintable()):
        raise RequestError(
            400,
            f"`Idempotency-Key` must be a header of 1 to {_LONGEST} characters, new for each change, so that "
            f"a repeated request does not count twice; got {key[:60]!r}.",
        )
    digest = hashlib.sha256("\0".join((request.method, *what)).encode(errors="surrogatepass"))
    digest.update(b"\0" + request.scope[BODY])
    return key, digest.digest()


def checked_id(request: Request) -> str:
    """The id of a set in the path; raises 422 if it is not valid."""
    id: str = request.path_params["id"]
    if not (0 < len(id) <= _LONGEST and id.isprintable() and "/" not in id):
        raise RequestError(
            422, f"`id` must be 1 to {_LONGEST} printable characters without '/'; got {id[:60]!r}."
        )
    return id


# --- answers ---------------------------------------------------------------------------------------------


def answer(content: dict[str, Any]) -> Response:
    """An answer as JSON; infinity and NaN are null."""
    return Response(to_json(content, inf_nan_mode="null"), media_type="application/json")


def failure(error: RequestError) -> Response:
    """An answer with an error."""
    body, headers = refusal(error)
    return Response(body, error.status, headers)


def picture(images: NDArray[Any], levels: int) -> Response:
    """Images (n, channels, height, width) on one PNG."""
    pixels = to_uint8(torch.from_numpy(images), levels)
    sheet = grid(pixels, min(_COLUMNS, len(pixels)), padding=0)
    return Response(png(sheet, width=1), media_type=PNG)


def as_base64(images: NDArray[Any], levels: int) -> list[str]:
    """Each image as a PNG in base64."""
    pixels = to_uint8(torch.from_numpy(images), levels).numpy()
    return [base64.b64encode(png(one.transpose(1, 2, 0), width=1)).decode() for one in pixels]
