"""A stream for every key: rows of many sets, in batches of any size, with bounded memory."""

import dataclasses

import numpy as np
import pytest
import torch
from streams.keyed import (
    DIM,
    NAN,
    assert_same,
    assert_same_states,
    calibration,
    detector,
    in_steps,
    keyed,
    machines,
    small_model,
    stream,
    trained,
)

import bruno
from bruno.process import Evidence
from bruno.streams import updates
from bruno.streams.encoder import encoder_of
from bruno.tasks.detector import Detector
from bruno.tasks.drift import DriftTest, WithinSet
from bruno.tasks.stream_evidence import START
from bruno.trained import KeyedDetector, Trained
from bruno.trained.batch import checked_rate

KEYS, X = stream(6, 40)
SETTINGS = [{}, {"window": 25}, {"half_life": 10.0}, {"count_all": True}, {"count_all": True, "window": 20}]


def made(store: object = ":memory:", *, count_all: bool = False, **settings: object) -> KeyedDetector:
    return keyed(store, detector=detector(count_all), **settings)


# --- exactness -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rows_have_the_same_judgements_in_batches_of_any_size(settings):
    whole = made(**settings)
    expected = in_steps(whole, KEYS, X, len(KEYS))
    for size, cache in ((1, 2), (7, 3), (100, 100)):
        judge = made(**settings, cache=cache)
        assert_same(in_steps(judge, KEYS, X, size), expected)
        assert_same_states(judge, whole)


@pytest.mark.parametrize("count_all", [False, True])
def test_each_set_is_judged_like_a_stream_of_its_own(count_all):
    found = in_steps(made(count_all=count_all), KEYS, X, 50)
    single = detector(count_all)
    for key in set(KEYS):
        rows = [i for i, one in enumerate(KEYS) if one == key]
        expected = list(single.watch(torch.from_numpy(X[rows])))
        assert [found[i].outlier for i in rows] == [one.outlier for one in expected]
        assert [found[i].seen for i in rows] == [one.seen for one in expected]
        assert [found[i].basis for i in rows] == [one.basis for one in expected]
        for name in ("score", "p", "threshold"):
            values = [getattr(found[i], name) for i in rows]
            wanted = [getattr(one, name) for one in expected]
            assert [value is None for value in values] == [value is None for value in wanted]
            assert values[1:] == pytest.approx(wanted[1:], rel=1e-4, abs=1e-4)


def test_a_fixed_threshold_needs_no_calibration():
    judge = keyed(detector=Detector(trained().model, -1.0))
    found = in_steps(judge, KEYS, X, 64)
    assert np.isnan(found.p).all()
    judged = found.seen > 0
    np.testing.assert_array_equal(found.outlier[judged], found.score[judged] < -1.0)


@pytest.mark.parametrize("made", [detector(), Detector(trained().model, -1.0)], ids=["p-values", "fixed"])
def test_single_rows_out_of_distribution_are_judged_like_those_of_a_batch(made):
    x = X.copy()
    x[::7] *= 1e6
    made = dataclasses.replace(made, floor=-80.0)
    expected = in_steps(keyed(detector=made), KEYS, x, len(KEYS))
    assert 0 < expected.out_of_distribution.mean() < 0.2
    assert_same(in_steps(keyed(detector=made), KEYS, x, 1), expected)


