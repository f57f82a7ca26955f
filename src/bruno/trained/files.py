"""Opening trained models: run folders, model files, and the models that come with the package."""

from __future__ import annotations

from pathlib import Path

from bruno.checkpoint import load_with_metadata
from bruno.config import Recipe, from_dict
from bruno.devices import resolve_device
from bruno.files import check_regular
from bruno.settings import nearest
from bruno.text import arguments_renamed
from bruno.trained.folders import checked_name, is_pretrained, is_run, results_folder
from bruno.trained.jobs import Trained
from bruno.training import Run
from bruno.weights import pretrained_names, pretrained_path


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
    name, folder, device = checked_name(path), results_folder(path), resolve_device(device)
    if is_run(name):
        run = Run(folder)
        with arguments_renamed({"run": "path"}):
            model, about = run.model_and_about(checkpoint, device)
        model.source = str(folder.resolve())
        return Trained(model, run.recipe, folder, data_dir=data_dir, drawings=drawings, about=about)
    model, about = load_with_metadata(_model_file(name, checkpoint), device=device)
    if is_pretrained(name):
        model.source = name  # unlike the path, the name is valid in every installation
    recipe = from_dict(Recipe, about["recipe"]) if about.get("recipe") else None
    return Trained(
        model,
        recipe,
        folder,
        pretrained=name if is_pretrained(name) else "",
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

    See `Trained.export`.

    Args:
        path: a run folder, a model file, or the name of a pretrained model.
        out: the file to write, or with `onnx` the folder.
        half: store the weights of the flow in half precision.
        int8: store 8-bit weights of the flow; not for ONNX graphs.
        checkpoint: which checkpoint of a run folder: "last", or "best" on validation.
        onnx: write the functions encode, decode and score as ONNX graphs; see `Trained.export_onnx`.
    """
    return open(path, checkpoint=checkpoint, device="cpu").export(out, half=half, int8=int8, onnx=onnx)


def _model_file(name: str, checkpoint: str) -> Path:
    path = pretrained_path(name) if is_pretrained(name) else Path(name)
    if not path.exists():
        hint = nearest(name, pretrained_names(), "the pretrained models are")
        raise ValueError(
            f"`path` must be a run folder, a model file or a pretrained model; {name} does not exist, {hint}"
        )
    check_regular(path)
    if checkpoint != "last":
        raise ValueError(f"`checkpoint` is for run folders; {name} is one model. Omit it.")
    return path
