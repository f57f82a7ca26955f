import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bruno import Bruno, FlowConfig, ModelConfig
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.tasks.anomaly import (
    Detector,
    Judgement,
    StreamSummary,
    Thresholds,
    batch_scores,
    calibrate,
    calibrate_batch,
    density_floor,
    judge_batch,
    leave_one_out_scores,
    online_scores,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def thresholds(digits_model, learnt_digits) -> Thresholds:
    sampler = SetSampler(learnt_digits)
    return calibrate(digits_model, sampler, rate=0.05, set_size=12, sets=300, generator=seeded())


def with_last_of_another_class(examples: Examples, sets: int, n: int) -> torch.Tensor:
    support, query = SetSampler(examples).episodes(sets, 2, n - 1, seeded())
    return torch.cat([support[:, 0], query[:, 1:]], 1)


def half_of(examples: Examples, which: int) -> Examples:
    return Examples(examples.elements[which::2], examples.labels[which::2], examples.names)


# --- scores ----------------------------------------------------------------------------------------------


def test_online_scores_are_those_of_the_posteriors_of_prefixes(digits_model, unseen_digits):
    x = SetSampler(unseen_digits).sets(2, 6, seeded())
    scores = online_scores(digits_model, x)
    assert (scores[:, 0] == 0).all()
    with torch.no_grad():
        for i in range(1, 6):
            expected = digits_model.condition(x[:, :i]).score(x[:, i])
            torch.testing.assert_close(scores[:, i], expected, rtol=1e-4, atol=1e-3)


def test_leave_one_out_scores_are_those_of_the_posteriors_of_all_others(digits_model, unseen_digits):
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
        watched = torch.tensor([judgement.score for judgement in Detector(model).watch(x)])
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
    watched = torch.tensor([judgement.score for judgement in Detector(digits_model).watch(x)])
    torch.testing.assert_close(watched, online_scores(digits_model, x), rtol=1e-4, atol=1e-3)


def test_each_element_is_judged_before_the_next_is_requested(digits_model, unseen_digits):
    requested = []

    def stream():
        for place, x in enumerate(unseen_digits.elements):
            requested.append(place)
            yield x

    watch = Detector(digits_model).watch(stream())
    assert requested == []
    for place in range(5):
        assert next(watch).seen == place
        assert requested == list(range(place + 1))


def test_the_state_of_a_stream_has_constant_size(digits_model, unseen_digits):
    def size(posterior) -> int:
        evidence = posterior.evidence
        return sum(t.untyped_storage().nbytes() for t in (evidence.count, evidence.mean, evidence.scatter))

    detector, posterior, sizes = Detector(digits_model), digits_model.prior(), []
    for x in unseen_digits.elements[:40]:
        posterior = detector.step(posterior, x).posterior
        sizes.append(size(posterior))
    assert int(posterior.evidence.count) == 40
    assert sizes[-1] == sizes[0]


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
    detector = Detector(digits_model)
    whole = [judgement.score for judgement in detector.watch(x)]
    known = digits_model.condition(x[:7]).detach()
    rest = [judgement.score for judgement in detector.watch(x[7:], known)]
    assert rest == pytest.approx(whole[7:], rel=1e-4, abs=1e-3)


def test_outliers_kept_out_are_excluded_from_the_evidence(digits_model, learnt_digits, thresholds):
    support, _ = SetSampler(learnt_digits).episodes(1, 2, 6, seeded())
    detector = Detector(digits_model, thresholds, keep_out=True)
    posterior, kept = digits_model.prior(), []
    for element in support.flatten(1, 2)[0]:
        judgement, posterior = detector.step(posterior, element)
        if not judgement.outlier:
            kept.append(element)
    assert 4 <= len(kept) <= 8
    expected = digits_model.condition(torch.stack(kept)).evidence
    assert int(posterior.evidence.count) == len(kept)
    torch.testing.assert_close(posterior.evidence.mean, expected.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(posterior.evidence.scatter, expected.scatter, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_keeping_outliers_out_helps_to_detect_those_that_follow(digits_model, learnt_digits, thresholds):
    """Six of one class, six of another, repeated: with the first outliers in the evidence, the others fit."""
    support, _ = SetSampler(learnt_digits).episodes(6, 2, 12, seeded())
    streams = torch.cat([support[:, which, part] for part in (slice(6), slice(6, 12)) for which in (0, 1)], 1)

    def ranked_correctly(keep_out: bool) -> float:
        detector = Detector(digits_model, thresholds, keep_out=keep_out)
        scores = torch.tensor([[judgement.score for judgement in detector.watch(x)] for x in streams])
        return (scores[:, 12:18, None] > scores[:, None, 18:]).double().mean().item()

    kept_out = ranked_correctly(keep_out=True)
    assert kept_out > 0.8
    assert kept_out > ranked_correctly(keep_out=False) + 0.15


def test_nothing_is_judged_during_warm_up(digits_model, unseen_digits):
    strict = Detector(digits_model, threshold=math.inf, keep_out=True, warm_up=3)
    judged = list(strict.watch(unseen_digits.elements[:6]))
    assert [j.outlier for j in judged] == [False] * 3 + [True] * 3
    assert [j.threshold for j in judged] == [None] * 3 + [math.inf] * 3
    assert [j.seen for j in judged] == [0, 1, 2, 3, 3, 3]
    assert judged[0].score == 0


def test_thresholds_depend_on_the_count_and_the_last_holds_for_larger_ones(digits_model, unseen_digits):
    thresholds = Thresholds((-3.0, -2.0, -1.0), rate=0.1, sets=100)
    judged = list(Detector(digits_model, thresholds).watch(unseen_digits.elements[:6]))
    assert [j.threshold for j in judged] == [None, -3.0, -2.0, -1.0, -1.0, -1.0]
    assert all(j.outlier == (j.score < j.threshold) for j in judged[1:])


# --- calibration -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_other_clean_sets_have_the_chosen_false_alarm_rate(digits_model, unseen_digits, rate):
    calibrated, other = (SetSampler(half_of(unseen_digits, which)) for which in (0, 1))
    thresholds = calibrate(digits_model, calibrated, rate=rate, set_size=8, sets=600, generator=seeded())
    scores = online_scores(digits_model, other.sets(600, 8, seeded(1)))
    alarms = (scores[:, 1:] < torch.tensor(thresholds.by_count)).double()
    assert alarms.mean().item() == pytest.approx(rate, abs=0.2 * rate + 0.01)
    assert (alarms.mean(0) - rate).abs().max() < 0.4 * rate + 0.02


def test_a_threshold_is_an_order_statistic_of_clean_scores(digits_model, unseen_digits, monkeypatch):
    """k = 5 of 99 sets at a rate of 0.05: a new set has each of the 100 ranks with equal probability."""
    clean = torch.stack([torch.randperm(99, generator=seeded(i)) for i in range(3)], 1).float()
    monkeypatch.setattr("bruno.tasks.anomaly._scores_of_clean_sets", lambda *arguments: clean)
    found = calibrate(
        digits_model, SetSampler(unseen_digits), rate=0.05, set_size=3, sets=99, generator=seeded()
    )
    assert found.by_count == (4.0, 4.0)  # the fifth smallest of 0 to 98


def test_the_floor_is_twice_as_far_below_the_median_as_the_lowest_clean_element():
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=0)))
    rows = torch.randn(41, 2).double()
    model.initialise(rows)
    sampler = SetSampler(Examples(rows, torch.zeros(41, dtype=torch.long), ("a",)))
    known = model.prior().log_prob(rows).sort().values
    floor = density_floor(model, sampler, generator=seeded())
    assert floor == pytest.approx((known[0] - (known[20] - known[0])).item())


