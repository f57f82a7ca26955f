import copy
import math
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tasks.machines import machine_model, machines

from bruno import Bruno, FlowConfig, ModelConfig
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.tasks.anomaly import Judgement, density_floor, judge_batch, leave_one_out_scores, online_scores
from bruno.tasks.calibration import GroupCalibration, fixed_cutoffs
from bruno.tasks.detector import Detector
from bruno.tasks.groups import Groups
from bruno.tasks.stream_evidence import START
from bruno.tasks.stream_summary import StreamSummary


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def calibration(digits_model, learnt_digits) -> GroupCalibration:
    groups = Groups.of(digits_model, learnt_digits, generator=seeded())
    return GroupCalibration(digits_model, groups, fixed_cutoffs(digits_model, groups), -math.inf, "", True)


def calibrated(calibration: GroupCalibration, rate: float = 0.05, **settings: bool) -> Detector:
    return Detector.calibrated(calibration, rate=rate, **settings)


def with_last_of_another_class(examples: Examples, sets: int, n: int) -> torch.Tensor:
    support, query = SetSampler(examples).episodes(sets, 2, n - 1, seeded())
    return torch.cat([support[:, 0], query[:, 1:]], 1)


# --- scores ----------------------------------------------------------------------------------------------


def test_online_scores_match_posteriors_given_prefixes(digits_model, unseen_digits):
    x = SetSampler(unseen_digits).sets(2, 6, seeded())
    scores = online_scores(digits_model, x)
    assert (scores[:, 0] == 0).all()
    with torch.no_grad():
        for i in range(1, 6):
            expected = digits_model.condition(x[:, :i]).score(x[:, i])
            torch.testing.assert_close(scores[:, i], expected, rtol=1e-4, atol=1e-3)


def test_leave_one_out_scores_match_posteriors_given_all_others(digits_model, unseen_digits):
    x = SetSampler(unseen_digits).sets(2, 6, seeded())
    scores = leave_one_out_scores(digits_model, x)
    with torch.no_grad():
        for i in range(6):
            others = torch.cat([x[:, :i], x[:, i + 1 :]], 1)
            expected = digits_model.condition(others).score(x[:, i])
            torch.testing.assert_close(scores[:, i], expected, rtol=1e-4, atol=1e-3)


def test_placeholders_for_missing_values_have_the_lowest_score():
    model = Bruno.from_config(ModelConfig((3,), 0, flow=FlowConfig("dense", couplings=2, units=16)))
    x = torch.randn(12, 3)
    model.initialise(x)
    for placeholder in (1e20, 1e37, -3e38):
        x[7] = placeholder
        watched = torch.tensor([judgement.score for judgement in Detector(model, count_all=True).watch(x)])
        torch.testing.assert_close(online_scores(model, x), watched, rtol=1e-3, atol=1e-3)
        for scores in (watched, leave_one_out_scores(model, x)):
            assert scores.isfinite().all()
            assert scores.argmin() == 7


def test_an_inserted_outlier_has_the_lowest_score_in_most_sets(digits_model, learnt_digits, unseen_digits):
    def found(scores: torch.Tensor) -> float:
        return (scores.argmin(1) == 9).double().mean().item()

    of_learnt = with_last_of_another_class(learnt_digits, 100, 10)
    assert found(leave_one_out_scores(digits_model, of_learnt)) > 0.85
    assert found(online_scores(digits_model, of_learnt)) > 0.7
    of_unseen = with_last_of_another_class(unseen_digits, 100, 10)
    assert found(leave_one_out_scores(digits_model, of_unseen)) > 0.7
    assert found(online_scores(digits_model, of_unseen)) > 0.6


# --- a stream --------------------------------------------------------------------------------------------


def test_a_stream_has_the_online_scores_of_the_set(digits_model, unseen_digits):
    x = SetSampler(unseen_digits).sets(1, 12, seeded())[0]
    watched = torch.tensor([judgement.score for judgement in Detector(digits_model, count_all=True).watch(x)])
    torch.testing.assert_close(watched, online_scores(digits_model, x), rtol=1e-4, atol=1e-3)


def test_each_element_is_judged_before_the_next_is_requested(digits_model, unseen_digits):
    requested = []

    def stream():
        for place, x in enumerate(unseen_digits.elements):
            requested.append(place)
            yield x

    watch = Detector(digits_model, count_all=True).watch(stream())
    assert requested == []
    for place in range(5):
        assert next(watch).seen == place
        assert requested == list(range(place + 1))


