"""Rows of a table, from training to a stream."""

import re
import shutil
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from torch.testing import assert_close

import bruno
from bruno.tasks import GroupCalibration
from bruno.trained import Trained
from bruno.training.run import Run
from cli.commandline import run, run_main, values_of, words

SCALE = np.array([1, 1, 1e5])  # the third column, weight, is in grams
OUT_OF_DISTRIBUTION = "outlier, out-of-distribution"
WATCH = ["anomaly", "watch", "runs/machines", "--one-set"]


_OUTLIERS = {"watch": "anomaly-outliers", "batch": "anomaly-batch-outliers"}  # results


class Table(NamedTuple):
    """30 rows of each of 31 machines; the last machine is the stream, with an outlier in line 27."""

    rows: np.ndarray
    folder: Path


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Table:
    folder, generator = tmp_path_factory.mktemp("machines"), np.random.default_rng(0)
    means = generator.normal(60, 5, (31, 1, 3))
    rows = (means + generator.normal(0, 1, (31, 30, 3))) * SCALE
    rows[30, 25, 0] += 8
    text = "".join(f"m{m},{a:.3f},{b:.3f},{c:.3f}\n" for m in range(30) for a, b, c in rows[m])
    (folder / "machines.csv").write_text("machine,heat,speed,weight\n" + text)
    stream = "heat,speed,weight\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows[30])
    (folder / "stream.csv").write_text(stream)
    data = ["--set", f"data.name={folder / 'machines.csv'}", "--set", "data.group=machine"]
    data += ["--set", "train.batch=8", "--no-verdict"]
    run("train", "table", *data, "--steps", "150", "--out", folder / "runs" / "machines", "--device", "cpu")
    return Table(rows, folder)


@pytest.fixture
def machines(table, monkeypatch) -> Table:
    """The table; its folder is the working directory."""
    monkeypatch.chdir(table.folder)
    return table


def test_an_outlier_in_a_stream_is_flagged(machines):
    output = run(*WATCH, "stream.csv")
    assert (
        "6 groups: rates of at least 28.6 % are exact in sets of up to 20 elements; 1 % is estimated"
        in output
    )
    assert "stream.csv, line 27  outlier" in output
    assert len(re.findall(r"  outlier", output)) == 1


def test_the_column_that_makes_an_outlier_is_named(machines):
    output = words(run("anomaly", "batch", "runs/machines", "stream.csv", "--one-set", "--explain"))
    assert re.search(r"line 27 .*heat −\d", output)
    values = values_of("runs/machines", "explanation")
    assert values["features"] == ["heat", "speed", "weight"]
    assert np.argmin(values["contributions"][0]) == 0
    trained = bruno.open("runs/machines", device="cpu")
    rows = machines.rows[30]
    found = trained.explain(rows[25:26], given=np.delete(rows, 25, 0))
    assert found.lowest(1)[0][0][0] == "heat"
    inliers = [f"stream.csv, line {line}" for line in range(2, 32) if line != 27]
    assert not set(values["names"]) & set(inliers)


