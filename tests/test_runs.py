import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bruno
from bruno import Bruno, FlowConfig, ModelConfig
from bruno.config import TrainConfig
from bruno.data import load_examples
from bruno.runs import Run
from bruno.sequences import SetSampler
from bruno.training import Trainer

MODEL = ModelConfig((1, 8, 8), flow=FlowConfig("dense", couplings=2, units=16))
TRAIN = TrainConfig(steps=12, batch=4, length=5, discriminative=0.1, episodes=2, way=3, ema=0.9)


@pytest.fixture(scope="module")
def sampler():
    return SetSampler(load_examples("digits"))


def trainer(sampler, config: TrainConfig = TRAIN) -> Trainer:
    torch.manual_seed(0)
    return Trainer(Bruno.from_config(MODEL), sampler, config)


def trained(sampler, steps: int = 12, config: TrainConfig = TRAIN) -> Trainer:
    result = trainer(sampler, config)
    for _ in range(steps):
        result.step()
    return result


def assert_same_state(a: Trainer, b: Trainer) -> None:
    mine, other = a.state(), b.state()
    assert mine.keys() == other.keys()
    for name, tensor in mine.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("optimiser", ["adamw", "adam", "rmsprop"])
def test_a_resumed_run_goes_on_to_the_bit(sampler, optimiser, tmp_path):
    config = TrainConfig(**{**vars(TRAIN), "optimiser": optimiser})
    whole = trained(sampler, 12, config)
    Run(tmp_path).save(trained(sampler, 5, config))
    resumed = trainer(sampler, config)
    assert Run(tmp_path).resume(resumed)
    assert resumed.index == 5
    while resumed.index < 12:
        resumed.step()
    assert_same_state(resumed, whole)


def test_a_new_run_has_nothing_to_resume_from(sampler, tmp_path):
    fresh = trainer(sampler)
    assert not Run(tmp_path / "new").resume(fresh)
    assert fresh.index == 0


def test_only_the_last_checkpoints_are_kept(sampler, tmp_path):
    run, current = Run(tmp_path), trainer(sampler)
    for _ in range(4):
        current.step()
        run.save(current)
    assert [path.name[-15:-12] for path in run.checkpoints] == ["003", "004"]


def test_a_damaged_checkpoint_falls_back_to_the_one_before(sampler, tmp_path):
    run, current = Run(tmp_path), trained(sampler, 2)
    run.save(current)
    before = current.model.fingerprint()
    current.step()
    newest = run.save(current)
    newest.write_bytes(newest.read_bytes()[:1000])
    resumed = trainer(sampler)
    with pytest.warns(UserWarning, match=r"Going back to the checkpoint before it"):
        assert run.resume(resumed)
    assert resumed.index == 2
    assert resumed.model.fingerprint() == before


def test_a_full_disk_loses_nothing_already_saved(sampler, tmp_path, monkeypatch):
    run, current = Run(tmp_path), trained(sampler, 2)
    saved = run.save(current)
    content = saved.read_bytes()
    current.step()

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("bruno.checkpoint.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        run.save(current)
    assert run.checkpoints == [saved]
    assert saved.read_bytes() == content


@pytest.mark.slow
def test_killed_at_any_moment_a_run_can_be_resumed(sampler, tmp_path):
    """Another process saves after every step; it is killed while it does, and its state is one of ours."""
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_runs import *
run, current = Run({str(tmp_path)!r}), trainer(SetSampler(load_examples("digits")))
while True:
    current.step()
    run.save(current)
    print(current.index, flush=True)
"""
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if int(line) == 5:
            os.kill(child.pid, signal.SIGKILL)
            break
    child.wait()
    child.stdout.close()
    resumed = trainer(sampler)
    assert Run(tmp_path).resume(resumed)
    assert resumed.index >= 5
    assert_same_state(resumed, trained(sampler, resumed.index))


def test_other_settings_are_refused_but_more_steps_are_not(sampler, tmp_path):
    run = Run(tmp_path)
    run.save(trained(sampler, 2))
    with pytest.raises(ValueError, match=r"`batch` must be as the run .* began, 4; got 8"):
        run.resume(trainer(sampler, TrainConfig(**{**vars(TRAIN), "batch": 8})))
    assert run.resume(trainer(sampler, TrainConfig(**{**vars(TRAIN), "steps": 50})))


def test_the_log_is_json_lines(sampler, tmp_path):
    run, current = Run(tmp_path), trainer(sampler, TrainConfig(steps=3, batch=4, length=5))
    for _ in range(3):
        run.log(current.step(), images_per_second=12.5)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [1, 2, 3]
    assert lines[0]["accuracy"] is None
    assert lines[0]["images_per_second"] == 12.5


def test_a_checkpoint_is_not_a_model(sampler, tmp_path):
    path = Run(tmp_path).save(trained(sampler, 1))
    with pytest.raises(ValueError, match=r"is the state of a training run"):
        bruno.load(path)
