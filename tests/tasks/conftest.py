"""Models for the tests of tasks; `digits_model` is in tests/session_fixtures.py."""

import pytest

from bruno import Bruno
from bruno.config import FlowConfig, ModelConfig


@pytest.fixture
def tiny_model() -> Bruno:
    """An untrained model of images of 2×2 pixels, for errors that are raised before scoring."""
    return Bruno.from_config(
        ModelConfig(shape=(1, 2, 2), flow=FlowConfig(kind="dense", couplings=2, units=4))
    )
