"""The sets in use: their states in arrays, with the store behind them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

from bruno.streams.codec import Ranks, SetRecord, decode, encode, encode_latents
from bruno.streams.store import Excluded, Store
from bruno.tasks.stream_evidence import START

Slots = NDArray[np.intp]
_INITIAL_SLOTS = 64


class First(NamedTuple):
    """The first elements of a set, while they may be reconsidered; preallocated.

    Attributes:
        z: latents.
        less: what is subtracted from their scores, the `shortfall`.
        flags: `USABLE`, `INSIDE` and `EXCLUDED`.
        ids: their names; "" for the default one.
    """

    z: NDArray[np.float64]
    less: NDArray[np.float64]
    flags: NDArray[np.uint8]
    ids: list[str]


class _Before(NamedTuple):
    """The states of the sets of a step as they were before it; arrays are copies."""

    slots: Slots
    arrays: list[NDArray[Any]]
    first: dict[int, tuple[First, NDArray[np.uint8]]]
    ranks: dict[int, Ranks | None]
    incomplete: set[int]


class HotSets:
    """A cache of the states of the sets in use; each set has a slot, an index into arrays.

    All other sets are in the store. If more than `capacity` sets are in use, the least recently used ones are
    written to the store. A step can be undone until the next one begins.

    Args:
        store: the store.
        fingerprint: fingerprint of the model.
        dim: number of latent dimensions.
        capacity: number of sets in memory; exceeded if a single step has more sets.
    """

    def __init__(self, store: Store, fingerprint: str, dim: int, capacity: int) -> None:
        self._store, self._fingerprint, self._dim, self._capacity = store, fingerprint, dim, capacity
        self.first: dict[int, First] = {}
        self.ranks: dict[int, Ranks] = {}
        self.incomplete: set[int] = set()  # slots of sets that have had an element with missing numbers
        self._slots: OrderedDict[str, int] = OrderedDict()
        self._names: list[str] = []
        self._free: list[int] = []
        self._before: _Before | None = None  # to undo the last step
        self._allocate(_INITIAL_SLOTS)

    def __len__(self) -> int:
        return len(self._slots)

    def name(self, slot: int) -> str:
        """The name of the set in a slot."""
        return self._names[slot]

    # --- slots -------------------------------------------------------------------------------------------

    def slots(self, names: Sequence[str]) -> Int[np.ndarray, " n"]:
        """The slots of sets; sets that are not in use are read from the store, or empty if they are new."""
        known = self._slots
        if len(names) == 1 and (only := known.get(names[0])) is not None:
            known.move_to_end(names[0])
            return np.array([only], np.intp)
        different = list(dict.fromkeys(names))
        absent = [name for name in different if name not in known]
        for name in different:
            if name in known:
                known.move_to_end(name)
        if absent:
            self._evict(len(known) + len(absent) - max(self._capacity, len(different)))
            self._load(absent)
        return np.fromiter((known[name] for name in names), np.intp, len(names))

    def _load(self, names: Sequence[str]) -> None:
        found = {name: self._decoded(name, state) for name, state in self._store.states(names).items()}
        for name in names:
            slot = self._free.pop() if self._free else len(self._names)
            if slot == len(self._names):
                self._names.append(name)
                if slot == len(self.count):
                    self._allocate(2 * slot)
            self._names[slot] = name
            self._slots[name] = slot
            self._set(slot, found.get(name) or SetRecord(0.0, np.zeros(self._dim), np.zeros(self._dim)))
            self._dirty[slot] = False

    def _decoded(self, name: str, state: bytes) -> SetRecord:
        try:
            return decode(state, self._fingerprint, self._dim, name)
        except ValueError as error:
            raise ValueError(f"{self._store.path}: {error}") from error

    def _evict(self, excess: int) -> None:
        """Write the sets that were used least recently to the store, and free their slots."""
        gone = [self._slots.popitem(last=False) for _ in range(excess)]
        changed = [(name, slot) for name, slot in gone if self._dirty[slot] and self.position[slot]]
        if changed:
            self._store.put(
                (name, encode(self.record(slot), self._fingerprint, name)) for name, slot in changed
            )
        for _, slot in gone:
            self.first.pop(slot, None)
            self.ranks.pop(slot, None)
            self.incomplete.discard(slot)
            self._dirty[slot] = False
            self._free.append(slot)

    def _allocate(self, size: int) -> None:
        """Make room for this many sets."""

        def grown(name: str, shape: tuple[int, ...], kind: Any) -> None:
            array, before = np.zeros((size, *shape), kind), getattr(self, name, None)
            if before is not None:
                array[: len(before)] = before
            setattr(self, name, array)

        self.count: NDArray[np.float64]
        self.mean: NDArray[np.float64]
        self.scatter: NDArray[np.float64]
        self.position: NDArray[np.int64]
        self.counted: NDArray[np.int64]
        self.offset: NDArray[np.int64]
        self._dirty: NDArray[np.bool_]
        grown("count", (), np.float64)
        grown("mean", (self._dim,), np.float64)
        grown("scatter", (self._dim,), np.float64)
        grown("position", (), np.int64)
        grown("counted", (), np.int64)
        grown("offset", (), np.int64)
        grown("_dirty", (), np.bool_)

    # --- records -----------------------------------------------------------------------------------------

    def record(self, slot: int) -> SetRecord:
        """The state in a slot."""
        position = int(self.position[slot])
        first = self.first.get(slot)
        record = SetRecord(
            float(self.count[slot]),
            self.mean[slot],
            self.scatter[slot],
            position,
            int(self.counted[slot]),
            int(self.offset[slot]),
            ranks=self.ranks.get(slot),
            incomplete=slot in self.incomplete,
        )
        if first is not None:
            record.first, record.less = first.z[:position], first.less[:position]
            record.flags = first.flags[:position]
            record.ids = first.ids[:position]
        return record

    def _set(self, slot: int, record: SetRecord) -> None:
        self.count[slot], self.mean[slot], self.scatter[slot] = record.count, record.mean, record.scatter
        self.position[slot], self.counted[slot] = record.position, record.counted
        self.offset[slot] = record.offset
        if m := len(record.first):
            first = self.begin(slot)
            first.z[:m], first.less[:m], first.flags[:m] = record.first, record.less, record.flags
            first.ids[: len(record.ids)] = record.ids
        if record.ranks is not None:
            self.ranks[slot] = record.ranks
        if record.incomplete:
            self.incomplete.add(slot)

    def begin(self, slot: int) -> First:
        """Begin to keep the first elements of a set."""
        z, less, flags = np.zeros((START, self._dim)), np.zeros(START), np.zeros(START, np.uint8)
        first = self.first[slot] = First(z, less, flags, [""] * START)
        return first

    def name_first(self, slot: int, place: int, id: str) -> None:
        """Keep the id of an element while it may be reconsidered."""
        if (first := self.first.get(slot)) is not None:
            first.ids[place] = id

    def first_element(self, slot: int, place: int) -> Excluded:
        """One of the first elements of a set, as the store remembers it if it is excluded."""
        first, name = self.first[slot], self._names[slot]
        return Excluded(first.ids[place] or default_id(name, place), name, encode_latents(first.z[place]))

    # --- steps -------------------------------------------------------------------------------------------

    def begin_step(self, slots: Slots) -> None:
        """Mark sets as changed, with a copy of their states for `undo`."""
        slots = np.unique(slots) if len(slots) > 1 else slots
        arrays = (self.count, self.mean, self.scatter, self.position, self.counted, self.offset)
        young = [slot for slot in slots.tolist() if slot in self.first] if self.first else []
        first = {slot: (self.first[slot], self.first[slot].flags.copy()) for slot in young}
        ranks = {slot: self.ranks.get(slot) for slot in slots.tolist()} if self.ranks else {}
        incomplete = self.incomplete.intersection(slots.tolist()) if self.incomplete else set()
        copies = [array.take(slots, 0) for array in arrays]
        self._before = _Before(slots, copies, first, ranks, incomplete)
        self._dirty[slots] = True

    def undo(self) -> None:
        """Restore the states before the last step; without one, do nothing."""
        if self._before is None:
            return
        slots, copies, first, ranks, incomplete = self._before
        arrays = (self.count, self.mean, self.scatter, self.position, self.counted, self.offset)
        for array, copy in zip(arrays, copies, strict=True):
            array[slots] = copy
        for slot in slots.tolist():
            self.first.pop(slot, None)
            self.ranks.pop(slot, None)
            self.incomplete.discard(slot)
        self.incomplete |= incomplete
        for slot, (one, flags) in first.items():
            one.flags[:] = flags
            self.first[slot] = one
        self.ranks |= {slot: one for slot, one in ranks.items() if one is not None}
        self._before = None

    def end_step(self) -> None:
        """Forget how to undo the last step."""
        self._before = None

    def flush(self) -> None:
        """Write all changed states to the store."""
        changed = np.flatnonzero(self._dirty & (self.position > 0)).tolist()
        if changed:
            self._store.put(
                (self._names[slot], encode(self.record(slot), self._fingerprint, self._names[slot]))
                for slot in changed
            )
            self._dirty[:] = False


def default_id(name: str, place: int) -> str:
    """The id of an element without one, given how many elements of its set were before it."""
    return f"{name}/{place + 1}"


def capacity_for(dim: int) -> int:
    """The number of sets that take about 256 MiB in memory, at most 100,000."""
    return max(1000, min(100_000, 2**28 // (16 * dim + 500)))
