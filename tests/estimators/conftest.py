"""Models and rows for the tests of estimators."""

import pytest
import torch
from set_rows import sets_of_rows

from bruno import Bruno
from bruno.config import FlowConfig, ModelConfig, ProcessConfig


@pytest.fixture(scope="session")
def set_model() -> Bruno:
    """A model of sets of three columns without training: means of sets differ, columns are independent."""
    config = ModelConfig(
        (3,),
        levels=0,
        flow=FlowConfig("dense", couplings=0),
        process=ProcessConfig(dof=50.0, correlation=0.9),
        missing="impute",
    )
    model = Bruno.from_config(config)
    rows, labels = sets_of_rows(30, 20, seed=9)
    model.initialise(rows)
    model.imputer.fit(model.preprocessing(torch.from_numpy(rows))[0], torch.from_numpy(labels))
    return model.requires_grad_(False)
