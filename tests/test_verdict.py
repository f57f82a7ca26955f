"""The verdict on a trained model."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

import bruno
from bruno.data.synthetic import simulate_machines
from bruno.reporting.summaries import summarise
from bruno.tasks.contamination import Contamination
from bruno.tasks.planted_faults import FAULTS
from bruno.tasks.planted_outliers import OUTLIERS
from bruno.trained import Trained, Verdict
from bruno.trained.data import Selection


@pytest.fixture(scope="module")
def digits(digits_run, tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("verdict") / "run"
    shutil.copytree(digits_run, folder)
    return bruno.open(folder, device="cpu")


@pytest.fixture(scope="module")
def of_digits(digits) -> Verdict:
    return digits.verdict(elements=2000)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Trained:
    """A model of 30 machines, of which 6 are held out."""
    folder = tmp_path_factory.mktemp("verdict")
    machines = simulate_machines(30, 15, seed=0).examples
    names = np.array(machines.names)[machines.labels.numpy()]
    np.savez(folder / "machines.npz", rows=machines.elements.numpy(), labels=names)
    return bruno.train(
        "table", folder / "run", data={"name": str(folder / "machines.npz")}, steps=100, device="cpu"
    )


def test_images_are_classified_and_compared_with_nearest_neighbours(of_digits):
    assert of_digits.measured_on == "unseen classes"
    assert of_digits.classes == 3
    assert of_digits.unit == "bits/dim"
    assert [(one.way, one.shot) for one in of_digits.few_shot.model] == [(3, 1), (3, 5)]
    assert of_digits.faults is None
    assert of_digits.training.mean < of_digits.held_out.mean
    assert of_digits.gain == of_digits.held_out.by_position[0] - of_digits.held_out.by_position[-1] > 0
    assert of_digits.beats_baseline


def test_outliers_are_planted_in_images_and_compared_with_patches_of_pixels(of_digits):
    assert set(of_digits.outliers.model) == set(of_digits.outliers.baseline) == set(OUTLIERS)
    assert of_digits.outliers.model["image of another class"] > 0.8
    assert any("patch of another class" in name for name, *_ in summarise(of_digits).rows)


@pytest.mark.parametrize(
    ("gain", "better", "said"),
    [
        (-0.2, False, "Outliers: the baseline is better, distances between patches of pixels. Batches"),
        (0.2, True, "Outliers: the model is better than the baseline, distances between patches"),
    ],
)
def test_a_verdict_says_what_finds_outliers_better(of_digits, gain, better, said):
    found = replace(of_digits, outliers=replace(of_digits.outliers, area_gain=gain, area_error=0.01))
    assert found.finds_outliers is better
    assert said in summarise(found).note
    unclear = replace(of_digits, outliers=replace(of_digits.outliers, area_gain=gain, area_error=0.2))
    assert unclear.finds_outliers is None
    assert "Outliers: no clear difference from the baseline, distances" in summarise(unclear).note


def test_a_verdict_names_the_outliers_that_the_baseline_finds_better(of_digits):
    area = dict(zip(OUTLIERS, (0.9, 0.6), strict=True))
    better = dict(zip(OUTLIERS, (0.8, 0.99), strict=True))
    outliers = replace(
        of_digits.outliers,
        model=area,
        baseline=better,
        area_gain=-0.03,
        area_error=0.03,
        kind_errors=dict.fromkeys(OUTLIERS, 0.02),
    )
    found = replace(of_digits, outliers=outliers)
    assert found.outlier_margins == dict(zip(OUTLIERS, (1, -1), strict=True))
    assert (
        "no clear difference from the baseline, distances between patches of pixels. For images of another "
        "class, the model is; for patches of another class, the baseline is better."
    ) in summarise(found).note
    worse = replace(found, outliers=replace(outliers, area_gain=-0.1, area_error=0.01))
    assert "by the model. For images of another class, the model is better." in summarise(worse).note
    errors = of_digits.outliers.kind_errors
    assert set(errors) == set(OUTLIERS)
    assert all(0 < error < 0.2 for error in errors.values())


def test_a_verdict_tells_a_model_that_overfits(of_digits):
    assert not of_digits.overfits
    assert "overfits" not in summarise(of_digits).note
    far = replace(of_digits, held_out=replace(of_digits.held_out, mean=5.0))
    assert "The model overfits: held-out images are less likely than random pixels, which have 4.09 bits" in (
        summarise(far).note
    )
    assert not replace(of_digits, held_out=None).overfits
    assert not replace(far, uniform=None).overfits


@pytest.mark.parametrize(
    ("measured_on", "classes", "said"),
    [
        ("unseen classes", 2, "Measured on 2 unseen classes."),
        (
            "unseen elements of the training classes",
            10,
            "Measured on unseen elements of the 10 training classes.",
        ),
        ("the training classes", 1, "Measured on the 1 training class."),
    ],
)
def test_a_verdict_says_how_many_classes_it_was_measured_on(of_digits, measured_on, classes, said):
    assert summarise(replace(of_digits, measured_on=measured_on, classes=classes)).note.startswith(said)


def test_a_seed_gives_the_same_verdict(digits):
    assert digits.verdict(elements=600, seed=3) == digits.verdict(elements=600, seed=3)


def test_faults_are_planted_in_rows(table):
    verdict = table.verdict(elements=1000)
    assert (verdict.measured_on, verdict.classes) == ("unseen classes", 6)
    assert verdict.few_shot is None
    assert verdict.faults.set_size == 15
    assert verdict.unit == "nats/row"
    assert verdict.density(verdict.held_out.mean) == pytest.approx(verdict.held_out.mean * 8 * np.log(2))
    printed = summarise(verdict)
    assert any(name.startswith("false alarms, requested 1 %") for name, *_ in printed.rows)


def test_numbers_measured_on_training_data_are_never_called_held_out(digits, tmp_path):
    two = digits.examples("train").of_classes([0, 1])  # fewer than three classes: none is held out
    two.save(tmp_path / "two.npz")
    np.savez(tmp_path / "two.npz", images=two.elements.numpy(), labels=two.labels.numpy())
    data = evolve(digits.recipe.data, name=str(tmp_path / "two.npz"))
    verdict = replace(digits, recipe=evolve(digits.recipe, data=data)).verdict(elements=600)
    assert verdict.measured_on == "the training classes"
    assert verdict.held_out is None
    assert verdict.few_shot is not None
    assert "No class was held out" in summarise(verdict).note


def test_unseen_elements_of_known_classes_are_reported_as_such(digits, monkeypatch):
    seen = digits.examples("train")
    monkeypatch.setattr(Trained, "_select", lambda self, split, **_: Selection(seen, str(split)))
    assert digits.verdict(elements=600).measured_on == "unseen elements of the training classes"


@pytest.mark.parametrize("split", ["train", "trainval", "all"])
def test_a_split_must_be_held_out(digits, split):
    with pytest.raises(ValueError, match=rf"`split` .*got '{split}'"):
        digits.verdict(split=split)
    trainval = evolve(digits.recipe, data=evolve(digits.recipe.data, split="trainval"))
    with pytest.raises(ValueError, match=r"`split` .*got 'validation'"):
        replace(digits, recipe=trainval).verdict(split="validation")


def test_too_few_elements_for_a_job_leave_the_densities(digits, monkeypatch):
    alone = digits.examples("test").of_classes([0])
    original = Trained._select
    monkeypatch.setattr(
        Trained,
        "_select",
        lambda self, split, *rest: original(self, split, *rest)._replace(
            **({"examples": alone} if split == "validation" else {})
        ),
    )
    verdict = digits.verdict(elements=600)
    assert verdict.few_shot is None
    assert verdict.unmeasured.startswith("`data` must have at least two classes")
    assert verdict.held_out is not None
    assert verdict.beats_baseline is None
    assert verdict.unmeasured in summarise(verdict).note


def test_the_number_of_elements_is_a_fraction_of_the_training_elements(digits):
    per_step = digits.recipe.train.elements
    assert digits._affordable_elements() == min(20_000, int(0.2 * 300 * per_step))
    short = replace(digits, folder=Path("no-such-run"))
    assert short._affordable_elements() == 4000


@pytest.mark.slow
def test_a_model_without_its_data_is_measured_on_other_characters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BRUNO_DATA", raising=False)
    verdict = bruno.open("omniglot-small", device="cpu", data_dir=tmp_path).verdict(elements=200)
    assert verdict.training is None
    assert verdict.measured_on == "unseen classes"


def test_it_says_so_if_the_baseline_is_better(of_digits):
    better = "Few-shot accuracy: the model is better than the baseline, nearest neighbours in pixels."
    assert better in summarise(of_digits).note
    few_shot = of_digits.few_shot
    swapped = replace(of_digits, few_shot=replace(few_shot, model=few_shot.baseline, baseline=few_shot.model))
    assert swapped.beats_baseline is False
    assert "Few-shot accuracy: the baseline is better, nearest" in summarise(swapped).note
    same = replace(of_digits, few_shot=replace(few_shot, baseline=few_shot.model))
    assert same.beats_baseline is None
    assert "Few-shot accuracy: no clear difference" in summarise(same).note


def with_detections(verdict: Verdict, model: dict, baseline: dict, area_gain: float = 0.0) -> Verdict:
    """The verdict with other detection rates of 200 faults of each kind, at 1 % of false alarms."""
    faults = verdict.faults
    pairs = {kind: (model.get(kind, 0.5), baseline.get(kind, 0.5)) for kind in FAULTS}
    errors = {
        kind: max(0.01, np.sqrt((a + b) / 2 * (1 - (a + b) / 2) / 100)) for kind, (a, b) in pairs.items()
    }
    methods = [
        replace(method, false_alarms=0.01, detections={kind: pair[i] for kind, pair in pairs.items()})
        for i, method in enumerate((faults.model, faults.baseline))
    ]
    return replace(
        verdict,
        faults=replace(
            faults,
            model=methods[0],
            baseline=methods[1],
            area_gain=area_gain,
            area_error=0.01,
            detection_errors=errors,
        ),
    )


@pytest.mark.parametrize(("area_gain", "said"), [(0.0, "about that of"), (0.1, "larger than that of")])
def test_a_kind_of_fault_that_the_baseline_finds_more_often_is_named(table, area_gain, said):
    verdict = table.verdict(elements=600)
    found = with_detections(
        verdict, {"row of another set": 0.049}, {"row of another set": 0.466}, area_gain=area_gain
    )
    assert found.beats_baseline is False
    note = summarise(found).note
    assert said in note
    assert "but the baseline finds 47 % of the rows of another set, the model 5 %." in note
    assert "Faults: the area under ROC is" in note
    assert "no clear difference" not in note
    assert "etter" not in note
    assert summarise(found).values["detection_margins"]["row of another set"] == -1


def test_differences_between_kinds_of_fault_are_named_for_both_methods(table):
    spike, row = "spike in one column", "row of another set"
    verdict = table.verdict(elements=600)
    note = summarise(with_detections(verdict, {spike: 0.9, row: 0.1}, {spike: 0.2, row: 0.8})).note
    assert "The model finds 90 % of the spikes in one column, the baseline 20 %, but the baseline" in note
    better = with_detections(verdict, {spike: 0.9}, {spike: 0.2})
    assert better.beats_baseline is True
    assert "Faults: the model is better than the baseline" in summarise(better).note
    assert "The model finds 90 % of the spikes" in summarise(better).note
    worse = with_detections(verdict, {spike: 0.2}, {spike: 0.9}, area_gain=-0.1)
    assert "Faults: the baseline is better, a robust" in summarise(worse).note
    assert "It finds 90 % of the spikes" in summarise(worse).note


def test_a_difference_that_may_be_due_to_chance_or_to_false_alarms_is_not_named(table):
    spike, verdict = "spike in one column", table.verdict(elements=600)
    assert with_detections(verdict, {spike: 0.5}, {spike: 0.6}).beats_baseline is None
    found = with_detections(verdict, {spike: 0.1}, {spike: 0.9})
    many = replace(found.faults.baseline, false_alarms=0.2)
    assert replace(found, faults=replace(found.faults, baseline=many)).beats_baseline is None


def test_faults_in_the_held_out_sets_are_reported_and_longer_training_is_not_advised(table):
    verdict = table.verdict(elements=600)
    assert verdict.contamination.rows == 6 * 15
    assert not verdict.contamination.suspected
    assert "contain faults" not in summarise(verdict).note
    faults = replace(verdict.faults, area_gain=-0.1, area_error=0.01)
    faulty = replace(verdict, faults=faults, contamination=Contamination(1000, 31, 3, 14, 15.0))
    note = summarise(faulty).note
    assert "The held-out sets seem to contain faults: about 3 % of the rows." in note
    assert f"Calibrate on clean sets: bruno calibrate {table.folder} CLEAN.csv." in note
    assert "longer" not in note
    assert "longer" in summarise(replace(faulty, contamination=verdict.contamination)).note


def test_a_calibration_on_sets_with_faults_says_so(table, tmp_path):
    machines = simulate_machines(30, 40, seed=5).examples
    rows, names = machines.elements.numpy().copy(), np.array(machines.names)[machines.labels.numpy()]
    for share, suspected in ((0.0, False), (0.04, True)):
        spiked = np.random.default_rng(0).random(len(rows)) < share
        rows[spiked, 2] += 15 * rows[:, 2].std()
        np.savez(tmp_path / "sets.npz", rows=rows, labels=names)
        report = table.calibrate(str(tmp_path / "sets.npz"))
        assert report.contamination.suspected is suspected
        note = summarise(report).note
        assert bool(re.search(r"faults: about [345] % of the rows", note)) is suspected
        assert (f"bruno calibrate {table.folder} CLEAN.csv" in note) is suspected
    report.path.unlink()


@pytest.mark.parametrize("missing", [False, True])
def test_a_batch_says_if_missing_numbers_make_its_p_values_estimates(table, caplog, missing):
    """The held-out groups of the calibration are complete."""
    rows = simulate_machines(2, 8, seed=7).examples.elements[:8].clone()
    rows[3, 1] = np.nan if missing else 0.0
    with caplog.at_level("INFO", "bruno"):
        table.judge_batch(rows, one_set=True, rate=0.3)
    assert ("1 of 1 sets have missing numbers" in caplog.text) is missing


def test_far_more_false_alarms_than_requested_are_pointed_out(table):
    verdict = table.verdict(elements=600)
    faults = verdict.faults
    for share, far_more in ((0.02, False), (0.3, True)):
        rates = replace(faults.model, false_alarms=share)
        note = summarise(replace(verdict, faults=replace(faults, model=rates))).note
        assert ("30 % of clean rows are flagged, but 1 %" in note) == far_more


def test_the_verdict_is_kept_as_json(digits, of_digits):
    path = digits.save_result(summarise(of_digits))
    assert path.name == "verdict.json"
    values = json.loads(path.read_text())["values"]
    assert values["held_out"]["mean"] == of_digits.held_out.mean
    assert values["measured_on"] == "unseen classes"
    assert values["beats_baseline"] is True
