"""Pretrained models: files of weights, each with a model card beside it, and their calibrations."""

from __future__ import annotations

from pathlib import Path

import torch

from bruno.checkpoint import load
from bruno.model import Bruno

_WEIGHTS = Path(__file__).parent


def pretrained_names() -> tuple[str, ...]:
    """Names of the pretrained models."""
    return tuple(sorted(path.stem for path in _WEIGHTS.glob("*.safetensors")))


def pretrained_path(name: str) -> Path:
    """The weights file of a pretrained model; its model card is NAME.md beside it."""
    if name not in pretrained_names():
        known = ", ".join(pretrained_names()) or "none in this installation"
        raise ValueError(f"`name` must be one of {known}; got {name!r}.")
    return _WEIGHTS / f"{name}.safetensors"


def pretrained_calibration_path(name: str) -> Path:
    """The file of the calibration of a pretrained model, which benchmarks/pretrained_calibration.py makes."""
    return _WEIGHTS / "calibrations" / f"{name}.safetensors"


def pretrained(name: str, *, device: torch.device | str = "cpu") -> Bruno:
    """A pretrained model, frozen (see `load`): ``bruno.pretrained("omniglot")``."""
    model = load(pretrained_path(name), device=device)
    model.source = name  # unlike the path, the name is valid in every installation
    return model
