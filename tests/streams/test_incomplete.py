"""Streams whose rows have missing numbers: their p-values, and what is in the evidence."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from streams.keyed import DIM, NAN, calibration, detector, in_steps, keyed, machines, stream, trained

from bruno import Bruno, FlowConfig, ModelConfig, ProcessConfig
from bruno.data import Element, Examples, SetSampler
from bruno.tasks.anomaly import density_floor, judge_batch, reference_density
from bruno.tasks.calibration import GroupCalibration, fixed_cutoffs
from bruno.tasks.detector import Detector
from bruno.tasks.groups import Groups
from bruno.tasks.robust_evidence import Cutoffs
from bruno.trained import KeyedDetector, Trained

RATE, GROUPS, SETS, ROWS = 0.05, 200, 400, 10


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


def test_p_values_of_an_incomplete_batch_are_estimated_if_the_calibration_is_complete(tmp_path):
    calibration().save(tmp_path / "calibration.safetensors")
    owner = Trained(trained().model, None, tmp_path)
    batch = elements_of(["a"] * 15 + ["b"] * 15, hole_at(2))
    judged = owner.judge_batch(batch, rate=0.1).judgements
    assert [one.judgement.basis for one in judged] == ["estimated"] * 15 + ["exact"] * 15


def test_batches_remember_that_the_groups_are_incomplete(tmp_path):
    model, path = linear_model(), tmp_path / "calibration.safetensors"
    groups = Groups.of(model, far_apart(20, 0.2, seed=1), generator=seeded())
    found = GroupCalibration(model, groups, Cutoffs((-math.inf,)), -math.inf, "", True)
    assert found.batch(5).incomplete
    found.save(path)
    assert GroupCalibration.load(path, model).batch(5).incomplete
    whole = judge_batch(model, torch.zeros(5, DIM), calibration=found, rate=0.2, count_all=True, imputed=True)
    assert {one.basis for one in whole} == {"exact"}


def test_incomplete_rows_do_not_count_before_another_element_does():
    """Imputed from the prior, they would be evidence of a guess."""
    x = machines(1, 30, seed=9)[0]
    x[[0, 1, 3, 6], 1] = NAN
    plain = detector(count_all=True)
    watch = trained().watch(elements_of(["a"] * 30, x), plain)
    seen = [one.judgement.seen for one in watch]
    assert seen[:8] == [0, 0, 0, 1, 2, 3, 4, 5]
    found = in_steps(keyed(detector=plain), ["a"] * 30, x, 7)
    assert found.seen.tolist() == seen
    assert np.isnan(found.p[:3]).all()


def test_a_set_of_incomplete_rows_is_judged_after_the_first_twenty():
    x = machines(1, 30, seed=9)[0]
    x[:, 1] = NAN
    judged = list(trained().watch(elements_of(["a"] * 30, x), detector()))
    found = in_steps(keyed(), ["a"] * 30, x, 7)
    assert [one.judgement.seen for one in judged] == [0] * 21 + list(range(1, 10))
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


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def far_apart(count: int, share: float, seed: int) -> Examples:
    """Rows of machines that differ far more than the rows of one; of their numbers, this share is missing."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 1, DIM)) + 0.1 * random.normal(size=(count, ROWS, DIM))
    labels = torch.arange(count).repeat_interleave(ROWS)
    return Examples(with_holes(x.reshape(-1, DIM), share, seed), labels, tuple(map(str, range(count))))


@cache
def linear_model() -> Bruno:
    """A model of such machines without training: columns are standardised."""
    process = ProcessConfig(dof=30.0, correlation=0.95)
    flow = FlowConfig("dense", couplings=0)
    config = ModelConfig((DIM,), levels=0, flow=flow, process=process, missing="impute", scales="linear")
    model, known = Bruno.from_config(config), far_apart(60, 0.0, seed=100)
    model.initialise(known.elements)
    assert model.imputer is not None
    model.imputer.fit(model.preprocessing(known.elements)[0], known.labels)
    return model.requires_grad_(False)


def calibrated(share: float, count_all: bool = False) -> Detector:
    """A detector for the machines of `far_apart`."""
    model = linear_model()
    other = far_apart(40, share, seed=50)
    whole = SetSampler(replace(other, elements=model.impute(other.elements, other.labels)))
    floor, reference = (of(model, whole, generator=seeded()) for of in (density_floor, reference_density))
    cutoffs = fixed_cutoffs(model, Groups.of(model, other, floor=floor, generator=seeded()))
    groups = Groups.of(
        model, far_apart(GROUPS, share, seed=1), floor=floor, reference=reference, generator=seeded()
    )
    found = GroupCalibration(model, groups, cutoffs, floor, "", True, 0, reference)
    scores = found.stream(count_all=count_all)
    return Detector(
        model, scores, RATE, cutoffs=cutoffs, count_all=count_all, floor=floor, reference=reference
    )


@pytest.mark.slow
@pytest.mark.parametrize("count_all", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_exact_false_alarms_of_sets_with_missing_numbers_are_within_the_rate(share, count_all):
    """The groups pass through the same imputation as a new set, one row after the other."""
    made, new = calibrated(share, count_all), far_apart(SETS, share, seed=2)
    owner, keys = Trained(made.model, None, Path("nowhere")), [f"m{i}" for i in new.labels.tolist()]
    with KeyedDetector(owner, ":memory:", made) as judge:
        found = judge.step(keys, new.elements.double())
    some = elements_of(keys[: 100 * ROWS], new.elements[: 100 * ROWS].numpy())
    watched = [one.judgement.outlier for one in owner.watch(some, made)]
    assert np.mean(found.outlier[: len(some)] == watched) > 0.998
    judged, flagged = (part.reshape(SETS, ROWS) for part in (~np.isnan(found.p), found.outlier))
    assert found.exact[judged.flatten()].all()
    for position in (1, 2, 3, 4, 9):
        n = int(judged[:, position].sum())
        error = math.sqrt(RATE * (1 - RATE) * (1 / n + 1 / GROUPS))
        assert flagged[judged[:, position], position].mean() < RATE + 3 * error
    assert RATE / 3 < flagged[judged].mean() < RATE + 3 * math.sqrt(RATE / GROUPS)


def test_a_row_without_any_number_is_an_error():
    judge, x = keyed(), machines(1, 3, seed=9)[0]
    x[1] = NAN
    with pytest.raises(ValueError, match=r"`x` .*row 2 has none"):
        judge.step(["a"] * 3, x)
    assert judge.posterior("a").evidence.count == 0
    with pytest.raises(ValueError, match=r"`source` .*row 2 has none"):
        trained().read(x)
