"""Shapley values of scores."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bruno.fit_rows import fit_rows
from bruno.tasks.explanation import explain

COLUMNS, SETS, SIZE = 6, 30, 20
COVARIANCE = 0.5 * np.eye(COLUMNS) + 0.5  # within a set: correlations of 0.5
DEVIATIONS = 1 / np.sqrt(np.diag(np.linalg.inv(COVARIANCE)))  # of a column given all others and the set


def sets(count, size, seed):
    random = np.random.default_rng(seed)
    means = 4 * random.normal(size=(count, 1, COLUMNS))
    return means + random.multivariate_normal(np.zeros(COLUMNS), COVARIANCE, size=(count, size))


@pytest.fixture(scope="module")
def model():
    return fit_rows(sets(SETS, SIZE, 0).reshape(-1, COLUMNS), np.repeat(np.arange(SETS), SIZE), steps=150)


@pytest.fixture(scope="module")
def posterior(model):
    return model.condition(sets(1, 30, 1)[0])


@pytest.mark.parametrize("criterion", ["score", "density"])
def test_contributions_add_up_to_the_score_less_the_mean_of_the_baseline(posterior, criterion):
    rows = sets(1, 36, 1)[0, 30:]
    found = explain(posterior, rows, criterion=criterion, permutations=16)
    expected = posterior.score(rows) if criterion == "score" else posterior.log_prob(rows)
    assert_close(found.scores, expected, atol=1e-5, rtol=1e-5)
    assert_close(found.contributions.sum(1), found.scores - found.baseline, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("criterion", ["score", "density"])
def test_the_column_that_was_moved_ranks_first(model, criterion):
    """One column is moved by 6 to 9 deviations given all others; the row is flagged at a score below 0."""
    random, hits, flagged = np.random.default_rng(2), 0, 0
    for rows in sets(60, 21, 3):
        given, row, column = model.condition(rows[:20]), rows[20].copy(), random.integers(COLUMNS)
        row[column] += random.choice([-1, 1]) * random.uniform(6, 9) * DEVIATIONS[column]
        if given.score(row).item() < 0:
            flagged += 1
            hits += explain(given, row[None], criterion=criterion).contributions[0].argmin().item() == column
    assert flagged >= 40
    assert hits >= 0.9 * flagged


def test_standard_errors_match_repeated_measurements(posterior):
    row = sets(1, 31, 1)[0, 30:] + 2
    repeated = [explain(posterior, row, permutations=32, seed=seed) for seed in range(40)]
    spread = torch.stack([found.contributions[0] for found in repeated]).std(0)
    assert_close(torch.stack([found.errors[0] for found in repeated]).mean(0), spread, rtol=0.4, atol=0)


def test_elements_share_orders_and_draws(posterior):
    rows = sets(1, 33, 1)[0, 30:]
    together = explain(posterior, rows, permutations=8).contributions
    alone = torch.cat([explain(posterior, row[None], permutations=8).contributions for row in rows])
    assert_close(together, alone)
    assert explain(posterior, rows, permutations=8).baseline.unique().numel() == 1


def test_the_score_of_one_column_is_explained_by_it(posterior):
    row = explain(posterior, sets(1, 31, 1)[0, 30:], features=tuple("abcdef"), permutations=8)
    assert [name for name, _ in row.lowest(6)[0]] == [row.features[i] for i in row.contributions[0].argsort()]
    with pytest.raises(ValueError, match="`maps`"):
        _ = row.maps


def test_each_element_may_have_its_own_set(model):
    rows = torch.from_numpy(sets(2, 21, 4))
    both = model.condition(rows[:, :20])
    found = explain(both, rows[:, 20], permutations=8)
    alone = explain(both[1], rows[1:, 20], permutations=8)
    assert_close(found.contributions[1:], alone.contributions)


def test_images_have_maps_of_patches(digits_model, unseen_digits):
    images = unseen_digits.elements[unseen_digits.labels == 0]
    given, image = digits_model.condition(images[:20]), images[20].clone()
    image[:, :2, :2] = 16  # a bright corner, which no digit has
    found = explain(given, image[None], criterion="density", patch=2, permutations=16)
    assert found.maps.shape == (1, 4, 4)
    assert found.contributions.argmin() == 0
    assert_close(found.contributions.sum(1), found.scores - found.baseline, atol=1e-5, rtol=0)
    assert_close(found.scores, given.log_prob(image[None]).double(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("setting", "value"), [("permutations", 7), ("features", ("a",))])
def test_wrong_settings_are_named(posterior, setting, value):
    with pytest.raises(ValueError, match=rf"`{setting}` .*got"):
        explain(posterior, sets(1, 31, 1)[0, 30:], **{setting: value})
    with pytest.raises(ValueError, match="`x`"):
        explain(posterior, sets(1, 31, 1)[0, 30])
