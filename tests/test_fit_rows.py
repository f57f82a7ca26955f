"""Small models that are trained on rows in memory."""

import math

import numpy as np
import pytest
import torch

from bruno.fit_rows import default_steps, fit_rows


def correlated(rows, seed):
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 4))
    x[:, 1] = x[:, 0] + 0.2 * x[:, 1]
    return x


@pytest.mark.slow
def test_a_small_model_learns_a_correlation():
    rows, new = correlated(200, 0), correlated(500, 1)
    posterior = fit_rows(rows).condition(rows)
    independent = -0.5 * (np.square(new / rows.std(0)).sum(1) + np.log(2 * np.pi * rows.var(0)).sum())
    assert posterior.log_prob(new).mean().item() > independent.mean() + 0.8


def test_the_process_starts_from_the_variance_between_sets():
    random = np.random.default_rng(0)
    rows = (3 * random.normal(size=(40, 1, 2)) + random.normal(size=(40, 10, 2))).reshape(-1, 2)
    model = fit_rows(rows, np.repeat(np.arange(40), 10), steps=1)
    assert model.process.correlation.tolist() == pytest.approx([0.9, 0.9], abs=0.05)


def test_the_seed_decides_all_and_leaves_other_random_numbers_alone():
    rows, state = correlated(30, 0), torch.get_rng_state()
    first, again, other = (fit_rows(rows, steps=2, seed=seed).fingerprint() for seed in (1, 1, 2))
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), state)


def test_missing_numbers_and_single_rows_are_allowed():
    rows = correlated(12, 0)
    rows[3, 2] = math.nan
    model = fit_rows(rows, [0] * 5 + [1] * 6 + [2], steps=2)
    assert model.imputer is not None
    assert model.condition(rows).score(rows[:2]).isfinite().all()
    assert fit_rows(correlated(4, 0), [0, 1, 2, 3], steps=1).dim == 4


def test_a_row_without_any_number_is_an_error():
    rows = correlated(12, 0)
    rows[3] = math.nan
    with pytest.raises(ValueError, match=r"`rows` .*row 4 has none"):
        fit_rows(rows, steps=2)


def test_an_infinite_number_is_an_error():
    rows = correlated(12, 0)
    rows[3, 2] = math.inf
    with pytest.raises(ValueError, match=r"`rows` must be finite; got inf at index \(3, 2\)"):
        fit_rows(rows, steps=2)


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        ([0, 0, 1], ValueError, "12 elements; got 3"),
        (np.linspace(0, 1, 12), TypeError, "integers.*float64"),
    ],
)
@pytest.mark.usefixtures("without_shape_checks")
def test_labels_are_an_integer_for_each_row(labels, error, message):
    with pytest.raises(error, match=f"`labels` .*{message}"):
        fit_rows(correlated(12, 0), labels, steps=2)


def test_any_integers_label_sets():
    rows = correlated(12, 0)
    fingerprints = [
        fit_rows(rows, [a] * 6 + [b] * 6, steps=2).fingerprint() for a, b in ((0, 1), (-(10**12), 7))
    ]
    assert fingerprints[0] == fingerprints[1]


def test_progress_counts_steps():
    calls = []
    fit_rows(correlated(10, 0), steps=3, progress=lambda *call: calls.append(call))
    assert calls == [(1, 3), (2, 3), (3, 3)]
    assert [default_steps(rows) for rows in (2, 300, 10**6)] == [10, 60, 1000]


@pytest.mark.parametrize("shape", [(1, 3), (3,), (4, 0)])
def test_rows_must_be_at_least_two(shape, without_shape_checks):
    with pytest.raises(ValueError, match=r"`rows` .*got shape"):
        fit_rows(torch.zeros(shape))
