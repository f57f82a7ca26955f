"""`bruno finetune`."""

import json
from pathlib import Path

import pytest

import bruno
from bruno.training.run import Run
from cli.commandline import SMALL, make_images, run

TUNE = ["finetune", "run", "--device", "cpu", "--no-verdict"]


def log_of(folder: str) -> list[dict]:
    return [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]


def test_it_starts_from_the_model_and_can_be_resumed(tiny, pictures):
    tune = [*TUNE, "--way", "3", "--episodes", "2", "--set", "train.batch=2"]
    run(*tune, "--set", "train.learning_rate=0.0", "--steps", "2", "--trials", "0", "--out", "still")
    before, still = (bruno.load(f"{name}/model.safetensors") for name in ("run", "still"))
    assert still.fingerprint() == before.fingerprint()
    assert "Before and after fine-tuning, on validation" in run(*tune, "--steps", "2")
    run(*tune, "--steps", "4", "--resume", "--trials", "0")
    assert "already completed step 4" in run(*tune, "--resume", "--trials", "0")  # without those of ./run
    log = log_of("run-finetuned")
    assert [line["index"] for line in log] == [1, 2, 3, 4]
    assert all(line["accuracy"] is not None and line["bits_per_dim"] is not None for line in log)
    assert bruno.load("run-finetuned/model.safetensors").fingerprint() != before.fingerprint()
    assert Path("run-finetuned/results/finetuning-validation.png").stat().st_size > 1000
    assert "mean" in run("evaluate", "run-finetuned", "--sets", "4", "--device", "cpu")


@pytest.mark.slow
def test_a_model_file_is_tuned_to_user_images(tiny):
    run("export", "run", "model.safetensors")
    make_images({f"class{i:02d}": 6 for i in range(20)}, 20)
    tune = ["finetune", "model.safetensors", "--set", "data.name=images", "--set", "train.set_size=5"]
    tune += ["--episodes", "2", "--trials", "2", "--steps", "2", "--device", "cpu", "--no-verdict"]
    run(*tune, "--way", "3")
    before, after = Run("run").recipe, Run("model-finetuned").recipe
    assert after.data.size == 8
    assert after.train.learning_rate == pytest.approx(
        0.1 * before.train.learning_rate
    )  # a new optimiser would undo training
    assert after.train.warmup == 0.1
    record = json.loads(Path("model-finetuned/results/finetuning-validation.json").read_text())
    assert "before" in record["columns"]
    assert "mean" in run("evaluate", "model-finetuned", "--set-size", "5")
    run(*tune, "--set", "data.split=trainval", "--out", "all")
    assert Path("all/results/finetuning-test.json").is_file()  # unseen in both trainings
    bruno.save(bruno.load("model.safetensors"), "bare.safetensors")
    with pytest.raises(ValueError, match=r"`trained` .*recipe; bare"):
        run("finetune", "bare.safetensors")


def test_few_user_classes_limit_the_episodes_and_the_sets(tiny):
    make_images({f"class{i}": 6 for i in range(4)}, 20)  # one of them is held out
    tune = [*TUNE, "--set", "data.name=images", "--steps", "1", "--episodes", "2"]
    output = run(*tune)
    assert "Too few held-out classes" in output
    assert "±" not in output  # one class gives no standard error
    tuned = Run("run-finetuned").recipe
    assert tuned.train.way == 3  # all that are not held out
    assert tuned.train.set_size == 6  # all elements of a class
    assert tuned.data.size == 8
    found = json.loads(Path("run-finetuned/results/finetuning-validation.json").read_text())
    assert [row[0] for row in found["rows"]] == ["bits/dim"]
    with pytest.raises(ValueError, match=r"`train.way` .*3.*classes; got 4"):
        run(*tune, "--way", "4", "--out", "unused")
    with pytest.raises(ValueError, match=r"`data` .*\(1, 8, 8\); got \(1, 4, 4\)"):
        run(*tune, "--set", "data.size=4", "--out", "unused")
    Path("one").mkdir()
    Path("images/class0").rename("one/class0")
    with pytest.raises(ValueError, match=r"`data` .*at least 2 classes; .*one has 1"):
        run(*TUNE, "--set", "data.name=one", "--steps", "1", "--out", "unused")
    assert not Path("unused").exists()


