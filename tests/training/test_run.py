"""A run: a recipe trained in a folder, through interruptions and failures."""

import itertools
import json
import math
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attrs import evolve
from tiny import MODEL, SETS, TRAIN, FakeClock, assert_same_state, digits, trained, trainer

import bruno
from bruno.checkpoint import read, read_about
from bruno.config import Recipe, from_dict, load_recipe
from bruno.training.run import Run, TrainingFailedError
from bruno.training.trainer import Trainer


def recipe_of(config) -> Recipe:
    return evolve(load_recipe("digits"), flow=MODEL.flow, train=config)


RECIPE = recipe_of(TRAIN)


def contents(folder: Path) -> dict[str, bytes]:
    """All files but TensorBoard's, which a thread writes at any time."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if "tfevents" not in name}


# --- fit --------------------------------------------------------------------------------------------------


def test_fitting_leaves_recipe_log_checkpoint_and_model(tmp_path):
    run = Run(tmp_path / "new" / "run")
    entries = list(run.fit(trainer(), RECIPE))
    assert [entry.index for entry in entries] == list(range(1, 13))
    assert run.recipe == RECIPE
    assert [entry["index"] for entry in run.read_log()] == list(range(1, 13))
    path = run.folder / "model.safetensors"
    assert bruno.load(path).fingerprint() == run.model().fingerprint() == trained(12).trained().fingerprint()
    assert from_dict(Recipe, read_about(path)["recipe"]) == RECIPE
    assert run.stop_signal == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_after_its_step_and_it_can_be_resumed(number, tmp_path):
    current = trainer()
    run, advance = Run(tmp_path), current.advance

    def interrupted(count, progress=None):
        if current.index == 4:
            signal.raise_signal(number)
        return advance(count, progress)

    current.advance = interrupted
    assert [entry.index for entry in run.fit(current, RECIPE)] == [1, 2, 3, 4, 5]
    assert run.stop_signal == number
    assert not (tmp_path / "model.safetensors").exists()
    resumed = trainer()
    assert [entry.index for entry in run.fit(resumed, RECIPE, resume=True)] == list(range(6, 13))
    assert run.stop_signal == 0
    assert bruno.load(tmp_path / "model.safetensors").fingerprint() == trained(12).trained().fingerprint()


def test_a_finished_run_that_is_resumed_takes_no_step_and_exports_its_model_again(tmp_path):
    list(Run(tmp_path).fit(trainer(), RECIPE))
    (tmp_path / "model.safetensors").unlink()
    assert list(Run(tmp_path).fit(trainer(), RECIPE, resume=True)) == []
    assert (tmp_path / "model.safetensors").is_file()


def test_a_longer_run_is_resumed_with_its_new_length(tmp_path):
    short, longer = evolve(SETS, steps=2), evolve(SETS, steps=3)
    list(Run(tmp_path).fit(trainer(short), recipe_of(short)))
    assert len(list(Run(tmp_path).fit(trainer(longer), recipe_of(longer), resume=True))) == 1
    assert Run(tmp_path).recipe.train.steps == 3


def test_a_rejected_run_changes_no_file(tmp_path):
    list(Run(tmp_path / "run").fit(trainer(SETS), recipe_of(SETS)))
    (tmp_path / "file").write_text("a file")
    before = contents(tmp_path)
    other = evolve(SETS, seed=7)
    for folder, config, options, message in (
        ("file", SETS, {}, r"`out` must be a folder; .*file"),
        ("run", SETS, {}, r"`out` must be a new folder; .*run has a run"),
        ("new", SETS, {"resume": True}, r"`resume` needs a checkpoint; .*new has none"),
        ("run", other, {"resume": True}, r"`train.seed` must .*0.*got 7"),
        ("new", SETS, {"save_every": math.nan}, r"`save_every` must be at least 0 .*got nan"),
    ):
        with pytest.raises(ValueError, match=message):
            next(Run(tmp_path / folder).fit(trainer(config), recipe_of(config), **options))
    assert contents(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]


def test_of_two_simultaneous_runs_in_one_folder_the_rejected_one_changes_no_file(tmp_path, monkeypatch):
    first, second = Run(tmp_path), Run(tmp_path)
    steps = first.fit(trainer(SETS), recipe_of(SETS))
    next(steps)
    before = contents(tmp_path)
    other = evolve(SETS, seed=7)
    with monkeypatch.context() as patch:  # as if it had checked the folder before the first one wrote to it
        patch.setattr(second, "_check", lambda recipe, resume: None)
        for resume in (False, True):
            with pytest.raises(ValueError, match=r"`out` must .*is in use"):
                next(second.fit(trainer(other), recipe_of(other), resume=resume))
    assert contents(tmp_path) == before
    list(steps)
    assert read_about(tmp_path / "model.safetensors")["recipe"]["train"]["seed"] == 0


def test_a_run_that_was_made_while_another_waited_for_the_lock_is_not_overwritten(tmp_path, monkeypatch):
    second = Run(tmp_path)
    check, calls = second._check, itertools.count()

    def check_then_lose_the_race(recipe, resume):
        check(recipe, resume)
        if next(calls) == 0:
            list(Run(tmp_path).fit(trainer(SETS), recipe_of(SETS)))

    monkeypatch.setattr(second, "_check", check_then_lose_the_race)
    other = evolve(SETS, seed=7)
    with pytest.raises(ValueError, match=r"`out` must be a new folder"):
        next(second.fit(trainer(other), recipe_of(other)))
    assert Run(tmp_path).recipe.train.seed == 0


def test_no_other_run_trains_resumes_or_writes_a_recipe_in_a_locked_folder(tmp_path):
    run, other = Run(tmp_path), Run(tmp_path)
    steps = run.train(trainer())
    next(steps)
    for attempt in (
        lambda: next(other.train(trainer())),
        lambda: other.resume(trainer()),
        lambda: other.keep_recipe(RECIPE),
    ):
        with pytest.raises(ValueError, match=r"`out` must .*is in use"):
            attempt()
    steps.close()
    assert other.resume(trainer())


# --- the recipe -------------------------------------------------------------------------------------------


def test_a_recipe_is_written_atomically(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.keep_recipe(load_recipe("digits"))
    before = contents(tmp_path)

    def full(self, text, encoding):
        self.write_bytes(text[:10].encode())
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            run.keep_recipe(load_recipe("digits", ["train.steps=7"]))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("content", [b"{half", b"\xff"])
def test_a_recipe_that_is_not_json_is_an_error(tmp_path, content):
    (tmp_path / "recipe.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"recipe.json: must be JSON"):
        _ = Run(tmp_path).recipe


def test_a_folder_without_a_recipe_is_not_a_run(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"`run` must be the folder of a training run"):
            _ = Run(folder).recipe


def test_once_a_run_has_begun_only_the_length_of_its_recipe_may_change(tmp_path):
    run = Run(tmp_path)
    run.keep_recipe(load_recipe("digits", ["data.rotations=false"]))
    run.keep_recipe(load_recipe("digits"))
    run.save(trained(1))
    run.keep_recipe(load_recipe("digits", ["train.steps=7"]))
    assert run.recipe.train.steps == 7
    with pytest.raises(ValueError, match=r"`data.rotations` must .*True.*got False"):
        run.keep_recipe(load_recipe("digits", ["data.rotations=false"]))


# --- log, saving and validation ---------------------------------------------------------------------------


def test_every_step_is_logged(tmp_path):
    run = Run(tmp_path)
    seen = list(run.train(trainer(SETS)))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [1, 2, 3, 4]
    assert [line["bits_per_dim"] for line in lines] == [entry.bits_per_dim for entry in seen]
    assert lines[0]["accuracy"] is None
    assert all(line["elements_per_second"] > 0 and line["memory"] > 2**20 for line in lines)
    assert (tmp_path / "tensorboard").is_dir()


def test_steps_that_are_repeated_count_once_in_the_log(tmp_path):
    run = Run(tmp_path)
    list(run.train(trainer(SETS)))
    run.checkpoints[-1].unlink()  # as if the run had been killed before saving
    again = trainer(SETS)
    run.resume(again)
    list(run.train(again))
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 8
    assert [entry["index"] for entry in run.read_log()] == [1, 2, 3, 4]


def test_checkpoints_are_saved_at_intervals_and_at_the_end(tmp_path):
    current = trainer(evolve(SETS, steps=10))
    entries = Run(tmp_path).train(current, save_every=2.5, measure=lambda model: 1.0, now=FakeClock(current))
    assert [entry.index for entry in entries if entry.validation == 1.0] == [3, 6, 9, 10]


def test_the_best_checkpoint_is_kept(tmp_path):
    values = iter([3.0, 1.0, math.nan, 2.0])
    run, current = Run(tmp_path), trainer(SETS)
    seen = list(
        run.train(current, save_every=0.5, measure=lambda model: next(values), now=FakeClock(current))
    )
    assert [entry.validation for entry in seen] == pytest.approx([3.0, 1.0, math.nan, 2.0], nan_ok=True)
    assert run.model("best").fingerprint() == trained(2, SETS).model.fingerprint()
    assert run.model("last").fingerprint() == trained(4, SETS).model.fingerprint()
    more, again = trainer(evolve(SETS, steps=5)), Run(tmp_path)
    again.resume(more)
    list(again.train(more, measure=lambda model: 1.5))  # worse than the previous best
    assert again.model("best").fingerprint() == trained(2, SETS).model.fingerprint()


def test_a_checkpoint_is_saved_before_it_is_measured(tmp_path):
    def measure(model):
        raise torch.cuda.OutOfMemoryError

    run = Run(tmp_path)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        list(run.train(trainer(SETS), measure=measure))
    resumed, again = trainer(SETS), Run(tmp_path)
    assert again.resume(resumed)
    assert resumed.index == 4
    values = iter([2.5])
    for _ in range(2):  # measured once: a second time, `values` would be exhausted
        assert list(again.train(resumed, measure=lambda model: next(values))) == []
    assert read(again.best, "cpu")[1]["metrics"] == {"validation": 2.5}


def test_validation_does_not_change_training(tmp_path):
    def measure(model):
        torch.rand(3)
        return model.log_prob(digits().sets(2, 3, torch.Generator().manual_seed(0))).mean().item()

    current = trainer()
    list(Run(tmp_path).train(current, save_every=3.5, measure=measure, now=FakeClock(current)))
    assert_same_state(current, trained(12))


# --- failing steps ----------------------------------------------------------------------------------------


@pytest.fixture
def _few_failures_are_enough(monkeypatch):
    monkeypatch.setattr("bruno.training.run._FAILURES", 4)


def failing(current: Trainer, fails) -> Trainer:
    """The trainer, with a non-finite gradient in every step after which `fails()` is true."""
    advance = current.advance

    def failing_advance(count, progress=None):
        steps = advance(count, progress)
        return [replace(s, gradient_norm=math.inf, skipped=True) for s in steps] if fails() else steps

    current.advance = failing_advance
    return current


def saving_every_step(folder: Path, current: Trainer):
    return Run(folder).train(current, save_every=0.5, now=FakeClock(current))


def test_a_run_goes_back_with_a_smaller_learning_rate_after_20_failures(tmp_path):
    current = trainer(evolve(SETS, steps=30))
    failing(current, lambda: current.index > 5 and current.scale > 0.5)
    entries = Run(tmp_path).train(current, save_every=4.5, now=FakeClock(current))
    (entry,) = [entry for entry in entries if entry.note]
    assert "in the last 20 steps up to 25; went back to step 5 " in entry.note


@pytest.mark.usefixtures("_few_failures_are_enough")
def test_a_run_continues_from_its_last_good_checkpoint(tmp_path):
    current = trainer(evolve(SETS, steps=14))
    failing(current, lambda: current.index > 5 and current.scale > 0.5)
    seen = list(saving_every_step(tmp_path, current))
    assert [entry.index for entry in seen] == [*range(1, 10), *range(6, 15)]
    notes = [entry.note for entry in seen if entry.note]
    assert len(notes) == 1
    assert "went back to step 5 with 0.3 of the learning rate" in notes[0]
    assert sum(entry.skipped for entry in seen) == 4
    assert seen[9].rate == pytest.approx(0.3 * seen[5].rate)
    assert all(one.seconds <= other.seconds for one, other in itertools.pairwise(seen))
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(lines[8])["note"] == notes[0]


@pytest.mark.usefixtures("_few_failures_are_enough")
def test_a_run_that_keeps_failing_from_its_checkpoint_ends_with_an_error(tmp_path):
    current = trainer(evolve(SETS, steps=200))
    failing(current, lambda: current.index > 3)
    with pytest.raises(TrainingFailedError, match=r"3 restarts from a checkpoint .*checkpoint-00000003"):
        list(saving_every_step(tmp_path, current))


def test_a_run_whose_last_steps_fail_ends_with_an_error_and_keeps_its_good_checkpoint(tmp_path):
    current = trainer(evolve(SETS, steps=8))
    failing(current, lambda: current.index > 5)
    with pytest.raises(TrainingFailedError, match=r"in its last 3 steps.*checkpoint-00000005"):
        list(saving_every_step(tmp_path, current))
    assert Run(tmp_path).checkpoints[-1].name == "checkpoint-00000005.safetensors"


@pytest.mark.usefixtures("_few_failures_are_enough")
def test_a_checkpoint_from_which_training_failed_before_is_deleted(tmp_path):
    current, bad = trainer(evolve(SETS, steps=14)), False

    def fails() -> bool:
        nonlocal bad
        if current.index == 5:  # a step that looks good but is not, unless its learning rate is small
            bad = current.scale > 0.2
            return False
        return bad

    failing(current, fails)
    seen = list(saving_every_step(tmp_path, current))
    notes = [entry.note.split("; ")[1] for entry in seen if entry.note]
    assert notes == [
        "went back to step 5 with 0.3 of the learning rate",
        "went back to step 4 with 0.09 of the learning rate",
    ]
    assert current.index == 14
