"""Outliers of sets, as an estimator."""

import math
import shutil
import warnings

import numpy as np
import pandas
import pytest
import torch
from set_rows import sets_of_rows

import bruno
from bruno.config import load_recipe
from bruno.sklearn import SetOutlierDetector
from bruno.tasks.null_distributions import PredictiveNull
from bruno.tasks.set_scores import SetScorer
from bruno.trained import Trained

NORMAL = np.random.default_rng(1).normal(size=(200, 4))


@pytest.fixture(scope="module")
def trained_detector():
    """A detector of new rows with its own small model."""
    return SetOutlierDetector(novelty=True).fit(NORMAL)


def clean_set(seed=0, size=60):
    return sets_of_rows(1, size, seed)[0]


def with_outliers(count, seed=0):
    """A set, and the same set with outliers in place of its first rows."""
    rows = clean_set(seed)
    rows[:count] += np.random.default_rng(seed).choice([-6.0, 6.0], size=(count, 3))
    return rows


# --- rows of the set itself ------------------------------------------------------------------------------


def test_outliers_of_a_set_are_found(set_model):
    found = SetOutlierDetector(set_model).fit_predict(with_outliers(5))
    assert (found[:5] == -1).all()
    assert (found[5:] == 1).mean() > 0.9


def test_a_cluster_of_outliers_does_not_hide_itself(set_model):
    rows = clean_set()
    rows[:20] += 6.0
    with pytest.warns(UserWarning, match="33 % are flagged, but 5 % was requested"):
        robust = SetOutlierDetector(set_model).fit_predict(rows)
    counted = SetOutlierDetector(set_model, count_all=True).fit_predict(rows)
    assert (robust[:20] == -1).all()
    assert (robust[20:] == 1).mean() > 0.9
    assert (counted[:20] == 1).any()


def test_scores_are_given_all_others_that_count(set_model):
    rows = with_outliers(3)
    detector = SetOutlierDetector(set_model).fit(rows)
    counts = detector.in_evidence_.copy()
    assert not counts[:3].any()
    for i in (0, 30):
        counts[i] = False
        given, alone = (
            set_model.condition(rows[counts]).log_prob(rows[i]),
            set_model.prior().log_prob(rows[i]),
        )
        expected = given - max(alone, detector._scorer.reference)  # elements of no set count as typical ones
        assert expected.item() == pytest.approx(detector.scores_[i], abs=1e-4)
        counts = detector.in_evidence_.copy()


@pytest.mark.parametrize("seed", range(2))
def test_a_small_model_does_not_learn_an_outlier(seed):
    """Trained on all rows, it expects such rows: p is 5 %."""
    rows = np.random.default_rng(seed).normal(size=(60, 2))
    rows[7] = 9.0
    detector = SetOutlierDetector(random_state=seed, steps=12)
    assert detector.fit_predict(rows)[7] == -1
    assert detector.p_values_[7] < 1e-5


def test_a_numpy_integer_is_the_same_seed():
    scores = [
        SetOutlierDetector(novelty=True, random_state=seed, steps=2)
        .fit(NORMAL[:40])
        .score_samples(NORMAL[40:50])
        for seed in (3, np.int64(3))
    ]
    np.testing.assert_array_equal(*scores)


def test_so_few_rows_that_none_is_held_out_are_judged():
    assert SetOutlierDetector(steps=2).fit_predict(NORMAL[:5]).tolist() == [1] * 5


def test_each_row_is_judged_within_its_group(set_model):
    rows, groups = sets_of_rows(4, 30, seed=2)
    rows[0], rows[40] = rows[40].copy(), rows[0].copy()  # usual rows, but of another set
    found = SetOutlierDetector(set_model, rate=0.01).fit_predict(rows, groups=groups)
    assert (found[[0, 40]] == -1).all()
    assert (np.delete(found, [0, 40]) == 1).mean() > 0.95


