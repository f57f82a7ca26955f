"""The evidence of many sets by key: reduction from rows, merging, lookup, and serialisation."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

from bruno.streams.codec import EvidenceArrays, decode_all, encode_all
from bruno.streams.densities import RowDensities
from bruno.streams.evidence import SetEvidence, without_element

FAR = 1e4  # standard deviations of the predictive; removing an element beyond costs precision

_EVIDENCE = "evidence"


@dataclass(frozen=True, eq=False)
class KeyedEvidence:
    """The evidence of many sets: a commutative monoid, like the evidence of one set.

    Attributes:
        keys: the key of each set, text or whole numbers, each once.
        count: number of elements.
        mean: mean of their latents.
        scatter: sum of squared deviations from the mean.
    """

    keys: Any  # pyarrow.Array
    count: Float[np.ndarray, " sets"]
    mean: Float[np.ndarray, "sets dim"]
    scatter: Float[np.ndarray, "sets dim"]

    @classmethod
    def of(cls, keys: Any, z: Float[np.ndarray, "n dim"]) -> KeyedEvidence:
        """The evidence of elements with these latents, by their keys."""
        z = z.astype(np.float64, copy=False)
        return cls._reduced(keys, np.ones(len(z)), z, None)

    @classmethod
    def merged(cls, parts: Sequence[KeyedEvidence]) -> KeyedEvidence:
        """The evidence of the unions of sets with the same key."""
        if len(parts) == 1:
            return parts[0]
        keys = pa.concat_arrays([part.keys for part in parts])
        return cls._reduced(
            keys,
            *(np.concatenate([getattr(p, name) for p in parts]) for name in ("count", "mean", "scatter")),
        )

    @classmethod
    def _reduced(
        cls, keys: Any, count: NDArray[Any], mean: NDArray[Any], scatter: NDArray[Any] | None
    ) -> KeyedEvidence:
        """Merge any number of parts of each set (Chan); the mean is corrected by the mean residual."""
        encoded = keys.dictionary_encode()
        which = encoded.indices.to_numpy()
        order = np.argsort(which, kind="stable")
        starts = np.searchsorted(which[order], np.arange(len(encoded.dictionary)))

        def total(values: NDArray[Any]) -> NDArray[Any]:
            return np.add.reduceat(values[order], starts) if len(order) else values

        n, weight = total(count), count[:, None]
        location = total(weight * mean) / n[:, None]
        residual = mean - location[which]
        shift = total(weight * residual) / n[:, None]
        spread = total(weight * residual**2) - n[:, None] * shift**2
        spread = np.maximum(spread, 0.0) if scatter is None else np.maximum(spread, 0.0) + total(scatter)
        return cls(encoded.dictionary, n, location + shift, spread)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: Any) -> KeyedEvidence:
        """Some of the sets."""
        index = np.arange(len(self))[index]
        return KeyedEvidence(
            self.keys.take(pa.array(index)), self.count[index], self.mean[index], self.scatter[index]
        )

    def places(self, keys: Any) -> Int[np.ndarray, " n"]:
        """The position of each key; −1 for a key that has no evidence."""
        encoded = keys.dictionary_encode()
        found = pc.index_in(encoded.dictionary, value_set=self.keys)
        return np.asarray(pc.fill_null(found, -1).to_numpy(zero_copy_only=False)[encoded.indices.to_numpy()])

    # --- leave-one-out -----------------------------------------------------------------------------------

    def without_each(self, places: Int[np.ndarray, " n"], z: Float[np.ndarray, "n dim"]) -> EvidenceArrays:
        """The evidence of the set of each element without the element itself."""
        given = SetEvidence(self.count[places, None], self.mean[places], self.scatter[places])
        rest = without_element(given, z)
        return EvidenceArrays(rest.n[:, 0], rest.mean, rest.scatter)

    # --- bytes -------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The keys as text, which the checksum of a record covers."""
        return [str(key) for key in self.keys.to_pylist()]

    def records(self, fingerprint: str) -> Any:
        """The evidence of each set as bytes, by the codec of streams: a pyarrow array."""
        arrays = EvidenceArrays(self.count, self.mean, self.scatter)
        return pa.array(encode_all(arrays, fingerprint, self.names), pa.binary())

    @classmethod
    def from_records(cls, keys: Any, records: Any, fingerprint: str, dim: int) -> KeyedEvidence:
        """The evidence from `records`; raises ValueError if another model wrote them."""
        names = [str(key) for key in keys.to_pylist()]
        return cls(keys, *decode_all(records.to_pylist(), fingerprint, dim, names))

    def packed(self, fingerprint: str) -> bytes:
        """All sets as one bytes object, to send between processes."""
        table = pa.table({"key": self.keys, _EVIDENCE: self.records(fingerprint)})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())

    @classmethod
    def unpacked(cls, data: bytes, fingerprint: str, dim: int) -> KeyedEvidence:
        """The evidence from `packed`."""
        table = pa.ipc.open_stream(data).read_all().combine_chunks()
        keys, records = (table.column(i).combine_chunks() for i in range(2))
        return cls.from_records(keys, records, fingerprint, dim)

    def partitions(self, number: int) -> Iterator[tuple[int, KeyedEvidence]]:
        """The sets in parts, by a hash of their key that all processes share."""
        part = np.array([zlib.crc32(name.encode("utf-8", "surrogatepass")) % number for name in self.names])
        for i in np.unique(part).tolist():
            yield i, self[part == i]


