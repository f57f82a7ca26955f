"""The detector for river, alone and in a pipeline."""

import copy
import importlib.util
import math
import pickle
import random
import sys

import numpy as np
import pytest
import torch
from river import anomaly, checks, compose, preprocessing
from set_rows import sets_of_rows
from sklearn.metrics import roc_auc_score

import bruno.river
from bruno.river import SetAnomalyDetector

COLUMNS = ("heat", "load", "noise")


def stream(count, seed=0, outliers=()):
    """Rows as dictionaries, and whether each is an outlier."""
    rows = sets_of_rows(1, count, seed)[0]
    labels = np.zeros(count, dtype=bool)
    labels[list(outliers)] = True
    rows[labels] += 8
    return [dict(zip(COLUMNS, row.tolist(), strict=True)) for row in rows], labels


def learnt(detector, rows):
    for row in rows:
        detector.learn_one(row)
    return detector


def state_of(detector):
    return pickle.dumps({name: value for name, value in vars(detector).items() if name != "model"})


@pytest.fixture
def small():
    return learnt(SetAnomalyDetector(warm_up=60, steps=10), stream(80)[0])


@pytest.mark.parametrize(
    "name",
    [
        "repr",
        "str",
        "tags",
        "clone_same_class",
        "clone_is_idempotent",
        "init_has_default_params_for_tests",
        "init_default_params_are_not_mutable",
        "clone_changes_memory_addresses",
        "mutate_can_be_idempotent",
        "pickling_supports_roundtrip",
        "clone_with_new_params_applies",
        "get_params_matches_signature",
    ],
)
def test_the_detector_passes_the_checks_of_river(name):
    getattr(checks.common, f"check_{name}")(SetAnomalyDetector())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "learn_one",
        "pickling",
        "shuffle_features_no_impact",
        "emerging_features",
        "disappearing_features",
        "radically_disappearing_features",
        "predict_one_pure",
        "predict_one_before_any_learn",
        "no_state_aliasing_with_input",
        "clone_is_independent",
    ],
)
def test_the_detector_passes_the_checks_of_river_on_a_stream(name):
    random.seed(0)
    rows, labels = stream(40)
    detector, data = SetAnomalyDetector(warm_up=20, steps=2), list(zip(rows, labels, strict=True))
    getattr(checks.common, f"check_{name}")(detector, data)


def test_scores_are_high_for_outliers_in_a_pipeline(set_model):
    rows, labels = stream(120, outliers=(60, 75, 90, 110))
    for detector in (SetAnomalyDetector(set_model), SetAnomalyDetector(warm_up=50, steps=10)):
        scaled = preprocessing.StandardScaler() if detector.model is None else compose.Select(*COLUMNS)
        pipeline = compose.Select(*COLUMNS) | scaled | detector
        scores = []
        for row in rows:
            scores.append(pipeline.score_one({**row, "time": 3.0}))
            pipeline.learn_one({**row, "time": 3.0})
        assert roc_auc_score(labels[50:], scores[50:]) > 0.97


def test_a_filter_of_river_takes_the_scores(set_model):
    rows, _ = stream(60, outliers=(50,))
    model = anomaly.QuantileFilter(SetAnomalyDetector(set_model), q=0.98)
    flagged = []
    for row in rows:
        score = model.score_one(row)
        flagged.append(model.classify(score))
        model.learn_one(row)
    assert flagged[50]


def test_scoring_changes_nothing(small, set_model):
    for detector in (small, SetAnomalyDetector(warm_up=60), SetAnomalyDetector(set_model)):
        before = state_of(detector)
        scores = [detector.score_one(row) for row in stream(5, seed=1)[0] * 2]
        assert scores[:5] == scores[5:]
        assert state_of(detector) == before


def test_scores_match_the_posterior(set_model):
    rows, _ = stream(30)
    detector = learnt(SetAnomalyDetector(set_model, count_all=True), rows)
    x = torch.tensor([list(row.values()) for row in rows], dtype=torch.double)
    assert detector.columns == tuple(sorted(COLUMNS))
    typical = max(range(30), key=lambda i: set_model.prior().log_prob(x[i]))  # of a usual log p(x)
    expected = set_model.condition(x).log_prob(x[typical]) - max(
        set_model.prior().log_prob(x[typical]), detector._scorer.reference
    )
    assert detector.score_one(rows[typical]) == pytest.approx(-expected.item(), abs=1e-4)
    assert int(detector.posterior.evidence.count) == 30


def test_outliers_are_not_learnt(set_model):
    rows, _ = stream(60, outliers=(0, 1, 40, 50))
    robust = learnt(SetAnomalyDetector(set_model), rows)
    assert 50 <= int(robust.posterior.evidence.count) <= 56
    assert robust.score_one(rows[40]) > 10


