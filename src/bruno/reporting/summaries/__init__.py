"""Results of the jobs of a trained model, with a table, a note and a picture."""

# Importing a module registers its summaries.
from bruno.reporting.summaries import (  # noqa: F401
    analysis,
    classification,
    evaluation,
    explanation,
    outliers,
    retrieval,
)
from bruno.reporting.summaries.base import summarise
from bruno.reporting.summaries.detection import p_value, verdict
from bruno.reporting.summaries.generation import class_samples_picture

__all__ = ["class_samples_picture", "p_value", "summarise", "verdict"]
