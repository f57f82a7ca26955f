"""Keyed streams: rows of many sets in any order, judged in batches, with their states in a store."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray

from bruno.arrays import ArrayLike
from bruno.checks import check_at_least, check_count, check_rate
from bruno.model import Posterior
from bruno.process import Evidence
from bruno.signals import StopSignal
from bruno.streams.codec import decode_latents, encode_latents
from bruno.streams.encoder import Latents, encoder_of
from bruno.streams.judgements import Judgements, Rule
from bruno.streams.rows import check_forgetting, checked_elements, checked_keys, checked_offsets, rounds_of
from bruno.streams.sets import HotSets, capacity_for, default_id
from bruno.streams.store import IN_MEMORY, Excluded, Mark, Store
from bruno.streams.updates import Updates
from bruno.streams.window import Window
from bruno.tasks.detector import Detector
from bruno.tasks.stream_evidence import START
from bruno.trained.detection import DetectionJobs
from bruno.trained.states import SET_SEPARATOR, check_one_set, only_name
from bruno.trained.watch import check_ranks

COMMIT_ROWS, COMMIT_SECONDS = 10_000, 1.0
WAIT = 5.0  # seconds to wait for another process that uses the store
_CANDIDATES = 10  # elements of which an error names some


class _Uncommitted(NamedTuple):
    """Numbers of uncommitted rows, excluded elements and elements put back, and how far sources were read."""

    rows: int
    excluded: int
    put_back: int
    sources: dict[str, Mark]


class KeyedDetector:
    """Judges rows of many sets, each by the elements of its own set so far; the states are in a store.

    The judgement of a row does not depend on how rows are divided into batches, nor on whether the stream was
    interrupted and continued. The result of a step is final once the next step begins, or `commit` is called:
    report the result before that. The states are committed in one transaction with the offsets of the input.
    As a context manager, a detector commits at the end; if the body raises, the last step is undone, as its
    result may not have been reported.

    Args:
        trained: the model.
        store: a file, created if it does not exist, or ":memory:".
        detector: a detector from `Trained.detector`, or a function that returns one and is called once all
            other arguments are valid; by default one calibrated at `rate`.
        rate: false-alarm rate of the default detector; 1 % by default. Another detector has its own rate.
        window: only this many of the latest elements of a set count, at least 20; by default, all do.
        half_life: the weight of an element is halved each time that its set gets this many more elements; by
            default, all weights are 1.
        within: judge by ranks within the set, and test for drift. It needs a detector with `count_all`.
        cache: number of sets in memory; by default as many as take 256 MiB, at most 100,000.
        commit_rows: commit before a step if at least this many rows are uncommitted.
        commit_seconds: commit before a step if the last commit was at least this many seconds ago.
        wait: seconds to wait for another process that uses the store; 5 by default.
    """

    def __init__(
        self,
        trained: DetectionJobs,
        store: str | Path = IN_MEMORY,
        detector: Detector | Callable[[], Detector] | None = None,
        *,
        rate: float | None = None,
        window: int | None = None,
        half_life: float | None = None,
        within: bool = False,
        cache: int | None = None,
        commit_rows: int = COMMIT_ROWS,
        commit_seconds: float = COMMIT_SECONDS,
        wait: float | None = None,
    ) -> None:
        if rate is not None:
            check_rate("rate", rate)
            if detector is not None:
                raise ValueError(f"`rate` is for the default detector; got {rate:g} and `detector`. Omit it.")
        within = within or (isinstance(detector, Detector) and detector.within)
        check_forgetting(window, half_life, within)
        check_count("commit_rows", commit_rows)
        check_at_least("commit_seconds", commit_seconds, 0)
        if cache is not None:
            check_count("cache", cache)
        if wait is not None and not 0 <= wait < np.inf:
            raise ValueError(f"`wait` must be at least 0 seconds and finite; got {wait}.")
        self._model, self._kind = trained.model, trained.kind
        self._imputes = trained.model.imputer is not None
        self._commit_rows, self.commit_seconds = commit_rows, commit_seconds
        fingerprint = self._model.fingerprint()
        settings = {"window": window, "half_life": half_life, "within": within}
        self.store = Store(store, fingerprint, settings, wait=WAIT if wait is None else wait)
        try:
            made = trained.detector(rate=rate) if detector is None else detector
            self.detector = made if isinstance(made, Detector) else made()
            if not self._model.is_same(self.detector.model):
                raise ValueError("`detector` must be of the model of `trained`; got one of another model.")
            if self.detector.window is not None:
                raise ValueError(
                    f"`detector` must have no window; got {self.detector.window}. Use the argument `window`."
                )
            if self.detector.within and not within:
                raise ValueError("`within` must be True for a detector that judges by ranks only; got False.")
            check_ranks(self.detector, within)
        except BaseException:
            self.store.close()
            raise
        self._sets = HotSets(self.store, fingerprint, self._model.dim, cache or capacity_for(self._model.dim))
        self._window = None if window is None else Window(window, self._sets, self.store)
        self._encode = encoder_of(self._model, on_scales=True)
        self._updates = Updates(
            self.detector, self._sets, self._window, half_life, within, self._warn_of_drift
        )
        self._rule = Rule(self.detector, window, half_life is not None)
        self._within = within
        self._interrupted = False
        self._sources: dict[str, Mark] = {}
        self._before = _Uncommitted(0, 0, 0, {})  # to undo the last step
        self._rows, self._committed = 0, time.monotonic()

    # --- judging -----------------------------------------------------------------------------------------

    def step(
        self,
        keys: Sequence[Any] | NDArray[Any],
        x: ArrayLike,
        *,
        ids: Sequence[str] | None = None,
        offsets: Sequence[Any] | Int[np.ndarray, " n"] | None = None,
        sources: Mapping[str, Mark] | None = None,
        evidence: bool = False,
    ) -> Judgements:
        """Judge the next rows, (n, *shape), of these sets; several rows of one set are judged in order.

        Args:
            keys: the set of each row, by its name or number.
            x: the rows, or a frame with the columns of the model; missing numbers, NaN, are imputed from the
                set, if the model can.
            ids: names of the rows, for `accept`; by default "KEY/NUMBER", counted from 1 in each set.
            offsets: positions in the input, increasing for each key. A row whose offset is at most the last
                one of its key is skipped: it was judged before.
            sources: how far each source has been read, committed with these rows; see `source`.
            evidence: also return the evidence by which each row was judged.
        """
        names = checked_keys(keys)
        x, complete = checked_elements(x, len(names), self._kind, self._imputes)
        given = checked_offsets(offsets, len(names))
        if ids is not None and len(ids) != len(names):
            raise ValueError(f"`ids` must have {len(names)} names, one for each key; got {len(ids)}.")
        self._begin_step()
        with _MarkInterrupted(self):
            slots = self._sets.slots(names)
            self._sets.begin_step(slots)
            try:
                found, excluded = self._judged(slots, x, complete, ids, given, evidence)
            except Exception:
                self.undo()
                raise
        for i in sorted(excluded):
            id = default_id(names[i], int(found.position[i])) if ids is None else str(ids[i])
            self._updates.excluded.append(Excluded(id, names[i], encode_latents(excluded[i])))
        self._rows += len(names)
        self._sources |= sources or {}
        return found

    def _judged(
        self,
        slots: NDArray[np.intp],
        x: Any,
        complete: NDArray[np.bool_] | None,
        ids: Sequence[str] | None,
        offsets: NDArray[np.int64] | None,
        evidence: bool,
    ) -> tuple[Judgements, dict[int, NDArray[np.float64]]]:
        """The judgements of rows, and the latents of the rows that are excluded from their sets."""
        found = Judgements.empty(len(slots))
        latents = self._encode(x) if complete is None else self._encoded(x, complete)
        prior = self._updates.prior(latents.z)
        excluded: dict[int, NDArray[np.float64]] = {}
        before = np.zeros((2, *latents.z.shape)) if evidence else None  # means and scatters
        for rows in rounds_of(slots):
            if offsets is not None:
                rows = rows[offsets[rows] > self._sets.offset[slots[rows]]]
                self._sets.offset[slots[rows]] = offsets[rows]
            if not len(rows):
                continue
            if complete is not None:
                self._impute(rows[~complete[rows]], slots, x, latents, prior)
            if self._sets.incomplete:
                found.incomplete[rows] = [slot in self._sets.incomplete for slot in slots[rows].tolist()]
            whole = len(rows) == len(slots)
            some = slots if whole else slots[rows]
            if before is not None:
                before[0][rows], before[1][rows] = self._sets.mean[some], self._sets.scatter[some]
            own = latents if whole else Latents(latents.z[rows], latents.log_det[rows])
            known = None if complete is None else complete[rows]
            update = self._updates.advance(some, *own, prior if whole else prior[rows], known)
            found.skipped[rows] = False
            found.score[rows], found.seen[rows], found.position[rows] = update[:3]
            found.out_of_distribution[rows], found.in_evidence[rows] = (
                update.out_of_distribution,
                update.in_evidence,
            )
            if update.p_within is not None:
                found.p_within[rows] = update.p_within
            excluded |= {i: latents.z[i] for i in rows[~update.in_evidence].tolist()}
            if ids is not None and self._sets.first:
                for i in rows[update.position < START].tolist():
                    self._sets.name_first(int(slots[i]), int(found.position[i]), str(ids[i]))
        if before is not None:
            on_cpu = Evidence(torch.from_numpy(found.seen).round().long(), *torch.from_numpy(before))
            found.evidence = on_cpu.to(self._model.device)
        self._rule.judge(found)
        if self._within:
            self._judge_within(found)
        return found, excluded

    def _judge_within(self, found: Judgements) -> None:
        """Replace the judgement of each row that has a rank within its set by one from that rank."""
        ranked = ~np.isnan(found.threshold) & ~np.isnan(found.p_within)
        found.outlier[ranked] = found.p_within[ranked] <= self.detector.rate
        found.p[ranked], found.exact[ranked] = found.p_within[ranked], ~found.incomplete[ranked]
        found.threshold[ranked] = np.nan

    def _encoded(self, x: Any, complete: NDArray[np.bool_]) -> Latents:
        """The latents of complete rows; zeros for rows with missing numbers."""
        n, dim = x.shape
        latents = Latents(np.zeros((n, dim)), np.zeros(n))
        if complete.any():
            latents.z[complete], latents.log_det[complete] = self._encode(x[complete])
        return latents

    @torch.no_grad()
    def _impute(
        self, rows: NDArray[np.intp], slots: NDArray[np.intp], x: Any, latents: Latents, prior: NDArray[Any]
    ) -> None:
        """Impute missing numbers from the sets, one row at a time: rounding depends on the batch."""
        self._sets.incomplete.update(slots[rows].tolist())
        for i in rows.tolist():
            filled = self._posterior(int(slots[i])).impute(torch.from_numpy(x[i])).cpu().numpy()
            z, log_det = self._encode(filled[None])
            latents.z[i], latents.log_det[i] = z[0], log_det[0]
            prior[i] = self._updates.prior(z)[0]

    def _warn_of_drift(self, slot: int, changed_at: int) -> None:
        warnings.warn(
            f"the distribution of set {self._sets.name(slot)!r} changed near element {changed_at}. If the "
            "change is permanent, start a new set.",
            stacklevel=2,
        )

    # --- the store ---------------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        """Make the last step final, commit if that is due, and prepare to undo the next step."""
        if self._rows >= self._commit_rows or (
            self._rows and time.monotonic() - self._committed >= self.commit_seconds
        ):
            self.commit()
        self.reported()

    def reported(self) -> None:
        """Make the last step final: its result has been reported."""
        excluded, put_back = len(self._updates.excluded), len(self._updates.put_back)
        self._before = _Uncommitted(self._rows, excluded, put_back, dict(self._sources))
        self._sets.end_step()
        if self._window is not None:
            self._window.begin_step()

    def undo(self) -> int:
        """Undo the last step, unless it is final; returns the number of rows that were undone."""
        before = self._before
        undone = self._rows - before.rows
        self._rows, self._sources = before.rows, before.sources
        del self._updates.excluded[before.excluded :], self._updates.put_back[before.put_back :]
        self._sets.undo()
        if self._window is not None:
            self._window.undo()
        return undone

    def commit(self) -> None:
        """Commit all steps so far in one transaction, which no signal interrupts."""
        if self._interrupted:
            raise RuntimeError("a step was interrupted: close the detector, and open its store again.")
        with StopSignal() as stop, _MarkInterrupted(self):
            self._commit()
        if stop.number:
            raise KeyboardInterrupt(stop.number)

    def _commit(self) -> None:
        self._sets.end_step()
        self._sets.flush()
        if self._window is not None:
            self._window.flush()
        if self._updates.excluded:  # before those that are put back, which may be among them
            self.store.put_excluded(self._updates.excluded)
            self._updates.excluded.clear()
        if self._updates.put_back:
            self.store.drop_put_back(self._updates.put_back)
            self._updates.put_back.clear()
        if self._sources:
            self.store.put_sources(self._sources)
            self._sources = {}
        self.store.commit()
        self._rows, self._committed = 0, time.monotonic()
        self._before = _Uncommitted(0, 0, 0, {})

    @property
    def uncommitted(self) -> int:
        """Number of rows since the last commit."""
        return self._rows

    def source(self, name: str) -> Mark | None:
        """How far a source has been read; None if it is new."""
        return self._sources.get(name) or self.store.source(name)

    def accept(self, *names: str) -> None:
        """Add elements that were excluded by mistake to their sets, by their `ids` in `step`, and commit.

        The folders at the beginning of a name may be omitted if the rest names only one element. "SET, NAME"
        names an element of one set, if several sets have elements of this name; of several elements of one
        set with the same name, it is the latest.
        """
        self.commit()
        elements = dict(map(self._element_excluded, names))
        if not elements:
            return
        slots = self._sets.slots([element.name for element in elements.values()])
        self._sets.begin_step(slots)
        for slot, (number, element) in zip(slots.tolist(), elements.items(), strict=True):
            self._updates.include(slot, decode_latents(element.z, self._model.dim, element.name))
            self.store.drop_excluded(number)
        self.commit()

    def _element_excluded(self, name: str) -> tuple[int, Excluded]:
        """An element that was excluded from its set, and its number in the store."""
        store, parts = self.store, name.split(SET_SEPARATOR)
        full = ((SET_SEPARATOR.join(parts[:i]), SET_SEPARATOR.join(parts[i:])) for i in range(1, len(parts)))
        found = next(filter(None, (store.excluded(id, of) for of, id in full)), None)
        if found is None:
            if not (sets := store.sets_excluding(name, _CANDIDATES)):
                ending = store.excluded_ending(f"/{name}", _CANDIDATES)
                name = only_name(name, ending, store.latest_excluded(_CANDIDATES))
                sets = store.sets_excluding(name, _CANDIDATES)
            check_one_set(name, sets)
            found = store.excluded(name)
            assert found is not None
        _, element = found
        decode_latents(element.z, self._model.dim, element.name)  # raises before anything changes
        return found

    def close(self) -> None:
        """Commit, unless a step was interrupted, and close the store."""
        try:
            if not self._interrupted:
                self.commit()
        finally:
            self.store.close()

    def __enter__(self) -> KeyedDetector:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is not None:
            self.undo()
        self.close()

    # --- sets --------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        self.commit()
        return len(self.store)

    def __bool__(self) -> bool:
        return True  # also without sets; and `__len__` would commit

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all sets."""
        self.commit()
        yield from self.store.names()

    def posterior(self, key: str | int) -> Posterior:
        """The posterior of a set; the prior if it has no elements."""
        record = self._sets.record(int(self._sets.slots(checked_keys([key]))[0]))
        return Posterior(self._model, record.evidence.to(self._model.device))

    def _posterior(self, slot: int) -> Posterior:
        """The posterior of the set in a slot, with the count rounded to a whole number."""
        count = torch.tensor(round(float(self._sets.count[slot])))
        mean, scatter = (torch.tensor(part[slot]) for part in (self._sets.mean, self._sets.scatter))
        return Posterior(self._model, Evidence(count, mean, scatter).to(self._model.device))


class _MarkInterrupted:
    """Marks the states in memory as unusable if the body is interrupted in the middle.

    This is a class because a context manager made from a generator takes several microseconds more.
    """

    def __init__(self, keyed: KeyedDetector) -> None:
        self._keyed = keyed

    def __enter__(self) -> None:
        self._keyed._interrupted = True

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self._keyed._interrupted = False
