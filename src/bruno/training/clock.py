"""Progress and speed of a training run, measured in steps or in time."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable

import torch

from bruno.training.distributed import broadcast
from bruno.training.log import LogEntry
from bruno.training.step_cost import few_steps_warning
from bruno.training.trainer import Step, Trainer

_STEADY = 3  # the time of a step is known after this many log entries
_SOON = 0.05  # the time of a step is judged after this fraction of a timed run at the latest
_EDGE = 1e-3  # progress of a timed run stays this far from 0 and 1, where the learning rate is 0


class Clock:
    """Advances a trainer and measures its progress and speed.

    A timed run ends after `train.minutes`; any other run ends after `train.steps`.

    Args:
        trainer: fresh or restored.
        now: returns the current time in seconds, from any starting point.
    """

    def __init__(self, trainer: Trainer, now: Callable[[], float] = time.monotonic) -> None:
        self._trainer, self._now, self._planned = trainer, now, 60 * trainer.config.minutes
        self._begun, self._spent_before, self._first = now(), trainer.seconds, trainer.index
        self._compiled_at: float | None = None  # training time at the end of the first steps
        self._compiled_index = 0  # number of the last of these steps
        self._step_seconds: list[float] = []  # times of a step in the first entries, until they are judged
        self._checked = not self._planned

    def done(self) -> bool:
        """Whether all steps are taken or, in a timed run, all minutes are over."""
        if self._planned:
            return broadcast(self._spent()) >= self._planned
        return self._trainer.index >= self._trainer.config.steps

    def advance(self, count: int) -> LogEntry:
        """Take `count` steps, or the remaining ones if fewer, and return their log entry."""
        trainer = self._trainer
        count = count if self._planned else min(count, trainer.config.steps - trainer.index)
        begun = self._now()
        steps = trainer.advance(count, self._progress() if self._planned else None)
        taken = self._now() - begun
        trainer.seconds = self._spent()
        if self._compiled_at is None:
            self._compiled_at, self._compiled_index = trainer.seconds, trainer.index
        return LogEntry(
            index=trainer.index,
            loss=_finite_mean(steps, "loss"),
            bits_per_dim=_finite_mean(steps, "bits_per_dim"),
            accuracy=_finite_mean(steps, "accuracy"),
            rate=steps[-1].rate,
            gradient_norm=_finite_mean(steps, "gradient_norm"),
            skipped=sum(step.skipped for step in steps),
            seconds=trainer.seconds,
            seconds_left=self._left(),
            step_seconds=taken / count,
            elements_per_second=trainer.elements * count / max(taken, 1e-9),
            memory=_peak_memory(trainer.device),
            note=self._check_pace(taken / count),
        )

    def _check_pace(self, step_seconds: float) -> str:
        """Return a warning if the time of a run allows too few steps; checked once, after its first steps."""
        self._step_seconds.append(max(step_seconds, 1e-9))
        compiled = self._trainer.device.type == "cuda" and len(self._step_seconds) == 1
        known = len(self._step_seconds) >= _STEADY or self._trainer.seconds > _SOON * self._planned
        if self._checked or compiled or not known:
            return ""
        self._checked, fastest = True, min(self._step_seconds)
        return few_steps_warning(self._trainer.config, self._trainer.index + self._left() / fastest, fastest)

    def _spent(self) -> float:
        """Seconds of training so far, including earlier parts of the run."""
        return self._spent_before + self._now() - self._begun

    def _left(self) -> float:
        """Estimated seconds until the run ends, by the steps after the first ones, which compile on a GPU."""
        trainer = self._trainer
        if self._planned:
            return max(0.0, self._planned - trainer.seconds)
        since, first = self._spent_before, self._first
        if self._compiled_at is not None and trainer.index > self._compiled_index:
            since, first = self._compiled_at, self._compiled_index
        return (
            (trainer.seconds - since) / max(1, trainer.index - first) * (trainer.config.steps - trainer.index)
        )

    def _progress(self) -> float:
        """Progress of a timed run from 0 to 1, for schedules.

        It does not advance during the first steps, in which a GPU compiles. Otherwise, a minute of
        compilation could use up the whole warm-up of the learning rate.
        """
        progress = self._spent_before / self._planned
        if self._compiled_at is not None:
            since = self._spent() - self._compiled_at
            progress += (1 - progress) * since / (self._planned - self._compiled_at)
        return broadcast(min(max(progress, _EDGE), 1 - _EDGE))


def _finite_mean(steps: list[Step], name: str) -> float:
    values = [value for step in steps if math.isfinite(value := getattr(step, name))]
    return statistics.fmean(values) if values else math.nan


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not available on Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
