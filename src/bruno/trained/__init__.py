"""Trained models with their recipes, data and jobs. `bruno.open` returns one; every command works on one."""

from bruno.tasks.familiarity import UnfamiliarDataWarning
from bruno.trained.base import Elements
from bruno.trained.evaluation import Evaluation
from bruno.trained.files import export, open
from bruno.trained.folders import results_folder
from bruno.trained.jobs import Trained
from bruno.trained.keyed import KeyedDetector
from bruno.trained.keyed_watch import KeyedWatch
from bruno.trained.verdict import Verdict
from bruno.trained.watch import Watch

__all__ = [
    "Elements",
    "Evaluation",
    "KeyedDetector",
    "KeyedWatch",
    "Trained",
    "UnfamiliarDataWarning",
    "Verdict",
    "Watch",
    "export",
    "open",
    "results_folder",
]