def test_groups_that_are_missing_are_a_warning_if_far_too_many_rows_are_flagged(set_model, tmp_path):
    rows, groups = sets_of_rows(4, 30, seed=2)
    frame = pandas.DataFrame(rows, columns=["a", "b", "c"]).assign(machine=groups)
    recipe = load_recipe("table", ["data.group=machine", 'data.columns=["a", "b", "c"]'])
    detector = SetOutlierDetector(Trained(set_model, recipe, tmp_path), rate=0.01)
    with pytest.warns(UserWarning, match=r"% are flagged, but 1 % .*`groups` is missing.*X\['machine'\]"):
        detector.fit(frame)
    with warnings.catch_warnings(action="error"):
        detector.fit(frame, groups=frame["machine"])
        detector.set_params(contamination=0.4).fit(frame)


def test_groups_of_any_size_are_judged_as_if_alone(set_model):
    sizes, detector = (1, 2, 3, 17, 60), SetOutlierDetector(set_model, count_all=True)
    parts = [clean_set(seed, size) for seed, size in enumerate(sizes)]
    together = detector.fit(np.concatenate(parts), groups=np.repeat(sizes, sizes)).scores_
    alone = np.concatenate([detector.fit(part).scores_ for part in parts])
    np.testing.assert_allclose(together, alone, atol=1e-4)


def test_a_fraction_of_contamination_is_flagged(set_model):
    for fraction in (0.1, 0.25):
        found = SetOutlierDetector(set_model, contamination=fraction).fit_predict(clean_set())
        assert (found == -1).sum() == 60 * fraction


def test_an_out_of_distribution_row_is_an_outlier(set_model):
    rows = clean_set()
    rows[0] = 1e7
    detector = SetOutlierDetector(set_model)
    assert detector.fit_predict(rows)[0] == -1
    assert np.isfinite(detector.scores_).all()


def test_the_order_of_rows_makes_no_difference(set_model):
    rows, order = with_outliers(5), np.random.default_rng(0).permutation(60)
    first, second = SetOutlierDetector(set_model).fit(rows), SetOutlierDetector(set_model).fit(rows[order])
    np.testing.assert_allclose(first.scores_[order], second.scores_, atol=1e-4)


# --- new rows --------------------------------------------------------------------------------------------


def test_novelty_decides_which_methods_exist():
    of_the_set, of_new_rows = SetOutlierDetector(), SetOutlierDetector(novelty=True)
    for name in ("predict", "score_samples", "decision_function", "partial_fit", "p_values"):
        assert hasattr(of_new_rows, name)
        assert not hasattr(of_the_set, name)
    assert hasattr(of_the_set, "fit_predict")
    assert not hasattr(of_new_rows, "fit_predict")


def test_new_rows_are_judged_row_by_row_and_change_nothing(trained_detector):
    rows = np.random.default_rng(2).normal(size=(20, 4))
    before = trained_detector.evidence_
    together = trained_detector.decision_function(rows)
    one_by_one = [trained_detector.decision_function(row[None])[0] for row in rows]
    np.testing.assert_allclose(together, one_by_one, atol=1e-9)
    assert trained_detector.evidence_ is before


def test_decisions_are_scores_less_the_offset_and_p_values_below_the_rate(trained_detector):
    rows = 2 * np.random.default_rng(2).normal(size=(100, 4))
    scores, decisions = trained_detector.score_samples(rows), trained_detector.decision_function(rows)
    np.testing.assert_allclose(decisions, scores - trained_detector.offset_)
    flagged = trained_detector.predict(rows) == -1
    np.testing.assert_array_equal(flagged, decisions < 0)
    np.testing.assert_array_equal(flagged, trained_detector.p_values(rows) < trained_detector.rate)
    assert 0 < flagged.sum() < 100


def test_a_model_trained_on_one_set_scores_by_the_density(trained_detector):
    posterior = trained_detector.model_.condition(NORMAL[trained_detector.in_evidence_])
    expected = posterior.log_prob(NORMAL[:5]).numpy()
    np.testing.assert_allclose(trained_detector.score_samples(NORMAL[:5]), expected, rtol=1e-6)


