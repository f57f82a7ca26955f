"""Opening trained models: run folders, model files, and the models that come with the package."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from bruno.checkpoint import load_with_metadata
from bruno.config import Recipe, from_dict
from bruno.data.archives import is_hidden
from bruno.devices import resolve_device
from bruno.files import check_regular, inside
from bruno.settings import nearest
from bruno.trained.calibration import CALIBRATION_FILE
from bruno.trained.jobs import Trained
from bruno.training import Run
from bruno.weights import pretrained_names, pretrained_path

_log = logging.getLogger(__name__)

STORE = "sets.db"  # of the sets of a service, in the folder of the results of a model
# All else is the user's.
_OURS = ("results", CALIBRATION_FILE, "report.html", STORE, f"{STORE}-shm", f"{STORE}-wal")


def open(
    path: str | Path,
    *,
    checkpoint: str = "last",
    device: str = "auto",
    data_dir: str | Path | None = None,
    drawings: bool | None = None,
) -> Trained:
    """Open a trained model with its recipe and data.

    Args:
        path: a run folder, a model file, or the name of a pretrained model.
        checkpoint: which checkpoint of a run folder: "last", or "best" on validation.
        device: "auto", "cpu", "cuda" or "cuda:NUMBER".
        data_dir: the folder of published datasets; $BRUNO_DATA by default.
        drawings: normalise images in user files as line drawings; by default as in training.
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise ValueError(f"`data_dir` must be an existing folder; got {str(data_dir)!r}.")
    name, folder, device = _checked_name(path), results_folder(path), resolve_device(device)
    if _is_run(name):
        run = Run(folder)
        model, about = run.model_and_about(checkpoint, device)
        model.source = str(folder.resolve())
        return Trained(model, run.recipe, folder, data_dir=data_dir, drawings=drawings, about=about)
    model, about = load_with_metadata(_model_file(name, checkpoint), device=device)
    if _is_pretrained(name):
        model.source = name  # unlike the path, the name is valid in every installation
    recipe = from_dict(Recipe, about["recipe"]) if about.get("recipe") else None
    return Trained(
        model,
        recipe,
        folder,
        pretrained=name if _is_pretrained(name) else "",
        data_dir=data_dir,
        drawings=drawings,
        about=about,
    )


def export(
    path: str | Path,
    out: str | Path,
    *,
    half: bool = False,
    int8: bool = False,
    checkpoint: str = "last",
    onnx: bool = False,
) -> Path:
    """Write a model to one file, with its recipe and provenance, or to a folder as ONNX; returns the path.

    The calibration of the model is kept beside the file, in the folder for its results, unless the weights
    are rounded: a calibration is of exact weights.

    Args:
        path: a run folder, a model file, or the name of a pretrained model.
        out: the file to write, or with `onnx` the folder.
        half: store the weights of the flow in half precision.
        int8: store 8-bit weights of the flow; not for ONNX graphs.
        checkpoint: which checkpoint of a run folder: "last", or "best" on validation.
        onnx: write the functions encode, decode and score as ONNX graphs; see `Trained.export_onnx`.
    """
    trained = open(path, checkpoint=checkpoint, device="cpu")
    written = trained.export(out, half=half, int8=int8, onnx=onnx)
    if not onnx and (calibration := trained.ready_calibration()) is not None:
        if half or int8:
            _log.info(
                "the calibration is not kept, as it is of exact weights; calibrate the file: bruno calibrate "
                "%s DATA",
                written,
            )
        else:
            folder = results_folder(written)
            folder.mkdir(parents=True, exist_ok=True)
            calibration.save(inside(folder, CALIBRATION_FILE))
            _log.info("the calibration is kept in %s", folder / CALIBRATION_FILE)
    return written


def results_folder(path: str | Path) -> Path:
    """The folder for the results of a model: its run folder, or a folder beside its file.

    Beside NAME.safetensors, this is NAME/, unless that has other files than results, such as images; results
    among class folders would become a class. Then it is NAME-results/.
    """
    name = _checked_name(path)
    if _is_pretrained(name):
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


def _checked_name(path: str | Path) -> str:
    """The path or name of a model as a string; raises if it is empty, as Path("") is "."."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"`path` must be a run folder, a model file or a pretrained model; got {path!r}.")
    if not str(path):
        raise ValueError(
            "`path` must be a run folder, a model file or a pretrained model; got ''. The current folder is "
            "'.'."
        )
    return str(path)


def _is_run(name: str) -> bool:
    return Path(name).is_dir() and not _is_pretrained(name)


def _is_pretrained(name: str) -> bool:
    """Whether a name is that of a pretrained model; a run folder of the same name takes precedence."""
    return name in pretrained_names() and not Run(name).checkpoints


def _model_file(name: str, checkpoint: str) -> Path:
    path = pretrained_path(name) if _is_pretrained(name) else Path(name)
    if not path.exists():
        hint = nearest(name, pretrained_names(), "the pretrained models are")
        raise ValueError(
            f"`path` must be a run folder, a model file or a pretrained model; {name} does not exist, {hint}"
        )
    check_regular(path)
    if checkpoint != "last":
        raise ValueError(f"`checkpoint` is for run folders; {name} is one model. Omit it.")
    return path
