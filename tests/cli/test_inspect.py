"""`bruno inspect`, `bruno study` and `bruno report`."""

import json
from pathlib import Path

import numpy as np
import pytest

from bruno.data import load_examples
from bruno.tasks import stability
from cli.commandline import SMALL, picture_of, run, values_of


def test_an_inspection_and_one_page_of_all_results(in_digits, pictures):
    run("inspect", "run", "--sets", "4")
    names = ("correlations", "degrees-of-freedom", "toy-comparison", "gain-by-position")
    for name in names:
        values_of("run", name)
        assert picture_of("run", name).std() > 3
    run("report", "run")
    text = Path("run/report.html").read_text()
    assert "Learning curve" in text
    assert text.count("data:image/png;base64") >= len(names) + 1
    assert "http" not in text


def test_a_page_marks_results_of_an_earlier_checkpoint(tiny):
    run("evaluate", "run", "--sets", "4")
    for steps, outdated in (("3", 0), ("4", 1)):
        run("train", "digits", "--steps", steps, "--out", "run", "--resume", *SMALL)
        run("report", "run")
        page = Path("run/report.html").read_text("utf-8")
        assert page.count("arlier checkpoint") == outdated
    with pytest.raises(ValueError, match=r"`out` .*no.p.html"):
        run("report", "run", "--out", "no/p.html")


def test_a_page_needs_results(in_digits):
    with pytest.raises(ValueError, match=r"support"):
        run("report", "support")
    with pytest.raises(ValueError, match=r"omniglot"):
        run("report", "omniglot")


def test_an_inspection_needs_two_sets(in_digits):
    with pytest.raises(ValueError, match=r"`--sets` .*at least 2; got 0"):
        run("inspect", "run", "--sets", "0")


@pytest.mark.parametrize("full_size", [False, True])
def test_a_study_at_full_size_has_the_network_of_the_paper(workplace, monkeypatch, full_size):
    asked = {}

    def remember(examples, **settings):
        asked.update(settings)
        return []

    monkeypatch.setattr(stability, "stability_study", remember)
    monkeypatch.setattr("bruno.reporting.summaries.analysis.training_curves", lambda curves: b"")
    run("study", "--out", "study", "--device", "cpu", *["--full-size"] * full_size)
    assert (asked["flow"].filters, asked["flow"].blocks) == ((64, 8) if full_size else (16, 1))
    assert asked["train"].batch == (32 if full_size else 8)
    recorded = json.loads(Path("study/results/study-digits.json").read_text())["config"]
    assert recorded["flow"]["filters"] == asked["flow"].filters
    assert recorded["train"]["batch"] == asked["train"].batch


@pytest.mark.slow
def test_a_study_compares_both_processes_on_each_dataset(workplace, monkeypatch, pictures):
    curves, train = [], stability.stability_study

    def train_once(examples, **settings):
        curves.extend(() if curves else train(examples, variants=stability.VARIANTS[:1], **settings))
        return curves

    monkeypatch.setattr(stability, "stability_study", train_once)  # the second dataset takes no time
    monkeypatch.setattr(stability, "_FINAL_SETS", 2)
    digits = load_examples("digits")
    np.savez("mine.npz", images=digits.elements[:, 0], labels=digits.labels)
    run("study", "--out", "study", "--steps", "1", "--device", "cpu", "--data", "digits,mine.npz")
    assert Path("study/results/study-mine.json").is_file()
    record = json.loads(Path("study/results/study-digits.json").read_text())
    assert len(record["rows"]) == len(record["values"]["curves"]) == 2
    assert Path("study/results/study-digits.png").stat().st_size > 1000
    run("report", "study")
    assert "Stability of training on digits" in Path("study/report.html").read_text()


def test_a_mistake_in_a_study_names_the_option_and_its_value(workplace):
    Path("file").touch()
    with pytest.raises(ValueError, match=r"`out` must be a folder; file"):
        run("study", "--out", "file")
    with pytest.raises(ValueError, match=r"`data` .*'nowhere'"):
        run("study", "--data", "nowhere", "--out", "study")
    with pytest.raises(ValueError, match=r"`--steps` .*at least 1; got 0"):
        run("study", "--steps", "0", "--out", "study")
