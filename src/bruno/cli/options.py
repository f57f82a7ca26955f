"""What the commands have in common: their options, the device, a run's data, and how they speak."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import distributed

from bruno.config import Recipe
from bruno.data import Examples, load_examples
from bruno.report import Result

# In a group of processes the first one speaks for all.
console = Console(quiet=int(os.environ.get("RANK", "0")) > 0)

RunFolder = Annotated[Path, typer.Argument(help="The folder of a training run.")]
DataDir = Annotated[Path | None, typer.Option(help="Where data sets are; $BRUNO_DATA if left out.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto for a GPU where there is one.")]
Checkpoint = Annotated[str, typer.Option(help="Which one of the run: last, or best on validation.")]
Seed = Annotated[int, typer.Option(help="Of all random numbers.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="section.key=value, as flow.filters=32; may be repeated.")
]


def choose_device(name: str) -> str:
    """The device to work on; a process that torchrun started gets a GPU of its own and joins the others."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"`--device` must be one that is there; got {name}, and there is no GPU. Use cpu.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if "LOCAL_RANK" in os.environ:
        if name == "cuda":
            name = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(name)
        if not distributed.is_initialized():
            distributed.init_process_group("nccl" if name.startswith("cuda") else "gloo")
    return name


def examples_of(recipe: Recipe, split: str, data_dir: Path | None) -> Examples:
    """A split of a recipe's data."""
    data = recipe.data
    examples = load_examples(
        data.name,
        split,
        data_dir=data_dir,
        size=data.size or None,
        grey=not data.colour,
        group=data.group,
        skip_bad=data.skip_bad,
    )
    if examples.skipped:
        console.print(f"left out {len(examples.skipped)} that could not be read, first {examples.skipped[0]}")
    return examples.named(data.classes) if data.classes else examples


def held_out_examples(recipe: Recipe, split: str, data_dir: Path | None) -> Examples:
    """A split to measure on: classes that a run was limited to are what it learnt from, in test all count."""
    limited = recipe.data.classes if split.startswith("train") else ()
    return examples_of(replace(recipe, data=replace(recipe.data, classes=limited)), split, data_dir)


def say(result: Result) -> None:
    """A result's table, for people."""
    if result.rows:
        table = Table(*result.columns, title=result.title, title_justify="left")
        for row in result.rows:
            table.add_row(*row)
        console.print(table)
