"""The command `bruno`: its commands, and one line with exit code 2 for a user's mistake."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

import bruno
from bruno.cli import (
    anomaly,
    calibrate,
    classify,
    data,
    demo,
    evaluate,
    export,
    fewshot,
    finetune,
    inspect,
    page,
    presets,
    repeat,
    report,
    retrieve,
    sample,
    serve,
    specks,
    study,
    train,
    verdict,
)
from bruno.cli.options import command
from bruno.cli.output import messages_printed, prepare_streams, print_message
from bruno.extras import MissingPackageError
from bruno.text import rename_arguments

app = typer.Typer(
    help="Exact, exchangeable deep models of sets: given a few examples, the distribution of the next one.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


_CORRECTABLE = (
    *(FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError),
    MissingPackageError,
)
_CORRECTABLE_NUMBERS = (errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL, errno.EROFS)
_OUT_OF_MEMORY = re.compile("OutOfMemoryError|allocate memory|not enough memory")


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"bruno {bruno.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options of `bruno` itself."""


# Each command with an example of how to type it.
COMMANDS: dict[str, tuple[Any, str]] = {
    "demo": (demo.demo, "bruno demo"),
    "train": (train.train, "bruno train omniglot --data-dir DIR --minutes 20 --set process.kind=gaussian"),
    "finetune": (finetune.finetune, "bruno finetune runs/omniglot --data-dir DIR --minutes 5 --way 20"),
    "evaluate": (evaluate.evaluate, "bruno evaluate runs/omniglot --split test --data-dir DIR"),
    "verdict": (verdict.verdict, "bruno verdict runs/omniglot --data-dir DIR"),
    "sample": (sample.sample, "bruno sample runs/omniglot --given my-drawings --samples 8 --temperature 0.8"),
    "repeat": (repeat.repeat, "bruno repeat runs/omniglot --given my-drawings"),
    "fewshot": (fewshot.fewshot, "bruno fewshot runs/omniglot --way 5,20 --shot 1,5"),
    "classify": (classify.classify, "bruno classify runs/omniglot photo.png --support my-classes --invert"),
    "calibrate": (calibrate.calibrate, "bruno calibrate runs/table clean-machines.csv"),
    "anomaly watch": (
        anomaly.watch,
        "bruno anomaly watch runs/omniglot my-stream --typical my-set",
    ),
    "anomaly keyed": (anomaly.keyed, "bruno anomaly keyed runs/table machines.csv --store machines.db"),
    "anomaly batch": (anomaly.batch, "bruno anomaly batch runs/omniglot my-images --rate 0.01"),
    "anomaly accept": (
        anomaly.accept,
        "bruno anomaly accept runs/table 'stream.csv, line 27' --state machine.state",
    ),
    "anomaly measure": (anomaly.measure, "bruno anomaly measure runs/omniglot --sets 200"),
    "retrieve search": (
        retrieve.search,
        "bruno retrieve search runs/omniglot --query my-examples --collection my-images --top 40",
    ),
    "retrieve measure": (retrieve.measure, "bruno retrieve measure runs/omniglot --shot 1,5"),
    "specks": (specks.specks, "bruno specks runs/omniglot --samples 1000 --data-dir DIR"),
    "inspect": (inspect.inspect, "bruno inspect runs/omniglot --data-dir DIR"),
    "study": (study.study, "bruno study --data digits,fashion-mnist --data-dir DIR"),
    "report": (report.report, "bruno report runs/omniglot"),
    "export": (export.export, "bruno export runs/omniglot omniglot.safetensors --half"),
    "page": (page.page, "bruno page --open"),
    "serve": (serve.serve, "bruno serve omniglot runs/table --port 8000"),
    "presets": (presets.presets, "bruno presets omniglot"),
    "data": (data.data, "bruno data --data-dir DIR"),
}
GROUPS = {
    "anomaly": "Find outliers in a stream or a batch, accept false alarms, or measure detection.",
    "retrieve": "Rank a collection by similarity to some examples, or measure retrieval.",
}

_apps = {"": app}
for _group, _help in GROUPS.items():
    _apps[_group] = typer.Typer(help=_help, no_args_is_help=True, rich_markup_mode="rich")
    app.add_typer(_apps[_group], name=_group)
for _name, (_function, _example) in COMMANDS.items():
    *_path, _last = _name.split()
    _apps["".join(_path)].command(_last, epilog=f"Example: [bold]{_example}[/bold]")(command(_function))


def main() -> None:
    """Run the command line; a mistake of the user is one line and exit code 2, not a traceback."""
    prepare_streams()
    names: dict[str, str] = {}  # of the arguments in messages; the command that runs adds its own
    try:
        with messages_printed(names):
            code = app(standalone_mode=False, obj=names)
        sys.stdout.flush()
    except Exception as error:
        code = _failed(error, names)
    sys.exit(code or 0)


def _failed(error: Exception, names: Mapping[str, str]) -> int:
    """Print an error on one line, and return the exit code: 2 if the user can correct it, 1 if not."""
    message = rename_arguments(error, names)
    if isinstance(error, PermissionError):
        where = os.path.realpath(error.filename or ".")
        return _error(f"{where}: permission denied. Choose a folder that you can read and write.", 2)
    if isinstance(error, BrokenPipeError):  # as with `| head`, which reads no further
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # Python flushes it at exit
        return _error("standard output was closed; results are saved before they are printed.", 1)
    if isinstance(error, (ValueError, *_CORRECTABLE)) or getattr(error, "errno", 0) in _CORRECTABLE_NUMBERS:
        return _error(message, 2)
    if isinstance(error, OSError) or type(error).__name__ == "TrainingFailedError":
        return _error(message, 1)
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(f"{type(error).__name__} {error}"):
        return _error("out of memory. Use smaller sets, fewer samples, or a smaller train.batch or flow.", 2)
    if not hasattr(error, "format_message"):
        raise error
    return _usage_error(error)


def _usage_error(error: Any) -> int:
    """Print a usage error of typer on one line; `bruno` without arguments shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return int(error.exit_code)
    where = error.ctx.command_path if getattr(error, "ctx", None) else "bruno"
    message = " ".join(error.format_message().split()).rstrip(".")
    end = "" if message.endswith("?") else "."  # it may suggest another command
    return _error(f"{message}{end} See {where} --help.", error.exit_code)


def _error(error: object, code: int) -> int:
    print_message("error", error, "red")
    return code
