"""`bruno presets` and `bruno data`: what there is."""

from __future__ import annotations

from rich.table import Table

from bruno.cli.options import DataDir, console
from bruno.config import presets
from bruno.data import SOURCES, locate


def list_presets() -> None:
    """The recipes that come with the package."""
    table = Table("preset", "what it is")
    for name, title in presets().items():
        table.add_row(name, title)
    console.print(table)


def list_data(data_dir: DataDir = None) -> None:
    """The named data sets: what is there, what is missing, and where to get it."""
    table = Table("data set", "what it is", "file")
    table.add_column("where", overflow="fold")
    for name, source in SOURCES.items():
        files = locate(name, data_dir)
        table.add_row(name, source.title, *([] if files else ["", "built in"]))
        for remote in source.files:
            place = files[remote.path]
            table.add_row("", "", remote.path, str(place) if place else f"missing: {remote.mirrors[0]}")
    console.print(table)
