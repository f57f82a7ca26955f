"""As many processes as one likes train the model that one would."""

import json
import subprocess
import sys

import pytest
import torch

import bruno

SMALL = ["--set", "flow.units=16", "--set", "flow.couplings=2", "--set", "train.batch=4", "--validate", "6"]
SAME_RATE = ["--set", "train.decay=none", "--set", "train.warmup=0.0"]  # whatever number of steps is planned
EPISODES = ["--set", "train.discriminative=0.1", "--set", "train.episodes=2", "--set", "train.way=3"]
COMMAND = ["train", "digits", "--device", "cpu", "--set", "train.ema=0.9", *SMALL, *SAME_RATE, *EPISODES]


def bruno_with(processes: int, folder, *arguments: str, code: int = 0) -> str:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(torchrun if processes > 1 else []), "-m", "bruno", *COMMAND, *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert result.returncode == code, result.stderr
    return result.stdout + result.stderr


@pytest.mark.slow
def test_two_processes_train_the_model_that_one_does(tmp_path):
    bruno_with(1, tmp_path, "--steps", "8", "--out", "one")
    bruno_with(2, tmp_path, "--steps", "4", "--out", "two")
    said = bruno_with(2, tmp_path, "--steps", "8", "--out", "two", "--resume")
    assert said.count("the model is in") == 1
    one, two = (bruno.load(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for (name, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}")
    logs = {}
    for name in ("one", "two"):
        text = (tmp_path / name / "log.jsonl").read_text()
        logs[name] = [json.loads(line) for line in text.splitlines()]
    assert [line["index"] for line in logs["two"]] == list(range(1, 9))
    for a, b in zip(logs["one"], logs["two"], strict=True):
        for key in ("loss", "bits_per_dim", "accuracy"):
            assert b[key] == pytest.approx(a[key], rel=1e-3)
    assert logs["two"][-1]["validation"] == pytest.approx(logs["one"][-1]["validation"], rel=1e-3)


@pytest.mark.slow
def test_a_batch_that_cannot_be_shared_is_refused(tmp_path):
    said = bruno_with(2, tmp_path, "--set", "train.batch=5", "--out", "run", code=1)  # torchrun's own code
    assert "`train.batch` must be a multiple of 2 processes; got 5" in said
