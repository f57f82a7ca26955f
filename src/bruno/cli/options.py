"""What the commands have in common: their options, what these may be, the device, and how they speak."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed.nn  # before a group is there: its functions hold the group they are imported with
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from torch import distributed

from bruno.data import ElementReader
from bruno.reporting.results import Result

# In a group of processes the first one speaks for all.
console = Console(quiet=int(os.environ.get("RANK", "0")) > 0, markup=False)

_MOST_NUMBERS = 10_000  # that a range may name

ModelName = Annotated[
    str, typer.Argument(help="A run's folder, a model's file, or a model that comes with the package.")
]
OtherData = Annotated[
    str | None, typer.Option(help="Not the run's data: a named set, or your own folder of class folders.")
]
Split = Annotated[
    str | None,
    typer.Option(help="Which part of the run's data: train, validation, trainval, all, or test if left out."),
]
Invert = Annotated[
    bool | None,
    typer.Option(
        "--invert/--no-invert",
        help="Of your own images: dark ink on bright paper becomes bright ink; as in training if left out.",
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out what cannot be read.")]
Temperature = Annotated[float, typer.Option(help="Below 1, samples stay closer to the mean of the latents.")]
DataDir = Annotated[Path | None, typer.Option(help="Where data sets are; $BRUNO_DATA if left out.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto for a GPU where there is one.")]
Checkpoint = Annotated[str, typer.Option(help="Which one of the run: last, or best on validation.")]
Seed = Annotated[int, typer.Option(help="The seed of all random numbers.", min=0, max=2**63 - 1)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="section.key=value, as flow.filters=32 (see `bruno presets NAME`); may be repeated."
    ),
]


def choose_device(name: str) -> str:
    """The device to work on; a process that torchrun started gets a GPU of its own and joins the others."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"`--device` must be auto, cpu, cuda or cuda:NUMBER; got {name!r}.")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name.startswith("cuda") and int(name.partition(":")[2] or 0) >= there:
        last = f"the last is cuda:{there - 1}" if there else "there is no GPU. Use cpu"
        raise ValueError(f"`--device` must be one that is there; got {name}, and {last}.")
    if name == "auto":
        name = "cuda" if there else "cpu"
    if name == "cuda" and "LOCAL_RANK" in os.environ:
        name = f"cuda:{os.environ['LOCAL_RANK']}"
    if name.startswith("cuda:"):
        torch.cuda.set_device(name)  # streams and graphs are made on the current one
    if "LOCAL_RANK" in os.environ and not distributed.is_initialized():
        # NCCL's watchdog must not ask a stream how it is while a step is captured there.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        distributed.init_process_group("nccl" if name.startswith("cuda") else "gloo")
    return name


@contextmanager
def console_aside(aside: bool = True) -> Iterator[None]:
    """What people read goes to standard error, so that standard output is for programs alone."""
    console.stderr = aside
    try:
        yield
    finally:
        console.stderr = False


@contextmanager
def progress_bar(unit: str) -> Iterator[Callable[[int, int], None]]:
    """A function to be told (done, total); a bar on a terminal, nothing elsewhere."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(unit, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def say_passed_over(reader: ElementReader) -> None:
    """What a reader could not read, and was told to leave out."""
    for name in reader.skipped:
        console.print(f"passed over {name}", soft_wrap=True)


def numbers(option: str, text: str) -> tuple[int, ...]:
    """1,5 or 480-500 as a person types it."""
    try:
        ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
        if any(len(part) > 2 or part[-1] < part[0] for part in ends):
            raise ValueError("a range has two ends, the lower one first")
    except ValueError as error:
        raise ValueError(f"`{option}` takes numbers, as 1,5 or 480-500; got {text!r}.") from error
    if sum(part[-1] - part[0] for part in ends) > _MOST_NUMBERS:
        raise ValueError(f"`{option}` takes at most {_MOST_NUMBERS:,} numbers; got {text!r}.")
    return tuple(n for part in ends for n in range(part[0], part[-1] + 1))


def short_names(names: Sequence[str]) -> list[str]:
    """Of files: without their folders, if that leaves no two alike."""
    short = [Path(name).name for name in names]
    return short if len(set(short)) == len(set(names)) else list(names)


def refuse(what: str, others: dict[str, Any]) -> None:
    """Raise if any of these options is given, beside one of which `what` tells why that cannot be."""
    given = [name for name, value in others.items() if not (value in (None, "", []) or value is False)]
    if given:
        raise ValueError(f"{what} leave out {' and '.join(given)}.")


def check_number(option: str, value: float, least: float = -math.inf, most: float = math.inf) -> None:
    """An option's number must be one, and within its limits."""
    if not (math.isfinite(value) and least <= value <= most):
        limits = [f"at least {least:g}"] * (least > -math.inf) + [f"at most {most:g}"] * (most < math.inf)
        raise ValueError(f"`{option}` must be {' and '.join(limits) or 'a finite number'}; got {value}.")


def keep(result: Result, folder: Path, config: dict[str, Any], seed: int) -> None:
    """Show a result and write it to a folder."""
    say(result)
    path = result.write(folder, config=config, seed=seed)
    picture = f" and {path.with_suffix('.png').name}" if result.picture else ""
    console.print(f"written: {path}{picture}", soft_wrap=True)


def say(result: Result) -> None:
    """A result's table and how to read it, for people."""
    if result.rows:
        columns = (Column(column, overflow="fold") for column in result.columns)  # a path is told whole
        table = Table(*columns, title=result.title, title_justify="left")
        for row in result.rows:
            table.add_row(*row)
        console.print(table)
    if result.note:
        console.print(result.note)
