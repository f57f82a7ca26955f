"""`bruno train`."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import bruno
from bruno.checkpoint import read
from bruno.training.run import Run
from bruno.training.trainer import Trainer
from cli.commandline import SMALL, make_images, run

TRAIN = ["train", "digits", *SMALL]


@pytest.fixture
def advance(monkeypatch):
    """Set a function to call before each step, with the number of steps taken."""
    original = Trainer.advance

    def set_hook(hook) -> None:
        def advance(self, count, progress):
            hook(self.index)
            return original(self, count, progress)

        monkeypatch.setattr(Trainer, "advance", advance)

    return set_hook


def interrupt_at(index: int):
    def hook(taken: int) -> None:
        if taken == index:
            raise KeyboardInterrupt

    return hook


def test_a_run_is_trained_in_parts(workplace):
    run(*TRAIN, "--steps", "2", "--out", "parts")
    run(*TRAIN, "--steps", "4", "--out", "parts", "--resume")
    assert bruno.load("parts/model.safetensors").shape == (1, 8, 8)
    log = [json.loads(line) for line in Path("parts/log.jsonl").read_text().splitlines()]
    assert [line["index"] for line in log] == [1, 2, 3, 4]


def test_a_resumed_run_ends_with_the_same_weights_as_an_uninterrupted_one(workplace, advance):
    run(*TRAIN, "--steps", "6", "--out", "whole")
    advance(interrupt_at(3))
    run(*TRAIN, "--steps", "6", "--out", "cut", "--save-every", "0", code=130)
    advance(lambda taken: None)
    run(*TRAIN, "--steps", "6", "--out", "cut", "--resume")
    whole, cut = (bruno.load(f"{name}/model.safetensors") for name in ("whole", "cut"))
    assert whole.fingerprint() == cut.fingerprint()


def test_a_resumed_run_has_its_planned_length_unless_another_is_given(workplace, advance):
    advance(interrupt_at(2))
    run(*TRAIN, "--steps", "4", "--out", "run", "--save-every", "0", code=130)
    advance(lambda taken: None)
    resume = [*TRAIN, "--out", "run", "--resume"]
    assert "4 steps in" in run(*resume)
    assert "already completed step 4" in run(*resume)
    assert "5 steps in" in run(*resume, "--steps", "5")
    assert "6 steps in" in run(*resume, "--set", "train.steps=6")


def test_steps_on_the_command_line_replace_minutes_in_the_settings(workplace):
    assert "2 steps in" in run(*TRAIN, "--steps", "2", "--set", "train.minutes=0.1", "--out", "run")


def test_a_number_of_steps_replaces_the_minutes_of_a_recipe_file(workplace):
    recipe = '[data]\nname = "digits"\n[flow]\nkind = "dense"\nunits = 8\n[train]\nminutes = 0.1\n'
    Path("minutes.toml").write_text(recipe)
    start = ["train", "minutes.toml", "--device", "cpu", "--validate", "0", "--set", "train.steps=2"]
    start += ["--no-verdict"]
    assert "2 steps in" in run(*start, "--out", "few")
    assert Run("few").recipe.train.minutes == 0
    run(*start, "--set", "train.minutes=0.01", "--out", "timed")
    assert Run("timed").recipe.train.minutes == 0.01


def test_the_saved_model_has_the_moving_average_of_the_weights(workplace):
    run(*TRAIN, "--steps", "3", "--out", "run", "--set", "train.ema=0.9")
    tensors, _ = read(Run("run").checkpoints[-1], "cpu")
    saved = bruno.load("run/model.safetensors").state_dict()["process.raw_variance"]
    assert torch.equal(saved, tensors["average.process.raw_variance"])
    assert not torch.equal(saved, tensors["model.process.raw_variance"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_training_after_the_step_and_its_checkpoint(number, workplace, advance):
    advance(lambda taken: os.kill(os.getpid(), number) if taken == 2 else None)
    output = run(*TRAIN, "--steps", "100", "--out", "run", code=128 + number)
    assert "stopped after step 3" in output
    assert "--resume" in output
    assert Path("run/checkpoint-00000003.safetensors").is_file()
    assert not Path("run/model.safetensors").exists()


@pytest.mark.slow
def test_a_process_that_is_terminated_saves_and_exits_with_the_code_of_the_signal(tmp_path):
    command = [sys.executable, "-m", "bruno", *TRAIN, "--steps", "100000", "--out", "run"]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    log = tmp_path / "run" / "log.jsonl"
    while not log.exists() or log.read_text().count("\n") < 3:
        assert child.poll() is None, child.stderr.read()
        time.sleep(0.05)
    child.send_signal(signal.SIGTERM)
    output, errors = child.communicate(timeout=300)
    assert child.returncode == 128 + signal.SIGTERM
    assert "Traceback" not in errors
    steps = log.read_text().count("\n")
    assert (tmp_path / "run" / f"checkpoint-{steps:08d}.safetensors").is_file()
    assert f"stopped after step {steps:,}" in output


def test_skipped_steps_are_reported(workplace, monkeypatch):
    original = Trainer.advance

    def advance(self, count, progress):
        return [replace(step, skipped=step.index == 2) for step in original(self, count, progress)]

    monkeypatch.setattr(Trainer, "advance", advance)
    assert "skipped 1 step with a non-finite gradient" in run(*TRAIN, "--steps", "3", "--out", "run")


@pytest.mark.slow
def test_images_in_their_original_size_train_a_model_of_smaller_images(workplace):
    make_images({f"class{i:02d}": 6 for i in range(20)}, 19)
    data = ["data.name=images", "data.size=8", "train.set_size=5", "train.slant=0.2", "train.shift=2"]
    settings = [word for setting in data for word in ("--set", setting)]
    run(*TRAIN, "--steps", "2", "--out", "small", *settings)
    settings += ["--set", "data.original=true"]
    run(*TRAIN, "--steps", "2", "--out", "large", *settings)
    small, large = (bruno.load(f"{name}/model.safetensors") for name in ("small", "large"))
    assert small.shape == large.shape == (1, 8, 8)
    assert not torch.equal(small.process.raw_variance, large.process.raw_variance)
    run(*TRAIN, "--steps", "3", "--out", "large", "--resume", *settings)
    run("finetune", "large", "--steps", "1", "--way", "3", "--trials", "2", "--device", "cpu")
    assert "mean" in run("evaluate", "large-finetuned", "--set-size", "5")


def test_a_preset_of_larger_images_takes_user_images_of_any_size(workplace):
    make_images({f"class{i:02d}": 4 for i in range(5)}, 20)
    for i in range(3):
        path = Path("images", "class00", f"{i}.png")
        Image.open(path).resize((31, 17 + i)).save(path)
    settings = ["data.name=images", "train.set_size=4", "train.batch=2", "flow.filters=4", "flow.units=8"]
    start = ["train", "omniglot", "--steps", "1", "--device", "cpu", "--validate", "0", "--no-verdict"]
    start += [word for setting in settings for word in ("--set", setting)]
    run(*start, "--set", "data.size=8", "--out", "run")
    assert bruno.load("run/model.safetensors").shape == (1, 8, 8)
    original = ["--set", "data.size=8", "--set", "data.original=true"]
    with pytest.raises(ValueError, match=r"images.*size"):
        run(*start, *original, "--set", "data.drawings=false", "--out", "original")
    run(*start, *original, "--out", "drawings")  # drawings are normalised to one size


def test_a_run_on_user_data_works_from_any_folder(workplace, monkeypatch):
    make_images({f"class{i}": 4 for i in range(5)}, 8)
    data = ["--set", "data.name=images", "--set", "train.set_size=3"]
    start = ["train", "digits", *SMALL, "--validate", "0"]
    run(*start, "--steps", "1", "--out", "run", *data)
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert "mean" in run("evaluate", "../run", "--set-size", "3")
    data[1] = "data.name=../images"
    run(*start, "--steps", "2", "--out", "../run", "--resume", *data)
    with pytest.raises(ValueError, match=r"`data.name` .*images.*got digits"):
        run(*start, "--steps", "3", "--out", "../run", "--resume")
    with pytest.raises(ValueError, match=r"images/class0: .*class folders"):
        run("finetune", "../run", "--set", "data.name=../images/class0", "--steps", "1")


def test_colours_that_are_not_used_are_reported(workplace):
    make_images({f"class{i}": 4 for i in range(5)}, 8)
    data = ["--data", "images", "--set", "data.rotations=false", "--set", "train.set_size=3", "--steps", "1"]
    note = "images: the images have colours, which are not used; data.colour=true keeps them"
    assert note not in run(*TRAIN, *data, "--out", "grey")
    for path in Path("images").glob("*/*.png"):
        Image.merge("RGB", [Image.open(path), *2 * [Image.new("L", (8, 8), 255)]]).save(path)
    assert note in run(*TRAIN, *data, "--out", "lost")
    assert note not in run(*TRAIN, *data, "--out", "kept", "--set", "data.colour=true")
    assert bruno.load("kept/model.safetensors").shape == (3, 8, 8)


def test_training_on_one_class_of_images_warns(workplace):
    make_images({"screws": 4}, 8)
    settings = ["--set", "data.rotations=false", "--set", "train.set_size=3", "--steps", "1"]
    words = " ".join(run(*TRAIN, "--data", "images", *settings, "--out", "one").split())
    assert "Only one training class, 'screws'" in words


def test_skipped_files_and_classes_are_reported_once(workplace):
    make_images({**{f"class{i}": 6 for i in range(5)}, "small": 2}, 8)
    Path("images/class0/0.png").write_bytes(b"no image")
    data = ["--set", "data.name=images", "--set", "data.rotations=false", "--set", "train.set_size=5"]
    with pytest.raises(ValueError, match=r"class0.0.png"):
        run(*TRAIN, "--steps", "1", *data, "--out", "strict")
    output = run(*TRAIN, "--steps", "1", *data, "--out", "lenient", "--skip-bad")
    assert output.count("skipped 1 unreadable element, first class0/0.png") == 1
    assert output.count("skipped 1 class with too few elements, first small (only 2)") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_on_a_machine_without_one_is_an_error():
    with pytest.raises(ValueError, match=r"`device` .*got cuda, .*cpu"):
        run("train", "digits", "--device", "cuda")


def test_a_gpu_beyond_the_last_is_an_error(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"`device` .*got cuda:2, .*cuda:1"):
        run("train", "digits", "--device", "cuda:2")
