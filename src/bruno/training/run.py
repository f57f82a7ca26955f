"""A training run in a folder: its recipe, its log, and checkpoints that survive a crash at any moment."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from bruno.checkpoint import save
from bruno.config import Recipe, from_dict, to_dict
from bruno.files import atomic_write, inside, parse_json, read_regular
from bruno.model import Bruno
from bruno.settings import check_same
from bruno.signals import StopSignal
from bruno.training.checkpoints import Checkpoint, Checkpoints
from bruno.training.clock import Clock
from bruno.training.distributed import broadcast, on_first_process
from bruno.training.log import Log, LogEntry
from bruno.training.trainer import Trainer

_RECIPE = "recipe.json"
_MODEL = "model.safetensors"
_NOTES = "notes.json"  # what was measured at the end of training, for the metadata of the model
_CHANGEABLE = ("steps", "minutes", "recompute")  # settings that may change when a run is resumed
_STEPS_PER_ENTRY_ON_A_GPU = 10  # steps between reads of the results
_FAILURES = 20  # after this many consecutive non-finite gradients, the run goes back to a checkpoint
_RETRIES = 3
_SMALLER = 0.3  # factor on the learning rate at each retry
_ADVICE = "Try a smaller train.learning_rate or train.clip, or look for extreme values in the data"

Measure = Callable[[Bruno], float]
Describe = Callable[[Bruno], dict[str, Any]]


class TrainingFailedError(RuntimeError):
    """Training kept failing, even from its last good checkpoint with smaller learning rates."""


class Run:
    """The folder of a training run.

    ``recipe.json`` is the recipe. ``checkpoint-STEP.safetensors`` holds the full training state and, in its
    header, the configs and provenance. ``best.safetensors`` is the best checkpoint on validation sets.
    ``log.jsonl`` has a line after every step or every few steps. ``model.safetensors`` is the trained model.

    Attributes:
        folder: path of the folder.
        stop_signal: number of the signal that stopped the last training, 0 if it reached its end.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.stop_signal = 0
        self._checkpoints, self._log = Checkpoints(self.folder), Log(self.folder)
        self._measured = True  # whether the checkpoint resumed from was measured on validation sets
        self._went_back_to: Path | None = None
        self._lock = FileLock(self.folder / ".lock")

    # --- contents -----------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> list[Path]:
        """Paths of the last checkpoints, oldest first."""
        return self._checkpoints.paths

    @property
    def best(self) -> Path:
        """Path of the checkpoint with the lowest bits/dim on the validation sets, if they were measured."""
        return self._checkpoints.best

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        path = self.folder / _RECIPE
        if not self.folder.is_dir():
            raise ValueError(f"`run` must be the folder of a training run; {self.folder} does not exist.")
        if not path.is_file():
            raise ValueError(f"`run` must be the folder of a training run; {self.folder} has no {_RECIPE}.")
        text = read_regular(inside(self.folder, _RECIPE))
        try:
            values = parse_json(text)
        except ValueError as error:
            raise ValueError(f"{path}: must be JSON; it is not: {error}.") from error
        return from_dict(Recipe, values)

    def model(self, which: str = "last", device: torch.device | str = "cpu") -> Bruno:
        """The frozen model at the "last" or the "best" checkpoint, with averaged weights if it has them."""
        return self._checkpoints.model(which, device)[0]

    def model_and_about(
        self, which: str = "last", device: torch.device | str = "cpu"
    ) -> tuple[Bruno, dict[str, Any]]:
        """The model at a checkpoint, and its metadata for a file: recipe, training provenance and notes."""
        model, header = self._checkpoints.model(which, device)
        return model, self.notes | {"recipe": to_dict(self.recipe), "provenance": header["provenance"]}

    @property
    def notes(self) -> dict[str, Any]:
        """What `describe` returned at the end of training; empty if there is nothing that can be read."""
        path = inside(self.folder, _NOTES)
        try:
            found = parse_json(read_regular(path)) if path.is_file() else {}
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def export(self, path: Path, which: str = "last", *, half: bool = False, int8: bool = False) -> None:
        """Write the model at a checkpoint to a file, with recipe and provenance."""
        model, about = self.model_and_about(which)
        save(model, path, half=half, int8=int8, about=about)

    def read_log(self) -> list[dict[str, Any]]:
        """Log entries as dicts, without truncated lines and without steps that were later repeated."""
        return self._log.read()

    # --- training -----------------------------------------------------------------------------------------

    def fit(
        self,
        trainer: Trainer,
        recipe: Recipe,
        *,
        resume: bool = False,
        measure: Measure | None = None,
        describe: Describe | None = None,
        save_every: float = 60.0,
        now: Callable[[], float] = time.monotonic,
    ) -> Iterator[LogEntry]:
        """Train a recipe in this folder to its end and export the model to ``model.safetensors``.

        Locks and checks the folder before anything is written, so that a rejected run changes no file, even
        if other processes use the folder. At SIGINT or SIGTERM, saves a checkpoint and ends without
        exporting; `stop_signal` is then the number of the signal.

        Args:
            trainer: a fresh trainer with the recipe's model, data and settings.
            recipe: written to ``recipe.json``. To resume, only the length of training may differ.
            resume: continue from the last checkpoint. Without it, the folder must not have a run.
            measure: bits/dim on validation sets, measured at every checkpoint to keep the best one.
            describe: measured on the trained model, and kept in its metadata.
            save_every: seconds between checkpoints.
            now: current time in seconds.

        Raises:
            ValueError: if the folder is a file, is in use, has a run (or has none to resume), or the recipe
                differs from the run's.
        """
        if not save_every >= 0:
            raise ValueError(f"`save_every` must be at least 0 seconds; got {save_every}.")
        on_first_process(lambda: self._check(recipe, resume))  # before the folder is created
        with self._locked(trainer):
            on_first_process(lambda: self._check(recipe, resume))  # no other process can change it now
            if resume:
                self.resume(trainer)
            on_first_process(lambda: self.keep_recipe(recipe))
            yield from self._train(trainer, save_every, measure, now)
            if trainer.rank == 0 and not self.stop_signal:
                if describe is not None:
                    self._keep_notes(describe(trainer.trained()))
                self.export(self.folder / _MODEL)

    def train(
        self,
        trainer: Trainer,
        *,
        save_every: float = 60.0,
        measure: Measure | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> Iterator[LogEntry]:
        """Take all remaining steps, log them, and save checkpoints; `fit` without recipe and export.

        At SIGINT or SIGTERM, saves a checkpoint and ends early; `stop_signal` is then the number of the
        signal. If steps keep failing, goes back to the last good checkpoint with a smaller learning rate, and
        logs a note.

        Args:
            trainer: fresh, or restored by `resume`.
            save_every: seconds between checkpoints.
            measure: bits/dim on validation sets, measured at every checkpoint to keep the best one.
            now: current time in seconds.

        Raises:
            ValueError: if another process trains in this folder.
        """
        with self._locked(trainer):
            yield from self._train(trainer, save_every, measure, now)

    def save(self, trainer: Trainer, metrics: dict[str, float] | None = None) -> Path:
        """Write a checkpoint atomically, then delete checkpoints that are no longer needed."""
        return self._checkpoints.save(trainer, metrics)

    def resume(self, trainer: Trainer) -> bool:
        """Restore a trainer from the last checkpoint; False if the run has none.

        A damaged checkpoint is renamed and the one before it used instead, with a warning.
        """
        found = on_first_process(lambda: self._read_newest(trainer))
        if found is None:
            return False
        try:
            trainer.restore(found.tensors)
        except (KeyError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"{found.path}: must hold the state of this training; it does not: {error}."
            ) from error
        trainer.seconds = found.header["seconds"]
        self._measured = "validation" in found.header["metrics"]
        return True

    def keep_recipe(self, recipe: Recipe) -> None:
        """Write the recipe; if the run has begun, only its length may change."""
        with self._locked():
            self.check_recipe(recipe)
            with atomic_write(self.folder / _RECIPE) as temporary:
                temporary.write_text(json.dumps(to_dict(recipe), indent=2) + "\n", "utf-8")

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise an error if the run was begun with another recipe; only the length of training may differ."""
        if self.checkpoints:
            began, now = to_dict(self.recipe), to_dict(recipe)
            check_same(self.folder.name, began | _lasting(began["train"]), now | _lasting(now["train"]))

    # --- private ------------------------------------------------------------------------------------------

    def _check(self, recipe: Recipe, resume: bool) -> None:
        """Raise unless the recipe can be trained in this folder; changes no file."""
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"`out` must be a folder; {self.folder} is a file.")
        if self.checkpoints and not resume:
            raise ValueError(
                f"`out` must be a new folder; {self.folder} has a run. Resume it, or choose another."
            )
        if resume and not self.checkpoints:
            raise ValueError(f"`resume` needs a checkpoint; {self.folder} has none.")
        self.check_recipe(recipe)

    def _keep_notes(self, notes: dict[str, Any]) -> None:
        with atomic_write(inside(self.folder, _NOTES)) as temporary:
            temporary.write_text(json.dumps(notes, indent=2) + "\n", "utf-8")

    @contextlib.contextmanager
    def _locked(self, trainer: Trainer | None = None) -> Iterator[None]:
        """Lock the folder against other processes, which would delete its checkpoints; reentrant.

        In a process group, the first process holds the lock for all.
        """
        acquire = self._acquire if trainer is None else lambda: on_first_process(self._acquire)
        acquire()
        try:
            yield
        finally:
            if trainer is None or trainer.rank == 0:
                self._lock.release()

    def _acquire(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        inside(self.folder, ".lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"`out` must be a folder in which no other process trains; {self.folder} is in use. "
                "Wait for the other process, or choose another folder."
            ) from error

    def _train(
        self, trainer: Trainer, save_every: float, measure: Measure | None, now: Callable[[], float]
    ) -> Iterator[LogEntry]:
        count = _STEPS_PER_ENTRY_ON_A_GPU if trainer.device.type == "cuda" else 1
        clock = Clock(trainer, now)
        trainer.begin()
        if not self.checkpoints:
            self.save(trainer)  # the checkpoint to return to if training fails
        saved, failures, retries, self.stop_signal = now(), 0, 0, 0
        finished = clock.done()
        if finished and measure and not self._measured:
            self._save_and_measure(trainer, measure)  # the run was stopped between saving and measuring
        with contextlib.closing(self._log), StopSignal() as stop:
            while not finished:
                entry = clock.advance(count)
                failures = failures + entry.skipped if math.isnan(entry.gradient_norm) else 0
                if failures >= _FAILURES:
                    failures, retries = 0, retries + 1
                    note = self._go_back(trainer, retries)
                    entry = replace(entry, note=f"{entry.note} {note}".lstrip())
                self.stop_signal = broadcast(stop.number)
                finished = clock.done() or self.stop_signal != 0
                if finished and failures > 1:  # not worth saving
                    raise TrainingFailedError(
                        f"training failed at its end: no finite gradient in its last {failures} steps. "
                        f"{_ADVICE}; the last checkpoint is {self.checkpoints[-1]}."
                    )
                if finished or (not failures and now() - saved > save_every):
                    entry = replace(entry, validation=self._save_and_measure(trainer, measure))
                    saved = now()
                if trainer.rank == 0:
                    self._log.append(entry)
                yield entry

    def _read_newest(self, trainer: Trainer) -> Checkpoint | None:
        """The newest readable checkpoint, if any; cleans up after crashes."""
        if not self.checkpoints:
            return None
        with self._locked():
            self._checkpoints.delete_temporary()
            newest = self._checkpoints.newest("cpu")
            self._checkpoints.clean_up(newest.path)
            self._check_same(newest.header, trainer)
            return newest

    def _save_and_measure(self, trainer: Trainer, measure: Measure | None) -> float:
        """Save a checkpoint, measure it, and keep it if it is the best; NaN if not measured."""
        path = self.save(trainer)  # before measuring, which may be slow or fail
        if measure is None or trainer.rank:
            return math.nan
        value, self._measured = measure(trainer.trained()), True
        if not math.isnan(value):
            self.save(trainer, {"validation": value})
            self._checkpoints.save_if_best(path, value)
        return value

    def _go_back(self, trainer: Trainer, retries: int) -> str:
        """Restore the last good checkpoint with a smaller learning rate; returns a note for the log."""
        scale, seconds = trainer.scale * _SMALLER, trainer.seconds
        what = f"no finite gradient in the last {_FAILURES} steps up to {trainer.index}"
        if retries > _RETRIES:
            raise TrainingFailedError(
                f"training failed: {what}, and {_RETRIES} restarts from a checkpoint with a smaller learning "
                f"rate did not help. {_ADVICE}; the last checkpoint is {self.checkpoints[-1]}."
            )
        if trainer.rank == 0 and self.checkpoints[1:] and self.checkpoints[-1] == self._went_back_to:
            self.checkpoints[-1].unlink()  # training from it failed again: its weights are already bad
        self.resume(trainer)
        self._went_back_to = self.checkpoints[-1] if trainer.rank == 0 else None
        trainer.scale, trainer.seconds = scale, seconds
        return f"{what}; went back to step {trainer.index} with {scale:.2g} of the learning rate"

    def _check_same(self, header: dict[str, Any], trainer: Trainer) -> None:
        """Raise unless a checkpoint has the trainer's settings; only the length of training may differ."""
        config = trainer.model.config
        check_same(self.folder.name, header["config"] or {}, to_dict(config) if config else {})
        check_same(self.folder.name, _lasting(header["train"]), _lasting(to_dict(trainer.config)))


def _lasting(train: dict[str, Any]) -> dict[str, Any]:
    """The training settings that a resumed run must keep: all except its length and its memory use."""
    return {"train": {name: value for name, value in train.items() if name not in _CHANGEABLE}}
