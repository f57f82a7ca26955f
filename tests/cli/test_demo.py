"""`bruno demo`."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

import bruno
from bruno.cli.demo import invite
from bruno.page.files import STATIC
from bruno.reporting.results import read_results
from bruno.training.run import Run
from bruno.training.trainer import Trainer
from cli.commandline import run


@pytest.mark.slow
def test_the_demo_trains_and_writes_one_page_of_all_results(workplace):
    Path("runs/demo").mkdir(parents=True)  # a folder of this name exists
    output = run("demo", "--no-show", "--steps", "2")
    assert "runs/demo-2/report.html" in output
    results = {result.name: result for result in read_results(Path("runs/demo-2"))}
    assert list(results)[:3] == ["new-characters", "more-of-the-same", "odd-one-out"]
    assert {"samples-by-class", "bits-test"} < results.keys()
    note = results["new-characters"].note
    assert re.search(r"temperature of 0.5. None was left out: \d of 36 are almost blank", note)
    assert "temperature of 0.5" in results["more-of-the-same"].note
    assert results["odd-one-out"].values["outliers"] == 1
    assert min(scores := results["odd-one-out"].values["scores"]) == scores[5]
    assert any(name.startswith("few-shot-test") for name in results)
    assert all(result.picture for result in results.values())
    text = Path("runs/demo-2/report.html").read_text()
    assert all(result.title in text for result in results.values())


@pytest.mark.parametrize(("built", "command"), [(True, "bruno page --open"), (False, "make page")])
def test_the_demo_ends_with_the_way_to_the_page(built, command, tmp_path, monkeypatch, capsys):
    if built:
        names = [path.name for path in STATIC.iterdir()]
        (tmp_path / "page.json").write_text(json.dumps({"page": names}))
    monkeypatch.setattr("bruno.page.files.BUILT", tmp_path)
    monkeypatch.setattr("bruno.page.serve_page", lambda folder, ready, **_: ready("http://0/"))
    invite(show=False)
    assert command in capsys.readouterr().out
    invite(show=True)
    assert ("http://0/" if built else command) in capsys.readouterr().out


@pytest.mark.slow
def test_the_results_of_the_demo_show_what_was_learnt(digits_run):
    trained = bruno.open(digits_run)
    found = trained.few_shot(trials=40, noise=False, rotations=False).comparison
    one_shot, five_shot = (result.accuracy for result in found.model)
    assert one_shot > found.baseline[0].accuracy + 0.02
    assert five_shot > 0.9
    assert trained.evaluate().bits.mean < 2.5


def test_a_stopped_demo_reports_how_to_resume_it(workplace, monkeypatch):
    original = Trainer.advance

    def advance(self, count, progress):
        if self.index == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, count, progress)

    monkeypatch.setattr(Trainer, "advance", advance)
    monkeypatch.setattr("bruno.training.run._STEPS_PER_ENTRY_ON_A_GPU", 1)
    output = run("demo", "--no-show", "--seed", "3", "--out", "run", code=130)
    command = "bruno train digits --seed 3 --out run --resume"
    assert f"`{command}`" in output
    assert Run("run").checkpoints[-1].stem == "checkpoint-00000002"
    assert re.search(r"\b3 steps in", run(*command.split()[1:], "--steps", "3"))
    assert Path("run/model.safetensors").is_file()
