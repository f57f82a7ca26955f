"""Columns that are functions of others."""

import warnings

import numpy as np
import pytest
import torch

from bruno.data import Examples
from bruno.data import related_columns as module
from bruno.data.quality import warn_of_misleading_columns
from bruno.data.related_columns import Related, related_columns
from bruno.data.synthetic import simulate_machines


@pytest.fixture
def plain() -> np.ndarray:
    """Unrelated columns: normal, counts, heavy tails, rarely 1, one of two, and constant."""
    random, n = np.random.default_rng(0), 2000
    columns = [
        random.normal(20, 5, n),
        random.poisson(3, n),
        np.exp(random.standard_t(3, n)),
        random.random(n) < 0.02,
        random.random(n) < 0.5,
        np.full(n, 7.0),
    ]
    return np.column_stack(columns).astype(np.float64)


def test_unrelated_columns_are_not_reported(plain):
    assert related_columns(plain) == []
    assert related_columns(plain[:20]) == []  # too few rows to tell
    assert related_columns(simulate_machines(40, 30, seed=0).examples.elements.numpy()) == []


def test_a_copy_in_other_units_is_found_in_spite_of_rounding_missing_numbers_and_faults(plain):
    fahrenheit = (1.8 * plain[:, 0] + 32).round(1)
    fahrenheit[::50] = np.nan
    fahrenheit[1::100] += 10
    assert related_columns(np.column_stack([plain, fahrenheit])) == [Related(6, (0,), False)]


def test_a_total_is_a_combination_of_its_parts(plain):
    total = plain[:, 0] + 2 * plain[:, 1] + 3 * plain[:, 4]
    assert related_columns(np.column_stack([plain, total])) == [Related(6, (0, 1, 4), False)]
    noisy = total + 0.05 * total.std() * np.random.default_rng(1).normal(size=len(total))
    assert related_columns(np.column_stack([plain, noisy])) == []


def test_columns_that_are_only_correlated_are_not_fitted_robustly(monkeypatch):
    """A robust fit of each takes time: ten seconds for 200 columns."""
    random = np.random.default_rng(0)
    correlated = random.normal(size=(2000, 3)) @ random.normal(size=(3, 12))
    correlated = correlated / correlated.std(0) + 0.15 * random.normal(size=correlated.shape)
    fits, fit = [], module._robust_fit
    monkeypatch.setattr(module, "_robust_fit", lambda x, *y, **k: fits.append(x.shape[1]) or fit(x, *y, **k))
    assert related_columns(correlated) == []
    assert 11 not in fits


def test_many_combinations_are_not_all_found(plain):
    copies = np.column_stack([plain[:, :1] * (i + 1) for i in range(15)])
    assert len(related_columns(copies)) == 10


@pytest.mark.parametrize("decimals", [2, 4])
@pytest.mark.parametrize("hours", ["all day", "around noon"])
def test_sine_and_cosine_are_on_a_circle(plain, hours, decimals):
    random = np.random.default_rng(2)
    hour = random.uniform(0, 24, len(plain)) if hours == "all day" else random.normal(12, 2, len(plain))
    angle = hour * np.pi / 12
    pair = np.column_stack([np.sin(angle), np.cos(angle)]).round(decimals)
    assert related_columns(np.column_stack([plain, pair])) == [Related(7, (6,), True)]
    noisy = pair + 0.1 * random.normal(size=pair.shape)
    assert related_columns(np.column_stack([plain, noisy])) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["breast_cancer", "wine", "iris", "diabetes"])
def test_the_tables_of_scikit_learn_have_no_such_columns(name):
    datasets = pytest.importorskip("sklearn.datasets")
    assert related_columns(getattr(datasets, f"load_{name}")().data) == []


def test_a_warning_names_the_columns_and_the_way_out(plain):
    x = np.column_stack([plain[:, :2], 2 * plain[:, 0]])
    examples = Examples(
        torch.from_numpy(x), torch.zeros(len(x), dtype=torch.long), ("a",), columns=("a", "b", "c")
    )
    with pytest.warns(UserWarning, match=r"column 'c' .* of 'a', .*data\.columns=\[\"a\", \"b\"\]"):
        warn_of_misleading_columns(examples)
    rows = np.column_stack([np.arange(len(x)), x, x[:, 0] + x[:, 1]])
    examples = Examples(torch.from_numpy(rows), examples.labels, ("a",), columns=("row", *"abcd"))
    with pytest.warns(UserWarning, match="column") as found:
        warn_of_misleading_columns(examples)
    settings = {str(warning.message).partition("--set ")[2] for warning in found}
    assert len(found) == 3
    assert settings == {'\'data.columns=["a", "b"]\' (`data.columns`).'}  # one way out for all
    angle = np.random.default_rng(0).uniform(0, 6.3, len(x))
    clock = np.column_stack([plain[:, 0], np.sin(angle), np.cos(angle)])
    columns = ("load", "hour_sin", "hour_cos")
    with pytest.warns(UserWarning, match=r"'hour_sin' and 'hour_cos' .*circle.*plain time"):
        warn_of_misleading_columns(
            Examples(torch.from_numpy(clock), examples.labels, ("a",), columns=columns)
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_misleading_columns(Examples(torch.from_numpy(plain), examples.labels, ("a",)))
