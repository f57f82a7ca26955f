import math
import weakref

import pytest
import torch

from bruno import Bruno, FlowConfig, ModelConfig
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.tasks.anomaly import (
    Detector,
    Thresholds,
    batch_scores,
    calibrate,
    calibrate_batch,
    density_floor,
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


def test_online_scores_are_the_posteriors_along_prefixes(digits_model, unseen_digits):
    x = SetSampler(unseen_digits).sets(2, 6, seeded())
    scores = online_scores(digits_model, x)
    assert (scores[:, 0] == 0).all()
    with torch.no_grad():
        for i in range(1, 6):
            expected = digits_model.condition(x[:, :i]).score(x[:, i])
            torch.testing.assert_close(scores[:, i], expected, rtol=1e-4, atol=1e-3)


def test_leave_one_out_scores_are_the_posteriors_of_all_others(digits_model, unseen_digits):
    x = SetSampler(unseen_digits).sets(2, 6, seeded())
    scores = leave_one_out_scores(digits_model, x)
    with torch.no_grad():
        for i in range(6):
            others = torch.cat([x[:, :i], x[:, i + 1 :]], 1)
            expected = digits_model.condition(others).score(x[:, i])
            torch.testing.assert_close(scores[:, i], expected, rtol=1e-4, atol=1e-3)


def test_numbers_that_stand_for_missing_ones_score_lowest_of_all():
    model = Bruno.from_config(ModelConfig((3,), 0, flow=FlowConfig("dense", couplings=2, units=16)))
    x = torch.randn(12, 3)
    model.initialise(x)
    for out_of_distribution in (1e20, 1e37, -3e38):
        x[7] = out_of_distribution
        watched = torch.tensor([scored.score for scored in Detector(model).watch(x)])
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


def test_a_stream_is_scored_like_the_finished_set(digits_model, unseen_digits):
    x = SetSampler(unseen_digits).sets(1, 12, seeded())[0]
    watched = torch.tensor([scored.score for scored in Detector(digits_model).watch(x)])
    torch.testing.assert_close(watched, online_scores(digits_model, x), rtol=1e-4, atol=1e-3)


def test_each_element_is_judged_before_the_next_is_asked_for(digits_model, unseen_digits):
    asked = []

    def stream():
        for place, x in enumerate(unseen_digits.elements):
            asked.append(place)
            yield x

    watch = Detector(digits_model).watch(stream())
    assert asked == []
    for place in range(5):
        assert next(watch).seen == place
        assert asked == list(range(place + 1))


def test_what_is_kept_of_a_stream_does_not_grow_with_it(digits_model, unseen_digits):
    def size(posterior) -> int:
        evidence = posterior.evidence
        return sum(t.untyped_storage().nbytes() for t in (evidence.count, evidence.mean, evidence.scatter))

    detector, posterior, sizes = Detector(digits_model), digits_model.prior(), []
    for x in unseen_digits.elements[:40]:
        posterior = detector.step(posterior, x).posterior
        sizes.append(size(posterior))
    assert int(posterior.evidence.count) == 40
    assert sizes[-1] == sizes[0]


def test_no_element_of_a_stream_is_held_on_to(digits_model, unseen_digits):
    alive = []

    def stream():
        for x in unseen_digits.elements[:20]:
            x = x.clone()
            alive.append(weakref.ref(x))
            yield x

    for _ in Detector(digits_model).watch(stream()):
        assert sum(element() is not None for element in alive) <= 2


def test_a_stream_goes_on_from_what_is_known(digits_model, unseen_digits):
    x = SetSampler(unseen_digits).sets(1, 12, seeded())[0]
    detector = Detector(digits_model)
    whole = [scored.score for scored in detector.watch(x)]
    rest = [scored.score for scored in detector.watch(x[7:], digits_model.condition(x[:7]).detach())]
    assert rest == pytest.approx(whole[7:], rel=1e-4, abs=1e-3)


def test_outliers_kept_out_leave_the_evidence_of_the_others(digits_model, learnt_digits, thresholds):
    support, _ = SetSampler(learnt_digits).episodes(1, 2, 6, seeded())
    detector = Detector(digits_model, thresholds, keep_out=True)
    posterior, kept = digits_model.prior(), []
    for element in support.flatten(1, 2)[0]:
        scored, posterior = detector.step(posterior, element)
        if not scored.outlier:
            kept.append(element)
    assert 4 <= len(kept) <= 8
    expected = digits_model.condition(torch.stack(kept)).evidence
    assert int(posterior.evidence.count) == len(kept)
    torch.testing.assert_close(posterior.evidence.mean, expected.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(posterior.evidence.scatter, expected.scatter, rtol=1e-4, atol=1e-4)


def test_keeping_outliers_out_helps_to_tell_those_that_follow(digits_model, learnt_digits, thresholds):
    """Six of a class, six of another, and again: with the first strangers in the evidence they belong."""
    support, _ = SetSampler(learnt_digits).episodes(10, 2, 12, seeded())
    streams = torch.cat([support[:, which, part] for part in (slice(6), slice(6, 12)) for which in (0, 1)], 1)

    def told_apart(keep_out: bool) -> float:
        detector = Detector(digits_model, thresholds, keep_out=keep_out)
        scores = torch.tensor([[scored.score for scored in detector.watch(x)] for x in streams])
        return (scores[:, 12:18, None] > scores[:, None, 18:]).double().mean().item()

    without_strangers = told_apart(keep_out=True)
    assert without_strangers > 0.8
    assert without_strangers > told_apart(keep_out=False) + 0.15


def test_nothing_is_judged_before_the_warm_up_is_over(digits_model, unseen_digits):
    strict = Detector(digits_model, threshold=math.inf, keep_out=True, warm_up=3)
    scored = list(strict.watch(unseen_digits.elements[:6]))
    assert [s.outlier for s in scored] == [False] * 3 + [True] * 3
    assert [s.threshold for s in scored] == [None] * 3 + [math.inf] * 3
    assert [s.seen for s in scored] == [0, 1, 2, 3, 3, 3]
    assert scored[0].score == 0


def test_thresholds_go_by_what_was_seen_and_the_last_holds_on(digits_model, unseen_digits):
    thresholds = Thresholds((-3.0, -2.0, -1.0), rate=0.1, sets=100)
    scored = list(Detector(digits_model, thresholds).watch(unseen_digits.elements[:6]))
    assert [s.threshold for s in scored] == [None, -3.0, -2.0, -1.0, -1.0, -1.0]
    assert all(s.outlier == (s.score < s.threshold) for s in scored[1:])


# --- false alarms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_other_clean_sets_raise_as_many_false_alarms_as_chosen(digits_model, unseen_digits, rate):
    calibrated, other = (SetSampler(half_of(unseen_digits, which)) for which in (0, 1))
    thresholds = calibrate(digits_model, calibrated, rate=rate, set_size=8, sets=600, generator=seeded())
    scores = online_scores(digits_model, other.sets(600, 8, seeded(1)))
    alarms = (scores[:, 1:] < torch.tensor(thresholds.by_count)).double()
    assert alarms.mean().item() == pytest.approx(rate, abs=0.2 * rate + 0.01)
    assert (alarms.mean(0) - rate).abs().max() < 0.4 * rate + 0.02


def test_a_threshold_is_the_score_that_few_clean_sets_fall_below(digits_model, unseen_digits, monkeypatch):
    """k = 5 of 99 sets at a rate of 0.05: one more set is as likely to be in any of the 100 places."""
    told = torch.stack([torch.randperm(99, generator=seeded(i)) for i in range(3)], 1).float()
    monkeypatch.setattr("bruno.tasks.anomaly._of_clean_sets", lambda *arguments: told)
    found = calibrate(
        digits_model, SetSampler(unseen_digits), rate=0.05, set_size=3, sets=99, generator=seeded()
    )
    assert found.by_count == (4.0, 4.0)  # the fifth smallest of 0 to 98


def test_likely_ends_twice_as_far_below_the_middle_as_the_lowest_of_clean_elements(monkeypatch):
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=0)))
    rows = torch.randn(41, 2).double()
    model.initialise(rows)
    sampler = SetSampler(Examples(rows, torch.zeros(41, dtype=torch.long), ("a",)))
    known = model.prior().log_prob(rows).sort().values
    floor = density_floor(model, sampler, generator=seeded())
    assert floor == pytest.approx((known[0] - (known[20] - known[0])).item())


