"""Few-shot classification, as an estimator."""

import copy
import math

import numpy as np
import pytest
from set_rows import sets_of_rows
from sklearn.metrics import log_loss

from bruno.sklearn import FewShotClassifier, LatentTransformer
from bruno.tasks import classify

ROWS, NUMBERS = sets_of_rows(4, 12, seed=5)
NAMES = np.array(["ash", "birch", "cedar", "dogwood"])
LABELS = NAMES[NUMBERS]
NEW, NEW_NUMBERS = sets_of_rows(4, 100, seed=5)  # the same means


def test_probabilities_match_the_posteriors(set_model):
    classifier = FewShotClassifier(set_model, temperature=2.0).fit(ROWS, LABELS)
    scores = np.stack([set_model.condition(ROWS[name == LABELS]).log_prob(NEW).numpy() for name in NAMES], 1)
    expected = np.exp(scores / 2 - np.logaddexp.reduce(scores / 2, axis=1, keepdims=True))
    np.testing.assert_allclose(classifier.predict_proba(NEW), expected, atol=1e-4)


def test_missing_numbers_are_imputed_from_each_class(set_model):
    rows = NEW.copy()
    rows[np.random.default_rng(0).random(rows.shape) < 0.3] = math.nan
    rows = rows[~np.isnan(rows).all(1)]
    classifier = FewShotClassifier(set_model, temperature=1.0).fit(ROWS, LABELS)
    support = {name: ROWS[name == LABELS] for name in NAMES}
    expected = classify(set_model, support, rows).probabilities.numpy()
    np.testing.assert_allclose(classifier.predict_proba(rows), expected, atol=1e-4)
    none = FewShotClassifier(set_model, temperature=1.0, none_prior=0.05).fit(ROWS, LABELS)
    assert (none.predict(rows) == "none of these").mean() < 0.1


def test_the_parameters_of_a_model_may_have_gradients(set_model):
    trainable = copy.deepcopy(set_model).requires_grad_(True)
    found = FewShotClassifier(trainable).fit(ROWS, LABELS).predict_proba(NEW)
    expected = FewShotClassifier(set_model).fit(ROWS, LABELS).predict_proba(NEW)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_few_examples_suffice(set_model):
    first = np.tile(np.arange(12) < 3, 4)
    classifier = FewShotClassifier(set_model).fit(ROWS[first], LABELS[first])
    assert classifier.score(ROWS[~first], LABELS[~first]) > 0.85


def test_examples_in_parts_are_the_examples(set_model):
    whole, parts = FewShotClassifier(set_model).fit(ROWS, LABELS), FewShotClassifier(set_model)
    for part in np.split(np.random.default_rng(0).permutation(48), 6):
        parts.partial_fit(ROWS[part], LABELS[part])
    np.testing.assert_array_equal(whole.classes_, parts.classes_)
    np.testing.assert_allclose(whole.predict_proba(NEW), parts.predict_proba(NEW), atol=1e-5)


def test_a_new_class_is_known_at_once(set_model):
    old = LABELS != "birch"
    classifier = FewShotClassifier(set_model).fit(ROWS[old], LABELS[old])
    assert "birch" not in classifier.classes_
    classifier.partial_fit(ROWS[~old][:2], LABELS[~old][:2])
    assert classifier.classes_.tolist() == NAMES.tolist()
    assert (classifier.predict(ROWS[~old][2:]) == "birch").mean() > 0.8


def test_forgotten_examples_leave_no_trace(set_model):
    some = np.arange(48) % 3 == 0
    without = FewShotClassifier(set_model).fit(ROWS[~some], LABELS[~some])
    forgotten = FewShotClassifier(set_model).fit(ROWS, LABELS).forget(ROWS[some], LABELS[some])
    assert forgotten.temperature_ == pytest.approx(without.temperature_, rel=1e-4)
    np.testing.assert_allclose(forgotten.predict_proba(NEW), without.predict_proba(NEW), atol=1e-5)
    assert len(forgotten._sample.labels) == 32


def test_a_class_without_examples_is_removed(set_model):
    gone = LABELS == "cedar"
    without = FewShotClassifier(set_model).fit(ROWS[~gone], LABELS[~gone])
    forgotten = FewShotClassifier(set_model).fit(ROWS, LABELS).forget(ROWS[gone], LABELS[gone])
    assert forgotten.classes_.tolist() == ["ash", "birch", "dogwood"]
    np.testing.assert_allclose(forgotten.predict_proba(NEW), without.predict_proba(NEW), atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "labels", "message"),
    [
        (ROWS[:1] + 30, LABELS[:1], "`X` .*added before"),
        (ROWS[:1], ["elm"], "`y` .*got .*elm"),
        (ROWS, LABELS, "at least one example"),
        (np.where([True, False, False], math.nan, ROWS[:1]), LABELS[:1], "`X` must be complete"),
    ],
)
def test_forgetting_what_was_not_added_changes_nothing(set_model, rows, labels, message):
    classifier = FewShotClassifier(set_model).fit(ROWS[:24], LABELS[:24])
    before = classifier.predict_proba(NEW)
    with pytest.raises(ValueError, match=message):
        classifier.forget(rows[:24], labels[:24])
    np.testing.assert_array_equal(classifier.predict_proba(NEW), before)