def test_the_state_of_a_stream_has_bounded_size(digits_model, unseen_digits):
    def size(state) -> int:
        evidence = state.evidence
        tensors = (evidence.count, evidence.mean, evidence.scatter, state.first, state.usable)
        return sum(t.numel() * t.element_size() for t in tensors)

    detector, sizes = Detector(digits_model, -math.inf), []
    state = detector.begin()
    for x in unseen_digits.elements[:40]:
        state = detector.step(state, x).state
        sizes.append(size(state))
    assert int(state.evidence.count) == 40
    assert max(sizes) < size(detector.begin()) + START * digits_model.dim * 9
    assert len(set(sizes[START:])) == 1


def test_elements_of_a_stream_are_released(digits_model, unseen_digits):
    alive = []

    def stream():
        for x in unseen_digits.elements[:20]:
            x = x.clone()
            alive.append(weakref.ref(x))
            yield x

    for _ in Detector(digits_model).watch(stream()):
        assert sum(element() is not None for element in alive) <= 2


def test_a_stream_continues_from_a_posterior(digits_model, unseen_digits):
    x = SetSampler(unseen_digits).sets(1, 12, seeded())[0]
    detector = Detector(digits_model, count_all=True)
    whole = [judgement.score for judgement in detector.watch(x)]
    known = digits_model.condition(x[:7]).detach()
    rest = [judgement.score for judgement in detector.watch(x[7:], known)]
    assert rest == pytest.approx(whole[7:], rel=1e-4, abs=1e-3)


def test_outliers_are_excluded_from_the_evidence_by_default(digits_model, learnt_digits, calibration):
    support, _ = SetSampler(learnt_digits).episodes(1, 2, 40, seeded())
    stream = torch.cat([support[0, 0, :30], support[0, 1, :6]])
    detector = calibrated(calibration)
    state = detector.begin()
    for x in stream[:START]:
        state = detector.step(state, x).state
    kept, before = [], state.evidence
    for x in stream[START:]:
        _, state, z, counts = detector.step(state, x)
        kept += [z] * counts
    assert 5 <= len(kept) <= 12
    expected = before.add(torch.stack(kept))
    assert int(state.evidence.count) == int(expected.count)
    torch.testing.assert_close(state.evidence.mean, expected.mean)
    torch.testing.assert_close(state.evidence.scatter, expected.scatter)


@pytest.mark.long
def test_excluding_outliers_helps_to_detect_those_that_follow(digits_model, learnt_digits, calibration):
    """Six of one class, six of another, repeated: with the first outliers in the evidence, the others fit."""
    support, _ = SetSampler(learnt_digits).episodes(6, 2, 12, seeded())
    streams = torch.cat([support[:, which, part] for part in (slice(6), slice(6, 12)) for which in (0, 1)], 1)

    def ranked_correctly(count_all: bool) -> float:
        detector = calibrated(calibration, count_all=count_all)
        scores = torch.tensor([[judgement.score for judgement in detector.watch(x)] for x in streams])
        return (scores[:, 12:18, None] > scores[:, None, 18:]).double().mean().item()

    excluded = ranked_correctly(count_all=False)
    assert excluded > 0.8
    assert excluded > ranked_correctly(count_all=True) + 0.15


def test_nothing_is_judged_during_warm_up(digits_model, unseen_digits):
    strict = Detector(digits_model, threshold=math.inf, count_all=True, warm_up=3)
    judged = list(strict.watch(unseen_digits.elements[:6]))
    assert [j.outlier for j in judged] == [False] * 3 + [True] * 3
    assert [j.threshold for j in judged] == [None] * 3 + [math.inf] * 3
    assert [j.seen for j in judged] == [0, 1, 2, 3, 4, 5]
    assert judged[0].score == 0


def test_an_element_is_an_outlier_if_its_p_value_is_at_most_the_rate(calibration, unseen_digits):
    judged = list(calibrated(calibration, rate=0.3).watch(unseen_digits.elements[:30]))
    assert judged[0].p is judged[0].basis is judged[0].threshold is None
    for judgement in judged[1:]:
        assert judgement.basis == "exact"  # seven classes support 25 %
        assert judgement.outlier == (judgement.p <= 0.3) == (judgement.score < judgement.threshold)
    at_a_low_rate = list(calibrated(calibration).watch(unseen_digits.elements[:9]))[1:]
    assert {judgement.basis for judgement in at_a_low_rate} == {"estimated"}


# --- out-of-distribution elements ------------------------------------------------------------------------


def test_the_floor_is_twice_as_far_below_the_median_as_the_lowest_clean_element():
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=0)))
    rows = torch.randn(41, 2).double()
    model.initialise(rows)
    sampler = SetSampler(Examples(rows, torch.zeros(41, dtype=torch.long), ("a",)))
    known = model.prior().log_prob(rows).sort().values
    floor = density_floor(model, sampler, generator=seeded())
    assert floor == pytest.approx((known[0] - (known[20] - known[0])).item())


