"""BRUNO: exact, exchangeable deep models of sets."""

import bruno.threads  # noqa: F401  # isort: split
from bruno.checkpoint import load, save
from bruno.config import FlowConfig, ModelConfig, ProcessConfig
from bruno.model import Bruno, Posterior
from bruno.process import Evidence, GaussianProcess, StudentTProcess
from bruno.weights import pretrained

__all__ = [
    "Bruno",
    "Evidence",
    "FlowConfig",
    "GaussianProcess",
    "ModelConfig",
    "Posterior",
    "ProcessConfig",
    "StudentTProcess",
    "load",
    "pretrained",
    "save",
]
__version__ = "0.1.0"