@pytest.mark.parametrize(
    ("settings", "rows", "label", "message"),
    [
        ({}, [[math.nan, 1.0]], "c", "`X` must be complete"),
        ({"prior": [2, 1]}, [[0.0, 1.0]], "c", "`prior` .*3 classes"),
        ({"none_prior": 0.1, "none_label": "c"}, [[0.0, 1.0]], "c", "`none_label` .*got .*c"),
    ],
)
def test_rejected_examples_change_nothing(settings, rows, label, message):
    examples = np.random.default_rng(0).normal(size=(20, 2)) + 6 * np.repeat([[0.0], [1.0]], 10, 0)
    classifier = FewShotClassifier(steps=2, **settings).fit(examples, ["a"] * 10 + ["b"] * 10)
    before = classifier.predict_proba(examples)
    with pytest.raises(ValueError, match=message):
        classifier.partial_fit(rows, [label])
    assert classifier.labels_.tolist() == ["a", "b"]
    np.testing.assert_array_equal(classifier.predict_proba(examples), before)
    np.testing.assert_array_equal(classifier.partial_fit(examples[:1], ["a"]).labels_, ["a", "b"])


def test_a_class_that_the_prior_needs_cannot_be_forgotten(set_model):
    classifier = FewShotClassifier(set_model, prior=[2, 1, 1, 1]).fit(ROWS, LABELS)
    before = classifier.predict_proba(NEW)
    with pytest.raises(ValueError, match=r"`prior` .*3 classes"):
        classifier.forget(ROWS[LABELS == "ash"], LABELS[LABELS == "ash"])
    np.testing.assert_array_equal(classifier.predict_proba(NEW), before)


def test_the_temperature_calibrates_an_overconfident_model(set_model):
    """Pairs of equal columns count twice: without a temperature, probabilities are too sure."""
    random = np.random.default_rng(0)
    labels = np.repeat([0, 1, 2], 60)
    column = labels[:, None] + random.normal(size=(180, 1))
    rows = np.repeat(column, 3, axis=1) + 0.01 * random.normal(size=(180, 3))
    first = np.arange(180) % 2 == 0
    losses = {}
    for temperature in (1.0, "auto"):
        classifier = FewShotClassifier(set_model, temperature=temperature).fit(rows[first], labels[first])
        losses[temperature] = log_loss(labels[~first], classifier.predict_proba(rows[~first]))
    assert classifier.temperature_ > 1.5
    assert losses["auto"] < losses[1.0]


def test_rows_of_no_class_are_none_of_these(set_model):
    known = LABELS != "dogwood"
    classifier = FewShotClassifier(set_model, none_prior=0.1).fit(ROWS[known], LABELS[known])
    assert classifier.classes_.tolist() == ["ash", "birch", "cedar", "none of these"]
    assert (classifier.predict(ROWS[~known]) == "none of these").mean() > 0.8
    assert (classifier.predict(ROWS[known]) == LABELS[known]).mean() > 0.8
    np.testing.assert_allclose(classifier.predict_proba(NEW).sum(1), 1.0)
    numbered = FewShotClassifier(set_model, none_prior=0.1).fit(ROWS, NUMBERS)
    assert numbered.classes_.tolist() == [-1, 0, 1, 2, 3]


def test_a_prior_shifts_probabilities(set_model):
    twice = np.concatenate([np.arange(48), np.arange(12)])  # the first class twice
    uniform = FewShotClassifier(set_model, temperature=1.0).fit(ROWS[twice], LABELS[twice])
    empirical = FewShotClassifier(set_model, temperature=1.0, prior="empirical").fit(
        ROWS[twice], LABELS[twice]
    )
    given = FewShotClassifier(set_model, temperature=1.0, prior=[2, 1, 1, 1]).fit(ROWS[twice], LABELS[twice])
    odds = [c.predict_proba(NEW)[:, 0] / c.predict_proba(NEW)[:, 1] for c in (uniform, empirical, given)]
    np.testing.assert_allclose(odds[1], 2 * odds[0], rtol=1e-3)
    np.testing.assert_allclose(odds[1], odds[2], rtol=1e-6)


def test_classes_may_be_declared_before_their_examples(set_model):
    classifier = FewShotClassifier(set_model).partial_fit(ROWS[:12], LABELS[:12], classes=NAMES)
    assert classifier.predict_proba(NEW).shape == (400, 4)
    classifier.partial_fit(ROWS[12:], LABELS[12:])
    assert classifier.score(ROWS, LABELS) > 0.85


def test_images_are_classified(digits_model, unseen_digits):
    x, y = unseen_digits.elements.numpy().reshape(len(unseen_digits), -1), unseen_digits.labels.numpy()
    support = np.concatenate([np.flatnonzero(y == label)[:5] for label in range(3)])
    rest = np.setdiff1d(np.arange(len(y)), support)[:150]
    assert FewShotClassifier(digits_model).fit(x[support], y[support]).score(x[rest], y[rest]) > 0.8


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("prior", "flat"),
        ("temperature", 0.0),
        ("temperature", None),
        ("none_prior", 1.0),
        ("none_prior", None),
        ("none_label", "ash"),
    ],
)
def test_wrong_parameters_are_named_in_fit(set_model, setting, value, without_shape_checks):
    settings = {"none_prior": 0.1, setting: value} if setting == "none_label" else {setting: value}
    with pytest.raises(ValueError, match=rf"`{setting}` .*got .*{value}"):
        FewShotClassifier(set_model, **settings).fit(ROWS, LABELS)


def test_latents_match_the_model_in_both_directions(set_model):
    transformer = LatentTransformer(set_model).fit(ROWS)
    z = transformer.transform(ROWS)
    np.testing.assert_allclose(z, set_model.latents(ROWS), rtol=1e-6)
    np.testing.assert_allclose(transformer.inverse_transform(z), ROWS, atol=1e-5)
    missing = ROWS.copy()
    missing[0, 1] = math.nan
    assert np.isfinite(transformer.transform(missing)).all()
