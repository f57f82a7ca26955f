"""A model of machines without training: a linear flow that removes the shared correlations of sensors."""

import torch

from bruno import Bruno, ModelConfig
from bruno.config import FlowConfig, ProcessConfig
from bruno.data import Examples
from bruno.data.synthetic import SENSORS, simulate_machines

FLOW, PROCESS = FlowConfig("dense", couplings=0), ProcessConfig(dof=30.0, correlation=0.6)


def machine_model(missing: str = "reject") -> Bruno:
    """A model of the sensors one by one: good enough to detect, and not at all well calibrated."""
    config = ModelConfig((len(SENSORS),), levels=0, flow=FLOW, process=PROCESS, missing=missing)
    model, known = Bruno.from_config(config), machines(40, 20, seed=100)
    model.initialise(known.elements)
    if model.imputer is not None:
        model.imputer.fit(model.preprocessing(known.elements)[0], known.labels)
    return model.requires_grad_(False)


def with_holes(x: torch.Tensor, rate: float, seed: int = 0) -> torch.Tensor:
    """Rows with missing numbers at random places."""
    missing = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < rate
    return x.masked_fill(missing, float("nan"))


def machines(count: int, rows: int, seed: int, fault_rate: float = 0.0) -> Examples:
    return simulate_machines(count, rows, fault_rate=fault_rate, seed=seed).examples


def latents_of(model: Bruno, examples: Examples) -> torch.Tensor:
    """Latents of sets of equal size, (sets, n, dim)."""
    return model.latents(examples.elements.view(len(examples.names), -1, len(SENSORS)))
