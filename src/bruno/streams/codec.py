"""The state of a set as bytes: its evidence, and everything else that judging the next element needs.

A record contains the version of its format, the fingerprint of the model, and the dtype of the latents. It
ends with a checksum, which covers the name of the set if there is one. The layout, little-endian:

    "BRS" version · type of latents · fingerprint · dimensions · first elements · sample · marks
    position · counted · offset · count · mean · scatter · first · flags · ids of the first elements
    of ranks: count · mean · scatter · drift test · sample
    checksum

Ids and ranks are present if they are marked. Evidence is float64. Latents have the dtype that the encoder
returns.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from numpy.typing import NDArray

from bruno.process import Evidence
from bruno.tasks.drift import RANKS, DriftTest, WithinSet
from bruno.tasks.stream_evidence import START

VERSION = 1
NO_OFFSET = -(2**63)

_MAGIC = b"BRS"
_HEADER = struct.Struct("<3sBB8sIBHB")
_NUMBERS = struct.Struct("<qqqd")  # position, counted, offset, count
_DRIFT = struct.Struct("<qdqq3d")  # position, gain, since, detected, wealth
_LENGTH = struct.Struct("<I")
_CHECKSUM = struct.Struct("<I")
_TYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<f4"), 8: np.dtype("<f8")}
_DOUBLE = np.dtype("<f8")
_LARGEST = 2**53  # count that float64 resolves

# Marks: has ranks, has had an element with missing numbers, has ids, has shortfalls of the first elements.
_RANKS, _INCOMPLETE, _IDS, _SHORTFALLS = 1, 2, 4, 8
USABLE, INSIDE, EXCLUDED = 1, 2, 4  # flags of first elements: may count, counts, did not count at first


class Ranks(NamedTuple):
    """The state of p-values within a set: the sample to rank among, and the test for drift."""

    within: WithinSet
    drift: DriftTest


@dataclass(eq=False)
class SetRecord:
    """The state of one set.

    Attributes:
        count: number of elements that count; a fraction if the set forgets.
        mean: mean of their latents.
        scatter: sum of squared deviations from the mean.
        position: number of elements so far, including those that do not count.
        counted: number of elements that have ever counted, which numbers the next element of a window.
        offset: offset in the input of the last element; `NO_OFFSET` without one.
        first: latents of the first elements while they may be reconsidered.
        flags: `USABLE`, `INSIDE` and `EXCLUDED` of each first element.
        ranks: state of p-values within the set; None without them.
        incomplete: whether an element so far had missing numbers.
        ids: name of each first element; empty if they have none.
        less: what is subtracted from the score of each first element, its `shortfall`.
    """

    count: float
    mean: Float[np.ndarray, " dim"]
    scatter: Float[np.ndarray, " dim"]
    position: int = 0
    counted: int = 0
    offset: int = NO_OFFSET
    first: Float[np.ndarray, "m dim"] = field(default_factory=lambda: np.zeros((0, 0)))
    flags: UInt8[np.ndarray, " m"] = field(default_factory=lambda: np.zeros(0, np.uint8))
    ranks: Ranks | None = None
    incomplete: bool = False
    ids: list[str] = field(default_factory=list)
    less: Float[np.ndarray, " m"] = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def of(cls, evidence: Evidence) -> SetRecord:
        """The state of a set with this evidence, all of which counts."""
        if evidence.batch_shape:
            raise ValueError(f"`evidence` must be of one set; got a batch {tuple(evidence.batch_shape)}.")
        mean, scatter = (part.detach().cpu().double().numpy() for part in (evidence.mean, evidence.scatter))
        count = int(evidence.count)
        return cls(float(count), mean, scatter, count, count)

    @property
    def evidence(self) -> Evidence:
        """The evidence; raises ValueError if elements have weights."""
        if self.count != int(self.count):
            raise ValueError(
                f"`evidence` needs whole elements; got a set of {self.count:g}, which forgets by a half-life."
            )
        count = torch.tensor(int(self.count))
        return Evidence.checked(len(self.mean), count, torch.tensor(self.mean), torch.tensor(self.scatter))


def encode(record: SetRecord, fingerprint: str, name: str = "") -> bytes:
    """A record as bytes, for the set `name` of the model with this fingerprint."""
    sample = np.zeros((0, 0)) if record.ranks is None else record.ranks.within.sample.cpu().numpy()
    latents = record.first if len(record.first) else sample
    size = latents.dtype.itemsize if len(latents) else 8
    first, dim, has_ids = len(record.first), len(record.mean), any(record.ids)
    has_shortfalls = bool(record.less.any())
    parts = [
        _HEADER.pack(
            _MAGIC,
            VERSION,
            size,
            bytes.fromhex(fingerprint),
            dim,
            first,
            len(sample),
            _RANKS * (record.ranks is not None)
            + _INCOMPLETE * record.incomplete
            + _IDS * has_ids
            + _SHORTFALLS * has_shortfalls,
        ),
        _NUMBERS.pack(record.position, record.counted, record.offset, record.count),
        record.mean.astype(_DOUBLE, copy=False).tobytes(),
        record.scatter.astype(_DOUBLE, copy=False).tobytes(),
    ]
    if first:
        parts += [record.first.astype(_TYPES[size], copy=False).tobytes(), record.flags.tobytes()]
    if has_shortfalls:
        parts.append(record.less.astype(_DOUBLE, copy=False).tobytes())
    for id in record.ids if has_ids else ():
        text = id.encode("utf-8", "surrogateescape")
        parts += [_LENGTH.pack(len(text)), text]
    if record.ranks is not None:
        parts += _encoded_ranks(record.ranks, sample.astype(_TYPES[size], copy=False))
    body = b"".join(parts)
    return body + _CHECKSUM.pack(_checksum(body, name))


def _encoded_ranks(ranks: Ranks, sample: NDArray[Any]) -> list[bytes]:
    evidence, drift = ranks.within.evidence, ranks.drift
    return [
        struct.pack("<q", int(evidence.count)),
        *(
            part.cpu().numpy().astype(_DOUBLE, copy=False).tobytes()
            for part in (evidence.mean, evidence.scatter)
        ),
        _DRIFT.pack(drift.position, drift.gain, drift.since, drift.detected, *drift.wealth),
        sample.tobytes(),
    ]


def decode(data: bytes, fingerprint: str, dim: int, name: str = "") -> SetRecord:
    """The record that `encode` wrote for the same set and model; raises ValueError for any other bytes."""
    reader = _Reader(data, name)
    magic, version, size, model, dims, first, sample, marks = reader.unpack(_HEADER)
    if magic != _MAGIC or size not in _TYPES:
        raise ValueError(f"the state of set {name!r} must begin with {_MAGIC!r}; got {data[:5]!r}.")
    if version != VERSION:
        raise ValueError(
            f"the state of set {name!r} must have version {VERSION}; got {version}. Update bruno to read it."
        )
    if model.hex() != fingerprint:
        raise ValueError(f"the state of set {name!r} must be of model {fingerprint}; got {model.hex()}.")
    if dims != dim or first > START or sample > RANKS:
        raise ValueError(
            f"the state of set {name!r} must have {dim} dimensions, at most {START} first elements and a "
            f"sample of at most {RANKS}; got {dims}, {first} and {sample}."
        )
    latents = _TYPES[size]
    position, counted, offset, count = reader.unpack(_NUMBERS)
    mean, scatter = reader.array(_DOUBLE, dim), reader.array(_DOUBLE, dim)
    record = SetRecord(
        count,
        mean,
        scatter,
        position,
        counted,
        offset,
        reader.array(latents, first * dim).reshape(first, dim),
        reader.array(np.dtype("u1"), first),
        less=reader.array(_DOUBLE, first) if marks & _SHORTFALLS else np.zeros(first),
        ids=[reader.text() for _ in range(first)] if marks & _IDS else [],
        ranks=_decoded_ranks(reader, dim, sample, latents) if marks & _RANKS else None,
        incomplete=bool(marks & _INCOMPLETE),
    )
    reader.end()
    _check(record, name)
    return record


def _decoded_ranks(reader: _Reader, dim: int, sample: int, latents: np.dtype[Any]) -> Ranks:
    (count,) = reader.unpack(struct.Struct("<q"))
    mean, scatter = (torch.from_numpy(reader.array(_DOUBLE, dim)) for _ in range(2))
    position, gain, since, detected, *wealth = reader.unpack(_DRIFT)
    rows = torch.from_numpy(reader.array(latents, sample * dim).reshape(sample, dim))
    evidence = Evidence.checked(dim, torch.tensor(count), mean, scatter)
    if not (rows.isfinite().all() and np.isfinite((gain, *wealth)).all()):
        raise ValueError("the ranks of a set must be finite numbers.")
    return Ranks(WithinSet(evidence, rows), DriftTest(tuple(wealth), position, gain, since, detected))


def _check(record: SetRecord, name: str) -> None:
    """Raise an error unless a set can have this state: numbers can be wrong even if the checksum is right."""
    numbers = np.concatenate([record.mean, record.scatter, record.first.ravel(), record.less, [record.count]])
    if not np.isfinite(numbers).all() or record.count < 0 or record.scatter.min(initial=0) < 0:
        raise ValueError(f"the state of set {name!r} must have finite numbers, and a count of at least 0.")
    if not (record.count <= _LARGEST and record.counted >= 0 and record.position >= 0):
        raise ValueError(f"the state of set {name!r} must have counts from 0 to 2**53; got {record.count:g}.")


def encode_latents(z: Float[np.ndarray, " dim"]) -> bytes:
    """The latents of one element as bytes, with a checksum."""
    body = z.astype(_DOUBLE, copy=False).tobytes()
    return body + _CHECKSUM.pack(zlib.crc32(body))


def decode_latents(data: bytes, dim: int, name: str) -> Float[np.ndarray, " dim"]:
    """The latents that `encode_latents` wrote for an element of this set; raises ValueError for others."""
    body = data[: -_CHECKSUM.size]
    if len(body) != 8 * dim or data[-_CHECKSUM.size :] != _CHECKSUM.pack(zlib.crc32(body)):
        raise ValueError(f"an element of set {name!r} is damaged: checksum mismatch.")
    return np.frombuffer(body, _DOUBLE)


def encode_evidence(evidence: Evidence, fingerprint: str) -> bytes:
    """The evidence of one set as bytes."""
    return encode(SetRecord.of(evidence), fingerprint)


def decode_evidence(data: bytes, fingerprint: str, dim: int) -> Evidence:
    """The evidence that `encode_evidence` wrote for the same model; raises ValueError for other bytes."""
    return decode(data, fingerprint, dim).evidence


# --- many sets at once -------------------------------------------------------------------------------------


_EVIDENCE = ("count", "mean", "scatter")


class EvidenceArrays(NamedTuple):
    """The evidence of many sets."""

    counts: Float[np.ndarray, " sets"]
    means: Float[np.ndarray, "sets dim"]
    scatters: Float[np.ndarray, "sets dim"]


def encode_all(evidence: EvidenceArrays, fingerprint: str, names: Sequence[str]) -> list[bytes]:
    """Records as `encode` writes them, of sets with these names, all of whose elements count."""
    dim = evidence.means.shape[1]
    bodies = np.zeros(len(names), _plain_record(dim))
    bodies["header"] = _plain_header(fingerprint, dim)
    bodies["position"] = bodies["counted"] = evidence.counts
    bodies["offset"] = NO_OFFSET
    for field_name, values in zip(_EVIDENCE, evidence, strict=True):
        bodies[field_name] = values
    size, data = bodies.itemsize, bodies.tobytes()
    parts = (data[i : i + size] for i in range(0, len(data), size))
    return [body + _CHECKSUM.pack(_checksum(body, name)) for body, name in zip(parts, names, strict=True)]


def decode_all(records: Sequence[bytes], fingerprint: str, dim: int, names: Sequence[str]) -> EvidenceArrays:
    """The evidence in records of sets with these names; raises ValueError as `decode` does."""
    kind, header = _plain_record(dim), _plain_header(fingerprint, dim)
    size = kind.itemsize
    fine = all(
        len(data) == size + _CHECKSUM.size
        and data.startswith(header)
        and data[size:] == _CHECKSUM.pack(_checksum(data[:size], name))
        for data, name in zip(records, names, strict=True)
    )
    if not fine:  # records of streams, or damaged records
        whole = [decode(data, fingerprint, dim, name) for data, name in zip(records, names, strict=True)]
        return EvidenceArrays(
            np.array([record.count for record in whole]),
            np.stack([record.mean for record in whole]),
            np.stack([record.scatter for record in whole]),
        )
    bodies = np.frombuffer(b"".join(data[:size] for data in records), kind)
    found = EvidenceArrays(*(bodies[name].copy() for name in _EVIDENCE))
    wrong = ~np.isfinite(found.means).all(1) | ~(np.isfinite(found.scatters) & (found.scatters >= 0)).all(1)
    wrong |= ~((found.counts >= 0) & (found.counts <= _LARGEST))
    for i in np.flatnonzero(wrong)[:1].tolist():
        decode(records[i], fingerprint, dim, names[i])  # raises
    return found


def _plain_record(dim: int) -> np.dtype[Any]:
    """The layout of a record without first elements and ranks."""
    fields: list[Any] = [("header", f"S{_HEADER.size}")]
    fields += [(name, "<i8") for name in ("position", "counted", "offset")]
    return np.dtype([*fields, ("count", "<f8"), ("mean", "<f8", dim), ("scatter", "<f8", dim)])


def _plain_header(fingerprint: str, dim: int) -> bytes:
    return _HEADER.pack(_MAGIC, VERSION, 8, bytes.fromhex(fingerprint), dim, 0, 0, 0)


class _Reader:
    """Reads parts of a record after a check of its checksum."""

    def __init__(self, data: bytes, name: str) -> None:
        self._body, self._place, self._name = data[: -_CHECKSUM.size], 0, name
        expected = data[-_CHECKSUM.size :]
        if len(data) < _HEADER.size or expected != _CHECKSUM.pack(_checksum(self._body, name)):
            raise ValueError(f"the state of set {name!r} is damaged: checksum mismatch.")

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self._take(form.size))

    def array(self, kind: np.dtype[Any], count: int) -> NDArray[Any]:
        return np.frombuffer(self._take(kind.itemsize * count), kind).copy()

    def text(self) -> str:
        (size,) = self.unpack(_LENGTH)
        return self._take(size).decode("utf-8", "surrogateescape")

    def end(self) -> None:
        if self._place != len(self._body):
            raise ValueError(
                f"the state of set {self._name!r} has {len(self._body) - self._place} bytes too many."
            )

    def _take(self, size: int) -> bytes:
        part = self._body[self._place : self._place + size]
        if len(part) < size:
            raise ValueError(f"the state of set {self._name!r} is too short: {len(self._body)} bytes.")
        self._place += size
        return part


def _checksum(body: bytes, name: str) -> int:
    return zlib.crc32(body, zlib.crc32(name.encode("utf-8", "surrogateescape")))
