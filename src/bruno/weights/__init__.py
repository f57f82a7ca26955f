"""Models that come with the package, each a file of weights with a card that says what it is."""

from __future__ import annotations

from pathlib import Path

import torch

from bruno.checkpoint import load
from bruno.model import Bruno

_WEIGHTS = Path(__file__).parent


def pretrained_names() -> tuple[str, ...]:
    """Of the models that come with the package."""
    return tuple(sorted(path.stem for path in _WEIGHTS.glob("*.safetensors")))


def pretrained_path(name: str) -> Path:
    """The file of one of them; its card lies beside it, as NAME.md."""
    if name not in pretrained_names():
        known = ", ".join(pretrained_names()) or "none in this installation"
        raise ValueError(f"`name` must be of {known}; got {name!r}.")
    return _WEIGHTS / f"{name}.safetensors"


def pretrained(name: str, *, device: torch.device | str = "cpu") -> Bruno:
    """A trained model, ready to use: ``bruno.pretrained("omniglot")``; see `load` for how to train it on."""
    return load(pretrained_path(name), device=device)