@pytest.mark.parametrize(("spread", "lower"), [(0.5, False), (2.0, True), (99.0, False)])
def test_the_floor_is_as_low_as_for_clean_elements_unless_most_of_them_are_below_it(spread, lower):
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=0)))
    rows, label = torch.randn(41, 2).double(), torch.zeros(41, dtype=torch.long)
    model.initialise(rows)
    trained, clean = (SetSampler(Examples(x, label, ("a",))) for x in (rows, spread * torch.randn(41, 2)))
    floor = density_floor(model, trained, generator=seeded(), clean=clean)
    assert (floor < density_floor(model, trained, generator=seeded())) == lower
    if lower:
        assert floor == density_floor(model, clean, generator=seeded())


def test_a_calibrated_detector_finds_outliers_with_few_false_alarms(learnt_digits, calibration):
    x = with_last_of_another_class(learnt_digits, 15, 10)
    detector = calibrated(calibration)
    judged = torch.tensor([[j.outlier for j in detector.watch(elements)] for elements in x])
    assert judged[:, -1].double().mean() > 0.8
    assert judged[:, :-1].double().mean() < 0.1


def test_out_of_distribution_elements_are_excluded_from_the_evidence():
    torch.manual_seed(0)
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=0)))
    rows = torch.randn(40, 2).double()
    model.initialise(rows)
    clean = Examples(rows, torch.arange(40) % 4, ("a", "b", "c", "d"))
    floor = density_floor(model, SetSampler(clean), generator=seeded())
    glitch = torch.full((1, 2), 99.0).double()
    stream = torch.cat([glitch, rows[:5], glitch, rows[5:8]])
    judged = list(Detector(model, -1e9, floor=floor).watch(stream))
    assert [j.out_of_distribution for j in judged] == [j.outlier for j in judged]
    assert [i for i, j in enumerate(judged) if j.out_of_distribution] == [0, 6]
    assert [j.seen for j in judged] == [0, 0, 1, 2, 3, 4, 5, 5, 6, 7]
    known = Detector(model, -1e9, floor=floor).after_typical(torch.cat([glitch, rows[:8]]))
    assert known.evidence.count == 8
    torch.testing.assert_close(known.evidence.mean, model.condition(rows[:8]).evidence.mean)
    alone = leave_one_out_scores(model, rows[:8])
    judged = judge_batch(model, stream, -1e9, floor=floor)
    assert [i for i, j in enumerate(judged) if j.out_of_distribution] == [0, 6]
    inliers = torch.tensor([j.score for j in judged if not j.out_of_distribution])
    torch.testing.assert_close(inliers, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_row_is_less_typical_by_its_shortfall_of_density():
    """The score given a set is log p(x | set) − max(log p(x), reference)."""
    model, rows = machine_model(), machines(2, 20, seed=1).elements[:20]
    rows = rows[model.prior().log_prob(rows).argsort()]  # the first has a shortfall
    log_prob = model.prior().log_prob(rows)
    reference = log_prob.median().item()
    less = (reference - log_prob).clamp(min=0)
    assert 0 < (less > 0).sum() < 20
    plain, judged = (judge_batch(model, rows, -1e9, reference=level) for level in (-math.inf, reference))
    scores = torch.tensor([[one.score for one in some] for some in (plain, judged)])
    torch.testing.assert_close(scores[0] - scores[1], less.float(), rtol=1e-4, atol=1e-3)
    streams = [list(Detector(model, -1e9, reference=level).watch(rows)) for level in (-math.inf, reference)]
    scores = torch.tensor([[one.score for one in some] for some in streams])
    torch.testing.assert_close(scores[0] - scores[1], less.float(), rtol=1e-4, atol=1e-3)
    assert scores[0, 0] == pytest.approx(0, abs=1e-4)  # without evidence, only the shortfall is left


# --- batches and summaries -------------------------------------------------------------------------------


def test_a_batch_is_judged_by_its_scores(digits_model, learnt_digits):
    x = with_last_of_another_class(learnt_digits, 1, 10)[0]
    scores = leave_one_out_scores(digits_model, x)
    threshold = scores.sort().values[1].item()
    judged = judge_batch(digits_model, x, threshold, count_all=True)
    assert [j.score for j in judged] == scores.tolist()
    assert [j.outlier for j in judged] == [score < threshold for score in scores.tolist()]
    assert {(j.seen, j.threshold, j.out_of_distribution) for j in judged} == {(9, threshold, False)}


def test_a_batch_is_encoded_once(digits_model, learnt_digits, monkeypatch):
    encode, encoded = Bruno.encode, []
    monkeypatch.setattr(
        Bruno, "encode", lambda model, x, *_, **__: encoded.append(len(x)) or encode(model, x)
    )
    judge_batch(digits_model, learnt_digits.elements[:6], 0.0, floor=-1e9, reference=-1e9)
    assert sum(encoded) == 6


def test_an_out_of_distribution_element_of_a_batch_is_an_outlier_at_any_threshold():
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=0)))
    rows = torch.randn(9, 2).double()
    model.initialise(rows)
    rows[4] = 99.0
    judged = judge_batch(model, rows, -math.inf, floor=-50.0)
    assert (
        [j.outlier for j in judged] == [j.out_of_distribution for j in judged] == [i == 4 for i in range(9)]
    )
    assert [j.seen for j in judged] == [8 if i == 4 else 7 for i in range(9)]


