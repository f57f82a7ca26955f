"""Windows: sets that consist of exactly the latest elements that count, as older elements are removed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float

from bruno.streams.codec import decode_latents, encode_latents
from bruno.streams.evidence import SetEvidence, without_element
from bruno.streams.sets import HotSets
from bruno.streams.store import Store

_HUGE = 1e8  # squared deviation; removing an element with a larger one costs precision


class Window:
    """Keeps the latents of the latest `size` elements that count in the store, and removes older ones.

    Removing an element leaves a rounding error. The evidence is therefore recomputed from all elements of the
    window after every `size` elements, and after the removal of an element that is far from the others.
    """

    def __init__(self, size: int, sets: HotSets, store: Store) -> None:
        self.size, self._sets, self._store = size, sets, store
        self._new: dict[str, dict[int, bytes]] = {}  # not in the store yet
        self._of_step: list[tuple[str, int]] = []

    def add(self, slot: int, z: Iterable[Float[np.ndarray, " dim"]]) -> None:
        """Add elements that are already in the evidence of a set, and remove the oldest beyond `size`."""
        sets, name = self._sets, self._sets.name(slot)
        for one in z:
            number = int(sets.counted[slot])
            self._new.setdefault(name, {})[number] = encode_latents(one)
            self._of_step.append((name, number))
            sets.counted[slot] = number + 1
            if sets.count[slot] > self.size:
                self._remove(slot, name, number)

    def _remove(self, slot: int, name: str, number: int) -> None:
        """Remove the oldest element of a set, number − `size`, from its evidence."""
        sets, n = self._sets, float(self.size)
        data = self._new.get(name, {}).get(number - self.size) or self._store.element(
            name, number - self.size
        )
        old = decode_latents(data, len(sets.mean[slot]), name)
        given = SetEvidence(n + 1, sets.mean[slot], sets.scatter[slot])
        _, rest, left = without_element(given, old)
        if number % self.size == 0 or ((old - rest) ** 2 > _HUGE * left / n).any():
            inside = self._elements(name, number)
            rest = inside.mean(0)
            left = ((inside - rest) ** 2).sum(0)
        sets.count[slot], sets.mean[slot], sets.scatter[slot] = n, rest, left

    def _elements(self, name: str, last: int) -> Float[np.ndarray, "size dim"]:
        """The latents of the elements of a window up to this number."""
        new = self._new.get(name, {})
        before = min(new, default=last + 1)
        kept = self._store.elements(name, last - self.size)
        recent = [new[number] for number in range(max(before, last - self.size + 1), last + 1)]
        dim = self._sets.mean.shape[1]
        rows = [decode_latents(data, dim, name) for data in (*kept, *recent)]
        return np.stack(rows[-self.size :])

    def begin_step(self) -> None:
        """Mark the beginning of a step, to which `undo` returns."""
        self._of_step.clear()

    def undo(self) -> None:
        """Drop the elements of the last step."""
        for name, number in self._of_step:
            self._new.get(name, {}).pop(number, None)
        self._of_step.clear()

    def flush(self) -> None:
        """Write new elements to the store, and drop the elements that were removed."""
        if not (new := self._new):
            return
        self._store.put_elements(
            (name, number, z) for name, some in new.items() for number, z in some.items()
        )
        self._store.drop_elements((name, max(some) - self.size) for name, some in new.items() if some)
        new.clear()
        self._of_step.clear()
