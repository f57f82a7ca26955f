"""The state of a set as bytes."""

import struct
import zlib

import numpy as np
import pytest
import torch
from streams.keyed import DIM

from bruno import Evidence
from bruno.streams.codec import Ranks, SetRecord, decode, decode_evidence, encode, encode_evidence
from bruno.tasks.drift import DriftTest, WithinSet

MODEL, OTHER = "0123456789abcdef", "fedcba9876543210"


def record(first: int = 3, kind: type = np.float64, ranks: bool = True) -> SetRecord:
    random = np.random.default_rng(0)
    within = WithinSet(
        Evidence.of(torch.randn(9, DIM)), torch.from_numpy(random.normal(size=(5, DIM)).astype(kind))
    )
    return SetRecord(
        2.5,
        random.normal(size=DIM),
        random.random(DIM),
        position=7,
        counted=6,
        offset=41,
        first=random.normal(size=(first, DIM)).astype(kind),
        flags=np.arange(first, dtype=np.uint8),
        ranks=Ranks(within, DriftTest().add(0.3)) if ranks else None,
    )


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("ranks", [False, True])
@pytest.mark.parametrize("first", [0, 3, 20])
def test_a_record_is_read_as_it_was_written(first, kind, ranks):
    written = record(first, kind, ranks)
    data = encode(written, MODEL, "machine é")
    read = decode(data, MODEL, DIM, "machine é")
    assert encode(read, MODEL, "machine é") == data
    for name in ("count", "position", "counted", "offset"):
        assert getattr(read, name) == getattr(written, name)
    for name in ("mean", "scatter", "flags"):
        np.testing.assert_array_equal(getattr(read, name), getattr(written, name))
    np.testing.assert_array_equal(read.first.ravel(), written.first.ravel())
    assert (read.ranks is None) == (not ranks)
    if ranks:
        assert read.ranks.drift == written.ranks.drift
        assert torch.equal(read.ranks.within.sample, written.ranks.within.sample)
        assert read.ranks.within.sample.dtype == written.ranks.within.sample.dtype


def test_evidence_is_read_as_it_was_written():
    evidence = Evidence.of(torch.randn(7, DIM))
    read = decode_evidence(encode_evidence(evidence, MODEL), MODEL, DIM)
    assert read.count == 7
    assert torch.equal(read.mean, evidence.mean)
    assert torch.equal(read.scatter, evidence.scatter)


def test_evidence_of_several_sets_is_not_one_record():
    with pytest.raises(ValueError, match=r"`evidence` .*\(2,\)"):
        encode_evidence(Evidence.of(torch.randn(2, 7, DIM)), MODEL)


def test_a_set_with_weights_has_no_evidence():
    with pytest.raises(ValueError, match=r"`evidence` .*2\.5"):
        _ = record().evidence


def test_a_record_of_another_model_is_refused():
    with pytest.raises(ValueError, match=f"{OTHER}; got {MODEL}"):
        decode(encode(record(), MODEL), OTHER, DIM)


def test_a_record_of_another_set_is_refused():
    with pytest.raises(ValueError, match="'b' is damaged"):
        decode(encode(record(), MODEL, "a"), MODEL, DIM, "b")


def test_a_record_of_other_dimensions_is_refused():
    with pytest.raises(ValueError, match=f"{DIM + 1} dimensions.*got {DIM}"):
        decode(encode(record(), MODEL), MODEL, DIM + 1)


def test_a_later_version_is_refused():
    data = bytearray(encode(record(), MODEL)[:-4])
    data[3] += 1
    with pytest.raises(ValueError, match="version 1; got 2"):
        decode(with_checksum(data), MODEL, DIM)


@pytest.mark.parametrize("cut", [0, 1, 10, 50, 200])
def test_a_truncated_record_is_refused(cut):
    data = encode(record(), MODEL)
    with pytest.raises(ValueError, match="checksum"):
        decode(data[:cut], MODEL, DIM)
    with pytest.raises(ValueError, match=r"short|checksum"):
        decode(with_checksum(bytearray(data[:cut])), MODEL, DIM)


def test_numbers_that_no_set_can_have_are_refused():
    for place, value in ((24, -1.0), (24, float("nan")), (24, 1e300)):
        data = bytearray(encode(record(), MODEL)[:-4])
        start = struct.calcsize("<3sBB8sIBHB")
        data[start + place : start + place + 8] = struct.pack("<d", value)
        with pytest.raises(ValueError, match="count"):
            decode(with_checksum(data), MODEL, DIM)


def with_checksum(data: bytearray) -> bytes:
    return bytes(data) + struct.pack("<I", zlib.crc32(data, zlib.crc32(b"")))
