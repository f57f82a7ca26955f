"""How a training run goes: how far, how fast, how much memory, how long still."""

from __future__ import annotations

import math
import statistics
import sys
import time
from dataclasses import dataclass

import torch

from bruno.training.trainer import Trainer, broadcast

_EDGE = 1e-3  # of a run of minutes: at its very ends, a rate that warms up or decays would waste a step


@dataclass(frozen=True)
class LogEntry:
    """What a run did since it last said something.

    Attributes:
        index: steps taken so far.
        loss: mean over the new steps, as are `bits_per_dim`, `accuracy` and `gradient_norm`; NaN if none is.
        rate: of the flow, at the last of them.
        skipped: how many of them changed nothing because their gradient was not finite.
        seconds: since training began, earlier parts of a resumed run included.
        seconds_left: until it will be done.
        step_seconds: for each of the new steps.
        elements_per_second: images or rows, episodes included.
        memory: the most that was in use, in bytes; on a GPU, its memory.
        validation: bits/dim on the validation sets, where they were measured.
        note: what a person should know, as that the run went back.
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


class Clock:
    """Drives a trainer; knows how far and how fast it is, by its steps or, given minutes, by the clock."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._planned = trainer, 60 * trainer.config.minutes
        self._begun, self._spent_before, self._first = time.monotonic(), trainer.seconds, trainer.index
        self._warm_at: float | None = None  # seconds when the first steps were done
        self._elements = trainer.config.elements

    def done(self) -> bool:
        """Whether all steps are taken, or all minutes spent."""
        if self._planned:
            return broadcast(self._spent()) >= self._planned
        return self._trainer.index >= self._trainer.config.steps

    def advance(self, batch_size: int) -> LogEntry:
        """A few steps, no more than are left, and how they went."""
        trainer = self._trainer
        count = batch_size if self._planned else min(batch_size, trainer.config.steps - trainer.index)
        begun = time.monotonic()
        steps = trainer.advance(count, self._share() if self._planned else None)
        taken = time.monotonic() - begun
        trainer.seconds = self._spent()
        if self._warm_at is None:
            self._warm_at = trainer.seconds
        each = (trainer.seconds - self._spent_before) / max(1, trainer.index - self._first)
        left = (
            self._planned - trainer.seconds
            if self._planned
            else each * (trainer.config.steps - trainer.index)
        )

        def mean(name: str) -> float:
            values = [value for step in steps if math.isfinite(value := getattr(step, name))]
            return statistics.fmean(values) if values else math.nan

        return LogEntry(
            index=trainer.index,
            loss=mean("loss"),
            bits_per_dim=mean("bits_per_dim"),
            accuracy=mean("accuracy"),
            rate=steps[-1].rate,
            gradient_norm=mean("gradient_norm"),
            skipped=sum(step.skipped for step in steps),
            seconds=trainer.seconds,
            seconds_left=max(0.0, left),
            step_seconds=taken / count,
            elements_per_second=self._elements * count / taken,
            memory=_memory(trainer.device),
        )

    def _spent(self) -> float:
        """Seconds of the run, earlier parts included."""
        return self._spent_before + time.monotonic() - self._begun

    def _share(self) -> float:
        """Of a run of minutes that is done, for rates that warm up or decay.

        It stands still during the first steps, in which a GPU compiles: a minute of that is the whole warm-up
        of a run of an hour, and it has to be gone through in steps.
        """
        share = self._spent_before / self._planned
        if self._warm_at is not None:
            share += (1 - share) * (self._spent() - self._warm_at) / (self._planned - self._warm_at)
        return broadcast(min(max(share, _EDGE), 1 - _EDGE))


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on every system that has torch
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
