import math

import pytest
import torch
from tasks.machines import latents_of, machine_model, machines

from bruno.data.synthetic import simulate_machines
from bruno.process import Evidence
from bruno.tasks.anomaly import leave_one_out_scores
from bruno.tasks.calibration import fixed_cutoffs
from bruno.tasks.detector import Detector
from bruno.tasks.groups import Groups
from bruno.tasks.metrics import roc_auc
from bruno.tasks.robust_evidence import (
    Cutoffs,
    batch_scores,
    evidence_within,
    scores_within,
    typical_elements,
    with_typical,
)
from bruno.tasks.stream_evidence import START, EncodedSets, StreamEvidence, scores_of_the_rest, stream_scores

CUTOFFS = Cutoffs((-4.0, -2.0, -1.0, 0.0), 0.01)


@pytest.fixture(scope="module")
def model():
    return machine_model()


@pytest.fixture(scope="module")
def cutoffs(model) -> Cutoffs:
    groups = Groups.of(model, machines(30, 20, seed=9), generator=torch.Generator().manual_seed(0))
    return fixed_cutoffs(model, groups)


def test_cutoffs_depend_on_the_count_and_the_last_holds_for_larger_ones():
    assert CUTOFFS.at(torch.tensor([0, 1, 2, 4, 99])).tolist() == [-math.inf, -4, -2, 0, 0]
    for wrong in ((), (math.nan,)):
        with pytest.raises(ValueError, match=r"`by_count` .*got \("):
            Cutoffs(wrong)


def test_the_evidence_within_a_mask_matches_the_elements_inside():
    z, inside = torch.randn(3, 9, 2), torch.rand(3, 9) < 0.6
    found = evidence_within(z, inside)
    for i in range(3):
        expected = Evidence.of(z[i, inside[i]])
        assert found.count[i] == expected.count
        torch.testing.assert_close(found.mean[i], expected.mean)
        torch.testing.assert_close(found.scatter[i], expected.scatter)
    assert evidence_within(z, torch.zeros(3, 9, dtype=torch.bool)).mean.abs().max() == 0


