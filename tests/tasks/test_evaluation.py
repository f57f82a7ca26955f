import pytest
import torch

from bruno import Bruno
from bruno.config import FlowConfig, ModelConfig, ProcessConfig
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.tasks.evaluation import measure_bits_per_dim


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def rows() -> Examples:
    """Seven classes of four rows each: rows have no noise, and a set of four is the whole class."""
    labels = torch.arange(7).repeat(4)
    return Examples(3 * torch.randn(7, 4)[labels] + torch.randn(28, 4), labels, tuple("abcdefg"))


@pytest.fixture
def model(rows) -> Bruno:
    flow, process = FlowConfig(kind="dense", couplings=2, units=8), ProcessConfig(dof=10.0, correlation=0.5)
    model = Bruno.from_config(ModelConfig(shape=(4,), levels=0, flow=flow, process=process))
    model.initialise(rows.elements)
    return model


def joint_bits(model: Bruno, rows: Examples) -> torch.Tensor:
    """Bits/dim of each whole class, a mean over positions that does not depend on their order."""
    sets = torch.stack([rows.elements[rows.labels == label] for label in range(len(rows.names))])
    return model.bits_per_dim(model.log_prob(sets)).mean(1).double().detach()


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_without_a_number_of_sets_every_class_is_measured_once(model, rows, batch_size):
    result = measure_bits_per_dim(
        model, SetSampler(rows), sets=None, set_size=4, generator=seeded(), batch_size=batch_size
    )
    expected = joint_bits(model, rows)
    assert result.sets == 7
    assert result.mean == pytest.approx(expected.mean().item(), rel=1e-5)
    assert result.error == pytest.approx(expected.std().item() / 7**0.5, rel=1e-4)


def test_a_probability_of_one_half_per_dimension_is_one_bit(model):
    assert model.bits_per_dim(torch.tensor(0.5).log() * model.dim).item() == pytest.approx(1)


def test_every_class_is_measured_on_sets_per_class_sets(model, rows):
    once, thrice = (
        measure_bits_per_dim(
            model, SetSampler(rows), sets=None, sets_per_class=n, set_size=4, generator=seeded()
        )
        for n in (1, 3)
    )
    assert thrice.sets == 21
    assert thrice.mean == pytest.approx(once.mean, rel=1e-5)


def test_measuring_every_class_removes_the_variance_between_classes(model, rows):
    def means(sets: int | None) -> torch.Tensor:
        sampler = SetSampler(rows)
        return torch.tensor(
            [
                measure_bits_per_dim(model, sampler, sets=sets, set_size=4, generator=seeded(seed)).mean
                for seed in range(8)
            ]
        )

    assert means(None).std() < 1e-5
    assert means(7).std() > 0.01


def test_random_sets_agree_with_every_class_within_the_standard_error(model, rows):
    drawn = measure_bits_per_dim(model, SetSampler(rows), sets=400, set_size=4, generator=seeded())
    assert drawn.sets == 400
    assert abs(drawn.mean - joint_bits(model, rows).mean().item()) < 4 * drawn.error


def test_the_standard_error_of_random_sets_is_between_classes(model, rows):
    few = SetSampler(rows.of_classes(range(5)))
    every = measure_bits_per_dim(model, few, sets=None, sets_per_class=80, set_size=4, generator=seeded())
    drawn = measure_bits_per_dim(model, few, sets=400, set_size=4, generator=seeded())
    assert drawn.error == pytest.approx(every.error, rel=0.25)


def test_positions_average_to_the_mean_and_the_first_is_the_prior(model, rows):
    for sets in (None, 30):
        result = measure_bits_per_dim(model, SetSampler(rows), sets=sets, set_size=3, generator=seeded())
        assert len(result.by_position) == 3
        assert result.mean == pytest.approx(sum(result.by_position) / 3)
        assert result.first == result.by_position[0]
        assert result.by_position[2] < result.first


def test_the_first_position_does_not_depend_on_the_order_of_elements(model, rows):
    prior = model.bits_per_dim(model.prior().log_prob(rows.elements)).mean().item()
    for seed in range(4):  # all elements of every class are drawn, in another order
        result = measure_bits_per_dim(model, SetSampler(rows), sets=None, set_size=4, generator=seeded(seed))
        assert result.first == pytest.approx(prior, rel=1e-5)


def test_rotated_classes_are_also_measured():
    images = torch.zeros(6, 1, 2, 2, dtype=torch.uint8)
    sampler = SetSampler(Examples(images, torch.arange(3).repeat(2), tuple("abc")), rotations=True)
    model = Bruno.from_config(
        ModelConfig(shape=(1, 2, 2), flow=FlowConfig(kind="dense", couplings=2, units=4))
    )
    assert measure_bits_per_dim(model, sampler, sets=None, set_size=2, generator=seeded()).sets == 12


def test_a_standard_error_needs_two_sets_or_classes(model, rows):
    with pytest.raises(ValueError, match=r"`sets` .*2.*; got 1\."):
        measure_bits_per_dim(model, SetSampler(rows), sets=1, set_size=2, generator=seeded())
    alone = SetSampler(rows.of_classes([3]))
    assert (
        measure_bits_per_dim(model, alone, sets=None, set_size=2, sets_per_class=5, generator=seeded()).error
        is None
    )


def test_more_sets_of_the_same_elements_do_not_reduce_the_standard_error(model, rows):
    once, often = (
        measure_bits_per_dim(
            model, SetSampler(rows), sets=None, sets_per_class=n, set_size=4, generator=seeded()
        )
        for n in (1, 50)
    )
    assert often.error == pytest.approx(once.error, rel=1e-4)  # all of each class, in another order


def test_progress_counts_sets(model, rows):
    reports = []
    measure_bits_per_dim(
        model,
        SetSampler(rows),
        sets=None,
        set_size=2,
        generator=seeded(),
        batch_size=3,
        progress=lambda *report: reports.append(report),
    )
    assert reports == [(3, 7), (6, 7), (7, 7)]
