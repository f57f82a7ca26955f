"""Training by two processes on one machine; see in_each_process.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from in_each_process import SETTINGS

import bruno
from bruno.training.distributed import broadcast, on_first_process, rank_and_processes
from bruno.training.run import Run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Output of two processes: a run, a fine-tuned run, and a report by each process."""
    folder = tmp_path_factory.mktemp("two-processes")
    script = str(Path(__file__).with_name("in_each_process.py"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, script, str(folder)]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def reports(folder) -> list[dict]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_two_processes_train_the_same_model_as_one(folder, tmp_path):
    bruno.train("digits", tmp_path, steps=8, **SETTINGS)
    one, two = (bruno.load(path / "model.safetensors") for path in (tmp_path, folder / "run"))
    for (name, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")
    logs = [Run(path).read_log() for path in (tmp_path, folder / "run")]
    assert [entry["index"] for entry in logs[1]] == list(range(1, 9))
    for a, b in zip(*logs, strict=True):
        for key in ("loss", "bits_per_dim", "accuracy"):
            assert b[key] == pytest.approx(a[key], rel=1e-3)
    assert logs[1][-1]["validation"] == pytest.approx(logs[0][-1]["validation"], rel=1e-3)


def test_all_processes_end_with_the_same_model(folder, reports):
    assert reports[0]["models"] == reports[1]["models"]
    assert reports[0]["models"][0] == bruno.load(folder / "run" / "model.safetensors").fingerprint()
    assert reports[0]["models"][1] == bruno.load(folder / "tuned" / "model.safetensors").fingerprint()


def test_errors_are_raised_in_all_processes(reports):
    for report in reports:
        indivisible, taken = report["errors"]
        assert "`train.batch` must be a multiple of 2 processes; got 5" in indivisible
        assert "`out` must be a new folder" in taken


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux lists threads there")
def test_no_thread_of_the_process_group_outlives_training(reports):
    for report in reports:
        assert report["threads"]
        assert not [name for name in report["threads"] if "gloo" in name]


def test_one_process_needs_no_group():
    assert rank_and_processes() == (0, 1)
    assert broadcast("value") == "value"
    assert on_first_process(lambda: 3) == 3
    with pytest.raises(ValueError, match="wrong"):
        on_first_process(lambda: int("wrong"))