def test_calibration_encodes_each_element_once(digits_model, unseen_digits, monkeypatch):
    encoded, original = [], digits_model.encode

    def counting(x, *arguments, **settings):
        encoded.append(len(x))
        return original(x, *arguments, **settings)

    monkeypatch.setitem(vars(digits_model), "encode", counting)
    reports = []
    calibrate(
        digits_model,
        SetSampler(unseen_digits, rotations=True),
        rate=0.1,
        set_size=8,
        sets=400,
        generator=seeded(),
        progress=lambda *report: reports.append(report),
    )
    assert sum(encoded) == reports[-1][0] == reports[-1][1] <= 4 * len(unseen_digits) < 400 * 8


def test_a_batch_threshold_has_the_chosen_false_alarm_rate(digits_model, unseen_digits):
    calibrated, others = (SetSampler(half_of(unseen_digits, which)) for which in (0, 1))
    threshold = calibrate_batch(digits_model, calibrated, rate=0.1, set_size=8, sets=300, generator=seeded())
    alarms = leave_one_out_scores(digits_model, others.sets(300, 8, seeded(1))) < threshold
    assert 0.05 < alarms.double().mean() < 0.15


def test_a_calibrated_detector_finds_outliers_with_few_false_alarms(digits_model, learnt_digits, thresholds):
    x = with_last_of_another_class(learnt_digits, 15, 10)
    detector = Detector(digits_model, thresholds)
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
    known = Detector(model, floor=floor).condition_on_typical(torch.cat([glitch, rows[:8]]))
    assert known.evidence.count == 8
    torch.testing.assert_close(known.evidence.mean, model.condition(rows[:8]).evidence.mean)
    alone = leave_one_out_scores(model, rows[:8])
    scores, out_of_distribution = batch_scores(model, stream, floor)
    assert out_of_distribution.nonzero().flatten().tolist() == [0, 6]
    torch.testing.assert_close(scores[~out_of_distribution], alone)
    torch.testing.assert_close(batch_scores(model, stream).scores, leave_one_out_scores(model, stream))


