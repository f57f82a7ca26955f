"""Training: objective, schedules, trainer, and a run in a folder."""

from bruno.training.log import LogEntry
from bruno.training.run import Run, TrainingFailedError
from bruno.training.trainer import Step, Trainer, train_steps

__all__ = ["LogEntry", "Run", "Step", "Trainer", "TrainingFailedError", "train_steps"]
