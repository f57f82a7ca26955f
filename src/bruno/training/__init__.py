"""Training: objective, schedules, trainer, and a run in a folder."""

from bruno.training.trainer import Step, Trainer, train_steps

__all__ = ["Step", "Trainer", "train_steps"]