def test_scores_within_a_set_are_given_all_others_inside(model):
    x = machines(2, 7, seed=1).elements[:7]
    z, inside = model.latents(x), torch.tensor([True, False, True, True, False, True, True])
    found = scores_within(model, z, inside)
    for i in range(7):
        others = inside.clone()
        others[i] = False
        expected = model.condition(x[others]).score(x[i])
        torch.testing.assert_close(found[i], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_most_elements_of_a_clean_set_are_typical_and_a_cluster_of_outliers_is_not(model, cutoffs):
    clean = latents_of(model, machines(20, 12, seed=2))
    assert typical_elements(model, clean, cutoffs).double().mean() > 0.95
    mixed = clean.clone()
    mixed[:, :3] = clean.roll(1, 0)[:, :3]  # three of twelve, all of one other machine
    counts = typical_elements(model, mixed, cutoffs)
    assert counts[:, :3].double().mean() < 0.3
    assert counts[:, 3:].double().mean() > 0.9


def test_unusable_elements_never_count_and_pairs_always_do(model):
    z = latents_of(model, machines(4, 6, seed=3))
    usable = torch.tensor([True] * 4 + [False] * 2).expand(4, 6)
    counts = typical_elements(model, z, Cutoffs((-math.inf,)), usable)
    assert torch.equal(counts, usable)
    assert typical_elements(model, z[:, :2], Cutoffs((math.inf,))).all()
    assert typical_elements(model, z, Cutoffs((math.inf,))).sum(1).min() >= 3  # never fewer than half


def test_typical_elements_are_put_back_until_nothing_changes_but_half_of_a_set_stays():
    places, usable = torch.arange(6), torch.arange(6) < torch.tensor([[6], [5], [2]])

    def next_to_those_inside(inside, changed):
        return places <= inside.sum(-1, keepdim=True)

    assert torch.equal(with_typical(usable & (places < 3), usable, next_to_those_inside), usable)
    assert torch.equal(with_typical(usable, usable, lambda inside, changed: inside & False), usable)


def test_sets_that_did_not_change_are_left_as_they_are():
    usable, seen = torch.ones(3, 6, dtype=torch.bool), []

    def grown(inside, changed):
        seen.append(changed.tolist())
        found = inside.clone()
        found[changed] = torch.arange(6) <= inside[changed].sum(-1, keepdim=True)
        return found

    inside = torch.arange(6) < torch.tensor([[3], [5], [6]])
    assert with_typical(inside, usable, grown).all()
    assert seen == [[True] * 3, [True, True, False], [True, False, False], [True, False, False]]


def test_the_order_of_a_batch_does_not_matter(model):
    z = latents_of(model, machines(3, 15, seed=4, fault_rate=0.2))
    order = torch.randperm(15)
    scores, counts = batch_scores(model, z, CUTOFFS)
    shuffled, counted = batch_scores(model, z[:, order], CUTOFFS)
    torch.testing.assert_close(shuffled, scores[:, order], rtol=1e-4, atol=1e-4)
    assert torch.equal(counted, counts[:, order])


def test_if_every_element_counts_scores_equal_those_of_whole_sets(model):
    examples = machines(3, 8, seed=5)
    z, x = latents_of(model, examples), examples.elements.view(3, 8, -1)
    torch.testing.assert_close(
        batch_scores(model, z, None)[0], leave_one_out_scores(model, x), rtol=1e-4, atol=1e-4
    )
    plain = stream_scores(model, z, None)
    torch.testing.assert_close(stream_scores(model, z, Cutoffs((-1e9,))), plain, rtol=1e-4, atol=1e-4)
    rest = scores_of_the_rest(
        model, EncodedSets(z, torch.ones(3, 8, dtype=torch.bool), torch.zeros(3, 8)), None
    )
    following = rest.diagonal(dim1=1, dim2=2)[:, 1:]
    torch.testing.assert_close(following, plain[:, 1:], rtol=1e-4, atol=1e-4)
    assert rest[:, 3, :3].isnan().all()


def test_a_stream_recovers_from_a_first_element_that_is_an_outlier(model):
    z = latents_of(model, machines(40, 10, seed=6))
    z[:, 0] = z.roll(1, 0)[:, 0]
    state = StreamEvidence.empty(z.shape[-1], (40,))
    for i in range(10):
        score = state.score(model, z[:, i], model.process.log_prob(z[:, i]))
        state = state.add(model, z[:, i], score, Cutoffs((-3.0,)), torch.ones(40, dtype=torch.bool))
    clean = Evidence.of(z[:, 1:])
    assert ((state.evidence.mean - clean.mean).abs().mean(1) < 0.3).double().mean() > 0.85


def test_first_elements_are_forgotten_once_they_are_no_longer_reconsidered(model):
    z = latents_of(model, machines(2, START + 3, seed=7))
    state = StreamEvidence.empty(z.shape[-1], (2,))
    for i in range(START + 3):
        score = state.score(model, z[:, i], model.process.log_prob(z[:, i]))
        state = state.add(model, z[:, i], score, CUTOFFS, torch.ones(2, dtype=torch.bool))
        assert state.first.shape[-2] == (i + 1 if i + 1 < START else 0)
    assert state.position == START + 3


@pytest.mark.slow
def test_excluding_outliers_makes_them_easier_to_find(model, cutoffs):
    examples, fault = simulate_machines(60, 30, fault_rate=0.3, seed=8)
    z, faulty = latents_of(model, examples), fault.view(60, 30) > 0

    def area(scores: torch.Tensor) -> float:
        return roc_auc(faulty[:, 1:].flatten(), -scores[:, 1:].flatten()).item()

    assert area(stream_scores(model, z, cutoffs)) > area(stream_scores(model, z, None))
    assert area(batch_scores(model, z, cutoffs)[0]) > area(batch_scores(model, z, None)[0])


@pytest.mark.slow
def test_a_window_is_the_latest_elements_reconsidered_unless_all_count(model, cutoffs):
    z = latents_of(model, machines(2, 30, seed=4))[0]
    state = StreamEvidence.empty(z.shape[-1])
    for i, one in enumerate(z):
        doubtful = i > 10
        score = torch.tensor(-math.inf if doubtful else math.inf)
        state = state.add(model, one, score, cutoffs, torch.tensor(True), window=7)
        latest = z[max(0, i - 6) : i + 1]
        every = torch.ones(len(latest), dtype=torch.bool)
        inside = typical_elements(model, latest, cutoffs) if doubtful else every
        expected = evidence_within(latest, inside)
        assert state.evidence.count == expected.count
        torch.testing.assert_close(state.evidence.mean, expected.mean)
        torch.testing.assert_close(state.evidence.scatter, expected.scatter)
    assert state.position == 30


def test_a_window_forgets_a_posterior_once_it_is_full(model):
    z = latents_of(model, machines(2, 30, seed=4))[0]
    state = StreamEvidence.of(Evidence.of(z[:10]))
    counts = []
    for one in z[10:20]:
        state = state.add(model, one, torch.tensor(0.0), None, torch.tensor(True), window=7)
        counts.append(int(state.evidence.count))
    assert counts == [11, 12, 13, 14, 15, 16, 7, 7, 7, 7]


def test_a_window_has_at_most_as_many_elements_as_a_state_keeps(model):
    for wrong in (1, START + 1):
        with pytest.raises(ValueError, match=rf"`window` .*got {wrong}"):
            Detector(model, window=wrong)
