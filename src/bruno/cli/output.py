"""Terminal output of commands: results, progress bars, warnings and log messages."""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from bruno.text import printable, rename_arguments, shortened

if TYPE_CHECKING:
    from bruno.reporting.results import Result
    from bruno.trained import Trained
    from bruno.training import LogEntry


_PADDING = 3  # characters of a table between two columns: two spaces and a line
_LONGEST_WORD = 20  # characters; longer words of a table, such as paths, may be folded


class _Console(Console):
    """A console that prints each string on one line, escaped by `printable`."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print strings and renderables."""
        super().print(*(printable(part) if isinstance(part, str) else part for part in objects), **options)


_rank = os.environ.get("RANK", "0") if "LOCAL_RANK" in os.environ else "0"
# In a group of processes of torchrun only the first one prints.
console = _Console(quiet=_rank.isdecimal() and int(_rank) > 0, markup=False)


def show(trained: Trained, outcome: Any, seed: int, *, samples: bool = False) -> None:
    """Save the result of a job beside the model, with its samples if asked, and print it."""
    show_all(trained, [outcome], seed, samples=samples)


def show_all(trained: Trained, outcomes: Sequence[Any], seed: int, *, samples: bool = False) -> None:
    """Save several results, with their samples if asked, and print them.

    All are saved before any is printed: standard output may be closed or full.
    """
    from bruno.reporting.summaries import summarise

    results = [summarise(outcome) for outcome in outcomes]
    paths = [trained.save_result(result, seed) for result in results]
    saved = [
        path
        for outcome, result in zip(outcomes, results, strict=True)
        if samples
        for path in trained.save_samples(outcome, result.name)
    ]
    for result, path in zip(results, paths, strict=True):
        print_result(result)
        picture = f" and {path.with_suffix('.png').name}" if result.picture else ""
        console.print(f"written: {path}{picture}", soft_wrap=True)
    print_samples(saved)


def print_samples(paths: Iterable[Path]) -> None:
    """Print where samples are saved."""
    for path in paths:
        console.print(f"samples: {path}", soft_wrap=True)


def show_verdict(trained: Trained, seed: int, split: str | None = None) -> None:
    """Save and print the verdict on a model; a failure to do so does not fail the training."""
    if console.quiet:  # one process is enough
        return
    try:
        show(trained, trained.verdict(split=split, seed=seed), seed)
    except Exception as error:  # whatever the error is, the model is trained and saved
        warnings.warn(f"the verdict on the model could not be computed or written: {error}", stacklevel=2)


def print_result(result: Result) -> None:
    """Print the table and the note of a result. A table that is too wide is printed in parts."""
    if result.rows:
        cells = [[*map(printable, row)] for row in (result.columns, *result.rows)]
        for part, title in zip(
            _parts(cells, console.width), chain([result.title], repeat("…")), strict=False
        ):
            _print_table([[row[i] for i in part] for row in cells], printable(title))
    if result.note:
        console.print(result.note)


def _print_table(cells: Sequence[Sequence[str]], title: str) -> None:
    """Print a table, the first row of cells as its header, without wrapping inside words and numbers.

    Words that are too long for a line are folded, so that paths are never cut.
    """
    widths = _widths(cells, console.width)
    columns = (Column(name, overflow="fold", width=n) for name, n in zip(cells[0], widths, strict=True))
    table = Table(*columns, title=title, title_justify="left")
    for row in cells[1:]:
        table.add_row(*row)
    console.print(table)