@pytest.mark.parametrize("clean", [0, 1, 2, 8])
def test_every_row_of_a_machine_that_is_out_of_distribution_is_flagged(clean):
    """A machine that reports in other units has no usable row."""
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=0)))
    rows = torch.randn(9, 2).double()
    model.initialise(rows)
    rows[clean:] += 99.0
    judged = judge_batch(model, rows, -math.inf, floor=-50.0)
    assert [j.out_of_distribution for j in judged] == [j.outlier for j in judged]
    assert [j.out_of_distribution for j in judged] == [i >= clean for i in range(9)]
    assert [j.seen for j in judged] == [clean - (i < clean) for i in range(9)]  # only clean rows are evidence


def test_outliers_of_a_batch_do_not_hide_each_other(learnt_digits, calibration):
    """Four of ten are of one other class: given all others, they fit; given the majority, they do not."""
    model, hidden, found = calibration.model, 0.0, 0.0
    support, _ = SetSampler(learnt_digits).episodes(20, 2, 8, seeded())
    for x in torch.cat([support[:, 0, :6], support[:, 1, :4]], 1):
        plain = torch.tensor([j.score for j in judge_batch(model, x, 0.0, count_all=True)])
        robust = torch.tensor([j.score for j in judge_batch(model, x, 0.0, cutoffs=calibration.cutoffs)])
        hidden += (plain[:6, None] > plain[None, 6:]).double().mean().item() / 20
        found += (robust[:6, None] > robust[None, 6:]).double().mean().item() / 20
    assert found > 0.85
    assert found > hidden + 0.1


def test_a_batch_is_judged_by_p_values_or_by_its_false_discovery_rate(learnt_digits, calibration):
    x = with_last_of_another_class(learnt_digits, 1, 10)[0]
    given = {"calibration": calibration}
    judged = judge_batch(calibration.model, x, rate=0.3, **given)
    assert all(j.basis == "exact" and j.outlier == (j.p <= 0.3) == (j.score < j.threshold) for j in judged)
    assert judged[-1].outlier
    few = judge_batch(calibration.model, x, false_discovery_rate=0.05, **given)
    assert sum(j.outlier for j in few) <= sum(j.outlier for j in judged)
    assert all(j.basis == "estimated" and j.outlier == (j.score < j.threshold) for j in few)
    assert few[0].threshold < min(j.score for j in few if not j.outlier)  # that of the largest flagged p
    none = judge_batch(calibration.model, x, false_discovery_rate=1e-6, **given)
    assert not any(j.outlier for j in none)
    assert all(-math.inf < j.threshold <= j.score for j in none)


def test_a_batch_is_judged_by_everything_that_its_calibration_sets(learnt_digits, calibration):
    x = with_last_of_another_class(learnt_digits, 1, 10)[0]
    strict = replace(calibration, floor=math.inf, _kept={})
    assert all(j.out_of_distribution for j in judge_batch(calibration.model, x, calibration=strict))
    with pytest.raises(ValueError, match=r"`calibration` decides what is flagged; omit `threshold`"):
        judge_batch(calibration.model, x, 0.0, calibration=calibration)
    with pytest.raises(ValueError, match=r"`threshold` or `calibration` must be given"):
        judge_batch(calibration.model, x)
    other = copy.deepcopy(calibration.model)
    with torch.no_grad():
        other.process.mean.add_(1)
    with pytest.raises(ValueError, match=r"`calibration` must be of `model`"):
        judge_batch(other, x, calibration=calibration)


