import math

import numpy as np
import pytest
import torch
from scipy import stats

from bruno.tasks.conformal import GroupScores, _student_t, benjamini_hochberg


def group_scores(
    groups: int, draws: int = 400, spread: float = 1.0, seed: int = 0, **settings
) -> GroupScores:
    """Normal scores of groups with different means, after one and after two elements."""
    generator = torch.Generator().manual_seed(seed)
    means = spread * torch.randn(1, groups, 1, generator=generator)
    scores = means + torch.randn(2, groups, draws, generator=generator)
    return GroupScores.of(torch.tensor([1, 2]), scores, groups * draws, **settings)


def test_a_p_value_is_the_mean_fraction_of_lower_scores_with_the_new_set_counted_as_one():
    scores = torch.randn(1, 9, 300)
    found = GroupScores.of(torch.tensor([4]), scores, 2700)
    asked = np.linspace(-4, 2, 25)
    shares = (scores.numpy()[0, :, :, None] <= asked).mean(1).sum(0)
    p = found.p_values(asked, 4, "exact")
    assert (p >= (1 + shares) / 10 - 1e-9).all()  # blocks are rounded up
    assert (p - (1 + shares) / 10).max() < 0.02


def test_the_smallest_p_value_is_that_of_the_groups_alone():
    found = group_scores(19)
    assert found.p_values(np.array([-math.inf, -99.0]), 1, "exact").tolist() == [1 / 20] * 2
    assert found.p_values(np.array([math.inf]), 1, "exact").tolist() == [1.0]


@pytest.mark.parametrize(("rate", "basis"), [(0.01, "estimated"), (0.099, "estimated"), (0.1, "exact")])
def test_rates_of_fewer_than_two_groups_are_estimated(rate, basis):
    found = group_scores(19)
    assert found.smallest_exact(1) == pytest.approx(0.1)
    assert found.p_value(-1.0, 1, rate).basis == found.basis(1, rate) == basis


def test_nothing_is_exact_at_other_positions_or_if_groups_were_trained_on():
    assert group_scores(99).basis(7, 0.1) == "estimated"
    assert group_scores(99, unseen=False).basis(1, 0.1) == "estimated"


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3])
def test_scores_below_the_threshold_are_those_with_p_at_most_the_rate(rate):
    found = group_scores(19)
    scores = np.concatenate([np.linspace(-6, 2, 300), np.unique(found.scores.numpy())[:200]])
    p = found.p_values(scores, 1, found.basis(1, rate))
    below = scores.astype(np.float32) < found.threshold(1, rate)
    assert (below == (p <= rate)).mean() > 0.99


def test_small_groups_support_early_positions_only():
    scores = torch.randn(2, 30, 50)
    scores[1, 20:] = math.nan
    found = GroupScores.of(torch.tensor([1, 2]), scores, 1500)
    assert (found.groups_at(1), found.groups_at(2), found.groups_at(3)) == (30, 20, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "spread"), [(2, 0.0), (2, 2.0), (4, 0.0), (4, 2.0), (20, 0.0), (20, 2.0), (120, 1.0)]
)
def test_false_alarms_of_new_groups_are_within_the_rate_if_exact_and_twice_the_rate_if_estimated(
    groups, spread
):
    alarms: dict[tuple[float, str], list[float]] = {}
    for seed in range(60):
        found = group_scores(groups, spread=spread, seed=seed)
        generator = np.random.default_rng(seed)
        new = spread * generator.normal(size=(200, 1)) + generator.normal(size=(200, 5))
        for rate in (0.01, 0.05, 0.1):
            basis = found.basis(1, rate)
            flagged = new.astype(np.float32) < found.threshold(1, rate)
            alarms.setdefault((rate, basis), []).append(flagged.mean())
    for (rate, basis), shares in alarms.items():
        error = np.std(shares) / math.sqrt(len(shares))
        assert np.mean(shares) < rate * (1 if basis == "exact" else 2) + 3 * error, (rate, basis)
        assert np.mean(shares) > rate * (0.2 if groups > 2 else 0.02), (rate, basis)


def test_estimated_thresholds_are_smooth_and_exact_ones_do_not_depend_on_neighbours():
    scores = torch.randn(40, 12, 200) + torch.arange(1, 41).log().view(40, 1, 1)
    found = GroupScores.of(torch.arange(1, 41), scores, 2400)
    smooth = np.array([found.threshold(n, 0.01) for n in range(1, 41)])
    assert (np.diff(smooth) > -0.02).all()
    raw = np.quantile(scores.numpy().reshape(40, -1), 0.01, axis=1)
    assert np.abs(np.diff(smooth, 2)[5:]).max() < np.abs(np.diff(raw, 2)[5:]).max() / 3
    alone = GroupScores.of(torch.tensor([7]), scores[6:7], 2400)
    assert alone.threshold(7, 0.3) == found.threshold(7, 0.3)