def test_to_calibrate_each_element_is_encoded_once(digits_model, unseen_digits, monkeypatch):
    encoded, original = [], digits_model.encode

    def counting(x, *arguments, **settings):
        encoded.append(len(x))
        return original(x, *arguments, **settings)

    monkeypatch.setattr(digits_model, "encode", counting)
    told = []
    calibrate(
        digits_model,
        SetSampler(unseen_digits, rotations=True),
        rate=0.1,
        set_size=8,
        sets=1000,
        generator=seeded(),
        progress=lambda done, total: told.append((done, total)),
    )
    assert sum(encoded) == told[-1][0] == told[-1][1] <= 4 * len(unseen_digits) < 1000 * 8


def test_a_batch_has_a_threshold_of_its_own(digits_model, unseen_digits):
    calibrated, others = (SetSampler(half_of(unseen_digits, which)) for which in (0, 1))
    limit = calibrate_batch(digits_model, calibrated, rate=0.1, set_size=8, sets=300, generator=seeded())
    alarms = leave_one_out_scores(digits_model, others.sets(300, 8, seeded(1))) < limit
    assert 0.05 < alarms.double().mean() < 0.15


def test_a_calibrated_detector_finds_outliers_at_few_false_alarms(digits_model, learnt_digits, thresholds):
    x = with_last_of_another_class(learnt_digits, 30, 10)
    judged = torch.tensor([[s.outlier for s in Detector(digits_model, thresholds).watch(set_)] for set_ in x])
    assert judged[:, -1].double().mean() > 0.8
    assert judged[:, :-1].double().mean() < 0.1


