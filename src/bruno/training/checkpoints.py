"""The checkpoints of a run folder: the last two, and the best on validation sets."""

from __future__ import annotations

import math
import re
import shutil
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bruno.checkpoint import load_weights, read, write
from bruno.checks import check_choice
from bruno.config import ModelConfig, from_dict, to_dict
from bruno.files import atomic_write, inside
from bruno.model import Bruno
from bruno.provenance import provenance
from bruno.training.trainer import Trainer

_NAME = re.compile(r"checkpoint-(\d+)\.safetensors")
_KEEP = 2  # the newest checkpoint, and the one before it in case the newest is damaged


class Checkpoint(NamedTuple):
    """A checkpoint file, the trainer's state in it, and its header: configs, step, metrics, provenance."""

    path: Path
    tensors: dict[str, Tensor]
    header: dict[str, Any]


class Checkpoints:
    """The files ``checkpoint-STEP.safetensors`` and ``best.safetensors`` of a run folder.

    Attributes:
        best: path of the checkpoint with the lowest bits/dim on the validation sets.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.best = folder, folder / "best.safetensors"
        self._lowest: float | None = None  # bits/dim of the best checkpoint, once known

    @property
    def paths(self) -> list[Path]:
        """All checkpoints but the best, oldest first."""
        found = filter(None, (_NAME.fullmatch(path.name) for path in self.folder.glob("checkpoint-*")))
        return [inside(self.folder, match[0]) for match in sorted(found, key=lambda match: int(match[1]))]

    def save(self, trainer: Trainer, metrics: dict[str, float] | None = None) -> Path:
        """Write a checkpoint atomically, then delete checkpoints that are no longer needed."""
        path = self.folder / f"checkpoint-{trainer.index:08d}.safetensors"
        if trainer.rank:  # only the first process writes
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
        for old in self.paths[:-_KEEP]:
            old.unlink()
        return path

    def save_if_best(self, path: Path, bits_per_dim: float) -> None:
        """Copy a checkpoint to `best` if it has the lowest bits/dim so far."""
        if self._lowest is None:
            self._lowest = self._read_lowest()
        if bits_per_dim < self._lowest:
            with atomic_write(self.best) as temporary:
                shutil.copyfile(path, temporary)
            self._lowest = bits_per_dim

    def newest(self, device: torch.device | str) -> Checkpoint:
        """The newest readable checkpoint; warns about newer ones that are damaged."""
        return _newest_readable(self.paths, device)

    def clean_up(self, newest: Path) -> None:
        """Rename damaged checkpoints after the newest readable one, so that they are not read again."""
        for damaged in self.paths[self.paths.index(newest) + 1 :]:
            damaged.rename(damaged.with_suffix(".damaged"))

    def delete_temporary(self) -> None:
        """Delete incomplete files of a killed process."""
        for path in self.folder.glob(".*.safetensors.*"):
            path.unlink()

    def model(self, which: str, device: torch.device | str) -> tuple[Bruno, dict[str, Any]]:
        """The frozen model at the "last" or the "best" checkpoint, and the checkpoint's header."""
        check_choice("checkpoint", which, ("last", "best"))
        paths = self.paths if which == "last" else [self.best] * self.best.is_file()
        if not paths and self.paths:
            raise ValueError(
                f"`checkpoint` must be 'last' for a run without validation; got {which!r} for {self.folder}."
            )
        if not paths:
            raise ValueError(
                f"`run` must be the folder of a training run; {self.folder} is a folder without checkpoints."
            )
        _, tensors, header = _newest_readable(paths, device)
        part = "average." if any(name.startswith("average.") for name in tensors) else "model."
        model = Bruno.from_config(from_dict(ModelConfig, header.get("config") or {}), seed=0).to(device)
        weights = {n.removeprefix(part): t for n, t in tensors.items() if n.startswith(part)}
        load_weights(model, weights, self.folder)
        return model.requires_grad_(False), header

    def _read_lowest(self) -> float:
        """Bits/dim of the best checkpoint; infinity if none can be read."""
        try:
            return float(_read_training(self.best, "cpu").header["metrics"]["validation"])
        except FileNotFoundError:
            return math.inf
        except ValueError as error:
            warnings.warn(f"{error} The next best checkpoint will replace it.", stacklevel=2)
            return math.inf


def _read_training(path: Path, device: torch.device | str) -> Checkpoint:
    """Read a checkpoint; raises ValueError if the file is damaged, or is not a checkpoint."""
    tensors, header = read(inside(path.parent, path.name), device)
    kinds = {"train": dict, "metrics": dict, "provenance": dict, "seconds": int | float}
    wrong = [name for name, kind in kinds.items() if not isinstance(header.get(name), kind)]
    validation = header["metrics"].get("validation", 0.0) if "metrics" not in wrong else 0.0
    if header["kind"] != "training" or wrong or not isinstance(validation, int | float):
        raise ValueError(f"{path}: must be a training checkpoint; it is of kind {header['kind']!r}.")
    return Checkpoint(path, tensors, header)


def _newest_readable(paths: list[Path], device: torch.device | str) -> Checkpoint:
    for path in reversed(paths):
        try:
            return _read_training(path, device)
        except ValueError as error:
            warnings.warn(f"{error} Using the checkpoint before it.", stacklevel=3)
    raise ValueError(
        f"`run` must have a readable checkpoint; none of {len(paths)} in {paths[0].parent} is readable."
    )
