import dataclasses
import json
import math

import pytest
import torch
from scipy.stats import multivariate_normal, multivariate_t

from bruno import Bruno, FlowConfig, ModelConfig, ProcessConfig
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.process import Evidence, GaussianProcess, StudentTProcess
from bruno.tasks.analysis import (
    correlation_and_dof,
    dimensions_by_correlation,
    inspect_model,
    log_prob_by_position,
    toy_comparison,
    toy_observations,
)
from bruno.tasks.evaluation import measure_bits_per_dim


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- parameters of a process -----------------------------------------------------------------------------


def test_fewer_dimensions_have_a_correlation_above_a_higher_threshold(digits_model):
    found = dimensions_by_correlation(digits_model)
    correlations = digits_model.process.correlation.tolist()
    assert found.total == len(correlations) == 64
    assert found.dimensions == tuple(sum(c > t for c in correlations) for t in found.thresholds)
    assert list(found.dimensions) == sorted(found.dimensions, reverse=True)
    assert found.dimensions[0] > found.dimensions[-1]


def test_default_thresholds_are_evenly_spaced_on_a_logarithmic_axis(digits_model):
    logs = torch.tensor(dimensions_by_correlation(digits_model).thresholds).double().log10()
    assert logs[0].item() == pytest.approx(-4)
    assert -0.1 < logs[-1] < 0
    torch.testing.assert_close(logs.diff(), torch.full((len(logs) - 1,), 0.05).double(), rtol=1e-4, atol=0)


def test_a_dimension_at_a_threshold_is_not_above_it():
    model = row_model("gaussian")
    with torch.no_grad():
        model.process.raw_correlation.copy_(torch.tensor([0.0, -3.0, 2.0]))  # the first is ½
    assert dimensions_by_correlation(model, (0.01, 0.499, 0.5, 0.9)).dimensions == (3, 2, 1, 0)


def row_model(process: str) -> Bruno:
    return Bruno.from_config(
        ModelConfig((3,), 0, flow=FlowConfig("dense", couplings=2, units=32), process=ProcessConfig(process))
    )


def test_correlation_and_dof_are_sorted_together_by_correlation(digits_model):
    found = correlation_and_dof(digits_model)
    assert sorted(found.dimension) == list(range(64))
    assert list(found.correlation) == sorted(found.correlation, reverse=True)
    order = list(found.dimension)
    assert digits_model.process.correlation[order].tolist() == list(found.correlation)
    assert digits_model.process.dof[order].tolist() == list(found.dof)
    assert found.above(found.correlation[9]) == 9
    assert len(set(found.dof)) > 32  # training changes each


def test_a_gaussian_process_has_no_degrees_of_freedom():
    assert correlation_and_dof(row_model("gaussian")).dof is None
    assert correlation_and_dof(row_model("student-t")).dof == pytest.approx((1000.0,) * 3)


# --- Student-t and Gaussian on toy data ------------------------------------------------------------------


def test_toy_observations_have_the_given_variance_and_covariance():
    generator = seeded()
    pairs = torch.stack([toy_observations(2, generator=generator) for _ in range(6000)])
    expected = torch.tensor([[0.1, 0.05], [0.05, 0.1]]).double()
    torch.testing.assert_close(pairs.T.cov(), expected, rtol=0, atol=0.008)
    assert pairs.mean().abs() < 0.01


def test_toy_predictions_are_those_of_the_processes_given_each_prefix():
    z = toy_observations(30, generator=seeded())
    found = toy_comparison(z, dofs=(5.0,), variance=2.0, covariance=0.5)
    settings = {"variance": 2.0, "correlation": 0.25, "dtype": torch.double}
    pairs = [
        (GaussianProcess(1, **settings), found.gaussian),
        (StudentTProcess(1, dof=5.0, **settings), found.student_t[0]),
    ]
    for process, predictions in pairs:
        for n in (0, 1, 2, 17, 29):
            seen = Evidence.of(z[:n].unsqueeze(1)) if n else Evidence.empty(1)
            predictive = process.predictive(seen)
            assert predictions.mean[n] == pytest.approx(predictive.mean.item(), abs=1e-12)
            assert predictions.variance[n] == pytest.approx(predictive.variance.item())
            assert predictions.log_prob[n] == pytest.approx(predictive.log_prob(z[n]).item())
    assert found.observations == tuple(z.tolist())


def test_toy_predictions_multiply_to_the_joint_densities_of_scipy():
    z = toy_observations(generator=seeded())
    found = toy_comparison(z)
    joint = torch.full((100, 100), 0.01).double().fill_diagonal_(1.0).numpy()
    expected = multivariate_normal(cov=joint).logpdf(z.numpy())
    assert sum(found.gaussian.log_prob) == pytest.approx(expected, rel=1e-8)
    assert [process.dof for process in found.student_t] == [10.0, 1000.0]
    for process in found.student_t:
        # scipy takes the scale, this package the covariance, which is ν/(ν − 2) times as large
        expected = multivariate_t(shape=joint * (process.dof - 2) / process.dof, df=process.dof).logpdf(
            z.numpy()
        )
        assert sum(process.log_prob) == pytest.approx(expected, rel=1e-8)


