"""A training run on disk: its settings, its log, and checkpoints that survive a crash at any moment."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from bruno.checkpoint import read, save, write
from bruno.config import ModelConfig, Recipe, check_choice, check_same, from_dict, to_dict
from bruno.files import atomic_write
from bruno.model import Bruno
from bruno.provenance import provenance
from bruno.training.clock import Clock, LogEntry
from bruno.training.trainer import Trainer, broadcast

_RECIPE = "recipe.json"
_KEEP = 2  # the newest, and the one before it in case the newest is damaged
_STEPS_AT_A_TIME_ON_A_GPU = 10  # between two looks at what they gave
_FAILURES = 20  # steps in a row without a finite gradient: the run is lost, go back
_RETRIES = 3
_SMALLER = 0.3  # what the rate is multiplied with each time
_ADVICE = "Try a smaller train.rate or train.clip, or look for extreme values in the data"


class TrainingFailedError(RuntimeError):
    """A run that kept failing, also from its last good checkpoint and with a smaller rate."""


class StopSignal:
    """Turns the first SIGINT or SIGTERM into a wish to stop, so that a step is finished and can be saved.

    A context manager; `number` is the signal that came, 0 so far. The second signal acts as ever.
    """

    number = 0

    def __enter__(self) -> StopSignal:
        listens = threading.current_thread() is threading.main_thread()  # others may not
        numbers = (signal.SIGINT, signal.SIGTERM) if listens else ()
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.number = number
        signal.signal(number, self._before[signal.Signals(number)])


class Run:
    """The folder of a run.

    ``checkpoint-STEP.safetensors`` holds all that the next step depends on, its header the configs and where
    it was made; ``best.safetensors`` is one of those; ``log.jsonl`` has a line for each step or few.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.stop_signal = 0
        self._fewest: float | None = None  # bits/dim of the best
        self._measured = True  # on validation, what it was resumed from
        self._went_back_to: Path | None = None
        self._board: Any = None
        self._lock = FileLock(self.folder / ".lock")

    @property
    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("checkpoint-*.safetensors"))

    @property
    def recipe(self) -> Recipe:
        """What the run was made from."""
        path = self.folder / _RECIPE
        if not self.folder.is_dir():
            raise ValueError(f"`run` must be the folder of a training run; there is no {self.folder}.")
        if not path.is_file():
            raise ValueError(f"`run` must be the folder of a training run; {self.folder} has no {_RECIPE}.")
        try:
            return from_dict(Recipe, json.loads(path.read_text("utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: is not JSON: {error}.") from error

    def keep_recipe(self, recipe: Recipe) -> None:
        """Write down what the run is made from; of one that is there already, only its length may change."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.check_recipe(recipe)
        with atomic_write(self.folder / _RECIPE) as beside:
            beside.write_text(json.dumps(to_dict(recipe), indent=2) + "\n", "utf-8")

    def check_recipe(self, recipe: Recipe) -> None:
        """Raise unless it is what the run, if it has begun, was made from; only its length may be another."""
        if self.checkpoints:
            began, now = to_dict(self.recipe), to_dict(recipe)
            check_same(self.folder.name, began | _lasting(began["train"]), now | _lasting(now["train"]))

    def model(self, which: str = "last", device: torch.device | str = "cpu") -> Bruno:
        """The model at the "last" checkpoint or at the "best" one, with averaged weights if it has them."""
        return self._restored(which, device)[0]

    def export(self, path: Path, which: str = "last", *, half: bool = False) -> None:
        """Write the model at a checkpoint to a file of its own, with what it was made from, where and how."""
        model, header = self._restored(which, "cpu")
        about = {"recipe": to_dict(self.recipe), "provenance": header["provenance"]}
        save(model, path, half=half, about=about)

    @property
    def best(self) -> Path:
        """The checkpoint with the min_count bits/dim on the validation sets, where there are any."""
        return self.folder / "best.safetensors"

    def train(
        self,
        trainer: Trainer,
        *,
        save_every: float = 60.0,
        measure: Callable[[Bruno], float] | None = None,
    ) -> Iterator[LogEntry]:
        """Take all remaining steps, log them, and save a checkpoint now and then and at the end.

        Ends early, after saving, at SIGINT or SIGTERM, which `stop_signal` then names. A run whose steps keep
        failing goes back to its last good checkpoint, with a smaller rate, and says so in a note.

        Args:
            trainer: fresh, or one that `resume` has put where the run was.
            save_every: seconds between checkpoints.
            measure: bits/dim on validation sets, at every checkpoint; the best one is kept.

        Raises:
            ValueError: if another process trains in this folder.
        """
        with contextlib.nullcontext() if trainer.rank else self._alone():
            yield from self._train(trainer, save_every, measure)

    def _train(
        self, trainer: Trainer, save_every: float, measure: Callable[[Bruno], float] | None
    ) -> Iterator[LogEntry]:
        batch_size = _STEPS_AT_A_TIME_ON_A_GPU if trainer.device.type == "cuda" else 1
        pace = Clock(trainer)
        trainer.begin()
        if not self.checkpoints:
            self.save(trainer)  # something to go back to
        saved, failures, retries = time.monotonic(), 0, 0
        finished = pace.done()
        if finished and measure and not self._measured:
            self._save_and_measure(trainer, measure)  # its last part ended before that
        with StopSignal() as stop:
            while not finished:
                progress = pace.advance(batch_size)
                failures = failures + progress.skipped if math.isnan(progress.gradient_norm) else 0
                if failures >= _FAILURES:
                    failures, retries = 0, retries + 1
                    progress = replace(progress, note=self._go_back(trainer, retries))
                self.stop_signal = broadcast(stop.number)
                finished = pace.done() or self.stop_signal != 0
                if finished and failures > 1:  # of which nothing is worth saving
                    raise TrainingFailedError(
                        f"training ended badly: no finite gradient in its last {failures} steps. "
                        f"{_ADVICE}; the last checkpoint is {self.checkpoints[-1]}."
                    )
                if finished or (not failures and time.monotonic() - saved > save_every):
                    progress = replace(progress, validation=self._save_and_measure(trainer, measure))
                    saved = time.monotonic()
                self.log(progress, trainer)
                yield progress
        if self._board is not None:
            self._board.close()

    def save(self, trainer: Trainer, metrics: dict[str, float] | None = None) -> Path:
        """Write a checkpoint, whole or not at all, and then delete those that are no longer needed."""
        path = self.folder / f"checkpoint-{trainer.index:08d}.safetensors"
        if trainer.rank:  # one process writes for all
            return path
        self.folder.mkdir(parents=True, exist_ok=True)
        model = trainer.model.config
        header = {
            "kind": "training",
            "config": to_dict(model) if model else None,
            "train": to_dict(trainer.config),
            "step": trainer.index,
            "seconds": trainer.seconds,
            "metrics": metrics or {},
            "provenance": provenance(trainer.config.seed),
        }
        write(path, trainer.state(), header)
        for old in self.checkpoints[:-_KEEP]:
            old.unlink()
        return path

    def resume(self, trainer: Trainer) -> bool:
        """Put a trainer where the run was last saved; False if there is nothing to resume from.

        A checkpoint that cannot be read is put aside for the one before it, with a warning.
        """
        found = None
        if trainer.rank == 0 and self.folder.is_dir():  # one process reads for all
            with self._alone():
                for half_written in self.folder.glob(".*.safetensors.*"):  # when it was killed
                    half_written.unlink()
                if self.checkpoints:
                    path, *found = _newest(self.checkpoints, "cpu")
                    for damaged in self.checkpoints[self.checkpoints.index(path) + 1 :]:
                        damaged.rename(damaged.with_suffix(".damaged"))
                    self._check_same(found[1], trainer)
        found = broadcast(found)
        if found is None:
            return False
        tensors, header = found
        trainer.restore(tensors)
        trainer.seconds = header["seconds"]
        self._measured = "validation" in header["metrics"]
        return True

    def log(self, progress: LogEntry, trainer: Trainer) -> None:
        """Append a line to the log, and to TensorBoard's where that is installed."""
        if trainer.rank:
            return
        values = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no NaN
            for name, value in asdict(progress).items()
        }
        with (self.folder / "log.jsonl").open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                cut = file.read() != b"\n"  # a line that a full disk or a crash left half written
                file.write(b"\n" * cut)
            file.write(json.dumps(values).encode() + b"\n")
        if self._board is None and find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(self.folder / "tensorboard", purge_step=progress.index)
        if self._board is not None:
            for name, value in values.items():
                if isinstance(value, float | int):
                    self._board.add_scalar(name, value, progress.index)

    def read_log(self) -> list[dict[str, Any]]:
        """The lines of the log, without those that were cut or whose steps were taken again later."""
        path = self.folder / "log.jsonl"
        written = path.read_text("utf-8").splitlines() if path.is_file() else []
        lines: list[dict[str, Any]] = []
        for line in (json.loads(text) for text in written if text.endswith("}")):
            while lines and lines[-1]["index"] >= line["index"]:  # it went back to a checkpoint before that
                lines.pop()
            lines.append(line)
        return lines

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process may train here meanwhile: each would delete what the other saves."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ValueError(
                f"{self.folder}: another process trains here; wait for it, or choose another folder."
            ) from error
        try:
            yield
        finally:
            self._lock.release()

    def _restored(self, which: str, device: torch.device | str) -> tuple[Bruno, dict[str, Any]]:
        """The model at a checkpoint, and the checkpoint's header."""
        check_choice("checkpoint", which, ("last", "best"))
        paths = self.checkpoints if which == "last" else [self.best] * self.best.is_file()
        if not paths and self.checkpoints:
            raise ValueError(f"`checkpoint` must be last: {self.folder} was not measured on validation sets.")
        if not paths:
            raise ValueError(f"`run` must be the folder of a training run; {self.folder} has no checkpoint.")
        _, tensors, header = _newest(paths, device)
        part = "average." if any(name.startswith("average.") for name in tensors) else "model."
        model = Bruno.from_config(from_dict(ModelConfig, header["config"])).to(device)
        model.load_state_dict({n.removeprefix(part): t for n, t in tensors.items() if n.startswith(part)})
        return model.requires_grad_(False), header

    def _save_and_measure(self, trainer: Trainer, measure: Callable[[Bruno], float] | None) -> float:
        """Bits/dim on validation; the checkpoint is also kept as the best if no other had fewer."""
        path = self.save(trainer)  # at once: measuring may take long, or fail
        if measure is None or trainer.rank:
            return math.nan
        value, self._measured = measure(trainer.trained()), True
        if not math.isnan(value):
            self.save(trainer, {"validation": value})
        if self._fewest is None:
            self._fewest = self._fewest_so_far()
        if value < self._fewest:
            with atomic_write(self.best) as beside:
                shutil.copyfile(path, beside)
            self._fewest = value
        return value

    def _fewest_so_far(self) -> float:
        """Bits/dim of the best checkpoint; infinite if there is none that can be read."""
        try:
            return float(read(self.best, "cpu")[1]["metrics"]["validation"])
        except FileNotFoundError:
            return math.inf
        except ValueError as error:
            warnings.warn(f"{error} The next best will replace it.", stacklevel=2)
            return math.inf

    def _go_back(self, trainer: Trainer, retries: int) -> str:
        """To the last good checkpoint, with a smaller rate; returns what happened, in words."""
        failed, scale = trainer.index, trainer.scale * _SMALLER
        what = f"no finite gradient in the last {_FAILURES} steps up to {failed}"
        if retries > _RETRIES:
            raise TrainingFailedError(
                f"training failed: {what}, and going back {_RETRIES} times with a smaller rate did not help. "
                f"{_ADVICE}; the last checkpoint is {self.checkpoints[-1]}."
            )
        if trainer.rank == 0 and self.checkpoints[1:] and self.checkpoints[-1] == self._went_back_to:
            self.checkpoints[-1].unlink()  # it was in ruins already when it was saved
        seconds = trainer.seconds
        self.resume(trainer)
        self._went_back_to = self.checkpoints[-1] if trainer.rank == 0 else None
        trainer.scale, trainer.seconds = scale, seconds
        return f"{what}; went back to step {trainer.index} with {scale:.2g} of the rate"

    def _check_same(self, header: dict[str, Any], trainer: Trainer) -> None:
        """A run goes on with the settings that it began with; only its length may change."""
        config = trainer.model.config
        check_same(self.folder.name, header["config"] or {}, to_dict(config) if config else {})
        check_same(self.folder.name, _lasting(header["train"]), _lasting(to_dict(trainer.config)))


def _lasting(train: dict[str, Any]) -> dict[str, Any]:
    """Settings of training that a run keeps, whatever its length."""
    return {"train": {name: value for name, value in train.items() if name not in ("steps", "minutes")}}


def _newest(paths: list[Path], device: torch.device | str) -> tuple[Path, dict[str, Tensor], dict[str, Any]]:
    """The last of some checkpoints that can be read; of each that cannot, a warning."""
    for path in reversed(paths):
        try:
            return path, *read(path, device)
        except ValueError as error:
            warnings.warn(f"{error} Going back to the checkpoint before it.", stacklevel=3)
    raise ValueError(
        f"`run` must have a checkpoint that can be read; none of {len(paths)} in {paths[0].parent} can."
    )
