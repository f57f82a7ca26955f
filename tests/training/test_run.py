import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from attrs import evolve
from safetensors import SafetensorError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import bruno
from bruno import Bruno, FlowConfig, ModelConfig
from bruno.checkpoint import read
from bruno.config import TrainConfig, load_recipe
from bruno.data import load_examples
from bruno.data.sampling import SetSampler
from bruno.training.run import Run, TrainingFailedError
from bruno.training.trainer import Trainer

MODEL = ModelConfig((1, 8, 8), flow=FlowConfig("dense", couplings=2, units=16))
TRAIN = TrainConfig(steps=12, batch=4, set_size=5, discriminative=0.1, episodes=2, way=3, ema=0.9)


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


def log_of(run: Run) -> list[dict]:
    return [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]


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


def test_a_damaged_checkpoint_is_put_aside_and_its_model_is_that_of_the_one_before(sampler, tmp_path):
    run, current = Run(tmp_path), trained(sampler, 2)
    run.save(current)
    before = run.model().fingerprint()
    current.step()
    newest = run.save(current)
    content = bytearray(newest.read_bytes())
    content[-2000:-1000] = b"\x7f" * 1000  # as good a file as any, but for its numbers
    newest.write_bytes(content)
    with pytest.warns(UserWarning, match=r"checksum is wrong. Going back to the checkpoint before it"):
        assert run.model().fingerprint() == before
    resumed = trainer(sampler)
    with pytest.warns(UserWarning, match=r"checksum is wrong"):
        run.resume(resumed)
    assert newest.with_suffix(".damaged").is_file()
    assert run.model().fingerprint() == before  # without a word


def test_checkpoints_that_are_all_damaged_are_not_called_none(sampler, tmp_path):
    run = Run(tmp_path)
    path = run.save(trained(sampler, 1))
    path.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="header too small"),
        pytest.raises(ValueError, match=r"none of 1 in .* can"),
    ):
        run.resume(trainer(sampler))


def test_a_damaged_best_does_not_stop_a_run(sampler, tmp_path):
    run = Run(tmp_path)
    run.best.write_bytes(b"nonsense")
    config = TrainConfig(steps=2, batch=4, set_size=5)
    with pytest.warns(UserWarning, match=r"The next best will replace it"):
        list(run.train(trainer(sampler, config), measure=lambda model: 3.0))
    run.model("best")


def test_what_a_killed_run_left_half_written_is_removed(sampler, tmp_path):
    run = Run(tmp_path)
    run.save(trained(sampler, 1))
    (tmp_path / ".checkpoint-00000002.safetensors.123").write_bytes(b"half")
    run.resume(trainer(sampler))
    assert not list(tmp_path.glob(".checkpoint*"))


def test_two_do_not_train_in_one_folder(sampler, tmp_path):
    run, other = Run(tmp_path), Run(tmp_path)
    steps = run.train(trainer(sampler))
    next(steps)
    for attempt in (lambda: next(other.train(trainer(sampler))), lambda: other.resume(trainer(sampler))):
        with pytest.raises(ValueError, match=r"another process trains here; wait for it, or choose another"):
            attempt()
    steps.close()
    assert other.resume(trainer(sampler))


def test_a_run_goes_on_on_another_kind_of_device(sampler, tmp_path):
    begun = trained(sampler, 3)
    state = begun.state() | {"generator": torch.zeros(16, dtype=torch.uint8)}  # as long as that of a GPU is
    drawn = []
    for _ in range(2):
        again = trainer(sampler)
        with pytest.warns(UserWarning, match="this run was on another kind of device"):
            again.restore(state)
        drawn.append(again.generator.get_state())
        assert again.index == 3
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], trainer(sampler).generator.get_state())  # not what it saw first, again


def test_a_state_is_what_it_was_after_further_steps(sampler):
    current = trained(sampler, 2)
    state = current.state()
    weights = current.model.fingerprint()
    current.advance(2)
    assert current.model.fingerprint() != weights
    current.restore(state)
    assert current.model.fingerprint() == weights


