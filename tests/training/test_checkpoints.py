"""Checkpoints: contents, damage, and retention."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from tiny import MODEL, SETS, TRAIN, assert_same_state, trained, trainer

import bruno
from bruno.checkpoint import read
from bruno.training.checkpoints import Checkpoints
from bruno.training.run import Run


@settings(max_examples=8)
@given(
    before=st.integers(0, 3),
    after=st.integers(1, 3),
    optimiser=st.sampled_from(["adamw", "adam", "rmsprop", "muon"]),
    ema=st.sampled_from([0.0, 0.9]),
    discriminative=st.sampled_from([0.0, 0.1]),
)
def test_a_restored_trainer_continues_bit_for_bit(before, after, optimiser, ema, discriminative):
    config = evolve(TRAIN, optimiser=optimiser, ema=ema, discriminative=discriminative)
    whole = trained(before + after, config)
    saved = trained(before, config)
    saved.begin()
    restored = trainer(config)
    restored.restore(saved.state())
    assert restored.index == before
    restored.advance(after)
    assert_same_state(restored, whole)


@pytest.mark.parametrize("optimiser", ["adamw", "adam", "rmsprop", "muon"])
def test_a_resumed_run_continues_bit_for_bit(optimiser, tmp_path):
    config = evolve(TRAIN, optimiser=optimiser)
    Run(tmp_path).save(trained(2, config))
    resumed = trainer(config)
    assert Run(tmp_path).resume(resumed)
    assert resumed.index == 2
    resumed.advance(3)
    assert_same_state(resumed, trained(5, config))


def test_a_state_can_be_restored_repeatedly():
    current = trained(2)
    state, weights = current.state(), current.model.fingerprint()
    losses = []
    for _ in range(2):
        losses.append([step.loss for step in current.advance(3)])
        assert current.model.fingerprint() != weights
        current.restore(state)
        assert current.model.fingerprint() == weights
    assert losses[0] == losses[1]


def test_a_state_of_another_kind_of_device_continues_with_new_random_numbers():
    state = trained(3).state() | {"generator": torch.zeros(16, dtype=torch.uint8)}  # as long as that of a GPU
    drawn = []
    for _ in range(2):
        again = trainer()
        with pytest.warns(UserWarning, match="another kind of device"):
            again.restore(state)
        drawn.append(again.generator.get_state())
        assert again.index == 3
    assert torch.equal(*drawn)
    assert not torch.equal(drawn[0], trainer().generator.get_state())  # the first batch is not drawn again


def test_a_new_run_has_no_checkpoint_to_resume_from(tmp_path):
    fresh = trainer()
    assert not Run(tmp_path / "new").resume(fresh)
    assert fresh.index == 0
    assert not (tmp_path / "new").exists()


def test_only_the_last_two_checkpoints_are_kept(tmp_path):
    run, current = Run(tmp_path), trainer()
    for _ in range(4):
        current.step()
        run.save(current)
    assert [path.name for path in run.checkpoints] == [
        "checkpoint-00000003.safetensors",
        "checkpoint-00000004.safetensors",
    ]


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    names = [f"checkpoint-{step:08d}.safetensors" for step in (99_999_999, 100_000_000)]
    for name in [*names, "checkpoint-copy.safetensors"]:
        (tmp_path / name).touch()
    assert [path.name for path in Checkpoints(tmp_path).paths] == names


def test_a_truncated_checkpoint_is_replaced_by_the_one_before(tmp_path):
    run, current = Run(tmp_path), trained(2)
    run.save(current)
    before = current.model.fingerprint()
    current.step()
    newest = run.save(current)
    newest.write_bytes(newest.read_bytes()[:1000])
    resumed = trainer()
    with pytest.warns(UserWarning, match=r"Using the checkpoint before it"):
        assert run.resume(resumed)
    assert resumed.index == 2
    assert resumed.model.fingerprint() == before


def test_a_checkpoint_with_changed_numbers_is_detected_and_renamed(tmp_path):
    run, current = Run(tmp_path), trained(2)
    run.save(current)
    before = run.model().fingerprint()
    current.step()
    newest = run.save(current)
    content = bytearray(newest.read_bytes())
    content[-2000:-1000] = b"\x7f" * 1000  # a valid file with other numbers
    newest.write_bytes(content)
    with pytest.warns(UserWarning, match=r"checksum.*Using the checkpoint before it"):
        assert run.model().fingerprint() == before
    with pytest.warns(UserWarning, match=r"checksum"):
        run.resume(trainer())
    assert newest.with_suffix(".damaged").is_file()
    assert run.model().fingerprint() == before  # without a warning


def test_a_run_with_only_damaged_checkpoints_is_an_error(tmp_path):
    run = Run(tmp_path)
    run.save(trained(1)).write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="header too small"),
        pytest.raises(ValueError, match=r"none of 1 in"),
    ):
        run.resume(trainer())


def test_a_damaged_best_checkpoint_is_replaced_by_the_next_best(tmp_path):
    run = Run(tmp_path)
    run.best.write_bytes(b"nonsense")
    with pytest.warns(UserWarning, match=r"The next best checkpoint will replace it"):
        list(run.train(trainer(SETS), measure=lambda model: 3.0))
    run.model("best")


def test_incomplete_files_of_a_killed_run_are_deleted(tmp_path):
    run = Run(tmp_path)
    run.save(trained(1))
    (tmp_path / ".checkpoint-00000002.safetensors.123").write_bytes(b"half")
    run.resume(trainer())
    assert not list(tmp_path.glob(".checkpoint*"))


def test_a_full_disk_destroys_no_checkpoint(tmp_path, monkeypatch):
    run, current = Run(tmp_path), trained(2)
    saved = run.save(current)
    content = saved.read_bytes()
    current.step()

    def full(error):
        def raises(*args):
            raise error("No space left on device")

        return raises

    for name, function in (
        ("bruno.checkpoint.save_file", full(SafetensorError)),
        ("bruno.files.os.fsync", full(OSError)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(name, function)
            with pytest.raises(OSError, match="No space left on device"):
                run.save(current)
    assert list(tmp_path.iterdir()) == run.checkpoints == [saved]
    assert saved.read_bytes() == content


SAVE_FOREVER = """
import sys
from tiny import trainer
from bruno.training.run import Run
run, current = Run(sys.argv[1]), trainer()
while True:
    current.step()
    run.save(current)
    print(current.index, flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("steps", range(3, 40))
def test_a_run_killed_while_it_saves_can_be_resumed(steps, tmp_path):
    """Another process saves after every step until it is killed; its state is that of an undisturbed run."""
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    child = subprocess.Popen(
        [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    for line in child.stdout:
        if int(line) == steps:
            os.kill(child.pid, signal.SIGKILL)
            break
    child.wait()
    child.stdout.close()
    resumed = trainer()
    assert Run(tmp_path).resume(resumed)
    assert resumed.index >= steps
    assert_same_state(resumed, trained(resumed.index))


def test_only_length_and_memory_use_may_change_when_a_run_is_resumed(tmp_path):
    run = Run(tmp_path)
    run.save(trained(2))
    with pytest.raises(ValueError, match=r"`train.batch` must .*4.*got 8"):
        run.resume(trainer(evolve(TRAIN, batch=8)))
    with pytest.raises(ValueError, match=r"`flow.units` must .*16.*got 17"):
        run.resume(trainer(model=evolve(MODEL, flow=evolve(MODEL.flow, units=17))))
    for changed in ({"steps": 50}, {"minutes": 3.0}, {"recompute": True}):
        assert run.resume(trainer(evolve(TRAIN, **changed)))


def test_a_checkpoint_cannot_be_loaded_as_a_model(tmp_path):
    path = Run(tmp_path).save(trained(1))
    with pytest.raises(ValueError, match=r"`path` must be a model"):
        bruno.load(path)


def test_the_model_of_a_run_has_the_averaged_weights_and_is_frozen(tmp_path):
    current = trained(3)
    Run(tmp_path).save(current)
    model = Run(tmp_path).model()
    assert model.fingerprint() == current.trained().fingerprint() != current.model.fingerprint()
    assert not any(weight.requires_grad for weight in model.parameters())


def test_a_run_without_validation_has_no_best_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"`run` must be the folder of a training run"):
        Run(tmp_path).model()
    Run(tmp_path).save(trained(1))
    with pytest.raises(ValueError, match=r"`checkpoint` must be 'last' .*got 'best'"):
        Run(tmp_path).model("best")
    with pytest.raises(ValueError, match=r"`checkpoint` must be .*got 'first'"):
        Run(tmp_path).model("first")


def test_a_reduced_learning_rate_stays_reduced_after_resuming(tmp_path):
    current = trained(2)
    current.scale = 0.3
    Run(tmp_path).save(current)
    resumed = trainer()
    Run(tmp_path).resume(resumed)
    assert resumed.scale == 0.3


def test_a_checkpoint_names_its_metrics_and_provenance(tmp_path):
    path = Run(tmp_path).save(trained(2), {"validation": 2.5})
    header = read(path, "cpu")[1]
    assert (header["step"], header["metrics"]) == (2, {"validation": 2.5})
    assert header["provenance"]["packages"]["torch"]
