"""Expensive session fixtures, made once for all workers of a parallel test run.

The package is imported by the fixtures: the process that starts the workers does not need it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from bruno import Bruno
    from bruno.data import Examples


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that the first worker makes and all workers share."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = root / name
    with FileLock(root / f".{name}.lock"):
        if not folder.exists():
            unfinished = root / f".{name}"
            make(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def digits_run(tmp_path_factory) -> Path:
    """The folder of a run on the built-in digits (2, 5 and 8 held out), with `model.safetensors`.

    For reading only: copy it (shutil.copytree) to write results into it or to resume it.
    """
    return made_once(tmp_path_factory, "digits-run", _train_digits)


@pytest.fixture(scope="session")
def digits_model(digits_run) -> Bruno:
    """The model of `digits_run`, frozen."""
    from bruno.training.run import Run

    return Run(digits_run).model()


@pytest.fixture(scope="session")
def learnt_digits() -> Examples:
    """The seven digits that the model was trained on."""
    from bruno.data import load_examples

    return load_examples("digits")


@pytest.fixture(scope="session")
def unseen_digits() -> Examples:
    """The three digits unseen in training."""
    from bruno.data import load_examples

    return load_examples("digits", "test")


_BITS_OF_SAMPLES: dict[str, tuple[float, float]] = {}


@pytest.fixture
def familiarity_once(monkeypatch) -> None:
    """Draw the samples behind `Familiarity` once for each model: those of a large one take seconds."""
    from functools import cached_property

    from bruno.tasks.familiarity import Familiarity

    drawn = vars(Familiarity)["_bits_of_samples"].func

    def shared(self: Familiarity) -> tuple[float, float]:
        model = self.model.fingerprint()
        if model not in _BITS_OF_SAMPLES:
            _BITS_OF_SAMPLES[model] = drawn(self)
        return _BITS_OF_SAMPLES[model]

    again = cached_property(shared)
    again.__set_name__(Familiarity, "_bits_of_samples")
    monkeypatch.setattr(Familiarity, "_bits_of_samples", again)


def _train_digits(folder: Path) -> None:
    """Train on upright digits at a high learning rate: 300 steps beat pixels and chance in all tasks."""
    import torch

    from bruno import Bruno
    from bruno.config import load_recipe
    from bruno.data import load_examples
    from bruno.data.sampling import SetSampler
    from bruno.training.run import Run
    from bruno.training.trainer import Trainer

    recipe = load_recipe("digits", ["train.steps=300", "train.rate=4e-3", "data.rotations=false"])
    examples = load_examples("digits")
    torch.manual_seed(recipe.train.seed)
    model = Bruno.from_config(recipe.model(examples.shape, examples.levels))
    for _ in Run(folder).fit(Trainer(model, SetSampler(examples), recipe.train), recipe):
        pass