def test_a_recipe_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.keep_recipe(load_recipe("digits"))
    written = (tmp_path / "recipe.json").read_text()

    def full(self, text, encoding):
        self.write_bytes(text[:10].encode())
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        run.keep_recipe(load_recipe("digits", ["train.steps=7"]))
    assert (tmp_path / "recipe.json").read_text() == written
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.json"]
    (tmp_path / "recipe.json").write_bytes(b"{half")
    with pytest.raises(ValueError, match=r"recipe.json: is not JSON"):
        _ = run.recipe


def test_a_run_goes_on_with_the_data_it_began_with(sampler, tmp_path):
    run = Run(tmp_path)
    run.keep_recipe(load_recipe("digits"))
    run.save(trained(sampler, 1))
    run.keep_recipe(load_recipe("digits", ["train.steps=7"]))
    assert run.recipe.train.steps == 7
    with pytest.raises(ValueError, match=r"`data.rotations` must be as the run .* began, True; got False"):
        run.keep_recipe(load_recipe("digits", ["data.rotations=false"]))


def test_a_line_of_the_log_that_was_cut_spoils_no_other(sampler, tmp_path):
    run, config = Run(tmp_path), TrainConfig(steps=2, batch=4, set_size=5)
    list(run.train(trainer(sampler, config)))
    log = tmp_path / "log.jsonl"
    log.write_text(log.read_text()[:-30])
    more = trainer(sampler, evolve(config, steps=3))
    run.resume(more)
    list(run.train(more))
    assert [line["index"] for line in run.read_log()] == [1, 3]


def test_steps_that_were_taken_again_are_read_from_the_log_once(sampler, tmp_path):
    run, config = Run(tmp_path), TrainConfig(steps=4, batch=4, set_size=5)
    for _ in run.train(trainer(sampler, config), save_every=1000):
        pass
    run.checkpoints[-1].unlink()  # as if it had been killed before it was written
    again = trainer(sampler, config)
    run.resume(again)
    list(run.train(again))
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 8
    assert [line["index"] for line in run.read_log()] == [1, 2, 3, 4]


def test_a_full_disk_loses_nothing_already_saved(sampler, tmp_path, monkeypatch):
    run, current = Run(tmp_path), trained(sampler, 2)
    saved = run.save(current)
    content = saved.read_bytes()
    current.step()

    def full(error, *args):
        raise error("No space left on device")

    for error in (OSError, SafetensorError):  # either may come of it
        monkeypatch.setattr("bruno.checkpoint.save_file", partial(full, error))
        with pytest.raises(OSError, match="No space left"):
            run.save(current)
    assert list(tmp_path.iterdir()) == run.checkpoints == [saved]
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
    with pytest.raises(ValueError, match=r"`train.batch` must be as the run .* began, 4; got 8"):
        run.resume(trainer(sampler, TrainConfig(**{**vars(TRAIN), "batch": 8})))
    assert run.resume(trainer(sampler, TrainConfig(**{**vars(TRAIN), "steps": 50})))
    wider = Bruno.from_config(evolve(MODEL, flow=evolve(MODEL.flow, units=17)))
    with pytest.raises(ValueError, match=r"`flow.units` must be as the run .* began, 16; got 17"):
        run.resume(Trainer(wider, sampler, TRAIN))


def test_the_log_is_json_lines(sampler, tmp_path):
    run, current = Run(tmp_path), trainer(sampler, TrainConfig(steps=3, batch=4, set_size=5))
    seen = list(run.train(current))
    lines = log_of(run)
    assert [line["index"] for line in lines] == [1, 2, 3]
    assert lines[0]["accuracy"] is None
    assert [line["bits_per_dim"] for line in lines] == [progress.bits_per_dim for progress in seen]
    assert all(line["elements_per_second"] > 0 and line["memory"] > 2**20 for line in lines)
    assert lines[2]["seconds_left"] == 0 < lines[0]["seconds_left"]


def test_a_checkpoint_is_not_a_model(sampler, tmp_path):
    path = Run(tmp_path).save(trained(sampler, 1))
    with pytest.raises(ValueError, match=r"is the state of a training run"):
        bruno.load(path)


