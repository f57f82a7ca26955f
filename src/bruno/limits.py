"""Limits on sizes that a file or an argument declares, checked before memory is allocated.

A file of a few megabytes may declare terabytes. Each limit has a default, and an environment variable that
overrides it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}


@dataclass(frozen=True)
class Limit:
    """The largest size that is accepted.

    Attributes:
        variable: the environment variable that overrides the default.
        default: the limit without that variable.
        unit: "bytes", "pixels" or "draws".
    """

    variable: str
    default: int
    unit: str

    @property
    def value(self) -> int:
        """The limit: the value of the environment variable if it is set, otherwise the default."""
        text = os.environ.get(self.variable, "")
        if text and not (text.isascii() and text.isdigit()):
            raise ValueError(
                f"`{self.variable}` must be a whole number of {self.unit}; got {text!r}. "
                f"Its default is {self.default}."
            )
        return int(text or self.default)

    def check(self, amount: int, subject: str) -> None:
        """Raise ValueError if `amount` is above the limit; `subject` begins the message."""
        if amount > self.value:
            raise ValueError(
                f"{subject} must have at most {self._readable(self.value)}; got {self._readable(amount)}. "
                f"Set {self.variable} to change this limit, by default {self.default}."
            )

    def check_argument(self, name: str, value: object, amount: int) -> None:
        """Raise ValueError if an argument of this value needs more than the limit."""
        if amount > self.value:
            rule = f"must be at most {self.value:,}; got {value}"
            if amount != value:
                rule = (
                    f"needs {self._readable(amount)} for {value}; the limit is {self._readable(self.value)}"
                )
            raise ValueError(
                f"`{name}` {rule}. Reduce it, or set {self.variable} to change this limit, by default "
                f"{self.default}."
            )

    def _readable(self, amount: int) -> str:
        if self.unit != "bytes":
            return f"{amount:,} {self.unit}"
        unit, size = next((unit, size) for unit, size in _UNITS.items() if amount >= size or size == 1)
        return f"{amount / size:,.1f} {unit}" if size > 1 else f"{amount} {unit}"


FILE = Limit("BRUNO_MAX_FILE", 2**28, "bytes")  # one file of a folder or archive
PIXELS = Limit("BRUNO_MAX_PIXELS", 50_000_000, "pixels")  # one image
MEMORY = Limit("BRUNO_MAX_MEMORY", 2**32, "bytes")  # all elements of a dataset, of a step, or of a result
COUNT = Limit("BRUNO_MAX_COUNT", 1_000_000, "draws")  # sets, samples, queries or trials