def summary_of(scores: list[float], **settings: int) -> StreamSummary:
    """A summary of elements with these scores: below 0 outliers, below −9 also out-of-distribution."""
    summary = StreamSummary(**settings)
    for position, score in enumerate(scores, start=1):
        judgement = Judgement(score, position - 1, 0.0, score < 0, score < -9)
        summary.add(f"number {position}", torch.tensor([score]), judgement)
    return summary


def test_a_summary_counts_all_and_keeps_the_latest():
    summary = summary_of([3.0, -1.0, -10.0, 2.0, 5.0], latest=2)
    assert (summary.count, summary.outliers, summary.out_of_distribution) == (5, 2, 1)
    assert [(name, j.score) for name, _, j in summary.latest] == [("number 4", 2.0), ("number 5", 5.0)]
    assert summary.latest_positions == [4, 5]


def test_a_summary_knows_the_positions_of_the_latest_elements_in_their_sets():
    summary = StreamSummary(latest=3)
    for i, group in enumerate("aabab"):
        summary.add(str(i), torch.zeros(1), Judgement(0.0, 0, None, False, False), group)
    assert list(zip([one.group for one in summary.latest], summary.latest_positions, strict=True)) == [
        ("b", 1),
        ("a", 3),
        ("b", 2),
    ]


@pytest.mark.slow
@given(st.lists(st.integers(-20, 20).map(float), unique=True), st.integers(0, 5))
def test_a_summary_keeps_the_lowest_outliers_and_the_highest_inliers(scores, extremes):
    summary = summary_of(scores, extremes=extremes)
    outliers = sorted(score for score in scores if score < 0)[:extremes]
    inliers = sorted((score for score in scores if score >= 0), reverse=True)[:extremes]
    for kept, expected in ((summary.most_unusual, outliers), (summary.most_typical, inliers)):
        assert [element.judgement.score for element in kept] == expected
        for element in kept:
            assert element.x.item() == scores[element.position - 1] == element.judgement.score
            assert element.name == f"number {element.position}"
    assert len(summary.latest) == summary.count == len(scores)


def test_out_of_distribution_elements_are_most_unusual_then_those_with_the_lowest_p():
    summary = StreamSummary(extremes=3)
    for score, p, beyond in (
        (-5.0, 0.01, False),
        (9.0, 0.01, True),
        (-1.0, 0.002, False),
        (-9.0, 0.01, False),
    ):
        summary.add("x", torch.zeros(1), Judgement(score, 5, 0.0, True, beyond, p, "estimated"))
    assert [element.judgement.score for element in summary.most_unusual] == [9, -1, -9]


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 1.0, math.nan])
def test_impossible_rates_raise(digits_model, rate):
    with pytest.raises(ValueError, match=rf"`rate` .*got {rate}"):
        Detector(digits_model, rate=rate)


def test_invalid_elements_and_posteriors_raise(digits_model, unseen_digits):
    x = unseen_digits.elements
    with pytest.raises(ValueError, match=r"`x` .*\(1, 8, 8\); got \(2, 1, 8, 8\)"):
        next(Detector(digits_model).watch([x[:2]]))
    with pytest.raises(ValueError, match=r"`posterior` .*one set; got .*\(2,\)"):
        Detector(digits_model).begin(digits_model.condition(x[:6].view(2, 3, 1, 8, 8)))
    other = Bruno.from_config(digits_model.config).requires_grad_(False)
    with pytest.raises(ValueError, match=r"`posterior` .*model.*other weights"):
        Detector(digits_model).begin(other.prior())
    with pytest.raises(ValueError, match=r"`warm_up` .*1.*got 0"):
        Detector(digits_model, warm_up=0)
    with pytest.raises(ValueError, match=r"`x` .*2; got shape \(1, 1, 8, 8\)"):
        leave_one_out_scores(digits_model, x[:1])
    with pytest.raises(ValueError, match=r"`x` .*1; got shape \(1, 8, 8\)"):
        online_scores(digits_model, x[0])


@pytest.mark.usefixtures("without_shape_checks")
def test_a_threshold_is_a_number_or_scores_of_groups(digits_model, calibration):
    with pytest.raises(TypeError, match=r"`threshold` .*got '3'"):
        Detector(digits_model, "3")
    with pytest.raises(ValueError, match=r"`cutoffs` .*got none"):
        Detector(digits_model, calibration.stream())
    with pytest.raises(ValueError, match=r"`threshold` .*got nan"):
        Detector(digits_model, math.nan)
    Detector(digits_model, torch.tensor(1.5))


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("floor", [math.nan, math.inf])
def test_a_floor_that_no_element_can_be_compared_with_is_rejected(floor):
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=2, units=8)))
    with pytest.raises(ValueError, match=rf"`floor` .*got {floor}"):
        Detector(model, floor=floor)