def test_later_positions_use_the_last_estimate():
    found = group_scores(12)
    assert found.threshold(99, 0.01) == found.threshold(2, 0.01)


def test_out_of_distribution_scores_are_the_lowest():
    scores = torch.randn(1, 30, 100)
    scores[0, :, 0] = -math.inf
    found = GroupScores.of(torch.tensor([1]), scores, 3000)
    assert found.p_value(-math.inf, 1, 0.1).p == pytest.approx((1 + 0.3) / 31, abs=0.02)
    assert 0 < found.p_value(-math.inf, 1, 0.001).p < 0.02


@pytest.mark.parametrize("dof", [1, 2, 9])
def test_quantiles_of_student_t(dof):
    found, parts = _student_t(9, dof)
    middle = np.cumsum(parts) - parts / 2
    np.testing.assert_allclose(found, stats.t.ppf(middle, dof), rtol=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 3, 20])
def test_elements_too_few_for_a_rate_flag_only_far_lower_scores(groups):
    """60 elements say little about 1 % of the elements."""
    scores = torch.randn(1, groups, 60 // groups, generator=torch.Generator().manual_seed(0))
    found = GroupScores.of(torch.tensor([1]), scores, 60)
    lowest = scores.min().item()
    assert found.p_value(lowest - 0.1, 1, 0.01).p > 1 / 200
    assert found.p_value(lowest - 1000, 1, 0.01).p < 0.01
    assert found.threshold(1, 0.005) < lowest
    p = found.p_values(-np.geomspace(1, 1e4, 200), 1, "estimated")
    assert (np.diff(p) <= 0).all()


@pytest.mark.slow
def test_the_fewer_groups_are_known_the_lower_is_the_estimated_threshold():
    thresholds = [
        np.mean([group_scores(groups, seed=seed).threshold(1, 0.01) for seed in range(20)])
        for groups in (2, 4, 12)
    ]
    assert thresholds == sorted(thresholds)


def test_benjamini_hochberg_flags_up_to_the_largest_p_value_below_its_line():
    p = np.array([0.9, 0.001, 0.02, 0.029, 0.2])
    assert benjamini_hochberg(p, 0.05).tolist() == [False, True, True, True, False]
    assert not benjamini_hochberg(np.array([0.5, 0.6]), 0.05).any()
    uniform = np.random.default_rng(0).random((400, 20))
    assert np.mean([benjamini_hochberg(some, 0.1).any() for some in uniform]) < 0.14


def test_the_lowest_score_is_no_rarer_by_estimate_than_it_is_in_the_groups():
    scores = torch.randn(1, 6, 400)
    scores[0, :, :20] = -math.inf  # one element in 20 is out-of-distribution
    found = GroupScores.of(torch.tensor([4]), scores, 2400)
    p = found.p_values(np.array([-math.inf, -99.0]), 4, "estimated")
    assert 0.05 <= p[0] < 0.07
    assert p[1] < 0.05
    assert group_scores(6).p_values(np.array([-math.inf]), 1, "estimated")[0] < 1e-5


def test_scores_of_earlier_positions_do_not_move_the_thresholds_of_many_ordered_groups():
    """In a stream with a window, all later rows are judged at the last position."""
    found = []
    for seed in range(20):
        scores = np.random.default_rng(seed).normal(size=(19, 300, 1)) - 0.1 * np.arange(1, 20)[:, None, None]
        known = GroupScores.of(torch.arange(1, 20), torch.from_numpy(scores), 19 * 300)
        found.append(known.threshold(19, 0.05, "estimated") + 1.9)
    assert np.mean(found) == pytest.approx(stats.norm.ppf(0.05), abs=0.12)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [15, 30])
@pytest.mark.parametrize("dof", [3, 8])
def test_few_groups_with_one_score_at_each_position_are_enough_for_low_rates(groups, dof):
    """Groups in the order of time have one score at each position: near positions show the tail."""
    flagged = []
    for seed in range(40):
        scores = np.random.default_rng(seed).standard_t(dof, size=(19, groups, 1))
        known = GroupScores.of(torch.arange(1, 20), torch.from_numpy(scores), 19 * groups)
        thresholds = [known.threshold(position, 0.01) for position in (1, 5, 10, 19)]
        flagged.append(stats.t(dof).cdf(thresholds).mean())
    assert 0.005 < np.mean(flagged) < 0.015
