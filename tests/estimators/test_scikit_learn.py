"""The contract of scikit-learn: its own checks, and clones, pickles, pipelines, searches, frames, routing."""

import importlib.util
import pickle
import sys

import numpy as np
import pandas
import pytest
import sklearn
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.metrics import make_scorer, roc_auc_score
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import bruno.sklearn.base
from bruno.sklearn import FewShotClassifier, LatentTransformer, SetOutlierDetector

ESTIMATORS = {
    "detector": SetOutlierDetector(steps=2, rate=0.1),
    "detector of new rows": SetOutlierDetector(novelty=True, steps=2, rate=0.1),
    "classifier": FewShotClassifier(steps=3),
    "transformer": LatentTransformer(steps=3),
}
DEFAULTS = [SetOutlierDetector(), SetOutlierDetector(novelty=True), FewShotClassifier(), LatentTransformer()]
RANDOM = np.random.default_rng(0)
ROWS = np.concatenate([RANDOM.normal(size=(30, 3)), RANDOM.normal(size=(30, 3)) + 5])
LABELS = np.repeat(["left", "right"], 30)
FRAME = pandas.DataFrame(ROWS, columns=["load", "heat", "noise"])


def each(estimators=ESTIMATORS):
    return pytest.mark.parametrize("estimator", estimators.values(), ids=estimators)


def output(estimator, rows=ROWS):
    """What a fitted estimator says about rows."""
    if isinstance(estimator, LatentTransformer):
        return estimator.transform(rows)
    if isinstance(estimator, FewShotClassifier):
        return estimator.predict_proba(rows)
    return estimator.score_samples(rows) if estimator.novelty else estimator.scores_


def assert_passes(estimator):
    for outcome in check_estimator(estimator, on_fail=None):
        skipped = outcome["check_name"] == "check_array_api_input"  # needs a setting of scipy
        assert skipped or outcome["status"] == "passed", (outcome["check_name"], outcome["exception"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n == "detector of new rows")) for n in ESTIMATORS]
)
@pytest.mark.filterwarnings("ignore")
def test_estimators_pass_the_checks_of_scikit_learn(name, without_shape_checks):
    assert_passes(ESTIMATORS[name])


@pytest.mark.long
@pytest.mark.parametrize("estimator", DEFAULTS, ids=str)
@pytest.mark.filterwarnings("ignore")
def test_estimators_pass_the_checks_with_their_defaults(estimator, without_shape_checks):
    assert_passes(estimator)


@each()
def test_a_pickle_gives_the_same_output(estimator):
    fitted = clone(estimator).fit(ROWS, LABELS)
    again = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(output(fitted), output(again))


def test_clones_share_the_weights_of_a_given_model(set_model):
    estimator = SetOutlierDetector(set_model)
    assert clone(estimator).model is set_model
    assert clone(make_pipeline(StandardScaler(), estimator))[-1].model is set_model


def test_a_given_model_is_not_changed(set_model):
    before = set_model.fingerprint()
    for estimator in ESTIMATORS.values():
        clone(estimator).set_params(model=set_model).fit(ROWS, LABELS)
    assert set_model.fingerprint() == before


def test_the_model_may_be_a_file_or_an_opened_model(set_model, tmp_path):
    path = tmp_path / "model.safetensors"
    bruno.save(set_model, path)
    given = [path, str(path), bruno.open(path, device="cpu"), set_model]
    outputs = [output(LatentTransformer(model).fit(ROWS)) for model in given]
    for found in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], found)


def test_estimators_work_in_a_pipeline(set_model):
    detector = make_pipeline(StandardScaler(), SetOutlierDetector(novelty=True, steps=5))
    assert set(np.unique(detector.fit(ROWS).predict([[0.0, 0, 0], [99, 99, 99]]))) == {-1, 1}
    classifier = make_pipeline(LatentTransformer(set_model), FewShotClassifier(steps=5))
    assert classifier.fit(ROWS, LABELS).score(ROWS, LABELS) > 0.9


