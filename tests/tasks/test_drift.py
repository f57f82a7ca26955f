import math

import numpy as np
import pytest
import torch
from scipy import stats
from tasks.machines import machine_model, machines

from bruno.tasks.drift import RANKS, DriftTest, WithinSet


@pytest.fixture(scope="module")
def model():
    return machine_model()


def ranked(model, rows: torch.Tensor) -> list[float]:
    """The uniform p-values of a stream."""
    known, found = WithinSet.empty(model.dim), []
    for z in model.latents(rows):
        found.append(known.p_value(model, z).uniform)
        known = known.add(z)
    return found


def test_the_p_value_is_the_rank_among_leave_one_out_scores(model):
    x = machines(2, 8, seed=0).elements[:8]
    known = WithinSet.empty(model.dim)
    for z in model.latents(x[:7]):
        known = known.add(z)
    scores = torch.stack([model.condition(torch.cat([x[:i], x[i + 1 :]])).score(x[i]) for i in range(8)])
    expected = (1 + int((scores[:7] <= scores[7]).sum())) / 8
    assert known.p_value(model, model.latents(x)[7]).p == pytest.approx(expected)
    assert WithinSet.empty(model.dim).p_value(model, model.latents(x)[0]).p == 1.0


@pytest.mark.parametrize("streams", [4, pytest.param(40, marks=pytest.mark.long)])
def test_p_values_within_a_set_are_uniform_for_a_model_that_does_not_fit(model, streams):
    found = np.array([ranked(model, machines(2, 40, seed=s).elements[:40])[5:] for s in range(streams)])
    assert stats.kstest(found.flatten(), "uniform").pvalue > 0.001


def test_the_sample_is_bounded_and_uniform(model):
    known = WithinSet.empty(1)
    for value in range(4 * RANKS):
        known = known.add(torch.tensor([float(value)]))
    assert known.sample.shape == (RANKS, 1)
    assert int(known.evidence.count) == 4 * RANKS
    assert stats.kstest(known.sample.flatten().numpy() / (4 * RANKS), "uniform").pvalue > 0.001


@pytest.mark.parametrize("streams", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_uniform_p_values_seldom_raise_a_drift_alarm(streams):
    random, alarms = np.random.default_rng(0), 0
    for _ in range(streams):
        test = DriftTest()
        for p in random.random(150):
            test = test.add(p)
        alarms += test.detected > 0
    assert alarms / streams <= 0.01 + 3 * math.sqrt(0.01 / streams)  # at most 1 %


def test_low_p_values_are_detected_and_dated():
    random, test = np.random.default_rng(0), DriftTest()
    for p in [*random.random(200), *random.random(60) * 0.2]:
        test = test.add(p)
    assert 200 < test.detected < 240
    assert test.since == pytest.approx(200, abs=8)
    assert test.position == 260
    assert test.changed_at == test.since + 1


def test_a_change_is_dated_by_elements_if_some_have_no_p_value():
    random, every, some = np.random.default_rng(0), DriftTest(), DriftTest()
    for i, p in enumerate([*random.random(200), *random.random(60) * 0.2], start=1):
        every, some = every.add(p), some.add(p, i + 10 * (i > 100))
    assert some.changed_at == every.changed_at + 10
    assert DriftTest().add(0.5).changed_at is None


@pytest.mark.slow
def test_a_change_of_a_machine_is_detected_and_a_constant_rate_of_faults_is_not(model):
    rows = machines(2, 120, seed=3, fault_rate=0.1).elements[:120]

    def detected(rows: torch.Tensor) -> int:
        test = DriftTest()
        for p in ranked(model, rows):
            test = test.add(p)
        return test.detected

    assert detected(rows) == 0
    rows[60:] += 3 * rows.std(0)
    assert 60 < detected(rows) < 110


def test_the_wealth_is_a_martingale():
    """The mean wealth after one uniform p-value is the wealth before it."""
    test = DriftTest()
    for p in (0.1, 0.3, 0.9):
        test = test.add(p)
    before = math.log(sum(map(math.exp, test.wealth)))
    after = [sum(map(math.exp, test.add(p).wealth)) for p in (np.arange(2000) + 0.5) / 2000]
    assert math.log(np.mean(after)) == pytest.approx(before, abs=1e-6)
