"""One small model, trained on the built-in digits (2, 5 and 8 held out), for all tests of what it can do."""

import pytest
import torch

from bruno import Bruno
from bruno.config import FlowConfig, ModelConfig, load_recipe
from bruno.data import Examples, load_examples
from bruno.data.sampling import SetSampler
from bruno.training import train_steps


@pytest.fixture(scope="session")
def digits_model() -> Bruno:
    recipe = load_recipe("digits", ["train.steps=800"])
    torch.manual_seed(0)
    examples = load_examples("digits")
    model = Bruno.from_config(recipe.model(examples.shape, examples.levels))
    for _ in train_steps(model, SetSampler(examples), recipe.train):
        pass
    return model


@pytest.fixture(scope="session")
def learnt_digits() -> Examples:
    """The seven digits that the model was trained on."""
    return load_examples("digits")


@pytest.fixture(scope="session")
def unseen_digits() -> Examples:
    """The three digits that the model never saw."""
    return load_examples("digits", "test")


@pytest.fixture
def tiny_model() -> Bruno:
    """Of images of 2×2 pixels, untrained: for what is refused before anything is scored."""
    return Bruno.from_config(
        ModelConfig(shape=(1, 2, 2), flow=FlowConfig(kind="dense", couplings=2, units=4))
    )
