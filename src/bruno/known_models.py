"""The loaded models by fingerprint, as a pickled posterior names its model and does not carry its weights."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from bruno import lazy_open

_OPENED = 4  # models opened for posteriors are cached, so that a worker opens a model only once

_alive: WeakSet[Any] = WeakSet()
_opened: OrderedDict[str, Any] = OrderedDict()
_fingerprints: WeakKeyDictionary[nn.Module, tuple[list[Tensor], list[int], str]] = WeakKeyDictionary()


class UnknownModel:
    """Placeholder for the model of a posterior if it cannot be found; any use of it raises an error.

    A posterior can be unpickled without its model, so that the error is raised where the model is needed, and
    not where a worker process receives its arguments.
    """

    def __init__(self, fingerprint: str, source: str | None, reason: str) -> None:
        self._fingerprint, self.source, self.reason = fingerprint, source, reason

    def fingerprint(self) -> str:
        """The fingerprint of the missing model."""
        return self._fingerprint

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise LookupError(
            f"the model of this posterior, {self._fingerprint}, is not in this process: {self.reason}. Save "
            "the model before pickling its posteriors (bruno.save), or load it in this process first, and "
            "keep a reference to it (bruno.load, bruno.open)."
        )


def register(model: Any) -> None:
    """Let posteriors find a model while it is in memory."""
    _alive.add(model)


def cached_fingerprint(model: nn.Module, compute: Callable[[], str]) -> str:
    """The fingerprint of a model; computed once for a frozen one, until its weights change."""
    tensors = list(model.state_dict().values())
    if any(weight.requires_grad for weight in model.parameters()) or any(t.is_inference() for t in tensors):
        return compute()
    versions = [tensor._version for tensor in tensors]
    known = _fingerprints.get(model)
    if known is not None and versions == known[1]:
        # The tensors are kept alive, so that no other tensor can have their addresses.
        same = (now.data_ptr() == then.data_ptr() for now, then in zip(tensors, known[0], strict=True))
        if all(same):
            return known[2]
    found = compute()
    _fingerprints[model] = (tensors, versions, found)
    return found


def find(fingerprint: str, dim: int, source: str | None, device: str) -> Any:
    """The model with this fingerprint: a model in this process, or one that is opened from its source.

    Args:
        fingerprint: fingerprint of the model.
        dim: its number of dimensions.
        source: the file, run folder or pretrained model that it came from, if known.
        device: device of the model when it was pickled; the CPU is used if there is no such device.
    """
    for model in [*_alive]:
        # A model that is being built has no attributes yet.
        if getattr(model, "dim", None) == dim and model.fingerprint() == fingerprint:
            return model
    if source is None:
        return UnknownModel(fingerprint, source, "it was never saved to a file")
    try:
        model = _open(source, fingerprint, device)
    except (OSError, ValueError) as error:
        return UnknownModel(fingerprint, source, str(error).rstrip("."))
    _opened[fingerprint] = model
    while len(_opened) > _OPENED:
        _opened.popitem(last=False)
    return model


def _open(source: str, fingerprint: str, device: str) -> Any:
    usable = device == "cpu" or (torch.device(device).index or 0) < torch.cuda.device_count()
    for checkpoint in ("last", "best") if Path(source).is_dir() else ("last",):
        model = lazy_open.opener(source, checkpoint=checkpoint, device=device if usable else "cpu").model
        if model.fingerprint() == fingerprint:
            return model
    raise ValueError(f"{source} now holds another model, {model.fingerprint()}")


def on_device(model: Any, device: torch.device | str) -> Any:
    """The model on a device: the model itself, one in this process with the same weights, or a copy."""
    wanted = torch.empty(0, device=device).device
    if model.device == wanted:
        return model
    fingerprint = model.fingerprint()
    for other in [*_alive]:
        alike = getattr(other, "dim", None) == model.dim and other.device == wanted
        if alike and other.fingerprint() == fingerprint:
            return other
    return copy.deepcopy(model).to(wanted)
