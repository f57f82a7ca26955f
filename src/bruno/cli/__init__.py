"""The command line: parses, calls one function, renders. Mistakes are one line and exit code 2."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from bruno import __version__
from bruno.cli.classification import classify, fewshot
from bruno.cli.demo import demo
from bruno.cli.exporting import export
from bruno.cli.finetuning import finetune
from bruno.cli.generation import sample
from bruno.cli.inspection import inspect, study
from bruno.cli.listing import list_data, list_presets
from bruno.cli.pages import report
from bruno.cli.retrieval import retrieve
from bruno.cli.streams import anomaly
from bruno.cli.training import evaluate, train
from bruno.training.run import TrainingFailedError

app = typer.Typer(
    help="Exact, exchangeable deep models of sets: given a few examples, the distribution of the next one.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


def _say_version(wanted: bool) -> bool:
    if wanted:
        print(f"bruno {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Say which version this is.", callback=_say_version, is_eager=True),
    ] = False,
) -> None:
    """What all commands have in common."""


# Each command with an example of how to type it.
COMMANDS: dict[str, tuple[Callable[..., Any], str]] = {
    "demo": (demo, "bruno demo"),
    "train": (train, "bruno train omniglot --data-dir DIR --minutes 20 --set process.kind=gaussian"),
    "finetune": (finetune, "bruno finetune runs/omniglot --data-dir DIR --minutes 5 --way 20 --shot 1"),
    "evaluate": (evaluate, "bruno evaluate runs/omniglot --split test --data-dir DIR"),
    "sample": (sample, "bruno sample runs/omniglot --given my-drawings --samples 8 --temperature 0.8"),
    "fewshot": (fewshot, "bruno fewshot runs/omniglot --way 5,20 --shot 1,5"),
    "classify": (classify, "bruno classify runs/omniglot photo.png --support my-classes --invert"),
    "anomaly": (anomaly, "bruno anomaly runs/omniglot my-stream --typical my-set --rate 0.01 --keep-out"),
    "retrieve": (
        retrieve,
        "bruno retrieve runs/omniglot --query my-examples --collection my-images --top 40",
    ),
    "inspect": (inspect, "bruno inspect runs/omniglot --data-dir DIR"),
    "study": (study, "bruno study --data digits,fashion-mnist --data-dir DIR"),
    "report": (report, "bruno report runs/omniglot"),
    "export": (export, "bruno export runs/omniglot omniglot.safetensors --half"),
    "presets": (list_presets, "bruno presets omniglot"),
    "data": (list_data, "bruno data --data-dir DIR"),
}
for _name, (_command, _example) in COMMANDS.items():
    app.command(_name, epilog=f"Example: [bold]{_example}[/bold]")(_command)


def main() -> None:
    """The command `bruno`; a user's mistake is a line, not a traceback."""
    warnings.showwarning = _warn
    try:
        code = app(standalone_mode=False)
    except (ValueError, FileNotFoundError) as error:
        sys.exit(_say(error, 2))
    except PermissionError as error:
        where = Path(error.filename or ".").resolve()
        sys.exit(_say(f"{where}: may not be read or written here; work in a folder of your own.", 1))
    except (TrainingFailedError, OSError) as error:
        sys.exit(_say(error, 1))
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        sys.exit(_say_usage(error))
    sys.exit(code or 0)


def _say_usage(error: Any) -> int:
    """What typer has against the command line, on one line too; a bare `bruno` shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return int(error.exit_code)
    where = error.ctx.command_path if getattr(error, "ctx", None) else "bruno"
    message = " ".join(error.format_message().split()).rstrip(".")
    return _say(f"{message}. See {where} --help.", error.exit_code)


def _say(error: object, code: int) -> int:
    _print("error", error, "red")
    return code


def _warn(message: Warning | str, *where: Any, **further: Any) -> None:
    _print("warning", message, "yellow")


def _print(kind: str, message: object, colour: str) -> None:
    """One line, whatever brackets there are in it."""
    Console(stderr=True).print(Text.assemble((f"{kind}:", colour), f" {message}"), soft_wrap=True)