# --- batches and summaries -------------------------------------------------------------------------------


def test_a_batch_is_judged_by_its_scores(digits_model, learnt_digits):
    x = with_last_of_another_class(learnt_digits, 1, 10)[0]
    scores = leave_one_out_scores(digits_model, x)
    threshold = scores.sort().values[1].item()
    judged = judge_batch(digits_model, x, threshold)
    assert [j.score for j in judged] == scores.tolist()
    assert [j.outlier for j in judged] == [score < threshold for score in scores.tolist()]
    assert {(j.seen, j.threshold, j.out_of_distribution) for j in judged} == {(9, threshold, False)}


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
    assert [(name, j.score) for name, j in summary.latest] == [("number 4", 2.0), ("number 5", 5.0)]
    assert summary.first_position == 4


@given(st.lists(st.integers(-20, 20).map(float), unique=True), st.integers(0, 5))
def test_a_summary_keeps_the_lowest_outliers_and_the_highest_inliers(scores, extremes):
    summary = summary_of(scores, extremes=extremes)
    outliers = sorted(score for score in scores if score < 0)[:extremes]
    inliers = sorted((score for score in scores if score >= 0), reverse=True)[:extremes]
    for kept, expected in ((summary.lowest_outliers, outliers), (summary.highest_inliers, inliers)):
        assert sorted(element.judgement.score for element in kept) == sorted(expected)
        assert [element.position for element in kept] == sorted(element.position for element in kept)
        for position, name, x, judgement in kept:
            assert x.item() == scores[position - 1] == judgement.score
            assert name == f"number {position}"
    assert len(summary.latest) == summary.count == len(scores)


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rate": 0.0}, r"`rate` .*got 0\.0"),
        ({"rate": 1.0}, r"`rate` .*got 1\.0"),
        ({"rate": 0.01, "sets": 98}, r"`sets` .*99 .*`rate` of 0\.01; got 98"),
        ({"set_size": 1}, r"`set_size` .*2.*got 1"),
        ({"set_size": 500}, r"`n` .*174.*got 500"),
    ],
)
def test_impossible_calibrations_raise(digits_model, unseen_digits, settings, message):
    with pytest.raises(ValueError, match=message):
        calibrate(
            digits_model,
            SetSampler(unseen_digits),
            **{"rate": 0.1, "set_size": 4, "sets": 20, "generator": seeded(), **settings},
        )


def test_a_batch_of_one_element_cannot_be_calibrated(digits_model, unseen_digits):
    with pytest.raises(ValueError, match=r"`set_size` .*2.*got 1"):
        calibrate_batch(
            digits_model, SetSampler(unseen_digits), rate=0.1, set_size=1, sets=9, generator=seeded()
        )


def test_invalid_elements_and_posteriors_raise(digits_model, unseen_digits):
    x = unseen_digits.elements
    with pytest.raises(ValueError, match=r"`x` .*\(1, 8, 8\); got \(2, 1, 8, 8\)"):
        next(Detector(digits_model).watch([x[:2]]))
    with pytest.raises(ValueError, match=r"`posterior` .*one set; got .*\(2,\)"):
        Detector(digits_model).step(digits_model.condition(x[:6].view(2, 3, 1, 8, 8)), x[0])
    other = Bruno.from_config(digits_model.config).requires_grad_(False)
    with pytest.raises(ValueError, match=r"`posterior` .*model.*other weights"):
        Detector(digits_model).step(other.prior(), x[0])
    with pytest.raises(ValueError, match=r"`warm_up` .*1.*got 0"):
        Detector(digits_model, warm_up=0)
    with pytest.raises(ValueError, match=r"`x` .*2; got shape \(1, 1, 8, 8\)"):
        leave_one_out_scores(digits_model, x[:1])
    with pytest.raises(ValueError, match=r"`x` .*1; got shape \(1, 8, 8\)"):
        online_scores(digits_model, x[0])


@pytest.mark.usefixtures("without_shape_checks")
def test_a_threshold_is_a_number_or_the_result_of_a_calibration(digits_model):
    with pytest.raises(TypeError, match=r"`threshold` .*`calibrate`.*; got '3'"):
        Detector(digits_model, "3")
    with pytest.raises(ValueError, match=r"`threshold` .*got nan"):
        Detector(digits_model, math.nan)
    Detector(digits_model, torch.tensor(1.5))


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("floor", [math.nan, math.inf])
def test_a_floor_that_no_element_can_be_compared_with_is_rejected(floor):
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=2, units=8)))
    with pytest.raises(ValueError, match=rf"`floor` .*got {floor}"):
        Detector(model, floor=floor)
