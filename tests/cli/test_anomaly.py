"""`bruno anomaly watch`, `bruno anomaly batch` and `bruno anomaly measure`."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import sklearn.ensemble

import bruno
from bruno.checkpoint import write
from bruno.cli.anomaly import _print_json
from bruno.data import ElementReader
from bruno.tasks.anomaly import Judgement
from bruno.tasks.stream_summary import StreamSummary
from bruno.training.run import Run
from cli.commandline import picture_of, run, run_main, values_of, words

pytestmark = pytest.mark.filterwarnings("ignore::bruno.trained.UnfamiliarDataWarning")  # enlarged images
WATCH = ["anomaly", "watch", "run"]
ELEMENTS = 10  # in queries/5


@pytest.fixture
def stream(in_digits, tmp_path) -> Path:
    """Images of a five, with one image of a two among them."""
    shutil.copytree("queries/5", tmp_path / "stream")
    shutil.copy("queries/2/2-05.png", tmp_path / "stream" / "5-04-outlier.png")
    return tmp_path / "stream"


def posterior_in(state: Path) -> bruno.Posterior:
    return bruno.load(state, model=Run("run").model())


# --- a stream --------------------------------------------------------------------------------------------


def test_an_outlier_in_a_folder_is_flagged(stream, pictures):
    watch = [*WATCH, stream, "--typical", "support/5", "--threshold", "10"]
    assert re.search(r"5-04-outlier\.png  outlier$", run(*watch), re.MULTILINE)
    values = values_of("run", "anomaly")
    assert values["names"][np.argmin(values["scores"])].endswith("5-04-outlier.png")
    assert picture_of("run", "anomaly").std() > 5


def test_paths_on_standard_input_are_judged_like_a_folder(stream):
    watch = ["run", "--typical", "support/5", "--threshold", "10"]
    run("anomaly", "watch", *watch, stream)
    of_folder = values_of("run", "anomaly")["scores"]
    lines = "".join(f"{path}\n" for path in sorted(stream.iterdir()))
    output = run("anomaly", "watch", *watch, "-", stdin=lines)
    assert "5-04-outlier.png  outlier" in output
    assert values_of("run", "anomaly")["scores"] == of_folder


def test_the_library_judges_like_the_command(stream):
    run(*WATCH, stream, "--typical", "support/5", "--threshold", "10")
    trained = bruno.open("run")
    watch = trained.watch(stream, trained.detector(threshold=10), typical="support/5")
    scores = [judged.judgement.score for judged in watch]
    assert values_of("run", "anomaly")["scores"] == scores


def test_json_lines_are_all_of_standard_output(in_digits, capsys):
    files = sorted(Path("queries/5").iterdir())
    ended = run_main(capsys, *WATCH, *files, "--threshold", "10", "--count-all", "--json")
    assert "are outliers. The score is" in words(ended.errors)
    lines = [json.loads(line) for line in ended.out.splitlines()]
    assert [line["element"] for line in lines] == [str(file) for file in files]
    assert [line["seen"] for line in lines] == list(range(len(files)))
    judgement = {"score", "seen", "threshold", "outlier", "out_of_distribution", "p", "basis", "p_within"}
    assert set(lines[0]) == {"element", "group", *judgement}


def test_a_stream_is_resumed_from_its_state(in_digits, tmp_path):
    files, state = sorted(Path("queries/5").iterdir()), tmp_path / "state"
    watch = [*WATCH, "--threshold", "10"]
    run(*watch, *files)
    whole = values_of("run", "anomaly")["scores"]
    run(*watch, *files[:4], "--state", state)
    parts = values_of("run", "anomaly")["scores"]
    output = run(*watch, *files[4:], "--state", state)
    assert f"resuming from {state}, after 4 elements" in output
    np.testing.assert_allclose(parts + values_of("run", "anomaly")["scores"], whole, atol=1e-4)
    assert posterior_in(state).evidence.count == ELEMENTS
    output = run(*watch, files[0], "--state", state, "--typical", "support/5")
    assert re.search(rf"after {ELEMENTS} elements.*`--typical` is ignored", output)


def test_an_interrupted_stream_leaves_its_results(in_digits, monkeypatch):
    read = ElementReader.read

    def interrupted(self, paths, **options):
        yield from itertools.islice(read(self, paths, **options), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(ElementReader, "read", interrupted)
    run(*WATCH, "queries/5", "--threshold", "0", code=130)
    assert values_of("run", "anomaly")["elements"] == 3


@pytest.mark.slow
def test_a_process_that_is_terminated_keeps_its_state(in_digits, tmp_path):
    watch = [*WATCH, "-", "--threshold", "0", "--state", str(tmp_path / "state")]
    with subprocess.Popen(
        [sys.executable, "-m", "bruno", *watch], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as service:
        files = sorted(Path("queries/5").iterdir())[:3]
        service.stdin.write("".join(f"{file}\n" for file in files))
        service.stdin.flush()
        for _ in files:  # all are judged, and the process waits for more
            service.stdout.readline()
        service.terminate()
        assert service.wait() == 128 + signal.SIGTERM
    assert posterior_in(tmp_path / "state").evidence.count == 3


def test_an_empty_stream_leaves_no_state(in_digits, tmp_path):
    with pytest.raises(ValueError, match=r"`stream` .*empty"):
        run(*WATCH, "-", "--threshold", "0", "--state", tmp_path / "state", stdin="")
    assert not (tmp_path / "state").exists()


def test_signals_do_not_interrupt_the_writing_of_the_state(in_digits, tmp_path, monkeypatch):
    def disturbed(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        write(*arguments)

    monkeypatch.setattr("bruno.trained.states.write", disturbed)
    run(*WATCH, "queries/5", "--threshold", "0", "--state", tmp_path / "state")
    assert posterior_in(tmp_path / "state").evidence.count == ELEMENTS


def test_the_state_is_written_before_the_picture_is_drawn(in_digits, tmp_path, monkeypatch):
    def impatient(*arguments, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr("bruno.reporting.summaries.detection.score_timeline", impatient)
    run(*WATCH, "queries/5", "--threshold", "0", "--state", tmp_path / "state", code=130)
    assert posterior_in(tmp_path / "state").evidence.count == ELEMENTS


def test_results_are_kept_if_the_state_cannot_be_written(in_digits, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bruno.trained.states.write", full)
    with pytest.raises(OSError, match="No space"):
        run(*WATCH, "queries/5/5-00.png", "queries/5/5-01.png", "--threshold", "0", "--state", tmp_path / "x")
    assert values_of("run", "anomaly")["elements"] == 2


def test_a_stream_with_a_bad_element_leaves_the_results_before_it(in_digits):
    with pytest.raises(ValueError, match=r"log\.jsonl: cannot be used"):
        run(*WATCH, "queries/5", "run/log.jsonl", "queries/5", "--threshold", "0")
    assert values_of("run", "anomaly")["elements"] == ELEMENTS


def test_only_the_latest_scores_of_a_long_stream_are_kept(in_digits, monkeypatch):
    monkeypatch.setattr("bruno.trained.watch.StreamSummary", lambda: StreamSummary(latest=4))
    run(*WATCH, "queries/5", "queries/2", "--threshold", "100")
    values = values_of("run", "anomaly")
    assert (values["elements"], values["outliers"]) == (20, 19)  # the first has no evidence
    assert [Path(name).name for name in values["names"]] == [f"2-0{i}.png" for i in range(6, 10)]


@pytest.mark.slow
def test_the_class_of_a_synthetic_stream_and_its_outliers_can_be_chosen(in_digits):
    examples = bruno.open("run").examples()
    places = zip(examples.elements, examples.labels.tolist(), strict=True)
    labels = {x.cpu().numpy().tobytes(): examples.names[label] for x, label in places}
    stream = bruno.open("run").synthetic_stream(classes=("5", "8"), set_class="5")
    found = [(labels[x.cpu().numpy().tobytes()], "another class" in name) for name, x, _ in stream]
    assert set(found) == {("5", False), ("8", True)}
    run("anomaly", "watch", "run", "--threshold", "0", "--classes", "5,8", "--set-class", "5")
    assert len(values_of("run", "anomaly")["scores"]) == len(stream)


def test_a_synthetic_stream_is_judged_by_calibrated_thresholds(in_digits):
    output = run(*WATCH, "--rate", "0.05")
    assert "of another class  outlier" in output
    assert (
        "3 groups: rates of at least 50.0 % are exact in sets of up to 20 elements; 5 % is estimated"
        in output
    )
    stream = bruno.open("run").synthetic_stream()
    assert values_of("run", "anomaly")["names"] == [element.name for element in stream]  # with any detector


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], r"nowhere: "),
        (["queries/2", "-"], r"`-` .*got queries/2 -"),
        (["queries/2", "--rate", "5"], r"`rate` .*between 0 and 1.*got 5"),
        (["queries/2", "--threshold", "nan"], r"`--threshold` .*finite.*got nan"),
        (["queries/2", "--threshold", "0", "--data", "digits"], r"`threshold` .*omit `data`"),
        (["--threshold", "0", "--rate", "0.1"], r"`threshold` .*omit `rate`"),
        (["--within"], r"`within` .*`count_all`"),
        (["queries/2", "--state", "."], r"`state` .*got \."),
        (["queries/2", "--state", "no/state"], r"`state` .*existing folder; no "),
        (["queries/2", "--typical", "no"], r"no: "),
    ],
)
def test_a_mistake_names_the_option_and_its_value_before_calibration(
    in_digits, arguments, message, monkeypatch
):
    def calibrated(*arguments, **options):
        raise AssertionError("calibrated")

    monkeypatch.setattr("bruno.trained.Trained.calibration", calibrated)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        run(*WATCH, *arguments)


def test_a_folder_without_images_is_an_error(in_digits, tmp_path):
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        run(*WATCH, tmp_path, "--threshold", "0")


# --- a batch ---------------------------------------------------------------------------------------------


def test_an_outlier_in_a_batch_is_flagged(stream):
    output = run("anomaly", "batch", "run", stream, "--threshold", "10")
    assert re.search(r"outlier\.png +│", output), output
    assert re.search(r"1 of 11 are outliers", output)


def test_class_folders_of_images_are_sets(stream):
    sets = stream.parent / "sets"
    sets.mkdir()
    stream.rename(sets / "of fives")
    shutil.copytree("queries/8", sets / "of eights")
    for command in ("batch", "watch"):
        run("anomaly", command, "run", sets, "--threshold", "-5")
        values = values_of("run", "anomaly-batch" if command == "batch" else "anomaly")
        assert {name: one["elements"] for name, one in values["groups"].items()} == {
            "of fives": ELEMENTS + 1,
            "of eights": ELEMENTS,
        }
    run("anomaly", "batch", "run", sets, "--threshold", "-5", "--one-set")
    assert not values_of("run", "anomaly-batch").get("groups")


def test_json_lines_of_a_batch_are_those_of_a_stream_and_all_of_standard_output(stream, capsys):
    files = sorted(stream.iterdir())
    batch = ["anomaly", "batch", "run", *files, "--threshold", "10", "--json", "--explain"]
    ended = run_main(capsys, *batch)
    assert "1 of 11 are outliers" in words(ended.errors)
    lines = [json.loads(line) for line in ended.out.splitlines()]
    assert [line["element"] for line in lines] == [str(file) for file in files]
    judgement = {"score", "seen", "threshold", "outlier", "out_of_distribution", "p", "basis", "p_within"}
    assert all(set(line) >= {"element", "group", *judgement} for line in lines)
    (odd,) = [line for line in lines if line["outlier"]]
    assert odd["element"].endswith("outlier.png")
    explained = values_of("run", "explanation")
    assert list(odd["contributions"].values()) == explained["contributions"][0]
    values = values_of("run", "anomaly-batch")
    assert values["outlier"] == [line["outlier"] for line in lines]
    assert values["out_of_distribution"] == [line["out_of_distribution"] for line in lines]


def test_json_has_null_for_a_threshold_that_is_infinite(capsys):
    """If every element of a set is flagged at a false-discovery rate."""
    _print_json("a", "", Judgement(-2.5, 1, math.inf, True, False))
    line = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (line["score"], line["threshold"]) == (-2.5, None)


def test_patches_of_an_outlier_are_explained(stream, pictures):
    output = words(run("anomaly", "batch", "run", stream, "--threshold", "10", "--explain"))
    assert "There are 4 × 4 patches; row 1 is at the top." in output
    assert re.search(r"row \d, column \d \S+; row \d, column \d", output)
    values = values_of("run", "explanation")
    assert values["names"][0].endswith("5-04-outlier.png")
    assert len(values["features"]) == 16
    assert picture_of("run", "explanation").std() > 5


def test_a_batch_is_judged_by_a_calibrated_threshold(stream):
    run("anomaly", "batch", "run", stream, "--rate", "0.3")
    values = values_of("run", "anomaly-batch")
    assert 1 <= values["outliers"] <= 6
    assert values["names"][np.argmin(values["scores"])].endswith("outlier.png")


def test_a_batch_can_come_from_standard_input(in_digits):
    lines = "queries/5/5-00.png\nqueries/5/5-01.png\n"
    assert "0 of 2 are outliers" in words(
        run("anomaly", "batch", "run", "-", "--threshold", "-999", stdin=lines)
    )


def test_the_help_of_the_false_discovery_rate_says_what_is_not_guaranteed():
    text = words(run("anomaly", "batch", "--help").replace("│", " "))
    assert "expected fraction of clean elements" in text
    assert "estimated p-values do not guarantee it" in text


def test_a_batch_has_at_least_two_elements(in_digits):
    with pytest.raises(ValueError, match=r"`batch` .*at least two elements; got 1"):
        run("anomaly", "batch", "run", "queries/5/5-00.png", "--threshold", "0")


@pytest.mark.parametrize("option", ["--within", "--state=x", "--typical=support/5"])
def test_a_batch_has_no_options_of_a_stream(in_digits, option):
    assert option.partition("=")[0] in run("anomaly", "batch", "run", "queries/2", option, code=2)


# --- quality ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_outliers_are_found_in_contaminated_sets(in_digits, monkeypatch, pictures):
    small_forest = partial(sklearn.ensemble.IsolationForest, n_estimators=3)
    monkeypatch.setattr("sklearn.ensemble.IsolationForest", small_forest)
    output = run("anomaly", "measure", "run", "--sets", "12", "--set-size", "10")
    assert "12 sets of 10 elements" in output
    for part in values_of("run", "anomaly-quality-test")["contamination"]:
        assert "IsolationForest, pixels" in part["qualities"]
        assert part["qualities"]["BRUNO, leave one out"]["area"] > 0.7
    assert picture_of("run", "anomaly-quality-test").std() > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--sets", "1"], r"`--sets` .*at least 2; got 1"), (["--set-size", "1"], r"`--set-size` .*got 1")],
)
def test_a_mistake_in_measuring_names_the_option_and_its_value(in_digits, arguments, message):
    with pytest.raises(ValueError, match=message):
        run("anomaly", "measure", "run", *arguments)


def test_measuring_takes_no_stream(in_digits):
    run("anomaly", "measure", "run", "queries/2", code=2)
    run("anomaly", "measure", "run", "--rate", "0.1", code=2)
