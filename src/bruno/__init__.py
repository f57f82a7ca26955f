"""BRUNO: exact, exchangeable deep models of sets.

Names are imported on first use: `import bruno` is fast and does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import bruno.threads  # noqa: F401  # before torch is imported
from bruno import lazy_open

if TYPE_CHECKING:
    from bruno.checkpoint import load, save
    from bruno.config import FlowConfig, ModelConfig, ProcessConfig, Recipe, TrainConfig, load_recipe
    from bruno.data import Examples
    from bruno.finetuning import finetune
    from bruno.fit import train
    from bruno.model import Bruno, Posterior
    from bruno.process import Evidence, GaussianProcess, StudentTProcess
    from bruno.trained import KeyedDetector, Trained, open
    from bruno.weights import pretrained

__version__ = "0.2.0"

_HOME = {  # the module that defines each public name
    "Bruno": "model",
    "Evidence": "process",
    "Examples": "data",
    "FlowConfig": "config",
    "GaussianProcess": "process",
    "KeyedDetector": "trained",
    "ModelConfig": "config",
    "Posterior": "model",
    "ProcessConfig": "config",
    "Recipe": "config",
    "StudentTProcess": "process",
    "TrainConfig": "config",
    "Trained": "trained",
    "finetune": "finetuning",
    "load": "checkpoint",
    "load_recipe": "config",
    "open": "trained",
    "pretrained": "weights",
    "save": "checkpoint",
    "train": "fit",
}
_MODULES = (  # public modules and packages
    "config",
    "data",
    "demo",
    "flow",
    "onnx",
    "page",
    "process",
    "provenance",
    "ray",
    "reporting",
    "river",
    "serving",
    "sklearn",
    "streams",
    "tasks",
    "trained",
    "training",
    "weights",
)

__all__ = [
    "Bruno",
    "Evidence",
    "Examples",
    "FlowConfig",
    "GaussianProcess",
    "KeyedDetector",
    "ModelConfig",
    "Posterior",
    "ProcessConfig",
    "Recipe",
    "StudentTProcess",
    "TrainConfig",
    "Trained",
    "finetune",
    "load",
    "load_recipe",
    "open",
    "pretrained",
    "save",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"bruno.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'bruno' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"bruno.{_HOME[name]}"), name)
    globals()[name] = value  # later lookups do not call this function
    return value


def _open_when_needed(source: str, **options: Any) -> Any:
    return __getattr__("open")(source, **options)


lazy_open.opener = _open_when_needed


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, "__version__"})
