"""Updates of the states of sets by their next elements: one element of each of many sets at a time."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int

from bruno.model import Bruno
from bruno.streams.codec import EXCLUDED, INSIDE, USABLE, Ranks
from bruno.streams.densities import RowDensities
from bruno.streams.evidence import Numbers, SetEvidence, evidence_inside, with_element
from bruno.streams.sets import First, HotSets
from bruno.streams.store import Excluded
from bruno.streams.window import Window
from bruno.tasks.detector import Detector
from bruno.tasks.drift import DriftTest, WithinSet
from bruno.tasks.robust_evidence import typical_elements
from bruno.tasks.stream_evidence import RECONSIDERED, START, may_count

_SIZES = (0, 8, START)  # sets are reconsidered in two batches: up to 8, and up to 20 first elements


class Update(NamedTuple):
    """The judged elements of a round: scores and evidence before the update, and which elements count."""

    score: Float[np.ndarray, " n"]
    seen: Float[np.ndarray, " n"]
    position: Int[np.ndarray, " n"]
    out_of_distribution: Bool[np.ndarray, " n"]
    in_evidence: Bool[np.ndarray, " n"]
    p_within: Float[np.ndarray, " n"] | None


class Updates:
    """Updates the states of sets, as `StreamEvidence.add` does, for one element of each of many sets.

    The first elements of a set are reconsidered together several times. Until then, they have full weight.

    Attributes:
        excluded: elements that do not count any more after a reconsideration. The caller adds those that
            did not count when they arrived, and clears the list.
        put_back: excluded elements that count again; cleared by the caller.

    Args:
        detector: the model, with the cutoffs and the floor.
        sets: the states.
        window: windows of the sets; None without one.
        half_life: number of elements after which an element has half of its weight; None for no forgetting.
        within: keep ranks within sets, and test for drift.
        drifted: called with the slot of a set that has changed, and the element near which it changed.
    """

    def __init__(
        self,
        detector: Detector,
        sets: HotSets,
        window: Window | None,
        half_life: float | None,
        within: bool,
        drifted: Callable[[int, int], None],
    ) -> None:
        self._sets, self._window, self._within, self._drifted = sets, window, within, drifted
        self._model = _with_process_in_double(detector.model)
        self.excluded: list[Excluded] = []
        self.put_back: list[Excluded] = []
        self._densities = RowDensities(detector.model.process)
        self._keeps = 1.0 if half_life is None else 2.0 ** (-1 / half_life)
        self._floor, self._reference = detector.floor, detector.reference
        self._cutoffs = None if detector.count_all else detector.cutoffs
        if self._cutoffs is not None:
            self._cutoff_at = np.array((-math.inf, *self._cutoffs.by_count))

    def prior(self, z: Float[np.ndarray, "n dim"]) -> Float[np.ndarray, " n"]:
        """log p(z) without evidence."""
        if len(z) == 1:  # a vector, as numpy is faster with fewer axes
            return self._densities.prior(z[0]).reshape(1)
        return self._densities.prior(z)

    def advance(
        self,
        slots: Int[np.ndarray, " n"],
        z: Float[np.ndarray, "n dim"],
        log_det: Float[np.ndarray, " n"],
        prior: Float[np.ndarray, " n"],
        complete: Bool[np.ndarray, " n"] | None = None,
    ) -> Update:
        """Score the next element of each set, and add elements that count; the sets are all different.

        `complete` marks the elements without missing numbers; None if all elements are complete.
        """
        sets = self._sets
        if len(slots) == 1 and not self._within and sets.position[slots[0]] >= START:
            return self._advance_one(int(slots[0]), z[0], log_det.item(), prior.item())
        seen, mean, scatter, position = (
            array.take(slots, 0) for array in (sets.count, sets.mean, sets.scatter, sets.position)
        )
        score = self._densities(z, seen, mean, scatter) - prior
        ood = prior + log_det < self._floor
        usable = ~ood
        if complete is not None:
            usable &= may_count(complete, seen, position)
        less = np.maximum(self._reference - prior - log_det, 0.0)  # `shortfall`, in numpy
        score = score - less
        in_evidence = usable.copy()
        if self._cutoffs is not None:
            places = np.minimum(np.rint(seen).astype(np.intp), len(self._cutoff_at) - 1)
            in_evidence &= score >= self._cutoff_at[places]
        is_young = self._keep_first(slots, z, position, usable, less, in_evidence)
        keeps = np.where(is_young, 1.0, self._keeps)
        self._add(slots[in_evidence], z[in_evidence], keeps[in_evidence, None])
        sets.position[slots] = position + 1
        if is_young.any():
            in_evidence[is_young] = self._reconsider(slots[is_young], position[is_young] + 1)
        if self._window is not None:
            for i in np.flatnonzero(in_evidence & ~is_young).tolist():
                self._window.add(int(slots[i]), z[i : i + 1])
        p_within = self._rank(slots, z, position, usable) if self._within else None
        return Update(score, seen, position, ood, in_evidence, p_within)

    def _advance_one(self, slot: int, z: Float[np.ndarray, " dim"], log_det: float, prior: float) -> Update:
        """Like `advance`, for one set whose first elements are no longer reconsidered: incomplete rows count.

        Branches are in Python, as a comparison takes a microsecond in numpy, however small its arrays are.
        """
        sets = self._sets
        seen, position = sets.count.item(slot), sets.position.item(slot)
        score = self._densities(z, seen, sets.mean[slot], sets.scatter[slot]).item() - prior
        score -= max(self._reference - prior - log_det, 0.0)
        ood = prior + log_det < self._floor
        in_evidence = not ood
        if in_evidence and self._cutoffs is not None:
            in_evidence = score >= self._cutoff_at.item(min(round(seen), len(self._cutoff_at) - 1))
        sets.position[slot] = position + 1
        if in_evidence:
            self._count(slot, z)
        found = (np.array([score]), np.array([seen]), np.array([position]), np.array([ood]))
        return Update(*found, np.array([in_evidence]), None)

    def include(self, slot: int, z: Float[np.ndarray, " dim"]) -> None:
        """Add an earlier element, which was excluded, to its set; the position stays the same."""
        self.end_of_start(slot)
        self._count(slot, z)

    def _count(self, slot: int, z: Float[np.ndarray, " dim"]) -> None:
        """Add an element to a set whose first elements are no longer reconsidered."""
        sets = self._sets
        given = SetEvidence(sets.count.item(slot), sets.mean[slot], sets.scatter[slot])
        sets.count[slot], sets.mean[slot], sets.scatter[slot] = with_element(given, z, self._keeps)
        if self._window is not None:
            self._window.add(slot, z[None])

    def _add(self, slots: Int[np.ndarray, " n"], z: Float[np.ndarray, "n dim"], keeps: Numbers) -> None:
        """Add an element to each set, after its earlier weights are scaled by `keeps`."""
        sets = self._sets
        given = SetEvidence(*(array.take(slots, 0) for array in (sets.count, sets.mean, sets.scatter)))
        after = with_element(given._replace(n=given.n[:, None]), z, keeps)
        sets.count[slots], sets.mean[slots], sets.scatter[slots] = after.n[:, 0], after.mean, after.scatter

    # --- the first elements ------------------------------------------------------------------------------

    def _keep_first(
        self,
        slots: Int[np.ndarray, " n"],
        z: Float[np.ndarray, "n dim"],
        position: Int[np.ndarray, " n"],
        usable: Bool[np.ndarray, " n"],
        less: Float[np.ndarray, " n"],
        in_evidence: Bool[np.ndarray, " n"],
    ) -> Bool[np.ndarray, " n"]:
        """Keep elements of sets that may still be reconsidered; returns which sets these are."""
        is_young = np.zeros(len(slots), np.bool_)
        if self._cutoffs is None:
            return is_young
        for i in (position < START).nonzero()[0].tolist():
            slot, place = int(slots[i]), int(position[i])
            first = self._sets.begin(slot) if place == 0 else self._sets.first.get(slot)
            if first is None:  # the set began with a posterior, or an element was accepted
                continue
            first.z[place], first.less[place] = z[i], less[i]
            first.flags[place] = USABLE * bool(usable[i]) + INSIDE * bool(in_evidence[i])
            is_young[i] = True
        return is_young

    def _reconsider(
        self, slots: Int[np.ndarray, " n"], sizes: Int[np.ndarray, " n"]
    ) -> Bool[np.ndarray, " n"]:
        """Reconsider the first elements of sets of some sizes; returns whether the latest element counts."""
        due = np.isin(sizes, list(RECONSIDERED))
        for least, most in itertools.pairwise(_SIZES):
            chosen = due & (sizes > least) & (sizes <= most)
            if chosen.any():
                self._reconsider_all(slots[chosen], sizes[chosen], most)
        latest = np.zeros(len(slots), np.bool_)
        for i, (slot, size) in enumerate(zip(slots.tolist(), sizes.tolist(), strict=True)):
            flags = self._sets.first[slot].flags
            latest[i] = flags[size - 1] & INSIDE
            flags[size - 1] |= 0 if latest[i] else EXCLUDED
            if size >= START:
                self.end_of_start(slot)
        return latest

    def _reconsider_all(self, slots: Int[np.ndarray, " k"], sizes: Int[np.ndarray, " k"], size: int) -> None:
        """Decide which of the first elements of sets, at most `size`, count, and make them the evidence."""
        firsts = [self._sets.first[slot] for slot in slots.tolist()]
        z = np.stack([first.z[:size] for first in firsts])
        flags = np.stack([first.flags[:size] for first in firsts])  # 0 for elements that are still to come
        less = np.stack([first.less[:size] for first in firsts])
        inside = self._typical(z, (flags & USABLE) > 0, less)
        self._replace(slots, z, inside)
        known, is_earlier = (flags & EXCLUDED) > 0, np.arange(size) < sizes[:, None] - 1
        excluded = ~inside & is_earlier  # whether the latest element counts is in the `Update`
        for changed, elements in ((inside & known, self.put_back), (excluded & ~known, self.excluded)):
            for set_, place in np.argwhere(changed).tolist():
                elements.append(self._sets.first_element(int(slots[set_]), place))
        marks = ((flags & USABLE) | INSIDE * inside | EXCLUDED * excluded).astype(np.uint8)
        for first, own in zip(firsts, marks, strict=True):
            first.flags[:size] = own

    def _typical(
        self,
        z: Float[np.ndarray, "k m dim"],
        usable: Bool[np.ndarray, "k m"],
        less: Float[np.ndarray, "k m"],
    ) -> Bool[np.ndarray, "k m"]:
        """Which elements are typical of their sets; in float64, as decisions must not depend on the batch."""
        assert self._cutoffs is not None
        latents, may, shortfalls = (torch.from_numpy(part) for part in (z, usable, less))
        scores = self._densities.scores_of(z)
        found = typical_elements(self._model, latents, self._cutoffs, may, scores, shortfalls)
        return np.asarray(found.numpy())

    def _replace(
        self, slots: Int[np.ndarray, " k"], z: Float[np.ndarray, "k m dim"], inside: Bool[np.ndarray, "k m"]
    ) -> None:
        """Make the elements that are inside the evidence of their sets."""
        found = evidence_inside(z, inside)
        self._sets.count[slots], self._sets.mean[slots] = found.n, found.mean
        self._sets.scatter[slots] = found.scatter

    def end_of_start(self, slot: int) -> None:
        """Stop reconsidering the first elements of a set: those that count now count permanently."""
        first: First | None = self._sets.first.pop(slot, None)
        if first is not None and self._window is not None:
            self._window.add(slot, first.z[(first.flags & INSIDE) > 0])

    # --- ranks -------------------------------------------------------------------------------------------

    def _rank(
        self,
        slots: Int[np.ndarray, " n"],
        z: Float[np.ndarray, "n dim"],
        position: Int[np.ndarray, " n"],
        usable: Bool[np.ndarray, " n"],
    ) -> Float[np.ndarray, " n"]:
        """p-values within the sets, of elements that may count."""
        found = np.full(len(slots), math.nan)
        for i in np.flatnonzero(usable).tolist():
            slot, one = int(slots[i]), torch.from_numpy(z[i].copy())
            within, drift = self._sets.ranks.get(slot) or Ranks(WithinSet.empty(self._model.dim), DriftTest())
            ranked = within.p_value(self._model, one)
            after = drift.add(ranked.uniform, int(position[i]) + 1)
            self._sets.ranks[slot] = Ranks(within.add(one), after)
            found[i] = ranked.p
            if after.changed_at is not None and not drift.detected:
                self._drifted(slot, after.changed_at)
        return found


def _with_process_in_double(model: Bruno) -> Bruno:
    """The model with its process in float64 and on the CPU, as decisions must not depend on the batch."""
    process = copy.deepcopy(model.process).cpu().double()
    return Bruno(model.shape, model.flow, process, model.preprocessing, model.config, model.imputer)
