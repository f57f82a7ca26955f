"""Models and posteriors as files: safetensors with a JSON header. Nothing is ever unpickled."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from bruno.config import ModelConfig, from_dict, to_dict
from bruno.files import atomic_write, raw_bytes
from bruno.model import Bruno, Posterior
from bruno.process import Evidence

_FORMAT = 1
_CHECKSUM = "checksum of all"
_CHECKSUM_OF_BYTES = "checksum"  # of older files


def save(
    thing: Bruno | Posterior, path: str | Path, *, half: bool = False, about: dict[str, Any] | None = None
) -> None:
    """Write a model or a posterior to a file, whole or not at all.

    Args:
        thing: a model that was built from a config, or a posterior of one.
        path: the file.
        half: the weights of a model's flow in half precision, half the size; loading widens them again.
        about: what else the file is to say of a model, ready for JSON; `read_about` gives it back.
    """
    if isinstance(thing, Posterior):
        evidence = thing.evidence
        tensors = {name: getattr(evidence, name) for name in ("count", "mean", "scatter")}
        header: dict[str, Any] = {"kind": "posterior", "model": thing.model.fingerprint()}
    elif isinstance(thing, Bruno):
        if thing.config is None:
            raise ValueError(
                "`thing` must be a model built from a config (Bruno.from_config) to be saved whole; this one "
                "has a flow of its own. Save its state_dict() instead."
            )
        tensors = thing.state_dict()
        if half:  # the process is small, and its parameters range widely
            tensors = {
                n: t.half() if n in dict(thing.named_parameters()) and n.startswith("flow.") else t
                for n, t in tensors.items()
            }
        header = {"kind": "model", "config": to_dict(thing.config), "about": about or {}}
    else:
        raise TypeError(f"`thing` must be a Bruno or a Posterior; got {type(thing).__name__}.")
    write(Path(path), tensors, header)


@overload
def load(path: str | Path, *, model: None = None, device: torch.device | str | None = None) -> Bruno: ...


@overload
def load(path: str | Path, *, model: Bruno, device: torch.device | str | None = None) -> Posterior: ...


def load(
    path: str | Path, *, model: Bruno | None = None, device: torch.device | str | None = None
) -> Bruno | Posterior:
    """Read what `save` wrote: a model or, with `model`, a posterior of it.

    On the CPU, or where the posterior's model is, unless a device is named. A model comes to be used: no
    weight of it asks for gradients, which would keep all that was computed for as long as its result is
    there. To train it by hand, `model.requires_grad_()`.
    """
    device = device or (model.process.mean.device if model else "cpu")
    tensors, header = read(Path(path), device)
    if header["kind"] == "model":
        if model is not None:
            raise ValueError(f"`model` must be left out to load a model; {path} is one.")
        restored = Bruno.from_config(from_dict(ModelConfig, header["config"]))
        wide = tensors["process.mean"].dtype
        half = [name for name, tensor in tensors.items() if tensor.dtype == torch.half]
        tensors |= {name: tensors[name].to(wide) for name in half}
        # Not a copy into what is there: some of it has, and keeps, a precision of its own.
        restored.to(wide).load_state_dict(tensors, assign=True)
        return restored.to(device).requires_grad_(False)
    if header["kind"] != "posterior":
        what = {"training": "the state of a training run", "index": "the index of a collection"}
        raise ValueError(f"`path` must be a model or a posterior; {path} is {what[header['kind']]}.")
    if model is None:
        raise ValueError(f"`model` must be given to load the posterior {path}, made by {header['model']}.")
    if model.fingerprint() != header["model"]:
        raise ValueError(
            f"`model` must be the one that made the posterior {path}, {header['model']}; "
            f"got {model.fingerprint()}."
        )
    return Posterior(model, Evidence(**tensors))


def read_about(path: str | Path) -> dict[str, Any]:
    """What a model's file says of it."""
    about: dict[str, Any] = read(Path(path), "cpu")[1].get("about", {})
    return about


def write(path: Path, tensors: dict[str, torch.Tensor], header: dict[str, Any]) -> None:
    """Tensors and what to know of them, to a file that is there whole or not at all."""
    here = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    header = {"format": _FORMAT, **header}
    # One entry: several come in an order of chance, and equal things are to be equal files.
    metadata = {"bruno": json.dumps({**header, _CHECKSUM: _checksum(here, header)})}
    with atomic_write(path) as beside:
        try:
            save_file(here, beside, metadata)
        except SafetensorError as error:  # as it calls a full disk
            raise OSError(f"{path}: could not be written: {error}") from error
        mask = os.umask(0)  # there is no other way to ask for it
        os.umask(mask)
        beside.chmod(0o666 & ~mask)  # as any other file: safetensors lets nobody else read its own


def _checksum(tensors: dict[str, torch.Tensor], header: dict[str, Any] | None) -> int:
    """Of the header and all tensors: a file can be damaged and still be read.

    Without a header, of the tensors' bytes alone, as older files have it.
    """
    result = 0 if header is None else zlib.crc32(json.dumps(header).encode())
    for name, tensor in sorted(tensors.items()):
        if header is not None:
            result = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), result)
        result = zlib.crc32(raw_bytes(tensor), result)
    return result


def read(path: Path, device: torch.device | str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What `write` wrote."""
    if not path.is_file():
        raise FileNotFoundError(f"`path` must be a file that bruno.save wrote; there is none at {path}.")
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            header = json.loads((file.metadata() or {}).get("bruno", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"`path` must be a file that bruno.save wrote; {path}: {error}.") from error
    if header is None or header.get("format") != _FORMAT:
        raise ValueError(f"`path` must be a file that bruno.save wrote, of format {_FORMAT}; {path} is not.")
    covered = header if _CHECKSUM in header else None
    said = header.pop(_CHECKSUM, header.get(_CHECKSUM_OF_BYTES))
    if said not in (None, _checksum(tensors, covered)):
        raise ValueError(f"`path` must be as bruno.save wrote it; {path} is damaged: its checksum is wrong.")
    return tensors, header