def test_few_user_classes_also_limit_the_sets_of_a_new_model(workplace):
    make_images({f"class{i}": 6 for i in range(4)}, 20)
    small = ["--no-verdict", "--set", "flow.blocks=1", "--set", "flow.filters=4", "--set", "flow.units=8"]
    run("train", "images", "--set", "data.name=images", "--steps", "1", *small, "--device", "cpu")
    assert Run("runs/images").recipe.train.set_size == 6


def test_shifts_are_in_pixels_of_the_model_for_images_of_any_size(workplace):
    larger = ["--set", "data.original=true", "--set", "train.shift=1"]
    run("train", "digits", "--steps", "1", "--out", "run", *larger, *SMALL)
    make_images({f"class{i}": 6 for i in range(4)}, 20)
    tune = [*TUNE, "--set", "data.name=images", "--steps", "1", "--episodes", "2", "--trials", "0"]
    run(*tune)
    assert Run("run-finetuned").recipe.train.shift == 1
    run(*tune, "--set", "train.shift=2", "--out", "moved")
    assert Run("moved").recipe.train.shift == 2


def test_images_of_the_size_of_the_model_are_not_blurred_by_maps(workplace):
    maps = ["--set", "train.slant=0.1", "--set", "train.warp=0.05"]
    run("train", "digits", "--steps", "1", "--out", "run", *SMALL, *maps)
    make_images({f"class{i}": 6 for i in range(4)}, 20)
    tune = [*TUNE, "--data", "images", "--steps", "1", "--episodes", "2", "--trials", "0"]
    run(*tune)
    assert (Run("run-finetuned").recipe.train.slant, Run("run-finetuned").recipe.train.warp) == (0, 0)
    run(*tune, "--set", "train.warp=0.02", "--out", "warped")
    assert Run("warped").recipe.train.warp == 0.02
    run(*TUNE, "--steps", "1", "--way", "3", "--episodes", "2", "--trials", "0", "--out", "same")
    assert Run("same").recipe.train.warp == 0.05  # on the training data


def test_a_mistake_leaves_no_run_behind(tiny):
    tune = [*TUNE, "--steps", "2", "--episodes", "2"]
    with pytest.raises(ValueError, match=r"`train.way` .*7.*classes; got 20"):
        run(*tune, "--way", "20", "--trials", "0")
    with pytest.raises(ValueError, match=r"`flow.units` .*16.*got 64"):
        run(*tune, "--way", "3", "--set", "flow.units=64", "--trials", "0")
    with pytest.raises(ValueError, match=r"`split` .*got 'foo'"):
        run(*tune, "--way", "3", "--split", "foo", "--trials", "2")
    for trials in (1, -2):
        with pytest.raises(ValueError, match=rf"`trials` .*at least 2.*got {trials}"):
            run(*tune, "--way", "3", "--trials", trials)
    assert not Path("run-finetuned").exists()
    run(*tune, "--way", "3", "--trials", "0")


def test_episodes_do_not_depend_on_those_of_the_original_training(workplace):
    episodes = ["discriminative=0.1", "shared=true", "episodes=1", "way=4", "queries=3"]
    settings = [word for setting in episodes for word in ("--set", f"train.{setting}")]
    run("train", "digits", "--steps", "1", "--out", "run", *SMALL, *settings)
    run(*TUNE, "--steps", "1", "--way", "3", "--trials", "0", "--generative", "0")
    tuned = Run("run-finetuned").recipe.train
    assert (tuned.shared, tuned.queries, tuned.way) == (False, 19, 3)


def test_episodes_without_noise_become_sets_with_noise_unless_these_are_set(workplace):
    settings = ["--set", "train.discriminative=0.1", "--set", "train.episode_noise=none"]
    settings += ["--set", "train.way=4"]
    run("train", "digits", "--steps", "1", "--out", "run", *SMALL, *settings)
    tune = [*TUNE, "--steps", "1", "--way", "3", "--trials", "0"]
    run(*tune)
    tuned = Run("run-finetuned").recipe.train
    assert (tuned.shared, tuned.episode_noise) == (True, "full")
    run(*tune, "--set", "train.episode_noise=none", "--out", "apart")
    tuned = Run("apart").recipe.train
    assert (tuned.shared, tuned.episode_noise) == (False, "none")


def test_a_run_is_tuned_and_reported_from_inside_its_folder(tiny, monkeypatch):
    monkeypatch.chdir(tiny)
    run("finetune", ".", "--steps", "1", "--way", "3", "--episodes", "2", "--trials", "0", "--device", "cpu")
    assert Path("../run-finetuned/model.safetensors").is_file()
    run("report", ".")
    assert "<title>run" in Path("report.html").read_text()