def test_a_grid_search_chooses_parameters(set_model):
    grid = {"temperature": [0.5, "auto"], "prior": ["uniform", "empirical"]}
    search = GridSearchCV(FewShotClassifier(set_model), grid, cv=3, scoring="neg_log_loss")
    assert search.fit(ROWS, LABELS).best_score_ > -0.2
    outlier = np.zeros(60, dtype=int)
    outlier[::10] = 1
    rows = ROWS[:30].repeat(2, 0) + outlier[:, None] * 20
    scoring = make_scorer(lambda y, scores: roc_auc_score(y, -scores), response_method="decision_function")
    detector = SetOutlierDetector(set_model, novelty=True)
    search = GridSearchCV(detector, {"count_all": [False, True]}, cv=2, scoring=scoring)
    assert search.fit(rows, outlier).best_score_ > 0.95


@each()
def test_frames_keep_the_names_of_their_columns(estimator):
    fitted = clone(estimator).fit(FRAME, LABELS)
    assert fitted.feature_names_in_.tolist() == ["load", "heat", "noise"]
    if hasattr(fitted, "predict"):
        with pytest.raises(ValueError, match="feature names"):
            fitted.predict(FRAME.rename(columns={"heat": "cold"}))


def test_latents_are_a_frame_if_asked_for():
    found = LatentTransformer(steps=2).set_output(transform="pandas").fit_transform(FRAME)
    assert found.columns.tolist() == ["latenttransformer0", "latenttransformer1", "latenttransformer2"]


def test_columns_of_a_frame_are_selected_by_the_names_of_the_model(set_model, tmp_path):
    recipe = bruno.config.load_recipe("table", ['data.columns=["load","heat","noise"]', "data.name=x.csv"])
    trained = bruno.Trained(set_model, recipe, tmp_path)
    shuffled = FRAME.assign(comment="none")[["noise", "comment", "load", "heat"]]
    plain, named = (LatentTransformer(trained).fit(frame) for frame in (FRAME, shuffled))
    np.testing.assert_array_equal(plain.transform(FRAME), named.transform(shuffled))
    with pytest.raises(ValueError, match=r"`X` .*heat"):
        named.transform(FRAME[["load", "noise"]])


def test_groups_are_routed_as_metadata(set_model):
    groups = np.repeat(["a", "b"], 30)
    with sklearn.config_context(enable_metadata_routing=True):
        detector = SetOutlierDetector(set_model, novelty=True)
        detector = detector.set_fit_request(groups=True).set_predict_request(groups=True)
        pipeline = make_pipeline(StandardScaler(), detector).fit(ROWS, groups=groups)
        assert pipeline[-1].groups_.tolist() == ["a", "b"]
        assert (pipeline.predict(ROWS, groups=groups) == 1).mean() > 0.8
        assert (pipeline.predict(ROWS, groups=groups[::-1]) == -1).all()


@each()
def test_methods_before_fit_say_so(estimator):
    for name in ("predict", "transform", "score_samples", "p_values", "predict_proba"):
        if hasattr(estimator, name):
            with pytest.raises(NotFittedError):
                getattr(clone(estimator), name)(ROWS)


@pytest.mark.parametrize("model", [3, object()])
def test_a_model_argument_must_be_a_model(model, without_shape_checks):
    with pytest.raises(TypeError, match=rf"`model` .*got {type(model).__name__}"):
        LatentTransformer(model).fit(ROWS)


def test_rows_must_have_the_columns_of_the_model(set_model):
    with pytest.raises(ValueError, match=r"`X` .*3 columns.*got 2"):
        LatentTransformer(set_model).fit(ROWS[:, :2])


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    source = importlib.util.spec_from_file_location("without_sklearn", bruno.sklearn.base.__file__)
    with pytest.raises(ImportError, match=r"bruno\[sklearn\]"):
        source.loader.exec_module(importlib.util.module_from_spec(source))
