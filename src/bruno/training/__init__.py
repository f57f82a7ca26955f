"""Training: the objective, its schedule, the trainer, and a run on disk."""

from bruno.training.trainer import Step, Trainer, train_steps

__all__ = ["Step", "Trainer", "train_steps"]
