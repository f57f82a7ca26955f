"""The log of a run: a JSON line after every step or every few steps, and TensorBoard if it is installed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bruno import limits
from bruno.files import inside, parse_json
from bruno.text import is_utf8

_LARGEST = 1e30  # a larger number cannot come from a training run
_LONGEST_LINE = 2**16  # bytes; the rest of a longer line is not an entry
_ENTRY_PER_LINE = 4  # memory of an entry, as a multiple of its line
_LOG, _BOARD = "log.jsonl", "tensorboard"


@dataclass(frozen=True)
class LogEntry:
    """The steps since the previous entry.

    Attributes:
        index: steps taken so far.
        loss: mean over the new steps, as are `bits_per_dim`, `accuracy` and `gradient_norm`; NaN if no value
            is finite.
        rate: learning rate of the flow at the last step.
        skipped: number of new steps that changed nothing because their gradient was not finite.
        seconds: training time so far, including earlier parts of a resumed run.
        seconds_left: estimate of the time until training ends.
        step_seconds: time per new step.
        elements_per_second: images or rows per second, including those of episodes.
        memory: peak memory use in bytes, of the GPU if there is one.
        validation: bits/dim on the validation sets; NaN if not measured.
        note: message for the user, such as a return to an earlier checkpoint.
    """

    index: int
    loss: float
    bits_per_dim: float
    accuracy: float
    rate: float
    gradient_norm: float
    skipped: int
    seconds: float
    seconds_left: float
    step_seconds: float
    elements_per_second: float
    memory: int
    validation: float = math.nan
    note: str = ""


class Log:
    """The files ``log.jsonl`` and ``tensorboard/`` of a run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._board: Any = None

    def append(self, entry: LogEntry) -> None:
        """Append an entry to both files."""
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no NaN
            for name, value in asdict(entry).items()
        }
        with inside(self._folder, _LOG).open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # a full disk or a crash truncated the last line
                    file.write(b"\n")
            file.write(json.dumps(values).encode() + b"\n")
        # TensorBoard rejects names that are not UTF-8.
        if self._board is None and find_spec("tensorboard") and is_utf8(str(self._folder)):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(inside(self._folder, _BOARD), purge_step=entry.index)
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, float | int):
                    self._board.add_scalar(name, value, entry.index)

    def read(self) -> list[dict[str, Any]]:
        """Entries as dicts, without truncated lines and without steps that were later repeated."""
        path = inside(self._folder, _LOG)
        if not path.is_file():
            return []
        limits.MEMORY.check(_ENTRY_PER_LINE * path.stat().st_size, f"{path}: its entries")
        with path.open("rb") as file:
            lines = iter(partial(file.readline, _LONGEST_LINE), b"")
            return drop_repeated(entry for line in lines if (entry := _parse(line)) is not None)

    def close(self) -> None:
        """Close TensorBoard's file; the next entry opens a new one."""
        if self._board is not None:
            self._board.close()
            self._board = None


def _parse(line: bytes) -> dict[str, Any] | None:
    """An entry; None if its line is truncated, or was not written by `append`."""
    try:
        entry = parse_json(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or not {"index", "seconds"} <= entry.keys():
        return None
    required = all(_is_number(entry[name]) and entry[name] >= 0 for name in ("index", "seconds"))
    numbers = (entry.get(field.name) for field in fields(LogEntry) if field.name != "note")
    valid = required and isinstance(entry["index"], int)
    return entry if valid and all(value is None or _is_number(value) for value in numbers) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


def drop_repeated(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Drop entries of steps that a resumed run repeated: the last entry of each step counts."""
    kept: list[dict[str, Any]] = []
    for entry in entries:
        while kept and kept[-1]["index"] >= entry["index"]:
            kept.pop()
        kept.append(entry)
    return kept