@pytest.mark.slow
def test_false_alarms_of_a_small_model_are_near_the_rate():
    """A hundred rows of eight columns are few: without the correction, rates are five times too high."""
    p = []
    for seed in range(3):
        rows = np.random.default_rng(seed).normal(size=(600, 8))
        detector = SetOutlierDetector(novelty=True, steps=15).fit(rows[:100])
        assert detector._scorer.exponent < 1
        p.append(detector.p_values(rows[100:]))
    for rate in (0.01, 0.05):
        assert (np.concatenate(p) <= rate).mean() < 2.5 * rate


def test_false_alarms_of_a_given_model_are_near_the_rate(set_model):
    rows, groups = sets_of_rows(40, 60, seed=3)
    first = np.tile(np.arange(60) < 30, 40)
    detector = SetOutlierDetector(set_model, novelty=True).fit(rows[first], groups=groups[first])
    alarms = (detector.predict(rows[~first], groups=groups[~first]) == -1).mean()
    assert 0.02 < alarms < 0.08  # at 5 %


def test_rows_with_a_calibration_are_scored_and_judged_as_by_the_library(set_model, tmp_path):
    rows, labels = sets_of_rows(30, 20, seed=7)
    np.savez(tmp_path / "clean.npz", rows=rows, labels=[f"set {label}" for label in labels])
    trained = bruno.Trained(set_model, None, tmp_path / "model")
    trained.calibrate(str(tmp_path / "clean.npz"))
    new = sets_of_rows(1, 30, seed=8)[0]
    new[3, 1] += 6
    judged = [one.judgement for one in trained.judge_batch(new, rate=0.05).summary.latest]
    detector = SetOutlierDetector(trained, rate=0.05)
    flagged = detector.fit_predict(new) == -1
    np.testing.assert_allclose(detector.scores_, [one.score for one in judged], atol=1e-3)
    np.testing.assert_allclose(detector.p_values_, [one.p for one in judged], rtol=0.02)
    assert flagged.tolist() == [one.outlier for one in judged]
    assert flagged[3]


def test_a_calibration_kept_with_the_model_gives_the_p_values(digits_run, tmp_path, unseen_digits):
    folder = shutil.copytree(digits_run, tmp_path / "run")
    trained = bruno.open(folder, device="cpu")
    with pytest.warns(UserWarning, match="too few"):
        calibration = trained.calibrate().calibration
    images = unseen_digits.elements[unseen_digits.labels == 0].numpy()
    detector = SetOutlierDetector(trained, novelty=True, rate=0.1).fit(images[:20])
    scores, groups = detector.score_samples(images[20:40]), calibration.stream()
    basis = groups.basis(int(detector.evidence_.count[0]), 0.1)
    expected = groups.p_values(scores, int(detector.evidence_.count[0]), basis)
    np.testing.assert_allclose(detector.p_values(images[20:40]), expected)


def test_a_detector_explains_its_scores(trained_detector):
    rows = NORMAL[:2].copy()
    rows[1, 2] += 8
    found = trained_detector.explain(rows, permutations=16)
    np.testing.assert_allclose(found.scores, trained_detector.score_samples(rows))
    assert found.contributions[1].argmin() == 2


# --- partial_fit -----------------------------------------------------------------------------------------


def test_parts_of_a_set_are_the_set(set_model):
    rows = clean_set()
    whole = SetOutlierDetector(set_model, novelty=True, count_all=True).fit(rows)
    parts = SetOutlierDetector(set_model, novelty=True, count_all=True)
    for part in np.split(rows, 4):
        parts.partial_fit(part)
    assert parts.evidence_.count.item() == 60
    np.testing.assert_allclose(parts.score_samples(rows), whole.score_samples(rows), atol=1e-5)


def test_the_offset_of_a_fraction_follows_all_parts(set_model):
    rows = clean_set(size=400)
    whole = SetOutlierDetector(set_model, novelty=True, count_all=True, contamination=0.1).fit(rows)
    parts = SetOutlierDetector(set_model, novelty=True, count_all=True, contamination=0.1)
    for part in np.split(rows, 4):
        parts.partial_fit(part)
    assert parts.offset_ == pytest.approx(whole.offset_, abs=1e-4)


