"""Labelled examples from files of every kind."""

from bruno.data.elements import Element, ElementReader
from bruno.data.examples import Examples
from bruno.data.sources import (
    SOURCES,
    MissingDataError,
    is_here,
    load_examples,
    locate,
    locate_compact,
    place_of,
    read_own,
)

__all__ = [
    "SOURCES",
    "Element",
    "ElementReader",
    "Examples",
    "MissingDataError",
    "is_here",
    "load_examples",
    "locate",
    "locate_compact",
    "place_of",
    "read_own",
]