def test_a_run_of_minutes_ends_on_time(sampler, tmp_path):
    config = TrainConfig(minutes=2 / 60, batch=4, set_size=5, warmup=0.0, decay="linear")
    begun = time.monotonic()
    seen = list(Run(tmp_path).train(trainer(sampler, config)))
    assert 2 <= time.monotonic() - begun < 3.5
    assert len(seen) > 20
    assert seen[0].rate > 0.9 * config.rate
    assert seen[-1].rate < 0.1 * config.rate


def test_a_run_of_minutes_wastes_no_step_at_a_rate_of_zero(sampler, tmp_path):
    config = TrainConfig(minutes=0.5 / 60, batch=4, set_size=5, warmup=0.5)
    assert min(progress.rate for progress in Run(tmp_path).train(trainer(sampler, config))) > 0


def test_time_to_compile_is_not_time_to_warm_up(sampler, tmp_path):
    config = TrainConfig(minutes=2 / 60, batch=4, set_size=5, warmup=0.2, decay="none")
    current = trainer(sampler, config)
    original = current.advance

    def advance(count, progress=None):
        if current.index == 0:
            time.sleep(0.8)  # twice the warm-up
        return original(count, progress)

    current.advance = advance
    seen = list(Run(tmp_path).train(current))
    assert seen[1].rate < 0.2 * config.rate
    assert len([progress for progress in seen if progress.rate < config.rate]) > 5
    assert seen[-1].rate == config.rate
    assert seen[-1].seconds < 2.5


def test_a_resumed_run_of_minutes_spends_what_is_left(sampler, tmp_path):
    config = TrainConfig(minutes=2 / 60, batch=4, set_size=5)
    for progress in Run(tmp_path).train(trainer(sampler, config), save_every=0.0):
        if progress.seconds > 1.2:
            break
    resumed, begun = trainer(sampler, config), time.monotonic()
    assert Run(tmp_path).resume(resumed)
    assert resumed.seconds == pytest.approx(progress.seconds, abs=0.3)
    list(Run(tmp_path).train(resumed))
    assert time.monotonic() - begun < 1.5


def fail_from(current: Trainer, step: int, until_scale: float) -> None:
    """From this step on, no gradient is finite unless the rates were lowered to this share."""
    original = current.advance

    def advance(count, progress=None):
        steps = original(count, progress)
        if current.index > step and current.scale > until_scale:
            return [replace(s, gradient_norm=math.inf, skipped=True) for s in steps]
        return steps

    current.advance = advance


def test_a_run_that_keeps_failing_goes_back_with_a_smaller_rate(sampler, tmp_path):
    current = trainer(sampler, TrainConfig(steps=60, batch=4, set_size=5))
    fail_from(current, step=10, until_scale=0.5)
    seen = list(Run(tmp_path).train(current, save_every=0.0))
    notes = [progress.note for progress in seen if progress.note]
    assert notes == [
        "no finite gradient in the last 20 steps up to 30; went back to step 10 with 0.3 of the rate"
    ]
    assert current.index == 60
    assert sum(progress.skipped for progress in seen) == 20
    after = next(progress for progress in seen[30:] if progress.index == 20)
    assert after.rate == pytest.approx(0.3 * seen[19].rate)
    assert log_of(Run(tmp_path))[29]["note"] == notes[0]


def test_a_run_that_fails_from_its_checkpoint_too_stops(sampler, tmp_path):
    current = trainer(sampler, TrainConfig(steps=200, batch=4, set_size=5))
    fail_from(current, step=10, until_scale=0.0)
    with pytest.raises(TrainingFailedError, match=r"going back 3 times .* did not help.*checkpoint-00000010"):
        list(Run(tmp_path).train(current, save_every=0.0))


