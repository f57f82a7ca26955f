"""The evidence of many sets by key: reduced, merged, removed from, and as bytes. No cluster is needed."""

import copy

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bruno import Evidence, GaussianProcess, StudentTProcess
from bruno.ray.evidence import FarElements, KeyedEvidence, far_elements
from bruno.streams.codec import EvidenceArrays, decode, decode_all, encode_all
from bruno.streams.densities import RowDensities

DIM, MODEL = 3, "0123456789abcdef"
PROCESSES = [
    StudentTProcess(DIM, dof=[2.5, 30.0, 1e6], variance=[1.0, 0.3, 2.0], correlation=[0.1, 0.9, 0.5]),
    GaussianProcess(DIM, variance=[1.0, 0.3, 2.0], correlation=[0.1, 0.9, 0.5]),
]


def keyed(sizes: list[int], seed: int = 0, offset: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Keys and latents of sets of these sizes, in random order."""
    random = np.random.default_rng(seed)
    numbers = random.permutation(np.repeat(np.arange(len(sizes)), sizes))
    z = random.normal(size=(len(numbers), DIM)) + random.normal(size=(len(sizes), DIM))[numbers] + offset
    return np.array([f"key {i}" for i in numbers], dtype=object), z


def spread_out(keys: np.ndarray, z: np.ndarray, parts: int) -> KeyedEvidence:
    """The evidence, reduced in parts and merged in two steps."""
    pieces = [
        KeyedEvidence.of(pa.array(some.tolist()), own)
        for some, own in zip(np.array_split(keys, parts), np.array_split(z, parts), strict=True)
        if len(some)
    ]
    half = len(pieces) // 2
    halves = [KeyedEvidence.merged(some) for some in (pieces[:half], pieces[half:]) if some]
    return KeyedEvidence.merged(halves)


def leave_one_out(process, keys: np.ndarray, z: np.ndarray) -> np.ndarray:
    """log p(z | others) of each element, by the process in one piece."""
    process, found = copy.deepcopy(process).double(), np.empty(len(z))
    for key in set(keys):
        inside = keys == key
        found[inside] = process.leave_one_out_log_prob(torch.from_numpy(z[inside])).detach().numpy()
    return found


def scores_by_removal(process, keys: np.ndarray, z: np.ndarray, parts: int = 4) -> np.ndarray:
    """What workers compute, in one process."""
    evidence, densities = spread_out(keys, z, parts), RowDensities(process)
    places = evidence.places(pa.array(keys.tolist()))
    others = evidence.without_each(places, z)
    is_far = far_elements(densities, z, others)
    if is_far.any():
        far = FarElements.of(places[is_far], z[is_far])
        pieces = [
            far.reduce(*piece)
            for piece in zip(np.array_split(places, parts), np.array_split(z, parts), strict=True)
        ]
        far = far.with_others(KeyedEvidence.merged([piece for piece in pieces if len(piece)]))
        others = far.correct(others, np.flatnonzero(is_far), places, z)
    return densities(z, *others)


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    assert (np.abs(found - expected) <= 1e-9 * (1 + np.abs(expected))).all()


@pytest.mark.slow
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 9), st.integers(0, 999))
@settings(max_examples=20, deadline=None)
def test_parts_of_sets_merge_to_the_evidence_of_the_whole(sizes, parts, seed):
    keys, z = keyed(sizes, seed)
    found = spread_out(keys, z, parts)
    assert sorted(found.names) == sorted(set(keys))
    for i, name in enumerate(found.names):
        whole = Evidence.of(torch.from_numpy(z[keys == name]))
        assert found.count[i] == whole.count
        assert_close(found.mean[i], whole.mean.numpy())
        assert_close(found.scatter[i], whole.scatter.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("process", PROCESSES, ids=["student-t", "gaussian"])
@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([0.0, 1e3]), st.integers(0, 999))
@settings(max_examples=15, deadline=None)
def test_removal_of_oneself_is_leave_one_out(process, sizes, offset, seed):
    keys, z = keyed(sizes, seed, offset)
    assert_close(scores_by_removal(process, keys, z), leave_one_out(process, keys, z))


@pytest.mark.slow
@pytest.mark.parametrize("process", PROCESSES, ids=["student-t", "gaussian"])
@pytest.mark.parametrize("distance", [1e3, 9e3, 1.1e4, 1e6, 1e9])
@pytest.mark.parametrize("size", [2, 3, 50, 1000])
def test_removing_far_elements_costs_the_rest_no_precision(process, distance, size):
    keys, z = keyed([size, 5])
    first = np.flatnonzero(keys == "key 0")
    z[first[0]] += [distance, 0.0, 0.0]
    z[first[-1]] -= [0.0, 0.0, 7 * distance]
    assert_close(scores_by_removal(process, keys, z), leave_one_out(process, keys, z))


@pytest.mark.parametrize("process", PROCESSES, ids=["student-t", "gaussian"])
def test_equal_elements_far_from_all_others_are_removed_one_at_a_time(process):
    keys, z = keyed([8])
    z[2] = z[5] = [1e7, 0.0, 0.0]
    assert_close(scores_by_removal(process, keys, z), leave_one_out(process, keys, z))


def test_few_elements_are_far_however_many_are_broken():
    keys, z = keyed([3000])
    z[::3] = 1e9 + np.random.default_rng(1).normal(size=(1000, DIM))
    evidence = spread_out(keys, z, 3)
    others = evidence.without_each(evidence.places(pa.array(keys.tolist())), z)
    for process in PROCESSES:
        assert far_elements(RowDensities(process), z, others).sum() <= DIM


@pytest.mark.parametrize("keys", [[7, -1, 7, 2**40, 7, -1], ["é", "a/b", "é", "c d", "é", "a/b"]])
def test_keys_are_numbers_or_text(keys):
    z = np.random.default_rng(0).normal(size=(6, DIM))
    found = KeyedEvidence.unpacked(KeyedEvidence.of(pa.array(keys), z).packed(MODEL), MODEL, DIM)
    assert found.keys.to_pylist() == list(dict.fromkeys(keys))
    assert found.count.tolist() == [3, 2, 1]
    assert found.places(pa.array(keys)).tolist() == [0, 1, 0, 2, 0, 1]
    assert found.places(pa.array([keys[0], type(keys[0])()])).tolist() == [0, -1]


def test_partitions_hold_each_key_once():
    keys, z = keyed([2] * 50)
    evidence = spread_out(keys, z, 1)
    parts = dict(evidence.partitions(4))
    assert sorted(parts) == [0, 1, 2, 3]
    assert sorted(name for part in parts.values() for name in part.names) == sorted(evidence.names)


# --- bytes -----------------------------------------------------------------------------------------------


def arrays(sets: int) -> EvidenceArrays:
    random = np.random.default_rng(0)
    return EvidenceArrays(
        random.integers(1, 9, sets).astype(float), random.normal(size=(sets, DIM)), random.random((sets, DIM))
    )


def test_many_records_equal_records_of_single_sets():
    written, names = arrays(5), ["a", "é", "", "c", "d"]
    records = encode_all(written, MODEL, names)
    for i, (data, name) in enumerate(zip(records, names, strict=True)):
        record = decode(data, MODEL, DIM, name)
        assert (record.count, record.position) == (written.counts[i], written.counts[i])
        np.testing.assert_array_equal(record.mean, written.means[i])
    for found, expected in zip(decode_all(records, MODEL, DIM, names), written, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("damage", ["model", "name", "bytes", "length"])
def test_records_of_others_are_refused(damage):
    records, model, names = encode_all(arrays(3), MODEL, ["a", "b", "c"]), MODEL, ["a", "b", "c"]
    if damage == "model":
        model = "fedcba9876543210"
    elif damage == "name":
        names = ["a", "c", "b"]
    elif damage == "bytes":
        records[1] = records[1][:40] + b"?" + records[1][41:]
    else:
        records[2] = records[2][:-9]
    with pytest.raises(ValueError, match=r"model|damaged|short"):
        decode_all(records, model, DIM, names)
