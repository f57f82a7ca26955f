import math

import pytest
import torch
from attrs import evolve
from tasks.machines import machine_model, machines

from bruno import Bruno
from bruno.data import Examples
from bruno.tasks.planted_faults import (
    FAULTS,
    RobustDistance,
    _detection_error,
    _with_faults,
    measure_planted_faults,
)


@pytest.fixture(scope="module")
def model() -> Bruno:
    return machine_model()


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def measure(model, train, test, rows=2000, **options):
    return measure_planted_faults(model, train, test, rows=rows, generator=seeded(), **options)


@pytest.fixture(scope="module")
def found(model):
    return measure(model, machines(40, 30, seed=1), machines(30, 30, seed=2), rows=12_000, rate=0.05)


@pytest.mark.slow
def test_both_methods_flag_about_as_many_clean_rows_as_requested(found):
    for method in (found.model, found.baseline):
        assert 0.02 < method.false_alarms < 0.1


def test_faults_of_every_kind_are_found_far_more_often_than_by_chance(found):
    assert found.sets == 400  # with one fault of each kind
    for method in (found.model, found.baseline):
        assert set(method.detections) == set(FAULTS)
        error = math.sqrt(method.false_alarms * (1 - method.false_alarms) / found.sets)
        assert min(method.detections.values()) > max(2 * method.false_alarms, method.false_alarms + 3 * error)
        assert method.detections["row of another set"] > 0.9


def test_correlations_give_the_baseline_an_edge_over_a_model_without_them(found):
    assert found.area_gain == pytest.approx(found.model.area - found.baseline.area)
    assert found.area_gain < -2 * found.area_error


def test_a_seed_gives_the_same_faults(model):
    train, test = machines(20, 12, seed=1), machines(5, 12, seed=2)
    assert measure(model, train, test, 200) == measure(model, train, test, 200)


def test_the_error_of_a_detection_rate_is_that_between_classes_and_never_too_small():
    faulty, classes = torch.ones(400, 1, dtype=torch.bool), torch.arange(400) % 40
    ours, other = torch.rand(2, 400, 1, generator=seeded()) < 0.5
    assert _detection_error(ours, other, faulty, classes) == pytest.approx(math.sqrt(0.5 / 400), rel=0.3)
    alike = (torch.arange(400) % 40 < 20).unsqueeze(1)  # all faults of a class are found, or none
    error = _detection_error(alike, torch.zeros_like(alike), faulty, classes)
    assert error == pytest.approx(math.sqrt(0.25 / 40), rel=0.1)
    few = faulty & (torch.arange(400) < 4).unsqueeze(1)
    assert _detection_error(few, ~few, few, classes) > 1 / 3  # no variance, but only four faults
    assert _detection_error(ours, other, faulty, torch.zeros_like(classes)) is None


def test_a_single_set_is_compared_with_training_rows(model):
    alone = machines(2, 20, seed=3).of_classes([0])
    found = measure(model, machines(20, 20, seed=1).of_classes(range(1, 20)), alone, 100)
    assert found.sets == 5
    assert found.area_error is None
    assert set(found.detection_errors.values()) == {None}


def test_sets_without_a_clean_row_are_rejected(model):
    with pytest.raises(ValueError, match=r"`test` .*at least 4 rows.*got 3"):
        measure(model, machines(20, 20, seed=1), machines(20, 3, seed=2))


def test_only_the_planted_cells_change(model):
    x = machines(50, 20, seed=4).elements.view(50, 20, -1).float()
    others = x.roll(1, 0)
    distance = RobustDistance.of(model, machines(20, 20, seed=1))
    planted, fault = _with_faults(model, x, others, distance, seeded())
    changed = (planted != x).sum(-1)
    assert (changed[fault == 0] == 0).all()
    assert torch.equal(planted[fault == 1], others[fault == 1])
    assert (changed[fault == 2] == 1).all()
    assert (changed[fault == 3] == 1).all()
    assert torch.bincount(fault.flatten()).tolist() == [
        50 * 17,
        50,
        50,
        50,
    ]  # a tenth, one of each kind at least
    size = (model.normalised(planted) - model.normalised(x)).abs() / distance.spread
    assert size[fault == 3].amax(-1).min() > 1.99
    assert size[fault == 3].amax() < 6.01


def test_no_fault_is_planted_in_a_constant_column(model):
    def without_the_first(examples):
        x = examples.elements.clone()
        x[:, 0] = 7.0
        return Examples(x, examples.labels, examples.names)

    constant = without_the_first(machines(20, 20, seed=1))
    x = constant.elements.view(20, 20, -1).float()
    planted, fault = _with_faults(model, x, x.roll(1, 0), RobustDistance.of(model, constant), seeded())
    assert (planted[..., 0] == 7).all()
    assert ((planted != x).sum(-1)[fault == 3] == 1).all()


def test_the_distance_is_that_of_the_covariance_within_sets(model):
    root = torch.randn(8, 8, dtype=torch.double, generator=seeded())
    mean = 20 * torch.randn(200, 1, 8, dtype=torch.double, generator=seeded(1))
    x = mean + torch.randn(200, 50, 8, dtype=torch.double, generator=seeded(2)) @ root
    x[0, 0] += 1000 * root.abs().max()  # trimmed
    examples = Examples(
        x.flatten(0, 1), torch.arange(200).repeat_interleave(50), [str(i) for i in range(200)]
    )
    plain = Bruno.from_config(evolve(model.config, scales="linear"))
    plain.initialise(torch.stack([torch.zeros(8), 2 * torch.ones(8)]))
    distance = RobustDistance.of(plain, examples)
    scale = plain.normalised(torch.eye(8)) - plain.normalised(torch.zeros(8, 8))
    expected = scale.double().T @ root.T @ root @ scale.double()
    torch.testing.assert_close(
        distance.covariance / distance.covariance.trace(), expected / expected.trace(), rtol=0, atol=0.02
    )