def test_a_run_that_ends_badly_says_so_and_keeps_what_was_good(sampler, tmp_path):
    current = trainer(sampler, TrainConfig(steps=12, batch=4, set_size=5))
    fail_from(current, step=7, until_scale=0.0)
    with pytest.raises(TrainingFailedError, match=r"no finite gradient in its last 5 steps.*00000007"):
        list(Run(tmp_path).train(current, save_every=0.0))
    assert Run(tmp_path).checkpoints[-1].name == "checkpoint-00000007.safetensors"


def test_a_checkpoint_that_was_in_ruins_already_is_not_gone_back_to_twice(sampler, tmp_path):
    current = trainer(sampler, TrainConfig(steps=60, batch=4, set_size=5))
    original, ruined = current.advance, False

    def advance(count, progress=None):
        nonlocal ruined
        steps = original(count, progress)
        if current.index == 10:  # a step that seems good, and is not unless it is small
            ruined = current.scale > 0.2
        elif ruined:
            return [replace(s, gradient_norm=math.inf, skipped=True) for s in steps]
        return steps

    current.advance = advance
    seen = list(Run(tmp_path).train(current, save_every=0.0))
    notes = [progress.note.split(";")[1] for progress in seen if progress.note]
    assert notes == [
        " went back to step 10 with 0.3 of the rate",
        " went back to step 9 with 0.09 of the rate",
    ]
    assert current.index == 60
    assert all(one.seconds <= other.seconds for one, other in itertools.pairwise(seen))  # none is given back


def test_a_lowered_rate_stays_low_after_resuming(sampler, tmp_path):
    current = trained(sampler, 2)
    current.scale = 0.3
    Run(tmp_path).save(current)
    resumed = trainer(sampler)
    Run(tmp_path).resume(resumed)
    assert resumed.scale == pytest.approx(0.3)


def test_the_best_checkpoint_is_kept(sampler, tmp_path):
    values = iter([3.0, 1.0, 2.0, 4.0])
    run = Run(tmp_path)
    config = TrainConfig(steps=4, batch=4, set_size=5)
    seen = list(run.train(trainer(sampler, config), save_every=0.0, measure=lambda model: next(values)))
    assert [progress.validation for progress in seen] == [3.0, 1.0, 2.0, 4.0]
    assert run.model("best").fingerprint() == trained(sampler, 2, config).model.fingerprint()
    assert run.model("last").fingerprint() == trained(sampler, 4, config).model.fingerprint()
    more = trainer(sampler, TrainConfig(steps=5, batch=4, set_size=5))
    again = Run(tmp_path)
    again.resume(more)
    list(again.train(more, measure=lambda model: 1.5))  # not better than the best of before
    assert again.model("best").fingerprint() == trained(sampler, 2, config).model.fingerprint()


def test_what_was_trained_is_saved_though_it_cannot_be_measured(sampler, tmp_path):
    def measure(model):
        raise torch.cuda.OutOfMemoryError

    run, config = Run(tmp_path), TrainConfig(steps=3, batch=4, set_size=5)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        list(run.train(trainer(sampler, config), measure=measure))
    resumed, again = trainer(sampler, config), Run(tmp_path)
    assert again.resume(resumed)
    assert resumed.index == 3
    values = iter([2.5])
    for _ in range(2):  # what is missing is made up for, once
        assert list(again.train(resumed, measure=lambda model: next(values))) == []
    assert read(again.best, "cpu")[1]["metrics"] == {"validation": 2.5}


def test_measuring_does_not_change_what_is_trained(sampler, tmp_path):
    def measure(model):
        torch.rand(3)
        return model.log_prob(sampler.sets(2, 3, torch.Generator().manual_seed(0))).mean().item()

    whole = trainer(sampler)
    list(Run(tmp_path).train(whole, save_every=0.0, measure=measure))
    assert_same_state(whole, trained(sampler))


def test_tensorboard_gets_what_the_log_gets(sampler, tmp_path):
    run = Run(tmp_path)
    list(run.train(trainer(sampler, TrainConfig(steps=3, batch=4, set_size=5))))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("bits_per_dim")
    assert [event.step for event in scalars] == [1, 2, 3]
    for event, line in zip(scalars, log_of(run), strict=True):
        assert event.value == pytest.approx(line["bits_per_dim"])