def test_partial_fit_excludes_outliers_and_accepts_new_sets(set_model):
    rows, groups = sets_of_rows(3, 40, seed=4)
    detector = SetOutlierDetector(set_model, novelty=True).fit(rows[:80], groups=groups[:80])
    detector.partial_fit(rows[:10] + 50, groups=groups[:10])
    assert detector.evidence_.count[0] <= 40
    with pytest.raises(ValueError, match=r"`groups` .*got .*2"):
        detector.predict(rows[80:], groups=groups[80:])
    detector.partial_fit(rows[80:], groups=groups[80:])
    assert detector.groups_.tolist() == [0, 1, 2]
    assert (detector.predict(rows, groups=groups) == 1).mean() > 0.85


def test_partial_fit_draws_only_for_the_sets_that_received_rows(set_model, monkeypatch):
    rows, groups = sets_of_rows(12, 20, seed=6)
    detector = SetOutlierDetector(set_model, novelty=True).fit(rows[:200], groups=groups[:200])
    drawn, draws = [], SetScorer.draws
    monkeypatch.setattr(
        SetScorer, "draws", lambda self, given, *n: drawn.append(len(given.count)) or draws(self, given, *n)
    )
    new = np.r_[0:5, 20:22, 200:240]  # of two known sets and two new ones
    detector.partial_fit(rows[new], groups=groups[new])
    assert max(drawn) == 4
    whole = detector._scorer.null_distributions(detector.evidence_, batch=False, rate=detector.rate)
    expected = [null.threshold(detector.rate) for null in whole]
    np.testing.assert_allclose(detector.offset_, expected, atol=1e-4)
    assert detector.groups_.tolist() == list(range(12))


def test_a_rate_that_was_set_since_holds_for_all_sets(set_model):
    rows, groups = sets_of_rows(4, 20, seed=6)
    strict, changed = (SetOutlierDetector(set_model, novelty=True, rate=rate) for rate in (0.001, 0.05))
    for detector in (strict, changed):
        detector.fit(rows, groups=groups).set_params(rate=0.001).partial_fit(rows[:2], groups=groups[:2])
    np.testing.assert_allclose(changed.offset_, strict.offset_)


def test_new_sets_are_judged_as_if_added_one_after_the_other(set_model):
    rows, groups = sets_of_rows(6, 20, seed=6)
    rows[::7] += 9
    together, apart = (
        SetOutlierDetector(set_model, novelty=True).fit(rows[:20], groups=groups[:20]) for _ in range(2)
    )
    together.partial_fit(rows[20:], groups=groups[20:])
    for i in range(1, 6):
        apart.partial_fit(rows[groups == i], groups=groups[groups == i])
    assert together.evidence_.count.max() < 20
    np.testing.assert_array_equal(together.evidence_.count, apart.evidence_.count)
    np.testing.assert_allclose(together.offset_, apart.offset_, atol=1e-4)


def test_rejected_rows_change_nothing(trained_detector):
    detector = SetOutlierDetector(trained_detector.model_, novelty=True)
    detector.fit(NORMAL[:40], groups=np.repeat([0, 1], 20))
    before = detector.decision_function(NORMAL[:40], groups=np.repeat([0, 1], 20))
    with pytest.raises(ValueError, match=r"`X` must be complete"):
        detector.partial_fit([[math.nan, 1, 1, 1]], groups=[7])
    with pytest.raises(ValueError, match=r"`groups` .*got .*7"):
        detector.predict(NORMAL[:1], groups=[7])
    after = detector.decision_function(NORMAL[:40], groups=np.repeat([0, 1], 20))
    np.testing.assert_array_equal(after, before)


# --- missing numbers, images -----------------------------------------------------------------------------


def test_missing_numbers_are_imputed(set_model):
    rows = with_outliers(3)
    rows[10:20, 1] = math.nan
    for detector in (SetOutlierDetector(set_model), SetOutlierDetector(steps=20)):
        found = detector.fit_predict(rows)
        assert (found[:3] == -1).all()
        assert (found[10:20] == 1).mean() > 0.7
    new = SetOutlierDetector(set_model, novelty=True).fit(clean_set())
    row = clean_set()[:1]
    row[0, 2] = math.nan
    assert np.isfinite(new.score_samples(row)).all()


