"""Scores of labelled sets, and the draws that they are compared with."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tasks.machines import machine_model, machines

from bruno.tasks.set_scores import ScoredSets, SetScorer, positions_by_label


@pytest.fixture(scope="module")
def scorer() -> SetScorer:
    return SetScorer.of(machine_model(), "score")


def faulty_machines() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of eight machines, some with faults, and the machine of each."""
    examples = machines(8, 15, seed=3, fault_rate=0.1)
    return examples.elements, examples.labels


def scored(scorer: SetScorer, x: torch.Tensor, labels: torch.Tensor) -> ScoredSets:
    return scorer.score_sets(scorer.encode(x), labels, int(labels.max()) + 1)


def test_positions_by_label_are_those_of_each_label_in_order():
    labels = np.array([3, 0, 3, 5, 0, 3])
    found = {label: own.tolist() for label, own in positions_by_label(labels)}
    assert found == {0: [1, 4], 3: [0, 2, 5], 5: [3]}
    assert list(positions_by_label(labels[:0])) == []


def test_what_a_set_is_compared_with_does_not_depend_on_the_other_sets(scorer):
    evidence = scored(scorer, *faulty_machines()).evidence
    draws, cutoffs = scorer.draws(evidence), scorer.cutoffs(evidence)
    for i in range(8):
        torch.testing.assert_close(scorer.draws(evidence[i]), draws[i], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scorer.cutoffs(evidence[i]), cutoffs[i], rtol=1e-4, atol=1e-4)


def test_sets_that_no_longer_change_are_not_compared_with_draws_again(scorer, monkeypatch):
    compared, cutoffs = [], SetScorer.cutoffs
    monkeypatch.setattr(
        SetScorer, "cutoffs", lambda self, given: compared.append(len(given.count)) or cutoffs(self, given)
    )
    scored(scorer, *faulty_machines())
    assert compared[0] == 8
    assert 0 < compared[-1] < 8
    assert compared == sorted(compared, reverse=True)


def test_scores_of_a_set_do_not_depend_on_the_other_sets(scorer):
    x, labels = faulty_machines()
    together = scored(scorer, x, labels)
    assert not together.in_evidence.all()
    for i in range(8):
        own = labels == i
        alone = scored(scorer, x[own], torch.zeros_like(labels[own]))
        assert torch.equal(alone.in_evidence, together.in_evidence[own])
        torch.testing.assert_close(alone.scores, together.scores[own], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_thresholds_of_sets_have_their_rate_whatever_the_seed(scorer, seed):
    """All sets share the errors of the draws, so these do not average out over sets."""
    evidence = scored(scorer, *faulty_machines()).evidence
    nulls = replace(scorer, seed=seed).null_distributions(evidence, batch=False, rate=0.01)
    new = replace(scorer, seed=99).draws(evidence, 20_000).numpy()
    for rate, tolerance in ((0.01, 0.004), (0.05, 0.01)):
        below = [(row < one.threshold(rate)).mean() for row, one in zip(new, nulls, strict=True)]
        assert sum(below) / len(below) == pytest.approx(rate, abs=tolerance)
