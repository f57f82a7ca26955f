"""Limits of the service, and the errors that it answers with."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

MIB = 2**20
_QUOTED = 60  # characters of a value in a message


@dataclass(frozen=True)
class Limits:
    """The limits of a service, which refuses requests beyond them, so that its memory is bounded.

    Attributes:
        body: bytes of a request.
        pixels: pixels of an image before it is resized.
        elements: elements of a request, in all of its sets together.
        samples: samples of a request.
        batch: elements that are encoded or decoded together; further requests wait for the next batch.
        waiting: requests that are in progress or wait for their turn; 503 beyond.
        memory: bytes of all requests in progress; 503 beyond.
        connections: open connections; 503 beyond.
        read_seconds: time for a client to send a request; 408 beyond.
        seconds: time to answer a request; 503 beyond. Also the time to finish requests at shutdown.
    """

    body: int = 4 * MIB
    pixels: int = 1_000_000
    elements: int = 256
    samples: int = 256
    batch: int = 64
    waiting: int = 256
    memory: int = 64 * MIB
    connections: int = 512
    read_seconds: float = 10.0
    seconds: float = 60.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            is_whole = not isinstance(value, bool) and isinstance(value, int)
            is_time = field.type == "float" and not isinstance(value, bool) and isinstance(value, int | float)
            if not (is_time and 0 < value < math.inf) and not (is_whole and value >= 1):
                rule = "above 0 and finite" if field.type == "float" else "a whole number, at least 1"
                raise ValueError(f"`{field.name}` must be {rule}; got {value!r}.")
        if self.body > self.memory:
            raise ValueError(
                f"`body` must be at most `memory`, {self.memory} bytes; got {self.body}. Raise `memory` too."
            )


class RequestError(Exception):
    """A request that is refused: the HTTP status, the reason, and when to try again, if that may help."""

    def __init__(self, status: int, reason: str, retry_after: int | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.retry_after = status, reason, retry_after


def quoted(value: object) -> str:
    """A value of a request, shortened for a message."""
    text = repr(value)
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"


def busy(reason: str) -> RequestError:
    """The error of an overloaded service."""
    return RequestError(503, f"{reason} Try again later.", retry_after=1)