def _parts(cells: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """The columns of a table in parts that fit a width; each part begins with the first column."""
    least = [*map(_longest_word, zip(*cells, strict=True))]
    parts: list[list[int]] = [[0]]
    for i in range(1, len(least)):
        if len(parts[-1]) > 1 and sum(least[j] + _PADDING for j in (*parts[-1], i)) + 1 > width:
            parts.append([0])
        parts[-1].append(i)
    return parts


def _widths(cells: Sequence[Sequence[str]], width: int) -> list[int]:
    """Widths of columns: those of their cells; if these are too wide, the widest columns are narrowed."""
    columns = [*zip(*cells, strict=True)]
    widths, least = [max(map(cell_len, column)) for column in columns], [*map(_longest_word, columns)]
    for _ in range(sum(widths) + _PADDING * len(widths) + 1 - width):
        spare = [i for i in range(len(widths)) if widths[i] > least[i]]
        if not spare:
            break
        widths[max(spare, key=widths.__getitem__)] -= 1
    return widths


def _longest_word(cells: Sequence[str]) -> int:
    """The length of the longest word, which is not wrapped unless it is very long, such as a path."""
    return min(_LONGEST_WORD, max(cell_len(word) for cell in cells for word in cell.split() or [""]))


def prepare_streams() -> None:
    """Escape what standard output cannot encode, and read names that are not UTF-8 from standard input."""
    for stream, errors in (
        (sys.stdin, "surrogateescape"),
        (sys.stdout, "backslashreplace"),
        (sys.stderr, "backslashreplace"),
    ):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


@contextmanager
def to_stderr(wanted: bool = True) -> Iterator[None]:
    """Send human-readable output to standard error; standard output is then for programs only."""
    console.stderr = wanted
    try:
        yield
    finally:
        console.stderr = False


@contextmanager
def progress_bar(unit: str) -> Iterator[Callable[..., None]]:
    """A function to call with (done, total) and optionally a text: a bar, on a terminal only."""
    columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task(unit, total=None)

        def update(done: float, total: float, text: str = "") -> None:
            bar.update(task, completed=done, total=total, description=text or f"{done:,}/{total:,} {unit}")

        yield update


@contextmanager
def training_bar() -> Iterator[Callable[[LogEntry], None]]:
    """A function to call with each training log entry: a bar on a terminal, and a summary at the end."""
    last: list[LogEntry] = []
    with progress_bar("steps") as progress:

        def update(entry: LogEntry) -> None:
            last[:] = [entry]
            words = [f"step {entry.index:,}", f"{entry.elements_per_second:,.0f}/s", _memory(entry.memory)]
            words += [f"{entry.bits_per_dim:.3f} bits/dim"] * (entry.bits_per_dim == entry.bits_per_dim)
            words += [f"{100 * entry.accuracy:.0f} % correct"] * (entry.accuracy == entry.accuracy)
            progress(entry.seconds, max(1e-9, entry.seconds + entry.seconds_left), " · ".join(words))

        yield update
    for entry in last:
        steps = f"{entry.index:,} step{'s' * (entry.index != 1)} in {_duration(entry.seconds)}"
        speed = f"{1000 * entry.step_seconds:.0f} ms per step, {entry.elements_per_second:,.0f} elements/s"
        console.print(f"{steps}; last: {speed}, {_memory(entry.memory)}")


@contextmanager
def stopped_by_signal(resume: str) -> Iterator[None]:
    """Report how to resume training after a signal, and exit with the signal's code.

    ``{folder}`` in `resume` stands for the run folder.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        step, number = getattr(error, "step", None), getattr(error, "signal", 0)
        if step is None:  # raised outside bruno.train, which finishes its step
            raise
        resume = resume.replace("{folder}", str(getattr(error, "folder", "")))
        console.print(f"stopped after step {step:,} and saved; resume with {resume}", soft_wrap=True)
        raise typer.Exit(128 + number) from error


class LogHandler(logging.Handler):
    """Prints the log messages of the package; `names` are those of its arguments on the command line."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self._names = names

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message on one line."""
        message = rename_arguments(record.getMessage(), self._names)
        console.print(message, soft_wrap=True, highlight=False)


@contextmanager
def messages_printed(names: Mapping[str, str]) -> Iterator[None]:
    """Print the log messages and the warnings of the package while the body runs.

    `names` are those of arguments on the command line; a command adds its own when it begins.
    """
    logger, handler = logging.getLogger("bruno"), LogHandler(names)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(print_warning, names)
            yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def print_warning(names: Mapping[str, str], message: Warning | str, *where: Any, **further: Any) -> None:
    """Print a warning on one line of standard error; replaces `warnings.showwarning`."""
    if not console.quiet:
        print_message("warning", rename_arguments(message, names), "yellow")


def print_message(kind: str, message: object, colour: str) -> None:
    """Print one line on standard error, with brackets printed literally."""
    text = Text.assemble((f"{kind}:", colour), f" {shortened(printable(str(message)))}")
    Console(stderr=True).print(text, soft_wrap=True)


def _memory(amount: int) -> str:
    return f"{amount / 2**30:.1f} GiB"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
