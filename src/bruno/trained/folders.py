"""Paths and names of trained models, and the folders for their results."""

from __future__ import annotations

import os
from pathlib import Path

from bruno.data.archives import is_hidden
from bruno.trained.calibration import CALIBRATION_FILE
from bruno.training import Run
from bruno.weights import pretrained_names

STORE = "sets.db"  # of the sets of a service, in the folder of the results of a model
# All else is the user's.
_OURS = ("results", CALIBRATION_FILE, "report.html", STORE, f"{STORE}-shm", f"{STORE}-wal")


def results_folder(path: str | Path) -> Path:
    """The folder for the results of a model: its run folder, or a folder beside its file.

    Beside NAME.safetensors, this is NAME/, unless that has other files than results, such as images; results
    among class folders would become a class. Then it is NAME-results/.
    """
    name = checked_name(path)
    if is_pretrained(name):
        return Path("runs") / f"pretrained-{name}"
    path = Path(path) if Path(path).name else Path(path).resolve()  # "." has no name
    if not path.is_file():
        return path
    folder = path.with_suffix("")
    return folder if _is_for_results(folder) else path.with_name(f"{folder.name}-results")


def _is_for_results(folder: Path) -> bool:
    """Whether a folder is new, or has nothing but results of a model."""
    if not folder.is_dir():
        return not folder.exists()
    return all(path.name in _OURS or is_hidden(path.name) for path in folder.iterdir())


def checked_name(path: str | Path) -> str:
    """The path or name of a model as a string; raises if it is empty, as Path("") is "."."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"`path` must be a run folder, a model file or a pretrained model; got {path!r}.")
    if not str(path):
        raise ValueError(
            "`path` must be a run folder, a model file or a pretrained model; got ''. The current folder is "
            "'.'."
        )
    return str(path)


def is_run(name: str) -> bool:
    """Whether a path is that of a run folder."""
    return Path(name).is_dir() and not is_pretrained(name)


def is_pretrained(name: str) -> bool:
    """Whether a name is that of a pretrained model; a run folder of the same name takes precedence."""
    return name in pretrained_names() and not Run(name).checkpoints