def far_elements(
    densities: RowDensities, z: Float[np.ndarray, "n dim"], others: EvidenceArrays
) -> Bool[np.ndarray, " n"]:
    """Which elements are so far from the rest of their set that their removal would cost it precision.

    Distance is in standard deviations of the predictive or of the rest, whichever is larger. Of n elements of
    a set, at most one in each dimension is therefore far, unless n exceeds 1e8.
    """
    location, scale = densities.location_and_scale(*others)
    spread = np.maximum(scale**2, others.scatters / np.maximum(others.counts, 1)[:, None])
    gap = np.maximum(np.abs(z - location), np.abs(z - others.means) * (others.counts > 0)[:, None])
    return np.asarray((gap**2 > FAR**2 * spread).any(1))


@dataclass(frozen=True, eq=False)
class FarElements:
    """Elements that are far from the rest of their sets, sorted by their sets.

    Attributes:
        places: the set of each element, as a position in the evidence of all sets.
        z: latents of the elements.
        others: the evidence of the rest of the set of each element; None until it is computed.
    """

    places: Int[np.ndarray, " far"]
    z: Float[np.ndarray, "far dim"]
    others: EvidenceArrays | None = None

    @classmethod
    def of(cls, places: Int[np.ndarray, " n"], z: Float[np.ndarray, "n dim"]) -> FarElements:
        """Far elements in any order; equal ones of a set count once."""
        order = np.argsort(places, kind="stable")
        distinct = list(dict.fromkeys((int(places[i]), z[i].tobytes()) for i in order))
        dim = z.shape[1]
        rows = [np.frombuffer(data, np.float64) for _, data in distinct]
        return cls(np.array([place for place, _ in distinct]), np.stack(rows).reshape(-1, dim))

    def reduce(self, places: Int[np.ndarray, " n"], z: Float[np.ndarray, "n dim"]) -> KeyedEvidence:
        """The evidence of some elements for each far element of their set.

        Key i has the elements that differ from far element i, key −1 − i those that are equal to it.
        """
        first, end = (np.searchsorted(self.places, places, side) for side in ("left", "right"))
        times = end - first
        rows = np.repeat(np.arange(len(z)), times)
        number = np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times) + np.repeat(first, times)
        equal = (z[rows] == self.z[number]).all(1)
        return KeyedEvidence.of(pa.array(np.where(equal, -1 - number, number)), z[rows])

    def with_others(self, reduced: KeyedEvidence) -> FarElements:
        """A copy with the evidence of the others, from the merged results of `reduce` of all batches."""
        numbers = np.arange(len(self.z))
        parts = []
        for keys, less in ((numbers, 0), (-1 - numbers, 1)):
            at = reduced.places(pa.array(keys))
            count = np.where(at < 0, 0.0, reduced.count[at] - less)
            used = count > 0
            parts.append(
                KeyedEvidence(
                    pa.array(numbers[used]),
                    count[used],
                    reduced.mean[at[used]],
                    reduced.scatter[at[used]] * (1 - less),
                )
            )
        merged = KeyedEvidence.merged(parts)
        at = merged.places(pa.array(numbers))
        return FarElements(
            self.places, self.z, EvidenceArrays(merged.count[at], merged.mean[at], merged.scatter[at])
        )

    def correct(
        self, others: EvidenceArrays, rows: Int[np.ndarray, " some"], places: Any, z: Any
    ) -> EvidenceArrays:
        """The evidence `others`, replaced where the element is far, in `rows`, by the evidence found here."""
        assert self.others is not None
        count, mean, scatter = (part.copy() for part in others)
        for i in rows.tolist():
            (one,) = np.flatnonzero((self.places == places[i]) & (self.z == z[i]).all(1))[:1]
            count[i], mean[i], scatter[i] = (part[one] for part in self.others)
        return EvidenceArrays(count, mean, scatter)
