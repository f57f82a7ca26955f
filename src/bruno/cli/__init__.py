"""The command line: parses, calls one function, renders. Mistakes are one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console

from bruno.cli.demo import demo
from bruno.cli.listing import list_data, list_presets
from bruno.cli.training import evaluate, finetune, train
from bruno.runs import TrainingFailedError

app = typer.Typer(
    help="Exact, exchangeable deep models of sets: given a few examples, the distribution of the next one.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)

# Each command with an example of how to type it.
COMMANDS: dict[str, tuple[Callable[..., Any], str]] = {
    "demo": (demo, "bruno demo"),
    "train": (train, "bruno train omniglot --data-dir DIR --minutes 20 --set process.kind=gaussian"),
    "finetune": (finetune, "bruno finetune runs/omniglot --minutes 5 --way 20 --shot 1"),
    "evaluate": (evaluate, "bruno evaluate runs/omniglot --split test --sets 500"),
    "presets": (list_presets, "bruno presets"),
    "data": (list_data, "bruno data --data-dir DIR"),
}
for _name, (_command, _example) in COMMANDS.items():
    app.command(_name, epilog=f"Example: [bold]{_example}[/bold]")(_command)


def main() -> None:
    """The command `bruno`; a user's mistake is a line, not a traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError) as error:
        sys.exit(_say(error, 2))
    except (TrainingFailedError, OSError) as error:
        sys.exit(_say(error, 1))


def _say(error: Exception, code: int) -> int:
    Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
    return code