@pytest.mark.parametrize("missing", [False, True])
def test_the_score_that_was_judged_is_explained(machines, missing):
    """Outliers that count are not in their own evidence; inliers below the cutoff do not count."""
    rows = machines.rows[30].copy()
    rows[[3, 4, 5, 6], 1] += [4.0, 5.0, 6.0, 7.0]
    rows[9, 0] = np.nan if missing else rows[9, 0]
    trained = bruno.open("runs/machines", device="cpu")
    for settings in ({"rate": 0.3}, {"rate": 0.01}, {"threshold": 2.0}, {"rate": 0.3, "count_all": True}):
        batch = trained.judge_batch(rows, one_set=True, explain=True, **settings)
        found, shown = batch.explanation, batch.outliers.elements
        assert found.names == tuple(one.name for one in shown)
        judged = torch.tensor([one.judgement.score for one in shown]).double()
        assert_close(found.scores, judged, atol=1e-4, rtol=1e-5)
        sums = [sum(one.judgement.contributions.values()) for one in shown]
        assert_close(torch.tensor(sums).double(), found.scores - found.baseline, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("job", ["watch", "batch"])
def test_explanations_say_how_many_outliers_they_are_the_most_unusual_of(machines, job):
    """Both tables have the same outliers in the same order."""
    command = ["anomaly", job, "runs/machines", "stream.csv", "--one-set", "--threshold", "999", "--explain"]
    output = words(run(*command))
    table, explained = values_of("runs/machines", _OUTLIERS[job]), values_of("runs/machines", "explanation")
    assert output.count(f"The 24 most unusual of {table['outliers']} outliers.") == 2
    assert table["outliers"] > len(explained["names"]) == 24
    assert table["names"] == explained["names"]


@pytest.mark.parametrize(
    "command",
    [
        "anomaly watch MODEL stream.csv --one-set --explain",
        "anomaly batch MODEL stream.csv --one-set --explain",
        "calibrate MODEL machines.csv",
        "evaluate MODEL",
        "retrieve search MODEL --query stream.csv --collection machines.csv",
        "sample MODEL",
    ],
)
def test_tables_have_one_minus_sign(machines, command):
    shutil.copytree("runs/machines", "runs/copy", dirs_exist_ok=True)
    output = run(*command.replace("MODEL", "runs/copy").split())
    assert not re.search(r"(?<!\w)-\d", output)


def test_the_representation_of_a_model_names_its_columns(machines):
    shown = repr(bruno.open("runs/machines", device="cpu"))
    assert "columns=('heat', 'speed', 'weight')" in shown


def test_nothing_is_explained_without_outliers(machines):
    Path("runs/machines/results/explanation.json").unlink(missing_ok=True)
    batch = ["anomaly", "batch", "runs/machines", "stream.csv", "--one-set", "--threshold", "-999"]
    run(*batch, "--explain")
    assert not Path("runs/machines/results/explanation.json").exists()


def test_calibration_on_few_sets_is_a_warning(machines):
    lines = Path("machines.csv").read_text().splitlines(keepends=True)
    Path("two.csv").write_text("".join(lines[:61]))
    output = run(*WATCH, "stream.csv", "--data", "two.csv")
    assert "calibrated on 2 classes with 60 elements" in output


def test_rows_of_a_frame_belong_to_the_sets_that_their_group_column_names(machines):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv("machines.csv").iloc[::10].rename(columns={"machine": "press"})
    trained = bruno.open("runs/machines", device="cpu")
    detector = trained.detector(threshold=0.0)
    batch = trained.judge_batch(frame, threshold=0.0, group="press")
    assert len(batch.summary.groups) == 30
    watched = [one.element.group for one in trained.watch(frame, detector, group="press")]
    keyed = [one.element.group for one in trained.watch_keys(frame, detector=detector, group="press")]
    assert watched == keyed == list(frame["press"])
    for judge in (trained.watch, trained.judge_batch):
        with pytest.raises(ValueError, match=r"row 1: .*'machine'.*`one_set`"):
            list(judge(frame))
    assert len(trained.judge_batch(frame, threshold=0.0, one_set=True).judgements) == 90


def test_columns_of_a_frame_are_found_by_name_or_the_frame_is_refused(machines):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv("machines.csv")[:20]
    trained = bruno.open("runs/machines", device="cpu")
    columns = ["weight", "speed", "heat"]  # not in the order of the model
    detector = trained.detector(threshold=0.0)
    of_rows, of_frame = (
        bruno.KeyedDetector(trained, detector=detector).step(["a"] * 20, x).score
        for x in (frame[list(trained.columns)].to_numpy(), frame[["machine", *columns]])
    )
    np.testing.assert_array_equal(of_rows, of_frame)
    posterior = trained.condition(frame[columns])
    for given in (posterior.score, trained.model.log_prob, posterior.update):
        with pytest.raises(TypeError, match=r"`x` .*got DataFrame\. Trained\.read .*by name"):
            given(frame[columns])


def test_a_frame_can_take_the_place_of_a_table_as_data(machines):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv("machines.csv")[:240]
    frame.to_csv("some.csv", index=False)
    trained = bruno.open("runs/machines", device="cpu")
    of_frame, of_file = trained.evaluate(data=frame), trained.evaluate(data="some.csv")
    assert (of_frame.data, of_frame.bits) == ("frame", of_file.bits)
    calibration = trained.calibration(frame)
    assert (calibration.data, len(calibration.groups.names)) == ("the frame", 8)
    with pytest.raises(ValueError, match=r"`split` .*the frame.*'all'"):
        trained.evaluate(data=frame, split="all")
    for job in (trained.evaluate, trained.calibration):
        with pytest.raises(TypeError, match=r"`data` .*frame; got ndarray"):
            job(data=machines.rows[0])


def test_infinite_numbers_are_rejected_in_arrays(machines):
    trained = bruno.open("runs/machines", device="cpu")
    with pytest.raises(ValueError, match="`source` must be finite; got inf"):
        trained.read(np.array([[60.0, np.inf, np.nan]]))


def broken_stream() -> list[str]:
    """The stream, with the output of a broken sensor in line 11."""
    lines = Path("stream.csv").read_text().splitlines()
    lines[9:9] = ["-999,-999,-999"]
    return lines


@pytest.mark.parametrize(("kind", "name"), [("watch", "anomaly"), ("batch", "anomaly-batch")])
def test_out_of_distribution_rows_are_outliers_and_excluded_from_the_evidence(machines, kind, name):
    Path("broken.csv").write_text("\n".join([*broken_stream(), "-999,-999,-999"]))
    output = run("anomaly", kind, "runs/machines", "broken.csv", "--one-set")
    assert output.count(OUT_OF_DISTRIBUTION) == (2 if kind == "watch" else 0)
    found = values_of("runs/machines", f"{name}-outliers")
    assert [one["out_of_distribution"] for one in found["judgements"]] == [True, True, False]
    assert found["names"][2] == "broken.csv, line 28"  # and no other row
    assert found["columns"][2]["column"] == 0  # heat
    assert "3 of 32 are outliers, 2 of them out-of-distribution. " in words(output)
    values = values_of("runs/machines", name)
    assert (values["outliers"], values["out_of_distribution_count"]) == (3, 2)
    assert (sum(values["outlier"]), sum(values["out_of_distribution"])) == (3, 2)


def test_rows_like_those_of_the_calibration_are_never_out_of_distribution(machines):
    """The model expects a far smaller spread than these clean machines have."""
    generator = np.random.default_rng(1)
    means = generator.normal(60, 5, (24, 1, 3))
    rows = ((means + generator.normal(0, 4, (24, 20, 3))) * SCALE).round(3)
    names = np.repeat([f"w{i:02d}" for i in range(24)], 20)
    wide = pd.DataFrame(rows.reshape(-1, 3), columns=["heat", "speed", "weight"]).assign(machine=names)
    trained = bruno.open("runs/machines", device="cpu")
    clean, new = wide[:240], wide[240:]
    judged = trained.judge_batch(new, rate=0.2, data=clean).summary
    assert judged.out_of_distribution == 0
    assert trained.calibration(clean).groups.usable.all()


def test_outliers_are_shown_with_their_unusual_column_and_on_the_page(machines, pictures):
    output = run("anomaly", "batch", "runs/machines", "stream.csv", "--one-set")
    assert re.search(r"line 27 +│ heat [0-9.]+ \(expected", output), output
    run("report", "runs/machines")
    page = Path("runs/machines/report.html").read_text()
    assert "Outliers in a batch, the most unusual first" in page
    assert page.index("stream.csv, line 27") > page.index("Outliers in a batch, the most unusual first")


def test_out_of_distribution_rows_are_not_typical(machines):
    Path("typical.csv").write_text("\n".join(broken_stream()[:11]))
    output = run(*WATCH, "stream.csv", "--typical", "typical.csv")
    assert "`--typical`: excluded 1 of 10 elements" in output
    assert len(re.findall(r"  outlier", output)) == 1


def test_columns_are_found_by_their_names(machines):
    rotated = "".join(f"{c},x,{a},{b}\n" for a, b, c in machines.rows[30])
    Path("rotated.csv").write_text("weight,note,heat,speed\n" + rotated)
    assert len(re.findall(r"  outlier", run(*WATCH, "rotated.csv"))) == 1
    Path("rotated.csv").write_text("weight,warmth,speed\n1,2,3\n")
    with pytest.raises(ValueError, match=r"rotated.csv.*heat, speed, weight.*'heat'"):
        run(*WATCH, "rotated.csv")


def test_samples_are_rows_of_a_csv(machines):
    sample = ["sample", "runs/machines", "--given", "stream.csv"]
    assert "The last 10" not in run(*sample, "--prefixes", "5", "--samples", "2")
    assert "The last 10 of 100 samples" in run(*sample, "--prefixes", "0,30", "--samples", "50")
    table = Path("runs/machines/results/samples.csv").read_text().splitlines()
    assert table[0] == "set,seen,heat,speed,weight"
    assert len(table) == 1 + 2 * 50
    with np.load("runs/machines/results/samples.npz") as file:
        assert file["samples"].shape == (1, 2, 50, 3)
        assert (np.abs(file["samples"][0, 1].mean(0) - machines.rows[30].mean(0)) / SCALE).max() < 1


def test_the_spread_after_repeated_rows_is_in_standardised_units(machines):
    output = words(run("repeat", "runs/machines", "--given", "stream.csv"))
    assert re.search(r"mean variance of a column, standardised, over 30 rows", re.sub(r"[│┃] ?", "", output))
    spread = values_of("runs/machines", "samples-repeats")["variance"]
    assert spread[-1] < spread[0] < 2


@pytest.mark.parametrize(("kind", "name"), [("watch", "anomaly"), ("batch", "anomaly-batch")])
def test_rows_of_several_groups_are_one_set_for_each_group(machines, kind, name):
    lines = Path("machines.csv").read_text().splitlines(keepends=True)
    Path("three.csv").write_text("".join([lines[0], *sorted(lines[1:91], key=lambda line: line[::-1])]))
    output = run("anomaly", kind, "runs/machines", "three.csv")
    assert re.search(r"all 3 sets +│ 90", output)
    values = values_of("runs/machines", name)
    assert {group: one["elements"] for group, one in values["groups"].items()} == dict.fromkeys(
        ("m0", "m1", "m2"), 30
    )
    assert values["outliers"] == sum(one["outliers"] for one in values["groups"].values()) < 9
    run("anomaly", kind, "runs/machines", "three.csv", "--one-set", "--threshold", "-9")
    assert "groups" not in values_of("runs/machines", name)


def test_a_file_without_the_group_column_must_be_called_one_set(machines):
    for kind in ("watch", "batch"):
        with pytest.raises(ValueError, match=r"`group` must be a column, .*'machine'.*`one_set`"):
            run("anomaly", kind, "runs/machines", "stream.csv")
    lines = Path("machines.csv").read_text().splitlines(keepends=True)
    Path("renamed.csv").write_text("unit,heat,speed,weight\n" + "".join(lines[1:61]))
    run("anomaly", "batch", "runs/machines", "renamed.csv", "--group", "unit")
    assert set(values_of("runs/machines", "anomaly-batch")["groups"]) == {"m0", "m1"}


@pytest.fixture(scope="module")
def others(table) -> Path:
    """25 rows of each of forty other machines."""
    generator = np.random.default_rng(1)
    rows = (generator.normal(60, 5, (40, 1, 3)) + generator.normal(0, 1, (40, 25, 3))) * SCALE
    text = "".join(f"n{m},{a},{b},{c}\n" for m in range(40) for a, b, c in rows[m])
    (table.folder / "clean.csv").write_text("machine,heat,speed,weight\n" + text)
    return table.folder / "clean.csv"


@pytest.fixture
def clean(others, machines) -> Path:
    """The table of other machines; a calibration of runs/machines is removed after the test."""
    yield Path("clean.csv")
    Path("runs/machines/calibration.safetensors").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def calibrated_once(table, others) -> Path:
    folder = shutil.copytree(table.folder / "runs" / "machines", table.folder / "runs" / "calibrated")
    bruno.open(folder, device="cpu").calibrate(str(others))
    return folder


@pytest.fixture
def calibrated(calibrated_once, machines) -> str:
    """The run, calibrated on the forty other machines."""
    return "runs/calibrated"


def test_a_calibration_is_kept_with_the_model_and_gives_exact_p_values(clean):
    output = words(run("calibrate", "runs/machines", clean))
    assert "40 groups of clean.csv, 25 elements each: rates of at least 4.9 % are exact" in output
    values = values_of("runs/machines", "calibration")
    assert (values["groups"], values["elements"], values["unseen"]) == (40, 1000, True)
    output = run(*WATCH, "stream.csv")
    assert (
        "40 groups: rates of at least 4.9 % are exact in sets of up to 20 elements; 1 % is estimated"
        in output
    )
    assert re.search(r"p ≈ (0\.00\d+|[\d.]+e-\d+)  stream.csv, line 27  outlier", output)
    run(*WATCH, "stream.csv", "--rate", "0.05")
    values = values_of("runs/machines", "anomaly")
    assert values["basis"] == [None] + ["exact"] * 24 + ["estimated"] * 5  # groups have 25 rows
    assert all(p is None or p >= 1 / 41 - 1e-9 for p in values["p"][:25])


def test_a_calibration_names_its_group_column(clean, capsys):
    header, *lines = clean.read_text().splitlines(keepends=True)
    Path("units.csv").write_text("".join([header.replace("machine", "unit"), *lines]))
    ended = run_main(capsys, "calibrate", "runs/machines", "units.csv")
    assert ended.errors.endswith(
        "`--group` must be a column, one of unit, heat, speed, weight; got 'machine'.\n"
    )
    assert "40 groups of units.csv" in words(
        run("calibrate", "runs/machines", "units.csv", "--group", "unit")
    )
    for data in ([], ["digits"]):
        with pytest.raises(ValueError, match=r"`group` .*got 'unit'"):
            run("calibrate", "runs/machines", *data, "--group", "unit")


def test_rows_that_cannot_be_read_are_skipped_in_a_calibration(clean, capsys):
    Path("some.csv").write_text(clean.read_text() + "m70,broken,2,3\n")
    ended = run_main(capsys, "calibrate", "runs/machines", "some.csv")
    assert ended.code == 2
    assert "line 1002 cannot be used" in ended.errors
    assert "skip such lines (`--skip-bad`)" in ended.errors
    output = words(run("calibrate", "runs/machines", "some.csv", "--skip-bad"))
    assert "line 1002" in output
    assert "40 groups of some.csv" in output
    watch = ["anomaly", "watch", "runs/machines", "stream.csv", "--one-set", "--data", "some.csv"]
    with pytest.raises(ValueError, match="line 1002 cannot be used"):
        run(*watch)
    run(*watch, "--skip-bad")
    with pytest.raises(ValueError, match="line 1002 cannot be used"):
        run("anomaly", "batch", "runs/machines", "stream.csv", "--one-set", "--data", "some.csv")
    run("anomaly", "batch", "runs/machines", "stream.csv", "--one-set", "--data", "some.csv", "--skip-bad")


def test_the_group_column_of_the_training_data_is_that_of_the_training(machines):
    with pytest.raises(ValueError, match=r"`group` must be omitted .*got 'heat'"):
        run("calibrate", "runs/machines", "machines.csv", "--group", "heat")


def test_a_batch_reports_the_basis_that_its_p_values_have(calibrated):
    batch = ["anomaly", "batch", calibrated]
    Path("some.csv").write_text("".join(Path("clean.csv").read_text().splitlines(keepends=True)[:201]))
    output = words(run(*batch, "some.csv", "--rate", "0.05"))
    assert (
        "40 groups: rates of at least 4.9 % are exact in sets of up to 25 elements; 5 % is exact there"
        in output
    )
    output = words(run(*batch, "stream.csv", "--one-set", "--rate", "0.05"))
    assert "40 groups, smaller than a set of 30: no rate is exact; 5 % is estimated" in output
    assert set(values_of(calibrated, "anomaly-batch")["basis"]) == {"estimated"}
    output = words(run(*batch, "some.csv", "--false-discovery-rate", "0.1"))
    assert "p-values for a false-discovery rate of 10 % are estimated" in output


def test_what_a_false_discovery_rate_flags_is_in_the_results(calibrated):
    run("anomaly", "batch", calibrated, "machines.csv", "--false-discovery-rate", "0.9")
    values = values_of(calibrated, "anomaly-batch")
    batch = bruno.open(calibrated, device="cpu").judge_batch("machines.csv", false_discovery_rate=0.9)
    assert [one.name for one in batch.judgements] == values["names"]
    assert [one.group for one in batch.judgements] == values["sets"]
    assert [one.judgement.outlier for one in batch.judgements] == values["outlier"]
    assert sum(values["outlier"]) == values["outliers"] > 24
    assert len(batch.outliers.elements) == 24


def test_sets_of_one_element_are_not_judged_and_no_rate_is_reported(calibrated):
    rows = "".join(f"new{i},60,60,6e6\n" for i in range(3))
    Path("single.csv").write_text("machine,heat,speed,weight\n" + rows)
    output = words(run("anomaly", "batch", calibrated, "single.csv"))
    assert "rates of at least" not in output
    assert values_of(calibrated, "anomaly-batch")["p"] == 3 * [None]


def test_a_table_is_calibrated_on_the_sets_that_it_was_not_trained_on(machines):
    trained = bruno.open("runs/machines", device="cpu")
    trained_on = set(trained._select("train").examples.names)
    for own in (trained.calibration(), trained.calibration("machines.csv")):
        assert own.unseen
        assert len(own.groups.names) == 6  # 3 for validation and 3 for tests
        assert trained_on.isdisjoint(own.groups.names)


def test_training_groups_give_no_exact_p_values(machines):
    lines = Path("machines.csv").read_text().splitlines(keepends=True)[:61]  # two machines
    Path("two.csv").write_text("".join(lines))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = bruno.train("table", "runs/two", data={"name": "two.csv", "group": "machine"}, steps=2)
        assert not trained.calibration().unseen


def test_a_calibration_of_another_model_is_rejected(calibrated, digits_run):
    other = bruno.open(digits_run, device="cpu")
    with pytest.raises(ValueError, match=r"must be of this model"):
        GroupCalibration.load(Path(calibrated, "calibration.safetensors"), other.model)


def test_far_more_alarms_than_requested_name_the_command_that_calibrates(clean):
    header, *lines = clean.read_text().splitlines()
    mixed = [f"n{i % 20},{line.split(',', 1)[1]}" for i, line in enumerate(lines)]  # rows of many machines
    Path("mixed.csv").write_text("\n".join([header, *mixed]))
    judge = ["anomaly", "batch", "runs/machines", "mixed.csv", "--rate", "0.03"]
    output = words(run(*judge))
    advice = "bruno calibrate runs/machines CLEAN.csv"  # never the file that was flagged
    assert re.search(rf"% are flagged, but 3 % was requested.*{advice}", output)
    run(*advice.replace("CLEAN", "mixed").split()[1:])
    assert "was requested" not in words(run(*judge))


@pytest.mark.parametrize("kind", ["watch", "batch"])
def test_rows_in_other_units_are_told_to_check_units_and_not_to_calibrate_on_them(clean, calibrated, kind):
    header, *lines = clean.read_text().splitlines()
    rows = [line.split(",") for line in lines]
    wrong = [",".join([row[0], *(str(1.8 * float(cell) + 320) for cell in row[1:])]) for row in rows]
    Path("wrong.csv").write_text("\n".join([header, *wrong]))
    output = words(run("anomaly", kind, calibrated, "wrong.csv"))
    assert "Check units and columns" in output
    assert "CLEAN.csv" in output
    assert "wrong.csv." not in output


def test_an_accepted_alarm_is_added_to_its_set(machines):
    Path("state").unlink(missing_ok=True)
    watch = [*WATCH, "stream.csv", "--state", "state"]
    assert re.search(r"stream.csv, line 27  outlier", run(*watch))
    model = bruno.open("runs/machines", device="cpu").model
    before = int(bruno.load("state", model=model).evidence.count)
    run("anomaly", "accept", "runs/machines", "stream.csv, line 27", "--state", "state")
    assert int(bruno.load("state", model=model).evidence.count) == before + 1
    with pytest.raises(FileNotFoundError, match=r"`state` .*`bruno anomaly watch --state`.*none.state"):
        run("anomaly", "accept", "runs/machines", "line 27", "--state", "none.state")
    with pytest.raises(ValueError, match=r"`state` must be a file .*stream.csv"):
        run("anomaly", "accept", "runs/machines", "line 27", "--state", "stream.csv")
    with pytest.raises(ValueError, match=r"`names` .*got 'stream.csv, line 27'"):
        run("anomaly", "accept", "runs/machines", "stream.csv, line 27", "--state", "state")


def test_the_state_of_several_sets_is_resumed(machines):
    lines = Path("machines.csv").read_text().splitlines(keepends=True)
    Path("state").unlink(missing_ok=True)
    watch = ["anomaly", "watch", "runs/machines", "--threshold", "-9", "--state", "state"]
    for part in (lines[1:41], lines[41:61]):
        Path("part.csv").write_text("".join([lines[0], *part]))
        output = run(*watch, "part.csv")
    assert "resuming from state, after 40 elements of 2 sets" in output
    model = bruno.open("runs/machines", device="cpu").model
    assert bruno.load("state", model=model).evidence.count.tolist() == [30, 30]


def test_a_stream_that_changes_is_reported_with_its_position(machines):
    rows = np.array([60, 60, 60]) + np.random.default_rng(3).normal(0, 1, (90, 3))
    rows[60:, 0] += 8
    lines = [f"{a},{b},{c}\n" for a, b, c in rows * SCALE]
    lines[:3] = [line.replace(line.split(",")[0], "", 1) for line in lines[:3]]  # these have no rank
    Path("changing.csv").write_text("heat,speed,weight\n" + "".join(lines))
    output = words(run(*WATCH, "changing.csv", "--threshold", "-3"))
    since = re.search(r"distribution of the stream changed near element (\d+)", output)
    assert 55 <= int(since[1]) <= 65
    assert output.count(f"changed near element {since[1]}.") == 2
    assert values_of("runs/machines", "anomaly")["changed_since"] == {"": int(since[1])}
    located = [f"{line.strip()},north\n" for line in lines]
    Path("located.csv").write_text("heat,speed,weight,site\n" + "".join(located))
    watch = ["anomaly", "watch", "runs/machines", "located.csv", "--group", "site", "--threshold", "-3"]
    assert "distribution of site north changed near" in words(run(*watch))


def test_ranks_within_a_set_need_no_calibration(machines):
    run(*WATCH, "stream.csv", "--count-all", "--within", "--rate", "0.05")
    values = values_of("runs/machines", "anomaly")
    assert values["basis"][1:] == ["exact"] * 29
    assert values["p"][25] == min(p for p in values["p"] if p is not None)
    with pytest.raises(ValueError, match="`count_all`"):
        run(*WATCH, "stream.csv", "--within")


def test_few_shot_accuracy_is_compared_with_standardised_columns(machines, pictures):
    output = run("fewshot", "runs/machines", "--way", "3", "--shot", "5", "--trials", "5")
    assert "nearest columns %" in output
    assert values_of("runs/machines", "few-shot-test")["columns"][0]["accuracy"] > 0.8
    assert Path("runs/machines/results/few-shot-test.png").stat().st_size > 1000


def test_retrieval_is_measured_on_other_tables(machines, pictures):
    run("retrieve", "measure", "runs/machines", "--queries", "5", "--data", "machines.csv")
    assert Path("runs/machines/results/retrieval-quality-machines.png").stat().st_size > 1000


def test_small_classes_limit_the_set_size(machines):
    few = "machine,heat,speed,weight\n" + "".join(f"a,60,{i},6e6\n" for i in range(25))
    Path("few.csv").write_text(few + "lonely,60,60,6e6\n")
    output = run("evaluate", "runs/machines", "--data", "few.csv")
    assert "set size 1 instead of 20: class 'lonely' has 1" in output
    with pytest.raises(ValueError, match=r"`data` .*at least 2 elements.*'lonely' has 1"):
        run("anomaly", "measure", "runs/machines", "--data", "few.csv")
    with pytest.raises(ValueError, match=r"`data` .*all 25 are out-of-distribution"):
        run(*WATCH, "stream.csv", "--data", "few.csv")  # a speed that no machine has
    lines = [f"a,{heat},{speed},{weight}\n" for heat, speed, weight in machines.rows[0, :25].tolist()]
    Path("few.csv").write_text("machine,heat,speed,weight\n" + "".join(lines))
    assert "calibrated on 1 class with 25 elements" in run(*WATCH, "stream.csv", "--data", "few.csv")


def test_rows_are_classified_given_a_folder_or_a_table(machines, pictures):
    Path("first.csv").write_text("".join(Path("stream.csv").read_text().splitlines(keepends=True)[:4]))
    for name, some in (("same", machines.rows[30, :5]), ("other", machines.rows[0, :5])):
        Path("support", name).mkdir(parents=True, exist_ok=True)
        np.savetxt(Path("support", name, "rows.csv"), some, delimiter=",")
    run("classify", "runs/machines", "first.csv", "--support", "support")
    assert values_of("runs/machines", "classification")["classes"] == ["other", "same"]
    Path("one.csv").write_text("machine,heat,speed,weight\n1,60,60,6e6\n1,61,61,6e6\n")
    with pytest.raises(ValueError, match=r"`support` .*at least two classes; .*1"):
        run("classify", "runs/machines", "first.csv", "--support", "one.csv")
    Path("bad.csv").write_text(Path("machines.csv").read_text() + "m1,broken,2,3\n")
    with pytest.raises(ValueError, match=r"bad.csv: line 902 .*'heat'"):
        run("classify", "runs/machines", "first.csv", "--support", "bad.csv")
    out = run("classify", "runs/machines", "first.csv", "--support", "bad.csv", "--skip-bad")
    assert "line 902" in out
    run("classify", "runs/machines", "first.csv", "--support", "machines.csv")
    found = values_of("runs/machines", "classification")
    assert sorted(found["classes"]) == sorted(f"m{m}" for m in range(30))
    assert found["support"] == [30] * 30
    assert Path("runs/machines/results/classification.png").stat().st_size > 1000


def test_rows_are_classified_given_a_frame_as_given_a_table(machines):
    pandas = pytest.importorskip("pandas")
    trained = bruno.open("runs/machines", device="cpu")
    frame = pandas.read_csv("machines.csv")
    frame.loc[3, "heat"] = np.nan
    frame.to_csv("holes.csv", index=False)
    of_table = trained.classify(machines.rows[30, :3], support="holes.csv")
    of_frame = trained.classify(machines.rows[30, :3], support=frame)
    assert of_frame.classes == of_table.classes
    np.testing.assert_array_equal(of_frame.probabilities, of_table.probabilities)
    with pytest.raises(ValueError, match=r"`group` .*'machine'"):
        trained.classify(machines.rows[30, :3], support=frame.drop(columns="machine"))
    with pytest.raises(TypeError, match=r"`support` .* table, or a frame; got ndarray"):
        trained.classify(machines.rows[30, :3], support=machines.rows[0])


def test_rows_without_a_group_are_skipped_if_asked(machines, capsys):
    lines = Path("machines.csv").read_text().splitlines(keepends=True)[:61]
    lines[6] = "," + lines[6].partition(",")[2]
    Path("some.csv").write_text("".join(lines))
    for job in (["watch"], ["batch"], ["keyed", "--store", "skip.db"]):
        command = ["anomaly", job[0], "runs/machines", "some.csv", "--threshold", "-9", *job[1:]]
        ended = run_main(capsys, *command)
        assert ended.code == 2
        assert "some.csv, line 7: must" in ended.errors
        ended = run_main(capsys, *command, "--skip-bad")
        assert ended.code == 0, ended.errors
        assert "some.csv, line 7" in ended.errors
    name = "anomaly-batch"
    assert "some.csv, line 7" not in values_of("runs/machines", name)["names"]
    assert len(values_of("runs/machines", name)["names"]) == 59


def test_a_model_is_tuned_to_a_table_in_another_format(machines):
    text = Path("machines.csv").read_text().replace(",", ";").replace(".", ",")
    Path("european.csv").write_text(text)
    tune = ["finetune", "runs/machines", "--data", "european.csv", "--steps", "2", "--trials", "0"]
    run(*tune, "--out", "runs/tuned", "--no-verdict")
    assert bruno.open("runs/tuned").recipe.data.format != bruno.open("runs/machines").recipe.data.format


def test_several_groups_are_not_merged_into_one_set(machines):
    message = r"one set; got 30 groups in 'machine', such as 'm0' and 'm1'"
    for command in (
        ["sample", "runs/machines", "--given", "machines.csv"],
        ["retrieve", "search", "runs/machines", "--query", "machines.csv", "--collection", "stream.csv"],
    ):
        with pytest.raises(ValueError, match=f"`(given|query)` must be {message}"):
            run(*command)
    trained = bruno.open("runs/machines", device="cpu")
    frame = pd.read_csv("machines.csv")
    one = frame[frame.machine == "m3"]
    with pytest.raises(ValueError, match=f"`source` must be {message}"):
        trained.condition(frame)
    with pytest.raises(ValueError, match=f"`given` must be {message}"):
        trained.explain(one[:1], given=frame)
    assert trained.condition(one).evidence.count == 30
    assert trained.condition(frame.drop(columns="machine")).evidence.count == 900
    assert trained.sample(one, prefixes=(30,)).samples.x.shape == (1, 1, 8, 3)


def test_a_table_is_searched_and_encoded_once(machines):
    Path("query").mkdir(exist_ok=True)
    np.savetxt("query/rows.csv", machines.rows[30, :5], delimiter=",")
    search = ["retrieve", "search", "runs/machines", "--query", "query", "--collection"]
    assert "encoded 30 of 30 elements" in run(*search, "stream.csv")
    assert "encoded" not in run(*search, "stream.csv")
    lines = Path("stream.csv").read_text().splitlines()
    lines[3] = "," + lines[3].partition(",")[2]
    Path("holes.csv").write_text("\n".join(lines))
    assert "encoded 30 of 30 elements" in run(*search, "holes.csv")  # a missing cell
    path = Path("stream.csv").resolve()
    assert "encoded" not in run(*search, path)  # the same table, by another path
    names = values_of("runs/machines", "retrieval")["names"]
    assert all(name.startswith(f"{path}, line ") for name in names)


# --- mistakes --------------------------------------------------------------------------------------------

GOOD = "".join(f"{i // 30},{i % 7},{i % 11}\n" for i in range(180))
TRAIN = ["train", "table", "--set", "data.name=t.csv", "--set", "data.group=of", "--steps", "1"]


def train(text: str, *more: str) -> str:
    Path("t.csv").write_text("of,a,b\n" + text)
    return run(*TRAIN, *more, "--device", "cpu", "--no-verdict")


def test_column_names_are_kept_in_the_recipe(workplace):
    assert "extreme values" not in train(GOOD)
    assert Run("runs/table").recipe.data.columns == ("a", "b")


def test_a_column_with_extreme_values_is_a_warning(workplace):
    assert re.search(r"column 'b' has a few extreme values, such as 1e\+37", train(GOOD + "0,1,1e37\n"))


def test_many_equal_placeholders_are_a_warning(workplace):
    lines = [
        line if i % 10 else f"{line.rpartition(',')[0]},-999" for i, line in enumerate(GOOD.splitlines())
    ]
    output = words(train("\n".join(lines)))
    assert "column 'b' has" in output
    assert "(10%) equal to -999, far from all others" in output


def test_a_line_that_cannot_be_used_is_an_error(workplace):
    with pytest.raises(ValueError, match=r"line 182 .*'b' .*'x'.*skip_bad"):
        train(GOOD + "0,1,x\n")


def test_rows_with_missing_cells_train_and_score(workplace):
    lines = GOOD.splitlines()
    lines[10], lines[40] = "0,,3", "1,4,NA"
    train("\n".join(lines))
    Path("new.csv").write_text("a,b\n1,2\n,4\n3,\n2,2\n")
    for command in ("watch", "batch"):
        output = run("anomaly", command, "runs/table", "new.csv", "--one-set", "--threshold", "-9")
        assert "of 4 are outliers" in output
    with pytest.raises(ValueError, match=r"line 12 .*'a' .*got ''"):
        run(*TRAIN, "--set", "missing=reject", "--out", "runs/strict")


def test_a_set_of_one_row_is_an_error_or_skipped(workplace):
    with pytest.raises(ValueError, match=r"`data` .*at least 2 elements.*'6' has 1.*`data.skip_bad`"):
        train(GOOD + "6,1,2\n")
    assert "skipped 1 class" in train(GOOD + "6,1,2\n", "--skip-bad")


def test_a_small_set_limits_the_set_size(workplace):
    assert "set size 2 instead of 20: class '6' has 2" in train(GOOD + "6,1,2\n6,2,2\n")


def test_a_table_that_is_too_small_is_an_error_with_the_size_that_is_enough(workplace):
    for text, message in (
        ("0,1,2\n0,2,5\n", r"`data` .*2 sets.*got 1\. 10 sets would be enough"),
        ("0,1,2\n0,2,5\n0,3,5\n" * 20, r"`data` .*2 sets.*got 1\. Omit the group column"),
        ("0,1,2\n0,2,5\n1,3,5\n1,5,4\n", r"`data` .*20 rows.*got 4\. 10 sets of 20 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            train(text)
    assert not Path("runs/table").exists()


def test_few_sets_are_a_warning(workplace):
    assert "Only 4 training sets: too few for 2 columns" in words(train(GOOD))
    enough = "".join(f"{i // 10},{i % 7},{i % 11}\n" for i in range(180))
    assert "too few" not in train(enough, "--out", "runs/enough")


def test_the_columns_are_a_list_of_different_names(workplace):
    with pytest.raises(ValueError, match=r"`data.columns` .*got 'a,b'"):
        train(GOOD, "--set", "data.columns=a,b")
    with pytest.raises(ValueError, match=r"`data.columns` .*'a'"):
        train(GOOD, "--set", 'data.columns=["a", "b", "a"]')


def test_the_columns_that_are_used_are_reported(workplace):
    lines = [f"1.1.2026 10:{i % 60:02d};{i // 30};{i % 7},5;ok;{i % 11}" for i in range(180)]
    Path("t.csv").write_text("zeit;of;a;state;b\n" + "\n".join(lines), encoding="utf-16")
    output = words(run("train", "table", "--data", "t.csv", "--group", "of", "--steps", "1"))
    assert "t.csv: using 2 of 4 columns: a, b; ignored: zeit (date), state (text)" in output
    assert "read as utf-16 semicolon decimal-comma" in output
    kept = Run("runs/table").recipe.data
    assert (kept.columns, kept.format.split()[:3]) == (("a", "b"), ["utf-16", "semicolon", "decimal-comma"])


def test_the_scales_of_columns_are_reported_and_can_be_switched_off(workplace):
    random = np.random.default_rng(0)
    rows = zip(np.arange(180) // 30, np.exp(random.normal(size=180)), random.poisson(3, 180), strict=True)
    text = "".join(f"{of},{a:.8f},{b}\n" for of, a, b in rows)
    assert "chosen from the data: a (log), b (steps of 1)" in words(train(text))
    assert "scales of columns" not in words(train(text, "--set", "scales=linear", "--out", "runs/linear"))
    samples = run("sample", "runs/table", "--prior", "--samples", "3")
    assert samples
    table = np.loadtxt("runs/table/results/samples-prior.csv", delimiter=",", skiprows=1)
    assert (table[:, -1] == table[:, -1].round()).all()


def test_consecutive_rows_are_sets_without_a_group_column(workplace):
    Path("t.csv").write_text("a,b\n" + "".join(f"{i % 7},{i % 11}\n" for i in range(180)))
    output = words(run("train", "table", "--data", "t.csv", "--steps", "1"))
    assert "no group column (`--group`), so consecutive rows form sets: 9 sets of 20 rows" in output
    watch = ["anomaly", "keyed", "runs/table", "--threshold", "-5", "--store", "s.db"]
    with pytest.raises(
        ValueError, match=r"t\.csv, line 2: .* trained without a group column.*without a store"
    ):
        run(*watch, "t.csv")
    Path("keyed.csv").write_text("key,a,b\n" + "".join(f"k{i % 2},{i % 7},{i % 11}\n" for i in range(40)))
    run(*watch, "keyed.csv", "--group", "key")
    assert set(values_of("runs/table", "anomaly")["groups"]) == {"k0", "k1"}
    for job in ("watch", "batch"):
        with pytest.raises(ValueError, match=r"`group` must be a column, one of key, a, b; got 'mode'"):
            run("anomaly", job, "runs/table", "keyed.csv", "--threshold", "-5", "--group", "mode")


@pytest.fixture(scope="module")
def wandering(tmp_path_factory) -> tuple[Trained, np.ndarray]:
    """A model of a machine whose level wanders, without a group column, and its later rows, all clean."""
    folder, generator = tmp_path_factory.mktemp("wandering"), np.random.default_rng(0)
    steps, level = generator.normal(size=(1100, 2)), np.zeros((1100, 2))
    for i in range(1, 1100):
        level[i] = 0.98 * level[i - 1] + 0.4 * steps[i]
    rows = level + 0.5 * generator.normal(size=(1100, 2))
    (folder / "t.csv").write_text("a,b\n" + "".join(f"{a:.4f},{b:.4f}\n" for a, b in rows[:900]))
    settings = {"data": {"name": str(folder / "t.csv")}, "steps": 100}
    return bruno.train("table", folder / "run", **settings), rows[900:]


@pytest.mark.slow
def test_a_row_without_a_group_column_is_judged_by_the_rows_near_it(wandering):
    trained, rows = wandering
    judged = trained.judge_batch(rows, rate=0.05)
    assert list(judged.summary.groups)[:2] == ["rows 1-20", "rows 21-40"]
    assert judged.has_consecutive_sets
    near = trained.watch(rows, trained.detector(rate=0.05))
    found = [sum(judgement.outlier for _, judgement in near), judged.summary.outliers]
    assert max(found) <= 30  # of 200; 0.3 to 0.7 of them are flagged if all rows are one set
    whole = trained.watch(rows[:2], trained.detector(rate=0.05), one_set=True)
    assert (near.detector.window, whole.detector.window) == (19, None)
    assert trained.judge_batch(rows, rate=0.05, one_set=True).summary.groups.keys() == {""}


@pytest.mark.slow
def test_a_window_continues_from_a_state(wandering, workplace):
    trained, rows = wandering
    detector = trained.detector(threshold=-3.0)
    whole = [judgement for _, judgement in trained.watch(rows[:40], detector)]
    parts = []
    for some in (rows[:27], rows[27:40]):
        with trained.watch(some, detector, state="state.safetensors") as watch:
            parts += [judgement for _, judgement in watch]
    assert [one.score for one in parts] == pytest.approx([one.score for one in whole], rel=1e-5)


def test_validation_sets_choose_the_number_of_steps_for_few_sets(workplace):
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(120, 8))
    text = "".join(f"m{i // 20}," + ",".join(f"{v:.3f}" for v in row) + "\n" for i, row in enumerate(rows))
    Path("t.csv").write_text("g," + ",".join("hijklmno") + "\n" + text)
    flow = 'kind = "dense"\ncouplings = 1\nunits = 8\n'
    recipe = f'scales = "auto"\n[data]\nname = "t.csv"\ngroup = "g"\n[flow]\n{flow}[train]\nsteps = 20\n'
    Path("short.toml").write_text(recipe)
    output = words(run("train", "short.toml", "--no-verdict"))
    found = re.search(r"Only 4 sets: training for (\d+) of 20 steps", output)
    assert Run("runs/short").recipe.train.steps == int(found[1])
    chosen = words(run("train", "short.toml", "--steps", "5", "--out", "runs/five", "--no-verdict"))
    assert "sets: training for" not in chosen
