"""Watched streams: elements are judged one by one, in a set for each group; a file keeps the state."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bruno.data import Element
from bruno.data.archives import file_stamp
from bruno.data.columns import BLOCK
from bruno.data.reader import collected
from bruno.files import check_regular
from bruno.model import Posterior
from bruno.signals import StopSignal
from bruno.streams.fast_densities import densities_of
from bruno.tasks.anomaly import Judgement
from bruno.tasks.conformal import Basis
from bruno.tasks.detector import Detector
from bruno.tasks.drift import RANKS
from bruno.tasks.explanation import Explanation
from bruno.tasks.familiarity import UnfamiliarDataWarning
from bruno.tasks.stream_evidence import StreamEvidence, may_count
from bruno.tasks.stream_summary import StreamSummary
from bruno.trained.base import Source, warn_of_unreadable
from bruno.trained.data import TrainedData
from bruno.trained.explanation import OutlierExplainer
from bruno.trained.outliers import Outliers
from bruno.trained.states import SetState, WatchState
from bruno.trained.stream_elements import grouped_elements

_log = logging.getLogger(__name__)


class Judged(NamedTuple):
    """An element of a stream and its judgement."""

    element: Element
    judgement: Judgement


class WatchedStream:
    """The outliers of a stream while it is watched; base of `Watch` and `KeyedWatch`."""

    _explainer: OutlierExplainer | None

    def __init__(self, trained: TrainedData) -> None:
        self.summary, self.kind = StreamSummary(), trained.kind
        self.advice = trained.calibration_command

    @property
    def outliers(self) -> Outliers:
        """The most unusual elements so far, with the columns that explain them."""
        return Outliers.of("anomaly", self.summary, self.kind)

    @property
    def explanation(self) -> Explanation | None:
        """The explanation of the most unusual elements; None if not requested, or if there are none."""
        return self._explainer.explain(self.summary) if self._explainer else None


class Watch(WatchedStream):
    """Judges the elements of a stream as they arrive; an iterator of `Judged`.

    Rows that name a group belong to the set of that group; other elements are one set. If training had no
    group column, a row is judged given the 19 before it, because 20 consecutive rows were a training set.

    As a context manager, a watch saves its state at the end, even if an exception ends it: no judgement is
    lost. The state of an empty stream is not saved. If another process has changed the file since it was
    read, the watch warns, and saves its state in another file beside it.

    Attributes:
        state: the states of all sets.
        summary: the judgements so far, in bounded memory.
        kind: kind of the elements.
        detector: the detector.
        advice: the command that calibrates on clean data.
    """

    def __init__(
        self,
        trained: TrainedData,
        stream: Source | Iterable[Element],
        detector: Detector | Callable[[], Detector],
        *,
        typical: Source | None = None,
        state: str | Path | None = None,
        one_set: bool = False,
        group: str | None = None,
        within: bool = False,
        explain: bool = False,
        invert: bool | None = None,
        skip_bad: bool = False,
    ) -> None:
        super().__init__(trained)
        self._trained, self._one_set = trained, one_set
        self._file = None if state is None else _checked_state_file(Path(state))
        self._stamp = None if self._file is None else _stamp(self._file)
        self._reader = trained.reader(invert=invert, skip_bad=skip_bad, group=group)
        self._elements = grouped_elements(trained, stream, self._reader, one_set, invert, "stream")
        self._warned_of_brightness = False
        resumed = self._resumed(typical)
        before = None
        if resumed is None and typical is not None:
            first = grouped_elements(trained, typical, self._reader, one_set, invert, "typical")
            before = collected(first)
        # Calibration may take long, so it comes after the checks of the other arguments.
        self.detector = detector if isinstance(detector, Detector) else detector()
        self._within = within = within or self.detector.within
        if trained.has_consecutive_sets and not (one_set or within or self.detector.window or group):
            self.detector = replace(self.detector, window=BLOCK - 1)
        if self.detector.densities is None:
            self.detector = replace(self.detector, densities=densities_of(trained.model))
        check_ranks(self.detector, within)
        self._explainer = OutlierExplainer(trained.columns, self.detector.reference) if explain else None
        self.state = resumed or WatchState()
        if before is not None:
            self._condition_on(before)

    @property
    def posterior(self) -> Posterior:
        """The posterior of the only set; see `posteriors` for several."""
        if len(self.state.sets) > 1:
            raise ValueError(f"`posterior` is for one set; got {len(self.state.sets)}. Use `posteriors`.")
        return next(iter(self.posteriors.values()), self._trained.model.prior())

    @property
    def posteriors(self) -> dict[str, Posterior]:
        """The posterior of each set, by its name."""
        model = self._trained.model
        return {name: Posterior(model, one.stream.evidence) for name, one in self.state.sets.items()}

    def __iter__(self) -> Iterator[Judged]:
        for element in self._elements:
            self._warn_of(element)
            given = self._posterior(element)
            judgement = self._advance(element)
            element = element._replace(x=given.impute(element.x.to(self._trained.device)).cpu())
            if self._explainer is not None and judgement.outlier:
                (parts,) = self._explainer.contributions(Posterior.stack([given]), element.x.unsqueeze(0))
                judgement = replace(judgement, contributions=parts)
            self.summary.add(element.name, element.x, judgement, self._set_of(element), given)
            yield Judged(element, judgement)
        warn_of_unreadable(self._reader)
        if not self.summary.count:
            raise ValueError("`stream` must have at least one element; it is empty.")

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.save()

    def accept(self, *names: str) -> None:
        """Add elements that were excluded by mistake to their sets, by name."""
        self.state = self.state.accepting(names)

    def save(self) -> None:
        """Write the state to its file, if it has one and anything was judged."""
        if self._file is None or not self.summary.count:
            return
        if _stamp(self._file) != self._stamp:
            other = self._file.with_name(f"{self._file.name}.{os.getpid()}")
            warnings.warn(
                f"{self._file}: another process has changed this file; the state is saved in {other}.",
                stacklevel=2,
            )
            self._file = other
        with StopSignal():  # no signal interrupts the writing
            self.state.save(self._file, self._trained.model)
        self._stamp = _stamp(self._file)
        _log.info("the state is saved in %s", self._file)

    def _posterior(self, element: Element) -> Posterior:
        """The posterior of the set of an element, before the element is added."""
        own, model = self.state.sets.get(self._set_of(element)), self._trained.model
        return Posterior(model, own.stream.evidence) if own else model.prior()

    def _advance(self, element: Element) -> Judgement:
        """Judge an element and update the state of its set."""
        group, model = self._set_of(element), self._trained.model
        own = self.state.sets.get(group) or SetState.of(self.detector.begin())
        judgement, stream, z, _ = self.detector.step(own.stream, model.as_elements(element.x))
        within, drift = own.within, own.drift
        # Ranks take as long as the judgement. With a window, they are only reported if every element counts.
        ranks = self.detector.window is None or self.detector.count_all
        if ranks and not judgement.out_of_distribution and _may_count(element, own.stream):
            ranked = within.p_value(model, z)
            within = within.add(z)
            if self.detector.window is None:  # with a window, sets are expected to change
                drift = drift.add(ranked.uniform, own.stream.position + 1)
            judgement = self._with_rank(judgement, ranked.p, stream.incomplete)
        latest = [*zip(own.names, own.stream.first, strict=True), (element.name, z)]
        names = tuple(name for name, _ in latest)[len(latest) - len(stream.first) :]
        state = self.state.with_set(group, SetState(stream, within, drift, names))
        self.state = state.with_decided(group, latest)
        if drift.changed_at is not None and not own.drift.detected:
            self._report_drift(element, group, drift.changed_at)
        return judgement

    def _with_rank(self, judgement: Judgement, p: float, incomplete: bool) -> Judgement:
        """The judgement with the p-value within the set; with `within`, the judgement by that p-value.

        Missing numbers are imputed from earlier elements alone, so elements of an incomplete set are not
        exchangeable.
        """
        if not self.detector.count_all:
            return judgement
        if not self._within or judgement.threshold is None:
            return replace(judgement, p_within=p)
        outlier = p <= self.detector.rate
        basis: Basis = "estimated" if incomplete else "exact"
        return replace(judgement, p=p, basis=basis, p_within=p, outlier=outlier, threshold=None)

    def _report_drift(self, element: Element, group: str, changed_at: int) -> None:
        what = f"{self._reader.group or 'set'} {group}" if group else "the stream"
        warnings.warn(
            f"{element.name}: the distribution of {what} changed near element {changed_at}. If the change "
            "is permanent, start a new set.",
            stacklevel=3,
        )

    def _set_of(self, element: Element) -> str:
        return "" if self._one_set else element.group

    def _resumed(self, typical: Source | None) -> WatchState | None:
        if self._file is None or not self._file.is_file():
            return None
        state = WatchState.load(self._file, self._trained.model)
        ignored = "; `typical` is ignored, because it is for a new stream" * (typical is not None)
        count = sum(one.stream.position for one in state.sets.values())
        sets = f" of {len(state.sets)} sets" if len(state.sets) > 1 else ""
        _log.info("resuming from %s, after %d elements%s%s", self._file, count, sets, ignored)
        return state

    def _condition_on(self, typical: list[Element]) -> None:
        for element in typical:
            self._advance(element)
        kept = sum(int(one.stream.evidence.count) for one in self.state.sets.values())
        if excluded := len(typical) - kept:
            _log.info("`typical`: excluded %d of %d elements as outliers", excluded, len(typical))

    def _warn_of(self, element: Element) -> None:
        """Warn about the first elements that are unlike the training images."""
        if self.summary.count == 0:
            self._trained.warn_if_unfamiliar(element.x)
            self._warned_of_brightness = bool(self._trained.familiarity.too_bright(element.x))
        elif not self._warned_of_brightness and (reason := self._trained.familiarity.too_bright(element.x)):
            warnings.warn(
                f"{element.name} is unlike the training images: {reason}.",
                UnfamiliarDataWarning,
                stacklevel=3,
            )
            self._warned_of_brightness = True


def _may_count(element: Element, before: StreamEvidence) -> bool:
    complete = not bool(element.x.isnan().any())
    return bool(may_count(complete, before.evidence.count, before.position))


def check_ranks(detector: Detector, within: bool) -> None:
    """Raise unless a detector can judge by ranks within a set, if it has to.

    Logs from which element on ranks can flag any.
    """
    if not within:
        return
    if not detector.count_all:
        raise ValueError("`within` needs `count_all`: ranks within a set hold only if every element counts.")
    first = math.ceil(1 / detector.rate)
    if first > RANKS + 1:
        raise ValueError(
            f"`rate` must be at least {math.ceil(1e4 / (RANKS + 1)) / 1e4:g} for `within`, as an element is "
            f"ranked among at most {RANKS} others; got {detector.rate:g}."
        )
    _log.info(
        "ranks within a set can reach p ≤ %s %% only from element %d on; earlier elements are never flagged",
        f"{100 * detector.rate:g}",
        first,
    )


def _stamp(path: Path) -> str | None:
    """The stamp of a file; None without a file."""
    return file_stamp(path) if path.is_file() else None


def _checked_state_file(path: Path) -> Path:
    if not path.parent.is_dir():
        raise ValueError(f"`state` must be a file in an existing folder; {path.parent} does not exist.")
    if path.is_dir() or not os.access(path.parent, os.W_OK) or (path.is_symlink() and not path.exists()):
        raise ValueError(f"`state` must be a writable file; got {path}.")
    if path.exists():
        check_regular(path)
    return path
