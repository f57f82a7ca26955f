"""A training run on disk: its settings, its log, and checkpoints that survive a crash at any moment."""

from __future__ import annotations

import json
import math
import signal
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bruno.checkpoint import read, write
from bruno.config import to_dict
from bruno.provenance import provenance
from bruno.training import Step, Trainer

_KEEP = 2  # the newest, and the one before it in case the newest is damaged


class StopSignal:
    """Turns the first SIGINT or SIGTERM into a wish to stop, so that a step is finished and can be saved.

    A context manager; `number` is the signal that came, 0 so far. The second signal acts as ever.
    """

    number = 0

    def __enter__(self) -> StopSignal:
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
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
    it was made; ``log.jsonl`` has a line for each step that was logged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def checkpoints(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob("checkpoint-*.safetensors"))

    def save(self, trainer: Trainer, metrics: dict[str, Any] | None = None) -> Path:
        """Write a checkpoint, whole or not at all, and then delete those that are no longer needed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"checkpoint-{trainer.index:08d}.safetensors"
        model = trainer.model.config
        header = {
            "kind": "training",
            "config": to_dict(model) if model else None,
            "train": to_dict(trainer.config),
            "metrics": metrics or {},
            "provenance": provenance(trainer.config.seed),
        }
        write(path, trainer.state(), header)
        for old in self.checkpoints[:-_KEEP]:
            old.unlink()
        return path

    def resume(self, trainer: Trainer) -> bool:
        """Put a trainer where the run was last saved; False if there is nothing to resume from.

        A checkpoint that cannot be read is passed over for the one before it, with a warning.
        """
        for path in reversed(self.checkpoints):
            try:
                tensors, header = read(path, trainer.model.process.mean.device)
            except ValueError as error:
                warnings.warn(f"{error} Going back to the checkpoint before it.", stacklevel=2)
                continue
            self._check_same(path, header, trainer)
            trainer.restore(tensors)
            return True
        return False

    def log(self, step: Step, **more: float) -> None:
        """Append a line to the log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        values = {
            k: None if isinstance(v, float) and math.isnan(v) else v
            for k, v in {**asdict(step), **more}.items()
        }
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(values) + "\n")

    @staticmethod
    def _check_same(path: Path, header: dict[str, Any], trainer: Trainer) -> None:
        """A run goes on with the settings that it began with; only its length may change."""
        for name, mine in (("config", trainer.model.config), ("train", trainer.config)):
            saved = dict(header[name] or {})
            now = json.loads(json.dumps(to_dict(mine))) if mine else {}
            for key in sorted(set(saved) | set(now)):
                if key != "steps" and saved.get(key) != now.get(key):
                    raise ValueError(
                        f"`{key}` must be as the run {path.parent.name} began, {saved.get(key)}; got "
                        f"{now.get(key)}. Start another run for other settings."
                    )
