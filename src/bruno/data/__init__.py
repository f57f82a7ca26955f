"""Labelled examples from files of every kind."""

from bruno.data.datasets import (
    DATASETS,
    MissingDataError,
    expected_path,
    is_available,
    load_examples,
    load_path,
    locate,
    locate_compact,
)
from bruno.data.elements import Element, ElementReader
from bruno.data.examples import Examples

__all__ = [
    "DATASETS",
    "Element",
    "ElementReader",
    "Examples",
    "MissingDataError",
    "expected_path",
    "is_available",
    "load_examples",
    "load_path",
    "locate",
    "locate_compact",
]
