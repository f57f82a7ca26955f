"""`bruno verdict`, and the verdict at the end of training."""

from pathlib import Path

import pytest

import bruno
from bruno import Trained
from cli.commandline import SMALL, run, values_of

TRAIN = ["train", "digits", "--steps", "2", "--out", "new", *SMALL]


def test_training_ends_with_a_verdict(workplace):
    output = run(*TRAIN, "--verdict")
    assert "Verdict" in output
    assert "Measured on 3 unseen classes." in output
    assert values_of("new", "verdict")["measured_on"] == "unseen classes"
    run("report", "new")
    assert "gain from conditioning" in Path("new/report.html").read_text()


def test_fine_tuning_ends_with_a_verdict(tiny):
    run("finetune", "run", "--steps", "1", "--trials", "0", "--device", "cpu")
    assert values_of("run-finetuned", "verdict")["classes"] == 3


def test_a_verdict_can_be_switched_off(workplace):
    assert "Verdict" not in run(*TRAIN, "--no-verdict")
    assert not Path("new/results").exists()


@pytest.mark.parametrize("method", ["verdict", "save_result"])
def test_a_failed_verdict_does_not_fail_the_training(workplace, monkeypatch, method):
    def fail(self, *arguments, **options):
        raise OSError("a disk is full")

    monkeypatch.setattr(Trained, method, fail)
    output = run(*TRAIN, "--verdict")
    assert "a disk is full" in output
    assert "model.safetensors" in output


def test_the_command_reports_what_the_library_measures(tiny):
    run("verdict", "run", "--elements", "600", "--seed", "5")
    measured = bruno.open("run").verdict(elements=600, seed=5)  # on the device of the command
    assert values_of("run", "verdict")["training"]["mean"] == pytest.approx(measured.training.mean)
