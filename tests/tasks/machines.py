"""A model of machines without training: a linear flow that removes the shared correlations of sensors."""

import torch

from bruno import Bruno, ModelConfig
from bruno.config import FlowConfig, ProcessConfig
from bruno.data import Examples
from bruno.data.synthetic import SENSORS, simulate_machines

FLOW, PROCESS = FlowConfig("dense", couplings=0), ProcessConfig(dof=30.0, correlation=0.6)


def machine_model() -> Bruno:
    """A model of the sensors one by one: good enough to detect, and not at all well calibrated."""
    model = Bruno.from_config(ModelConfig((len(SENSORS),), levels=0, flow=FLOW, process=PROCESS))
    model.initialise(machines(40, 20, seed=100).elements)
    return model.requires_grad_(False)


def machines(count: int, rows: int, seed: int, fault_rate: float = 0.0) -> Examples:
    return simulate_machines(count, rows, fault_rate=fault_rate, seed=seed).examples


def latents_of(model: Bruno, examples: Examples) -> torch.Tensor:
    """Latents of sets of equal size, (sets, n, dim)."""
    return model.latents(examples.elements.view(len(examples.names), -1, len(SENSORS)))
