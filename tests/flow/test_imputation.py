"""Missing numbers are replaced by their means, or draws, given the row and its set."""

import pytest
import torch

from bruno.flow import Imputer
from bruno.flow.imputation import _Precisions

DIM = 3
ROWS = 5


def covariance(seed: int) -> torch.Tensor:
    root = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    return root @ root.T + 0.1 * torch.eye(DIM)


@pytest.fixture
def imputer() -> Imputer:
    imputer = Imputer(DIM)
    imputer.mean.copy_(torch.tensor([1.0, -2.0, 0.5]))
    imputer.between.copy_(4 * covariance(0))
    imputer.within.copy_(covariance(1))
    imputer.fitted.fill_(True)
    return imputer


def rows_of_sets(imputer: Imputer, sets: int, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(sets, rows + 1, DIM, generator=generator, dtype=torch.double)
    b = noise[:, :1] @ torch.linalg.cholesky(imputer.between).T
    w = noise[:, 1:] @ torch.linalg.cholesky(imputer.within).T
    return (imputer.mean + b + w).flatten(0, 1), torch.arange(sets).repeat_interleave(rows)


def with_holes(y: torch.Tensor, rate: float, seed: int = 0) -> torch.Tensor:
    hidden = torch.rand(y.shape, generator=torch.Generator().manual_seed(seed)) < rate
    hidden[:, 0] &= ~hidden.all(1)
    return y.masked_fill(hidden, torch.nan)


def joint_means(imputer: Imputer, y: torch.Tensor) -> torch.Tensor:
    """The means of the missing numbers of one set, from its joint normal distribution."""
    n = len(y)
    joint = torch.kron(torch.ones(n, n), imputer.between) + torch.kron(torch.eye(n), imputer.within)
    flat, mean = y.flatten(), imputer.mean.repeat(n)
    there = ~flat.isnan()
    gain = torch.linalg.solve(joint[there][:, there], joint[there]).T
    return (mean + gain @ (flat - mean)[there]).view(y.shape)


def test_imputed_numbers_are_the_means_given_the_whole_set(imputer):
    y, labels = rows_of_sets(imputer, 2, ROWS)
    y = with_holes(y, 0.4)
    filled = imputer(y, labels)
    for label in (0, 1):
        torch.testing.assert_close(filled[labels == label], joint_means(imputer, y[labels == label]))
    assert torch.equal(filled[~y.isnan()], y[~y.isnan()])


def test_a_spike_in_one_row_does_not_move_the_missing_numbers_of_others(imputer):
    y, labels = rows_of_sets(imputer, 20, 12)
    holed = with_holes(y, 0.2)
    holed[::12] = y[::12]
    spiked = holed.clone()
    spiked[::12, 1] += 1e4
    others = torch.arange(len(y)) % 12 > 0
    change = (imputer(spiked, labels) - imputer(holed, labels))[others].abs()
    assert holed[others].isnan().any()
    assert change.max() < imputer.within.diagonal().max().sqrt()


def test_both_of_two_distant_rows_count(imputer):
    y = torch.tensor([[0.0, 0.0, 0.0], [50.0, 50.0, torch.nan], [0.0, 0.0, torch.nan]], dtype=torch.double)
    near = imputer._is_near(y[:2], _Precisions(imputer.within))
    assert near.tolist() == [True, True]
    assert imputer._is_near(y, _Precisions(imputer.within)).tolist() == [True, False, True]


def test_the_next_row_is_imputed_given_the_rows_before_it(imputer):
    y, _ = rows_of_sets(imputer, 1, ROWS)
    y[-1, 1] = torch.nan
    seen = torch.tensor(ROWS - 1)
    gain = imputer.between @ torch.linalg.inv(imputer.between + imputer.within / seen)
    centre = imputer.mean + gain @ (y[:-1].mean(0) - imputer.mean)
    torch.testing.assert_close(imputer.impute_next(y[-1], centre, seen), joint_means(imputer, y)[-1])
    first = imputer.impute_next(y[-1], imputer.mean, torch.tensor(0))
    torch.testing.assert_close(first, joint_means(imputer, y[-1:])[0])


@pytest.mark.slow
def test_next_rows_of_several_sets_are_imputed_like_each_alone(imputer):
    """Rows that lack no number, some, or all."""
    y, _ = rows_of_sets(imputer, 1, 8)
    y[torch.arange(8).unsqueeze(1) >> torch.arange(DIM) & 1 > 0] = torch.nan
    centre, seen = rows_of_sets(imputer, 2, 1, seed=1)[0].unsqueeze(1), torch.tensor([[0], [7]])
    filled = imputer.impute_next(y, centre, seen)
    for i, row in ((i, row) for i in range(2) for row in range(8)):
        torch.testing.assert_close(filled[i, row], imputer.impute_next(y[row], centre[i, 0], seen[i, 0]))
    assert torch.equal(filled[1][~y.isnan()], y[~y.isnan()])
    torch.testing.assert_close(filled[1, 7], centre[1, 0])  # nothing is known of this row


def test_draws_have_the_distribution_of_the_missing_numbers(imputer):
    y, _ = rows_of_sets(imputer, 1, ROWS)
    y[-1, 1:] = torch.nan
    many, labels = y.repeat(1000, 1), torch.arange(1000).repeat_interleave(ROWS)
    drawn = imputer(many, labels, torch.Generator().manual_seed(0)).view(1000, ROWS, DIM)[:, -1]
    torch.testing.assert_close(drawn.mean(0), imputer(y, labels[:ROWS])[-1], atol=0.1, rtol=0.1)
    w = imputer.within
    expected = w[1:, 1:] - w[1:, :1] @ w[:1, 1:] / w[0, 0]
    torch.testing.assert_close(drawn[:, 1:].T.cov(), expected, atol=0.1, rtol=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_covariances_are_learnt_from_rows_with_and_without_holes(imputer, rate):
    y, labels = rows_of_sets(imputer, 200, 20)
    fitted = Imputer(DIM).fit(with_holes(y, rate), labels)
    for name, tolerance in (("within", 0.15), ("between", 0.35), ("mean", 0.5)):
        torch.testing.assert_close(getattr(fitted, name), getattr(imputer, name), atol=tolerance, rtol=0.2)
    assert torch.equal(fitted.fit(y + 1, labels).mean, fitted.mean)  # only once


def test_constant_and_empty_columns_can_be_imputed():
    y = torch.tensor([[1.0, 5.0, torch.nan], [2.0, 5.0, torch.nan], [3.0, torch.nan, torch.nan]])
    labels = torch.zeros(3, dtype=torch.long)
    filled = Imputer(3).fit(y, labels)(y, labels)
    assert filled.isfinite().all()
    assert filled[2, 1].item() == pytest.approx(5.0, abs=1e-3)
