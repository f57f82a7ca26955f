"""`bruno presets`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from bruno.cli.output import console
from bruno.text import arguments_renamed


def presets(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A preset or a TOML file: show all its settings.")
    ] = None,
) -> None:
    """List the recipes that come with the package, or all settings of one with their descriptions."""
    from bruno import config
    from bruno.settings import describe, flat

    if name is not None:
        descriptions = describe(config.Recipe)
        with arguments_renamed({"preset": "name"}):
            recipe = config.load_recipe(name)
        for key, value in flat(config.to_dict(recipe)).items():
            line = f"{key}={json.dumps(value)}"
            console.print(f"{line:<36} # {descriptions[key]}", highlight=False, soft_wrap=True)
        return
    table = Table("preset", "description")
    for preset, title in config.presets().items():
        table.add_row(preset, title)
    console.print(table)