def test_posteriors_match_the_elements_that_count():
    judge = made(count_all=True)
    in_steps(judge, KEYS, X, 33)
    rows = X[[key == "m3" for key in KEYS]]
    evidence = judge.posterior("m3").evidence
    expected = Evidence.of(torch.from_numpy(encoder_of(trained().model)(rows).z))
    assert evidence.count == len(rows)
    torch.testing.assert_close(evidence.mean, expected.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(evidence.scatter, expected.scatter, rtol=1e-9, atol=1e-9)
    assert judge.posterior("new").evidence.count == 0


def test_missing_numbers_are_imputed_from_the_set_in_any_batch():
    x = X.copy()
    x[np.random.default_rng(0).random(X.shape) < 0.05] = NAN
    expected = in_steps(made(), KEYS, x, 1)
    assert np.isfinite(expected.score).all()
    assert_same(in_steps(made(), KEYS, x, 90), expected)


def test_models_of_images_are_judged_too(digits_model, unseen_digits, tmp_path):
    owner = bruno.Trained(digits_model, None, tmp_path)
    single = Detector(digits_model, -30.0)
    judge = KeyedDetector(owner, tmp_path / "s.db", single)
    images = unseen_digits.elements[:12]
    found = [one.score for one in judge.step(["a"] * 12, images)]
    assert found == pytest.approx([one.score for one in single.watch(images)], rel=1e-3, abs=1e-2)


# --- forgetting ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [20, 33])
def test_a_window_is_the_evidence_of_the_latest_elements_that_count(size):
    judge = made(window=size)
    rows = machines(1, 150, seed=5)[0]
    rows[40::9] += 4.0
    found = in_steps(judge, ["a"] * 150, rows, 11)
    assert 0 < (~found.in_evidence).sum() < 60
    z = encoder_of(trained().model)(rows).z[found.in_evidence][-size:]
    evidence = judge.posterior("a").evidence
    expected = Evidence.of(torch.from_numpy(z))
    assert evidence.count == size
    torch.testing.assert_close(evidence.mean, expected.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(evidence.scatter, expected.scatter, rtol=1e-7, atol=1e-9)
    judge.commit()
    assert len(judge.store.elements("a", -1)) == size


def test_a_detector_of_ranks_judges_by_ranks():
    detector = trained().detector(within=True, count_all=True, rate=0.05)
    judged, asked = (
        [one for _, one in trained().watch(X[:40], detector, within=within)] for within in (False, True)
    )
    assert judged == asked
    assert judged[-1].p_within is not None
    with KeyedDetector(trained(), detector=detector) as by_key:
        assert by_key  # also without sets
        assert by_key.step(["a"] * 40, X[:40])[39].p_within == judged[-1].p_within
    with pytest.raises(ValueError, match=r"`within` must be True"):
        KeyedDetector(trained(), detector=lambda: detector)


def test_a_detector_with_a_window_of_its_own_is_an_error():
    detector = Detector(trained().model, -5.0, window=5)
    with pytest.raises(ValueError, match=r"`detector` must have no window; got 5.*`window`"):
        KeyedDetector(trained(), detector=detector)


def test_a_huge_element_leaves_a_window_without_a_trace():
    judge = KeyedDetector(trained(), detector=Detector(trained().model, count_all=True), window=20)
    rows = machines(1, 60, seed=6)[0]
    rows[10] = 1e30
    in_steps(judge, ["a"] * 60, rows, 7)
    expected = Evidence.of(torch.from_numpy(encoder_of(trained().model)(rows[-20:]).z))
    torch.testing.assert_close(judge.posterior("a").evidence.scatter, expected.scatter, rtol=1e-6, atol=1e-9)


def test_a_set_with_a_half_life_is_the_weighted_evidence():
    judge = made(count_all=True, half_life=8.0)
    rows = machines(1, 50, seed=5)[0]
    found = in_steps(judge, ["a"] * 50, rows, 13)
    weight = 0.5 ** (np.arange(49, -1, -1) / 8.0)
    z = encoder_of(trained().model)(rows).z
    slot = int(judge._sets.slots(["a"])[0])
    mean = weight @ z / weight.sum()
    np.testing.assert_allclose(judge._sets.count[slot], weight.sum())
    np.testing.assert_allclose(judge._sets.mean[slot], mean)
    np.testing.assert_allclose(judge._sets.scatter[slot], weight @ (z - mean) ** 2)
    assert not found.exact.any()
    with pytest.raises(ValueError, match="half-life"):
        judge.posterior("a")


def test_a_window_adapts_to_a_change_unlike_a_set_of_all_elements():
    rows = machines(1, 300, seed=5)[0]
    rows[100:] += 1.0
    alarms = {}
    for window in (None, 20):
        found = in_steps(made(count_all=True, window=window), ["a"] * 300, rows, 50)
        alarms[window] = found.score[-50:].mean()
    assert alarms[20] > alarms[None]


def test_p_values_of_a_full_window_are_exact_only_if_every_element_counts():
    rows = machines(1, 60, seed=5)[0]
    for count_all in (False, True):
        found = in_steps(made(count_all=count_all, window=20), ["a"] * 60, rows, 60)
        assert found.exact[1:21].all()
        assert found.exact[21:].all() == count_all


# --- ranks within the set --------------------------------------------------------------------------------


def test_ranks_within_the_set_match_the_library():
    judge = made(count_all=True, within=True)
    found = in_steps(judge, KEYS[:60], X[:60], 40)
    z, model = encoder_of(trained().model)(X[:60]).z, judge._updates._model  # in float64: ranks have ties
    for key in set(KEYS[:60]):
        within = WithinSet.empty(DIM)
        for i in (i for i in range(60) if KEYS[i] == key):
            if found.out_of_distribution[i]:
                continue
            one = torch.from_numpy(z[i])
            assert found.p_within[i] == within.p_value(model, one).p
            within = within.add(one)
    assert_same(in_steps(made(count_all=True, within=True, cache=2), KEYS[:60], X[:60], 1), found)


def test_ranks_that_cannot_reach_the_rate_are_reported(caplog):
    judge = detector(count_all=True, rate=0.05)
    with caplog.at_level("INFO", "bruno"):
        keyed(detector=judge, within=True)
    assert "can reach p ≤ 5 % only from element 20" in caplog.text
    with pytest.raises(ValueError, match=r"`rate` must be at least 0.0078 .*got 0.005"):
        keyed(detector=detector(count_all=True, rate=0.005), within=True)


def test_the_rate_of_the_default_detector_can_be_set(monkeypatch):
    monkeypatch.setattr(Trained, "detector", lambda self, rate: detector(rate=checked_rate(rate, None, None)))
    assert KeyedDetector(trained(), rate=0.05).detector.rate == 0.05
    assert KeyedDetector(trained()).detector.rate == 0.01
    for settings in ({"rate": 0.0}, {"rate": 0.05, "detector": detector()}):
        with pytest.raises(ValueError, match=r"`rate` .*got 0"):
            KeyedDetector(trained(), **settings)


def test_a_set_that_changes_is_reported(monkeypatch):
    always = DriftTest(detected=0)
    monkeypatch.setattr(DriftTest, "add", lambda self, *_: DriftTest(position=5, since=3, detected=5))
    assert not always.detected
    with pytest.warns(UserWarning, match=r"'a' changed near element 4\."):
        made(count_all=True, within=True).step(["a"], X[:1])


# --- feedback --------------------------------------------------------------------------------------------


def outlier_after(judge: KeyedDetector, rows: int = START + 5, **more: object) -> np.ndarray:
    x = machines(1, rows + 1, seed=5)[0]
    x[-1] += 6.0
    found = judge.step(["a"] * (rows + 1), x, **more)
    assert found.outlier[-1]
    assert not found.in_evidence[-1]
    return x


@pytest.mark.parametrize("window", [None, 40])
def test_an_accepted_element_counts(tmp_path, window):
    with made(tmp_path / "s.db", window=window) as judge:
        x = outlier_after(judge)
        before = judge.posterior("a").evidence
        judge.accept(f"a/{len(x)}")
        z = torch.from_numpy(encoder_of(trained().model)(x[-1:]).z[0])
        expected = before.add(z)
    with made(tmp_path / "s.db", window=window) as judge:
        after = judge.posterior("a").evidence
        torch.testing.assert_close(after.mean, expected.mean)
        assert after.count == expected.count
        with pytest.raises(ValueError, match=r"`names` .*'a/26'"):
            judge.accept("a/26")


def test_elements_are_accepted_by_their_own_ids():
    judge = made()
    outlier_after(judge, ids=[f"row {i}" for i in range(26)])
    with pytest.raises(ValueError, match=r"`names` .*'row 25'; got 'row 26'"):
        judge.accept("row 25", "row 26")
    assert judge.posterior("a").evidence.count == 25  # nothing was accepted
    judge.accept("row 25")
    assert judge.posterior("a").evidence.count == 26


def test_elements_of_one_name_in_several_sets_are_named_by_their_sets():
    judge = made()
    x = np.concatenate([machines(1, 25, seed=5)[0], machines(1, 1, seed=5)[0] + 6.0])
    for key in ("a", "b, c"):
        judge.step([key] * 26, x, ids=[f"offset {i}" for i in range(26)])
    with pytest.raises(ValueError, match=r"`names` .*'b, c, offset 25', 'a, offset 25'"):
        judge.accept("offset 25")
    assert judge.posterior("a").evidence.count == 25
    judge.accept("b, c, offset 25")
    assert [int(judge.posterior(key).evidence.count) for key in ("a", "b, c")] == [25, 26]
    with pytest.raises(ValueError, match=r"`names` .*got 'b, c, offset 25'"):
        judge.accept("b, c, offset 25")
    judge.accept("offset 25")  # the only one that is left
    assert judge.posterior("a").evidence.count == 26


def test_outliers_that_are_unlikely_in_every_set_do_not_count():
    """Their scores without the shortfall are high: they would be learnt, and then missed."""
    keys, x = stream(6, 120)
    x[::4] += 9.0 * np.sign(np.random.default_rng(0).normal(size=x[::4].shape))
    found = KeyedDetector(trained(), detector=detector(rate=0.001)).step(keys, x)
    late = found.position >= START
    assert (found.outlier & late).sum() > 50
    assert not (found.outlier & found.in_evidence & late).any()
    for key in dict.fromkeys(keys):
        own = [i for i, other in enumerate(keys) if other == key]
        judged = [one for _, one in trained().watch(x[own], detector(rate=0.001))]
        assert [one.outlier for one in judged] == found.outlier[own].tolist()


@pytest.mark.parametrize("size", [1, 10])
def test_an_element_that_is_put_back_cannot_be_accepted_again(monkeypatch, size):
    monkeypatch.setattr(updates, "typical_elements", lambda model, z, cutoffs, usable, *_: usable)
    rows = machines(1, 10, seed=5)[0]
    rows[8] += 6.0  # the ninth element does not count until the tenth, when all are reconsidered
    judge = made()
    found = in_steps(judge, ["a"] * 10, rows, size)
    assert (~found.in_evidence).nonzero()[0].tolist() == [8]
    assert judge.posterior("a").evidence.count == 10
    with pytest.raises(ValueError, match="'a/9'"):
        judge.accept("a/9")


# --- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "x", "more", "message"),
    [
        (["a", ""], X[:2], {}, "`keys` .*row 2 has ''"),
        (["a", None], X[:2], {}, "`keys` .*row 2 has None"),
        ([NAN, "a"], X[:2], {}, "`keys` .*row 1 has nan"),
        ([], X[:0], {}, "`keys` .*none"),
        (["a"], X[:2], {}, r"`x` .*\(1, 4\).*\(2, 4\)"),
        (["a"], X[:1, :3], {}, r"`x` .*\(1, 4\).*\(1, 3\)"),
        (["a"], [[1.0, 2.0, 3.0, np.inf]], {}, "`x` .*row 1 has inf in column 4"),
        (["a"], [[1e39, 2.0, 3.0, 4.0]], {}, r"`x` .*row 1 has 1e\+39 in column 1"),
        (["a"], X[:1], {"ids": ["b", "c"]}, "`ids` .*1.*got 2"),
        (["a"], X[:1], {"offsets": [1.5]}, "`offsets` .*float64"),
    ],
)
@pytest.mark.usefixtures("without_shape_checks")
def test_bad_rows_change_nothing(keys, x, more, message):
    judge = made()
    judge.step(["a"], X[:1])
    with pytest.raises(ValueError, match=message):
        judge.step(keys, x, **more)
    assert judge.posterior("a").evidence.count == 1
    assert list(judge) == ["a"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 19}, "`window` .*20.*got 19"),
        ({"half_life": 0.0}, "`half_life` .*got 0"),
        ({"window": 20, "half_life": 1.0}, "`window` and `half_life`"),
        ({"within": True}, "`within` .*`count_all`"),
        ({"within": True, "count_all": True, "window": 20}, "`within`.*`window`"),
        ({"commit_rows": 0}, "`commit_rows` .*got 0"),
        ({"commit_seconds": -1.0}, "`commit_seconds` .*got -1"),
        ({"cache": 0}, "`cache` .*got 0"),
    ],
)
def test_bad_settings_create_no_store(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        made(tmp_path / "s.db", **settings)
    assert list(tmp_path.iterdir()) == []


def test_a_detector_of_another_model_is_refused():
    other = small_model("spline")
    with pytest.raises(ValueError, match="`detector`"):
        keyed(detector=Detector(other))


def test_keys_may_be_numbers():
    judge = made()
    judge.step([3, np.int64(4)], X[:2])
    assert list(judge) == ["3", "4"]


def test_the_calibration_of_the_test_supports_exact_p_values():
    assert calibration().stream().basis(5, 0.1) == "exact"


def test_the_evidence_of_a_row_is_its_set_before_the_row():
    found = keyed().step(KEYS, X, evidence=True)
    for i in (0, 17, len(KEYS) - 1):
        before = keyed()
        if i:
            before.step(KEYS[:i], X[:i])
        expected = before.posterior(KEYS[i]).evidence
        assert found.evidence.count[i] == expected.count
        torch.testing.assert_close(found.evidence.mean[i], expected.mean)
        torch.testing.assert_close(found.evidence.scatter[i], expected.scatter)
    assert keyed().step(KEYS[:1], X[:1]).evidence is None