def test_nothing_is_anomalous_before_the_small_model_is_trained():
    detector = learnt(SetAnomalyDetector(warm_up=60), stream(59)[0])
    assert detector.posterior is None
    assert detector.score_one({"heat": 99.0}) == 0.0
    assert detector.explain_one({"heat": 99.0}) == {}


def test_missing_columns_are_imputed_and_new_ones_ignored(small):
    row = stream(1, seed=2)[0][0]
    score = small.score_one(row)
    assert small.score_one({**row, "colour": 5.0}) == score
    for partial in ({**row, "heat": None}, {**row, "heat": math.nan}, {"load": row["load"]}):
        assert math.isfinite(small.score_one(partial))
        small.learn_one(partial)
    assert small.score_one({}) == 0.0


def test_rows_without_numbers_are_not_learnt(set_model):
    rows, _ = stream(40)
    plain, gappy = SetAnomalyDetector(set_model), SetAnomalyDetector(set_model)
    for row in rows:
        plain.learn_one(row)
        for none in ({}, dict.fromkeys(COLUMNS), dict.fromkeys(COLUMNS, math.nan)):
            gappy.learn_one(none)
            assert gappy.score_one(none) == 0.0
        gappy.learn_one(row)
    assert gappy.score_one(rows[0]) == plain.score_one(rows[0])


def test_columns_without_names_are_those_of_the_first_row_in_its_order(set_model):
    rows, _ = stream(30)
    names = ("V1", "V2", "V10")
    renamed = [dict(zip(names, row.values(), strict=True)) for row in rows]
    detector, plain = (learnt(SetAnomalyDetector(set_model), some[:-1]) for some in (renamed, rows))
    assert detector.columns == names
    assert detector.score_one(renamed[-1]) == plain.score_one(rows[-1])


def test_a_set_begins_with_a_complete_row(small):
    rows, _ = stream(30)
    detector = SetAnomalyDetector(small._scorer.model)
    for row in rows[:5]:
        detector.learn_one({**row, "heat": None})
        assert int(detector.posterior.evidence.count) == 0
    for row in [*rows[5:7], {**rows[7], "heat": None}]:
        detector.learn_one(row)
    assert int(detector.posterior.evidence.count) == 3


def test_the_column_that_was_moved_is_named(small):
    row = stream(1, seed=0)[0][0]
    found = small.explain_one({**row, "load": row["load"] + 9})
    assert max(found, key=found.get) == "load"


def test_clones_share_a_given_model(set_model, tmp_path):
    trained = bruno.Trained(set_model, None, tmp_path)
    assert SetAnomalyDetector(trained).clone().model.model is set_model
    assert copy.deepcopy(trained) is trained


def test_wrong_input_is_named(set_model, digits_model, small):
    with pytest.raises(ValueError, match=r"`x` .*'warm'.*'heat'"):
        small.score_one({"heat": "warm"})
    for learn_or_score in (small.learn_one, small.score_one, small.explain_one):
        with pytest.raises(ValueError, match=r"`x` .*one of the columns \('heat', .*got \('haet',\)"):
            learn_or_score({"haet": 1.0})
    with pytest.raises(ValueError, match=r"`x` .*3 columns.*got 2"):
        SetAnomalyDetector(set_model).learn_one({"heat": 1.0, "load": 2.0})
    with pytest.raises(ValueError, match=r"`model` .*images"):
        SetAnomalyDetector(digits_model).learn_one({"heat": 1.0})
    with pytest.raises(ValueError, match=r"`warm_up` .*got 1"):
        SetAnomalyDetector(warm_up=1)


def test_without_river_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "river.base", None)
    source = importlib.util.spec_from_file_location("without_river", bruno.river.__file__)
    with pytest.raises(ImportError, match=r"bruno\[river\]"):
        source.loader.exec_module(importlib.util.module_from_spec(source))


def test_the_columns_of_a_model_are_in_its_own_order_if_it_is_a_path(tmp_path):
    rows = np.random.default_rng(3).normal([0.0, 5.0, 50.0], size=(240, 3)).tolist()
    table = tmp_path / "table.csv"
    lines = [f"{i // 8},{','.join(map(str, row))}" for i, row in enumerate(rows)]
    table.write_text("\n".join(["set,zeta,mid,alpha", *lines]) + "\n")
    data = {"name": str(table), "group": "set"}
    trained = bruno.train("table", out=tmp_path / "run", data=data, steps=2, validation_sets=0)
    names = ("zeta", "mid", "alpha")
    given = [dict(zip(names, row, strict=True)) for row in rows[:8]]
    by_path, by_model = (
        learnt(SetAnomalyDetector(model), given) for model in (str(tmp_path / "run"), trained)
    )
    assert by_path.columns == by_model.columns == names
    assert by_path.score_one(given[0]) == pytest.approx(by_model.score_one(given[0]), abs=1e-4)
