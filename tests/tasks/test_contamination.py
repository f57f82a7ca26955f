"""Signs of faults in sets that should be clean."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from tasks.machines import machine_model, machines, with_holes

from bruno import Bruno
from bruno.data import Examples
from bruno.tasks.calibration import fixed_cutoffs
from bruno.tasks.contamination import Contamination, measure_contamination
from bruno.tasks.groups import Groups
from bruno.tasks.robust_evidence import Cutoffs


@pytest.fixture(scope="module")
def model() -> Bruno:
    return machine_model()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


TRAIN = machines(40, 30, seed=1)


@cache
def cutoffs_of(model: Bruno) -> Cutoffs:
    return fixed_cutoffs(model, Groups.of(model, TRAIN, generator=seeded()))


def measure(model: Bruno, test: Examples, train: Examples = TRAIN) -> Contamination:
    return measure_contamination(model, cutoffs_of(model), train, test, generator=seeded())


def with_noise(examples: Examples, noise: torch.Tensor) -> Examples:
    """The examples with noise in units of the standard deviation of each column within sets."""
    x = examples.elements.double()
    spread = torch.stack([x[members].std(0) for members in examples.by_class()]).mean(0)
    return replace(examples, elements=(x + noise * spread).to(examples.elements.dtype))


def spikes(examples: Examples, fraction: float, *, sets: int | None = None) -> Examples:
    """The examples with spikes in a fraction of the rows: of all sets, or of the first few alone."""
    rows, columns = examples.elements.shape
    may = examples.labels < (sets or len(examples.names))
    chosen = (torch.rand(rows, generator=seeded(1)) < fraction) & may
    column = torch.randint(columns, (rows,), generator=seeded(2))
    noise = torch.zeros(rows, columns, dtype=torch.double)
    noise[chosen, column[chosen]] = 12.0
    return with_noise(examples, noise)


@pytest.mark.parametrize("fraction", [0.02, 0.036, 0.08])
def test_spikes_in_a_few_rows_are_suspected_and_counted(model, fraction):
    found = measure(model, spikes(machines(30, 40, seed=2), fraction))
    assert found.rows == 1200
    assert found.suspected
    assert found.fraction == pytest.approx(fraction, rel=0.5)


def test_missing_numbers_are_imputed():
    imputing, train, clean = machine_model("impute"), machines(10, 20, seed=1), machines(12, 30, seed=2)
    for examples, suspected in ((clean, False), (spikes(clean, 0.05), True)):
        parts = (replace(part, elements=with_holes(part.elements, 0.05)) for part in (examples, train))
        assert measure(imputing, *parts).suspected == suspected


def test_clean_sets_are_not_suspected(model):
    found = measure(model, machines(30, 40, seed=2))
    assert not found.suspected
    assert found.fraction < 0.01


@pytest.mark.parametrize("freedom", [3, 5])
def test_heavy_tails_are_not_suspected(model, freedom):
    examples = machines(30, 40, seed=2)
    scale = torch.distributions.Chi2(torch.tensor(float(freedom)))
    torch.manual_seed(freedom)
    heavy = torch.randn(examples.elements.shape) / (scale.sample((len(examples), 1)) / freedom).sqrt()
    found = measure(model, with_noise(examples, 2 * heavy))
    assert found.far > 0
    assert not found.suspected


def test_rows_of_one_unusual_set_are_not_suspected(model):
    found = measure(model, spikes(machines(30, 40, seed=2), 0.4, sets=2))
    assert found.fraction > 0.01
    assert not found.suspected


def test_columns_of_equal_numbers_and_small_sets_are_no_error(model):
    examples = machines(3, 2, seed=2)
    assert measure(model, examples) == Contamination(0, 0, 0, 0, 0.0)
    examples = machines(3, 10, seed=2)
    same = replace(examples, elements=torch.ones_like(examples.elements))
    assert not measure(model, same).suspected


@pytest.mark.parametrize("changed", [0.0, 0.1])
def test_sets_of_mostly_equal_rows_are_no_error(model, changed):
    """Most rows, or all, equal the median of their set: the covariance of the nearest rows is zero."""
    examples = machines(20, 20, seed=2)
    same = examples.elements[::20][examples.labels]
    kept = torch.rand(len(same), 1, generator=seeded()) < changed
    mostly = replace(examples, elements=torch.where(kept, examples.elements, same))
    assert not measure(model, mostly, train=mostly).suspected
