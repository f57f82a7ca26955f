import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.special import softmax
from scipy.stats import sem
from sklearn import metrics as sklearn_metrics

from bruno.tasks.metrics import (
    average_precision,
    calibration_error,
    log_loss,
    mean_and_error,
    precision_at_k,
    roc_auc,
)

FINITE = st.floats(-50, 50, allow_subnormal=False)


@st.composite
def rankings(draw):
    """Targets with both classes, scores with many ties, and weights of which some are 0."""
    n = draw(st.integers(2, 30))
    target = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    assume(any(target) and not all(target))
    score = draw(st.lists(st.integers(-3, 3) | FINITE, min_size=n, max_size=n))
    weight = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    return torch.tensor(target), torch.tensor(score, dtype=torch.double), torch.tensor(weight).double()


@st.composite
def classifications(draw):
    n, classes = draw(st.integers(1, 20)), draw(st.integers(2, 5))
    rows = st.lists(FINITE, min_size=classes, max_size=classes)
    log_scores = draw(st.lists(rows, min_size=n, max_size=n))
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=n, max_size=n))
    return torch.tensor(labels), torch.tensor(log_scores, dtype=torch.double)


# --- rankings --------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(rankings())
def test_rankings_are_measured_as_by_scikit_learn_with_ties(ranking):
    target, score, _ = ranking
    assert roc_auc(target, score).item() == pytest.approx(sklearn_metrics.roc_auc_score(target, score))
    expected = sklearn_metrics.average_precision_score(target, score)
    assert average_precision(target, score).item() == pytest.approx(expected)


@pytest.mark.slow
@given(rankings())
def test_weights_are_those_of_scikit_learn(ranking):
    target, score, weight = ranking
    assume(weight[target].sum() > 0 and weight[~target].sum() > 0)
    batch = torch.stack([weight, torch.ones_like(weight)])
    for found, reference in (
        (roc_auc(target, score, batch), sklearn_metrics.roc_auc_score),
        (average_precision(target, score, batch), sklearn_metrics.average_precision_score),
    ):
        expected = [reference(target, score, sample_weight=w) for w in batch]
        assert found.tolist() == pytest.approx(expected)


@given(rankings())
def test_a_negated_score_mirrors_the_area(ranking):
    target, score, _ = ranking
    assert roc_auc(target, -score).item() == pytest.approx(1 - roc_auc(target, score).item())


@given(rankings(), st.data())
def test_precision_at_k_matches_the_sorted_list(ranking, data):
    target, score, _ = ranking
    k = data.draw(st.integers(1, len(score)))
    best = sorted(range(len(score)), key=lambda i: (-score[i].item(), i))[:k]
    assert precision_at_k(target, score, k) == pytest.approx(np.mean([target[i].item() for i in best]))


def test_a_ranking_without_positives_has_no_area_and_no_precision():
    target, score = torch.zeros(3, dtype=torch.bool), torch.arange(3.0)
    assert roc_auc(target, score).isnan()
    assert average_precision(target, score).isnan()


@pytest.mark.parametrize("k", [0, 4])
def test_precision_needs_a_k_within_the_ranking(k):
    with pytest.raises(ValueError, match=rf"`k` .* 3.*; got {k}"):
        precision_at_k(torch.ones(3, dtype=torch.bool), torch.arange(3.0), k)


# --- class probabilities ---------------------------------------------------------------------------------


@pytest.mark.slow
@given(classifications(), st.floats(0.5, 20))
def test_log_loss_matches_scikit_learn(classification, temperature):
    labels, log_scores = classification
    probabilities = softmax(log_scores.numpy() / temperature, axis=1)
    assume(probabilities.min() > 1e-12)  # scikit-learn clips smaller ones
    expected = sklearn_metrics.log_loss(labels, probabilities, labels=range(log_scores.shape[1]))
    assert log_loss(labels, log_scores, temperature) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(classifications(), st.integers(2, 20))
def test_calibration_error_is_the_weighted_gap_of_each_bin(classification, bins):
    labels, log_scores = classification
    probabilities = softmax(log_scores.numpy(), axis=1)
    confidence, right = probabilities.max(1), probabilities.argmax(1) == labels.numpy()
    edges = np.linspace(0, 1, bins + 1)[1:-1]
    assume(np.abs(confidence[:, None] - edges).min() > 1e-9)  # at an edge, rounding decides
    which = np.digitize(confidence, edges)
    gaps = [abs((confidence - right)[which == b].mean()) * (which == b).mean() for b in set(which)]
    assert calibration_error(labels, log_scores, bins=bins) == pytest.approx(sum(gaps), abs=1e-9)


def test_uniform_probabilities_have_a_log_loss_of_log_k():
    assert log_loss(torch.tensor([0, 3]), torch.zeros(2, 4)) == pytest.approx(math.log(4))


# --- standard errors -------------------------------------------------------------------------------------


@given(st.lists(st.tuples(FINITE, FINITE), min_size=2, max_size=20))
def test_the_standard_error_is_that_of_scipy(rows):
    found = mean_and_error(torch.tensor(rows, dtype=torch.double))
    assert found.mean.tolist() == pytest.approx(np.mean(rows, 0).tolist(), abs=1e-9)
    assert found.error.tolist() == pytest.approx(sem(rows).tolist(), abs=1e-9)


def test_a_standard_error_needs_two_values():
    with pytest.raises(ValueError, match=r"`values` .*2.*; got 1"):
        mean_and_error(torch.ones(1))
