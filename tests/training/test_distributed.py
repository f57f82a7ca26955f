"""As many processes as one likes train the model that one would."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bruno

SMALL = ["--set", "flow.units=16", "--set", "flow.couplings=2", "--set", "train.batch=4", "--validate", "6"]
SAME_RATE = ["--set", "train.decay=none", "--set", "train.warmup=0.0"]  # whatever number of steps is planned
EPISODES = ["--set", "train.discriminative=0.1", "--set", "train.episodes=2", "--set", "train.way=3"]
COMMAND = ["train", "digits", "--device", "cpu", "--set", "train.ema=0.9", *SMALL, *SAME_RATE, *EPISODES]


def torchrun(processes: int) -> list[str]:
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]


def bruno_with(processes: int, folder, *arguments: str, code: int = 0) -> str:
    launcher = torchrun(processes) if processes > 1 else []
    return python_with(folder, *launcher, "-m", "bruno", *COMMAND, *arguments, code=code)


def python_with(folder, *arguments: str, code: int = 0) -> str:
    command = [sys.executable, *arguments]
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


# What a process still runs after a command that ended well; a thread of gloo's would abort it now and then.
THREADS_LEFT = """
import sys
from pathlib import Path
from bruno.cli import app
app(sys.argv[1:], standalone_mode=False)
print(*(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")), "were left")
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed by Linux alone")
def test_no_thread_of_the_group_outlives_the_command(tmp_path):
    (tmp_path / "script.py").write_text(THREADS_LEFT)
    tuning = ("finetune", "run", "--steps", "2", "--way", "3", "--trials", "0", "--device", "cpu")
    for command in ((*COMMAND, "--steps", "2", "--out", "run"), tuning):
        said = python_with(tmp_path, *torchrun(2), "script.py", *command)
        assert said.count("were left") == 2
        assert "gloo" not in said, said
