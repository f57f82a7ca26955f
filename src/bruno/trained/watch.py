"""A stream under watch: judged element by element, with a state that can be kept in a file."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from torch import Tensor

from bruno.checkpoint import load, save
from bruno.data import Element
from bruno.model import Posterior
from bruno.signals import StopSignal
from bruno.tasks.anomaly import Detector, Judgement, StreamSummary
from bruno.tasks.familiarity import UnfamiliarDataWarning
from bruno.trained.data import Source, TrainedData, are_paths, warn_of_unreadable

_log = logging.getLogger(__name__)


class Judged(NamedTuple):
    """An element of a stream and its judgement."""

    element: Element
    judgement: Judgement


class Watch:
    """Judges the elements of a stream as they arrive; an iterator of `Judged`.

    The state is the posterior after the elements so far. As a context manager, a watch saves its state when
    the stream ends, for any reason: no judgement is lost. An empty stream leaves no state.

    Attributes:
        posterior: the state.
        summary: the judgements so far, in bounded memory.
        kind: kind of the elements.
    """

    def __init__(
        self,
        trained: TrainedData,
        stream: Source | Iterable[Element],
        detector: Detector | Callable[[], Detector],
        *,
        typical: Source | None = None,
        state: str | Path | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
    ) -> None:
        self._trained = trained
        self._state = None if state is None else _writable(Path(state))
        self._reader = trained.reader(invert=invert, skip_bad=skip_bad)
        self._elements = self._opened(stream)
        self.summary, self.kind = StreamSummary(), trained.model.kind
        self._group: str | None = None
        self._warned_of_group = self._warned_of_brightness = False
        resumed = self._resumed(typical)
        seen = None
        if resumed is None and typical is not None:
            seen = trained.read(typical, invert=invert, skip_bad=skip_bad).x
        # Calibration may take long: the arguments are checked first.
        self._detector = detector if isinstance(detector, Detector) else detector()
        if seen is not None:
            resumed = self._conditioned(seen)
        self.posterior = trained.model.prior() if resumed is None else resumed

    def __iter__(self) -> Iterator[Judged]:
        for element in self._elements:
            self._warn_of(element)
            x = self.posterior.impute(element.x.to(self._trained.device))
            judgement, self.posterior = self._detector.step(self.posterior, x)
            self.summary.add(element.name, x.cpu(), judgement)
            yield Judged(element, judgement)
        warn_of_unreadable(self._reader)
        if not self.summary.count:
            raise ValueError("`stream` must have at least one element; it is empty.")

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.save()

    def save(self) -> None:
        """Write the state to its file, if it has one and anything was judged."""
        if self._state is None or not self.summary.count:
            return
        with StopSignal():  # no signal interrupts the writing
            save(self.posterior, self._state)
        _log.info("the state is kept in %s", self._state)

    def _opened(self, stream: Source | Iterable[Element]) -> Iterable[Element]:
        if isinstance(stream, Iterator):
            return stream
        if not are_paths(stream):
            x, names, groups = self._trained.read(stream, impute=False)
            return [Element(*one) for one in zip(names, x, groups, strict=True)]
        paths = [stream] if isinstance(stream, str | Path) else list(cast(Sequence[str], stream))
        if not self._reader.skip_bad:
            for path in paths:
                if not Path(path).exists():
                    raise FileNotFoundError(f"{path}: no such file or folder.")
        return self._reader.read(paths)

    def _resumed(self, typical: Source | None) -> Posterior | None:
        if self._state is None or not self._state.is_file():
            return None
        posterior = load(self._state, model=self._trained.model)
        ignored = "; `typical` is ignored, it is for the beginning of a stream" * (typical is not None)
        _log.info("resuming from %s, after %d elements%s", self._state, posterior.evidence.count, ignored)
        return posterior

    def _conditioned(self, typical: Tensor) -> Posterior:
        posterior = self._detector.condition_on_typical(typical)
        if excluded := len(typical) - int(posterior.evidence.count):
            warnings.warn(
                f"`typical`: excluded {excluded} of {len(typical)} elements, which are out-of-distribution.",
                stacklevel=3,
            )
        return posterior

    def _warn_of(self, element: Element) -> None:
        """Warn about the first elements that are unlike training, and once of elements of another group."""
        if self.summary.count == 0:
            self._group = element.group
            self._trained.warn_if_unfamiliar(element.x)
            self._warned_of_brightness = bool(self._trained.familiarity.too_bright(element.x))
        elif not self._warned_of_brightness and (reason := self._trained.familiarity.too_bright(element.x)):
            warnings.warn(
                f"{element.name} is unlike the images of training: {reason}.",
                UnfamiliarDataWarning,
                stacklevel=3,
            )
            self._warned_of_brightness = True
        if element.group != self._group and not self._warned_of_group:
            warnings.warn(
                f"{element.name}: {self._trained.group} changes from {self._group} to {element.group}; all "
                "rows are judged as one set. Use one stream per group.",
                stacklevel=3,
            )
            self._warned_of_group = True


def _writable(path: Path) -> Path:
    if not path.parent.is_dir():
        raise ValueError(f"`state` must be a file in an existing folder; {path.parent} does not exist.")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"`state` must be a writable file; got {path}.")
    return path