def test_a_model_without_imputer_rejects_missing_numbers(trained_detector):
    rows = NORMAL[:2].copy()
    rows[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"complete"):
        trained_detector.predict(rows)


def test_a_row_without_any_number_is_an_error(set_model):
    rows = clean_set()
    rows[4] = math.nan
    with pytest.raises(ValueError, match=r"`X` .*row 5 has none"):
        SetOutlierDetector(set_model).fit(rows)
    detector = SetOutlierDetector(set_model, novelty=True).fit(clean_set())
    for method in (detector.predict, detector.score_samples, detector.partial_fit):
        with pytest.raises(ValueError, match=r"`X` .*row 5 has none"):
            method(rows)


def test_images_are_rows_of_pixels_or_arrays(digits_model, unseen_digits):
    images = unseen_digits.elements[unseen_digits.labels == 0][:30]
    others = unseen_digits.elements[unseen_digits.labels == 1][:5]
    x = torch.cat([images, others]).numpy()
    flat = SetOutlierDetector(digits_model, rate=0.05)
    found = flat.fit_predict(x.reshape(35, -1).astype(float))
    assert (found[30:] == -1).sum() >= 4
    np.testing.assert_array_equal(SetOutlierDetector(digits_model, rate=0.05).fit_predict(x), found)


# --- errors, null distributions ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("contamination", 0.7),
        ("contamination", "some"),
        ("rate", 0.0),
        ("criterion", "distance"),
        ("steps", 0),
    ],
)
def test_wrong_parameters_are_named_in_fit(setting, value, without_shape_checks):
    with pytest.raises(ValueError, match=rf"`{setting}` .*got .*{value}"):
        SetOutlierDetector(**{setting: value}).fit(NORMAL)


@pytest.mark.parametrize("value", [None, [0.1]])
def test_a_contamination_that_is_not_a_number_is_named(value, without_shape_checks):
    with pytest.raises(TypeError, match=r"`contamination` .*got"):
        SetOutlierDetector(contamination=value).fit(NORMAL)


@pytest.mark.parametrize(
    "groups",
    [
        ["a", None, "b"],
        ["a", math.nan, "b"],
        [1.0, math.nan, 2.0],
        np.array([1.0, math.nan, 2.0]),
        pandas.Series(["a", None, "b"]),
        pandas.Series(["a", pandas.NA, "b"], dtype="string"),
        pandas.Series(pandas.to_datetime(["2026-01-01", None, "2026-01-02"])),
    ],
)
def test_a_missing_group_is_an_error_that_names_its_row(set_model, groups):
    with pytest.raises(ValueError, match=r"`groups` .*row 2 has"):
        SetOutlierDetector(set_model).fit(clean_set()[:3], groups=groups)


def test_groups_must_be_given_as_in_fit(set_model):
    rows, groups = sets_of_rows(2, 10)
    grouped = SetOutlierDetector(set_model, novelty=True).fit(rows, groups=groups)
    with pytest.raises(ValueError, match=r"`groups` .*got None"):
        grouped.predict(rows)
    with pytest.raises(ValueError, match="`groups`"):
        SetOutlierDetector(set_model, novelty=True).fit(rows).predict(rows, groups=groups)
    with pytest.raises(ValueError, match="inconsistent"):
        SetOutlierDetector(set_model).fit(rows, groups=groups[:-1])


@pytest.mark.parametrize(("draws", "exponent"), [(999, 1.0), (999, 0.6), (4999, 1.0)])
def test_p_values_of_draws_are_uniform_and_thresholds_are_their_inverse(draws, exponent):
    random = np.random.default_rng(0)
    null = PredictiveNull.of(np.sort(-random.exponential(size=draws)), exponent)
    for rate in (1e-6, 0.001, 0.02, 0.3):
        p = null.p_values(np.array([null.threshold(rate)]))
        assert p[0] == pytest.approx(rate, rel=1e-6)
    p = null.p_values(-random.exponential(size=4000)) ** (1 / exponent)
    for level in (0.001, 0.01, 0.1, 0.5):
        assert (p <= level).mean() == pytest.approx(level, rel=0.4, abs=0.002)
