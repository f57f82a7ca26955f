"""`bruno presets` and `bruno data`: what there is."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Table

from bruno.cli.options import DataDir, console
from bruno.config import flat, load_recipe, presets, to_dict
from bruno.data import DATASETS, expected_path, locate, locate_compact


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
    """The named data sets: what is there, what is missing, where to put it and where to get it."""
    lines = []
    for name, source in DATASETS.items():
        files, compact = locate(name, data_dir), locate_compact(name, data_dir)
        found = {str(place.parent) for place in files.values() if place}
        missing = [remote for remote in source.files if not files[remote.path] and not compact]
        state = "missing" if missing else "there" if files or compact else "built in"
        where = f", in {compact or ', '.join(sorted(found))}" if state == "there" else ""
        lines.append(f"{name:<14} {state:<9} {source.title}{where}")
        for remote in missing:
            place = expected_path(remote, data_dir)
            lines.append(f"    put {place.name} into {place.parent}/")
            lines += [f"        {'or' if i else 'get it'} from {url}" for i, url in enumerate(remote.mirrors)]
    lines.append("What is missing is downloaded when it is first asked for, where there is a network.")
    for line in lines:  # never cut nor broken: names and addresses are there to be copied
        console.print(line, highlight=False, markup=False, soft_wrap=True)
