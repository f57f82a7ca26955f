"""Labelled examples: named datasets and user files, single elements, and random sets."""

from bruno.data.datasets import DATASETS
from bruno.data.examples import Examples
from bruno.data.loading import check_source, load_examples, load_path
from bruno.data.published import (
    DatasetStatus,
    MissingDataError,
    dataset_status,
    is_available,
)
from bruno.data.reader import Element, ElementReader
from bruno.data.sampling import SetSampler

__all__ = [
    "DATASETS",
    "DatasetStatus",
    "Element",
    "ElementReader",
    "Examples",
    "MissingDataError",
    "SetSampler",
    "check_source",
    "dataset_status",
    "is_available",
    "load_examples",
    "load_path",
]
