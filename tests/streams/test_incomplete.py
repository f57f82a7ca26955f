"""Streams whose rows have missing numbers: their p-values, and what counts as seen."""

import numpy as np
import torch
from streams.keyed import NAN, detector, in_steps, keyed, machines, stream, trained

from bruno.data import Element
from bruno.tasks.anomaly import Detector


def with_holes(x: np.ndarray, share: float = 0.05, seed: int = 0) -> np.ndarray:
    """Numbers of which this share is missing, at random places; no row misses all."""
    missing = np.random.default_rng(seed).random(x.shape) < share
    missing[missing.all(-1)] = False
    return np.where(missing, NAN, x)


def elements_of(keys: list[str], x: np.ndarray) -> list[Element]:
    rows = zip(keys, torch.from_numpy(x), strict=True)
    return [Element(f"row {i}", row, key) for i, (key, row) in enumerate(rows, start=1)]


def hole_at(row: int) -> np.ndarray:
    """30 rows of a machine, one of which has a missing number."""
    x = machines(1, 30, seed=9)[0]
    x[row, 1] = NAN
    return x


def test_p_values_are_estimated_after_a_hole_if_the_calibration_has_none():
    """A complete group never passes through the imputation of a stream."""
    for row in (2, 25):
        x = hole_at(row)
        judged = list(trained().watch(elements_of(["a"] * 30, x), detector()))
        found = in_steps(keyed(), ["a"] * 30, x, 7)
        expected = ["exact"] * (row - 1) + ["estimated"] * (30 - row)
        expected[23:] = ["estimated"] * 6  # the groups have 24 elements
        assert [one.judgement.basis for one in judged][1:] == expected
        assert [one.basis for one in found][1:] == expected


def test_an_interrupted_stream_remembers_that_a_row_was_incomplete(tmp_path):
    x = hole_at(2)
    elements = elements_of(["a"] * 30, x)
    for some in (elements[:5], elements[5:8]):
        with trained().watch(some, detector(), state=tmp_path / "state") as watch:
            judged = list(watch)
    assert {one.judgement.basis for one in judged} == {"estimated"}
    for some in (x[:5], x[5:8]):
        with keyed(tmp_path / "store") as judge:
            found = judge.step(["a"] * len(some), some)
    assert not found.exact.any()


def test_an_undone_row_does_not_make_its_set_incomplete():
    x, judge = hole_at(2), keyed()
    judge.step(["a", "a"], x[:2])
    judge.step(["a"], x[2:3])
    judge.undo()
    assert judge.step(["a"], x[3:4]).exact.all()


def test_ranks_within_an_incomplete_set_are_estimated():
    x, single = hole_at(8), Detector(trained().model, count_all=True)
    judged = list(trained().watch(elements_of(["a"] * 30, x), single, within=True))
    found = in_steps(keyed(detector=single, within=True), ["a"] * 30, x, 7)
    expected = ["exact"] * 7 + ["estimated"] * 22
    assert [one.judgement.basis for one in judged][1:] == expected
    assert [one.basis for one in found][1:] == expected


def test_incomplete_rows_do_not_count_before_a_few_elements_do():
    """Imputed from the prior, they would be evidence of a guess."""
    x = machines(1, 30, seed=9)[0]
    x[[0, 2, 3, 6, 7], 1] = NAN
    plain = detector(count_all=True)
    watch = trained().watch(elements_of(["a"] * 30, x), plain)
    seen = [one.judgement.seen for one in watch]
    assert seen[:10] == [0, 0, 1, 1, 1, 2, 3, 4, 5, 6]
    found = in_steps(keyed(detector=plain), ["a"] * 30, x, 7)
    assert found.seen.tolist() == seen
    assert np.isnan(found.p[:2]).all()


def test_a_set_of_incomplete_rows_is_judged_after_some_of_them():
    x = machines(1, 30, seed=9)[0]
    x[:, 1] = NAN
    judged = list(trained().watch(elements_of(["a"] * 30, x), detector()))
    found = in_steps(keyed(), ["a"] * 30, x, 7)
    assert [one.judgement.seen for one in judged] == [0] * 11 + list(range(1, 20))
    assert found.seen.tolist() == [one.judgement.seen for one in judged]


def test_watch_and_keyed_streams_agree_about_incomplete_rows():
    keys, x = stream(6, 40)
    x = with_holes(x, 0.1)
    found = in_steps(keyed(), keys, x, 50)
    judged = list(trained().watch(elements_of(keys, x), detector()))
    for name in ("outlier", "basis", "seen"):
        assert [getattr(one, name) for one in found] == [getattr(one.judgement, name) for one in judged]
    scores = [one.judgement.score for one in judged]
    np.testing.assert_allclose(found.score, scores, rtol=1e-3, atol=1e-3)
    numbers = [
        np.array([one.p for one in some], float) for some in (found, [one.judgement for one in judged])
    ]
    np.testing.assert_allclose(*numbers, rtol=1e-3, atol=1e-3)