def test_only_student_t_processes_adapt_their_variance_to_the_observations():
    narrow = toy_observations(generator=seeded())
    found, wide = toy_comparison(narrow), toy_comparison(10 * narrow)
    assert found.gaussian.variance == wide.gaussian.variance
    for on_narrow, on_wide in zip(found.student_t, wide.student_t, strict=True):
        assert on_narrow.variance[0] == on_wide.variance[0]
        assert all(a < b for a, b in zip(on_narrow.variance[1:], on_wide.variance[1:], strict=True))


def test_on_the_toy_data_of_the_paper_fewer_degrees_of_freedom_predict_better():
    found = toy_comparison(toy_observations(generator=seeded()))
    low, high, gaussian = (sum(p.log_prob[-50:]) / 50 for p in (*found.student_t, found.gaussian))
    assert low > high + 0.3
    assert high > gaussian + 0.01


def test_with_many_degrees_of_freedom_student_t_and_gaussian_agree():
    z = toy_observations(generator=seeded())
    found = toy_comparison(z, dofs=(1e8,))
    for name in ("mean", "variance", "log_prob"):
        many, gaussian = getattr(found.student_t[0], name), getattr(found.gaussian, name)
        assert many == pytest.approx(gaussian, rel=1e-5, abs=1e-6)


def test_a_covariance_above_the_variance_raises():
    with pytest.raises(ValueError, match=r"`covariance` .* 0.1.*got 0.2"):
        toy_observations(variance=0.1, covariance=0.2, generator=seeded())


# --- prediction by position ------------------------------------------------------------------------------


def test_evidence_improves_predictions(digits_model, learnt_digits):
    calls: list[tuple[int, int]] = []
    found = log_prob_by_position(
        digits_model,
        SetSampler(learnt_digits),
        sets=200,
        set_size=12,
        generator=seeded(),
        progress=lambda *done: calls.append(done),
    )
    assert found.gain[0] == found.gain_error[0] == 0
    assert min(found.gain[1:]) > 3 * max(found.gain_error[1:]) > 0
    assert found.gain[-1] > found.gain[1]
    later, spread = sum(found.log_prob[6:]) / 6, math.hypot(found.error[0], *found.error[6:])
    assert later > found.log_prob[0] + spread
    assert calls[0] == (16, 200)
    assert calls[-1] == (200, 200)


def test_log_prob_by_position_is_the_measured_bits_in_nats(digits_model, unseen_digits):
    arguments = {"sets": 20, "set_size": 5}
    sampler = SetSampler(unseen_digits)
    found = log_prob_by_position(digits_model, sampler, **arguments, generator=seeded(3))
    bits, nats = (
        measure_bits_per_dim(digits_model, sampler, **arguments, generator=seeded(3)),
        64 * math.log(2),
    )
    assert sum(found.log_prob) / 5 == pytest.approx(-bits.mean * nats, rel=1e-6)
    assert found.gain == pytest.approx([(bits.first - b) * nats for b in bits.by_position], abs=1e-4)


@torch.no_grad()
def test_errors_by_position_are_standard_errors_over_sets(digits_model, unseen_digits):
    sampler, generator = SetSampler(unseen_digits), seeded(4)
    found = log_prob_by_position(digits_model, sampler, sets=10, set_size=3, generator=seeded(4))
    log_prob = digits_model.log_prob(sampler.sets(10, 3, generator), generator)
    assert found.error == pytest.approx((log_prob.std(0) / math.sqrt(10)).tolist(), rel=1e-4)


def test_a_standard_error_needs_two_sets(digits_model, unseen_digits):
    with pytest.raises(ValueError, match=r"`sets` .*2.*; got 1"):
        log_prob_by_position(digits_model, SetSampler(unseen_digits), sets=1, set_size=3, generator=seeded())


# --- all together ----------------------------------------------------------------------------------------


def test_an_inspection_holds_all_analyses(digits_model, unseen_digits):
    sampler, reports = SetSampler(unseen_digits), []
    found = inspect_model(
        digits_model,
        sampler,
        sets=4,
        set_size=3,
        generator=seeded(),
        progress=lambda *report: reports.append(report),
    )
    generator = seeded()
    assert found.correlations == dimensions_by_correlation(digits_model)
    assert found.dof == correlation_and_dof(digits_model)
    assert found.toy == toy_comparison(toy_observations(generator=generator))
    expected = log_prob_by_position(digits_model, sampler, sets=4, set_size=3, generator=generator)
    assert found.positions == expected
    assert reports == [(4, 4)]


def test_an_inspection_uses_sets_no_larger_than_the_smallest_class(digits_model, unseen_digits):
    few = SetSampler(Examples(unseen_digits.elements[:6], torch.arange(6) % 2, ("a", "b"), levels=17))
    assert len(inspect_model(digits_model, few, sets=2, generator=seeded()).positions.gain) == 3


def test_results_can_be_written_as_json(digits_model, learnt_digits):
    found = inspect_model(digits_model, SetSampler(learnt_digits), sets=2, set_size=2, generator=seeded())
    values = dataclasses.asdict(found)
    assert json.loads(json.dumps(values)).keys() == values.keys()
