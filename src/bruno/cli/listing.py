"""`bruno presets` and `bruno data`: what there is."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from bruno.cli.options import DataDir, console
from bruno.config import flat, load_recipe, presets, to_dict
from bruno.data import SOURCES, locate


def list_presets(
    name: Annotated[
        str | None, typer.Argument(help="A preset or a TOML file: show all its settings.")
    ] = None,
) -> None:
    """The recipes that come with the package, or all settings of one, as --set takes them."""
    if name is not None:
        for key, value in flat(to_dict(load_recipe(name))).items():
            console.print(f"{key}={json.dumps(value)}", highlight=False, soft_wrap=True)
        return
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