def test_what_is_absurd_never_counts_as_seen():
    torch.manual_seed(0)
    model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=0)))
    rows = torch.randn(40, 2).double()
    model.initialise(rows)
    clean = Examples(rows, torch.arange(40) % 4, ("a", "b", "c", "d"))
    floor = density_floor(model, SetSampler(clean), generator=seeded())
    glitch = torch.full((1, 2), 99.0).double()
    stream = torch.cat([glitch, rows[:5], glitch, rows[5:8]])
    judged = list(Detector(model, -1e9, floor=floor).watch(stream))
    assert [said.out_of_distribution for said in judged] == [said.outlier for said in judged]
    assert [i for i, said in enumerate(judged) if said.out_of_distribution] == [0, 6]
    assert [said.seen for said in judged] == [0, 0, 1, 2, 3, 4, 5, 5, 6, 7]
    known = Detector(model, floor=floor).condition_on_typical(torch.cat([glitch, rows[:8]]))
    assert known.evidence.count == 8
    torch.testing.assert_close(known.evidence.mean, model.condition(rows[:8]).evidence.mean)
    alone = leave_one_out_scores(model, rows[:8])
    scores, out_of_distribution = batch_scores(model, stream, floor)
    assert out_of_distribution.nonzero().flatten().tolist() == [0, 6]
    torch.testing.assert_close(scores[~out_of_distribution], alone)
    torch.testing.assert_close(batch_scores(model, stream).scores, leave_one_out_scores(model, stream))


# --- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rate": 0.0}, r"`rate` must be between 0 and 1.*got 0\.0"),
        ({"rate": 1.0}, r"`rate` must be between 0 and 1.*got 1\.0"),
        ({"rate": 0.01, "sets": 98}, r"`sets` must be at least 99 for a `rate` of 0\.01; got 98"),
        ({"set_size": 1}, r"`set_size` must be at least 2.*got 1"),
        ({"set_size": 500}, r"`n` must be from 1 to 174.*got 500"),
    ],
)
def test_what_cannot_be_calibrated(digits_model, unseen_digits, asked, message):
    with pytest.raises(ValueError, match=message):
        calibrate(
            digits_model,
            SetSampler(unseen_digits),
            **{"rate": 0.1, "set_size": 4, "sets": 20, "generator": seeded(), **asked},
        )


def test_a_batch_of_one_cannot_be_calibrated(digits_model, unseen_digits):
    with pytest.raises(ValueError, match=r"`set_size` must be at least 2.*got 1"):
        calibrate_batch(
            digits_model, SetSampler(unseen_digits), rate=0.1, set_size=1, sets=9, generator=seeded()
        )


def test_what_cannot_be_judged(digits_model, unseen_digits):
    x = unseen_digits.elements
    with pytest.raises(ValueError, match=r"`x` must be one element of shape \(1, 8, 8\); got \(2, 1, 8, 8\)"):
        next(Detector(digits_model).watch([x[:2]]))
    with pytest.raises(ValueError, match=r"`posterior` must know one set; this one knows a batch of \(2,\)"):
        Detector(digits_model).step(digits_model.condition(x[:6].view(2, 3, 1, 8, 8)), x[0])
    other = Bruno.from_config(digits_model.config).requires_grad_(False)
    with pytest.raises(ValueError, match="`posterior` must be one of the detector's model"):
        Detector(digits_model).step(other.prior(), x[0])
    with pytest.raises(ValueError, match=r"`warm_up` must be at least 1.*got 0"):
        Detector(digits_model, warm_up=0)
    with pytest.raises(ValueError, match=r"n of at least 2; got shape \(1, 1, 8, 8\)"):
        leave_one_out_scores(digits_model, x[:1])
    with pytest.raises(ValueError, match=r"n of at least 1; got shape \(1, 8, 8\)"):
        online_scores(digits_model, x[0])


@pytest.mark.usefixtures("without_shape_checks")
def test_a_threshold_is_a_number_or_what_is_calibrated(digits_model):
    with pytest.raises(TypeError, match=r"`threshold` must be a number, or .* `calibrate` returns; got '3'"):
        Detector(digits_model, "3")
    with pytest.raises(ValueError, match=r"`threshold` must be a number.*got nan"):
        Detector(digits_model, math.nan)
    Detector(digits_model, torch.tensor(1.5))
