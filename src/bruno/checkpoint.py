"""Models and posteriors as files: safetensors with a JSON header. Nothing is unpickled."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from bruno import known_models
from bruno.checks import check_omitted
from bruno.config import ModelConfig, from_dict, to_dict
from bruno.data.archives import reason
from bruno.files import atomic_write, check_regular, parse_json, raw_bytes
from bruno.flow.compression import compress, restore
from bruno.model import Bruno, Posterior
from bruno.process import Evidence
from bruno.text import is_utf8

_FORMAT = 1
_EVIDENCE = ("count", "mean", "scatter")
_CHECKSUM = "checksum of all"


def save(
    thing: Bruno | Posterior,
    path: str | Path,
    *,
    half: bool = False,
    int8: bool = False,
    about: dict[str, Any] | None = None,
) -> None:
    """Write a model or a posterior to a file, atomically.

    Args:
        thing: a model that was built from a config, or a posterior of any model.
        path: the file.
        half: store the weights of a model's flow in half precision; loading restores the dtype of the model.
        int8: store most weights of the flow as 8-bit integers, and the others in half precision; see
            `bruno.flow.compression`.
        about: metadata of a model, ready for JSON; `load_with_metadata` returns it.
    """
    if isinstance(thing, Posterior):
        check_omitted("`thing` is a posterior, not a model;", half=half, int8=int8, about=about)
        evidence = thing.evidence
        tensors = {name: getattr(evidence, name) for name in _EVIDENCE}
        header: dict[str, Any] = {
            "kind": "posterior",
            "model": thing.model.fingerprint(),
            "source": thing.model.source,
        }
    elif isinstance(thing, Bruno):
        if thing.config is None:
            raise ValueError(
                "`thing` must be a model built from a config (Bruno.from_config); this one has its own flow. "
                "Save its state_dict() instead."
            )
        if half and int8:
            raise ValueError(
                "`half` and `int8` cannot be combined; `int8` is the smaller one. Omit one of them."
            )
        tensors = thing.state_dict()
        if half or int8:  # the process stays as it is: it is small, and its parameters range widely
            short = {n for n, _ in thing.named_parameters() if n.startswith("flow.")}
            compressed = compress(tensors) if int8 else {}
            tensors = {n: t.half() if n in short else t for n, t in tensors.items()} | compressed
        header = {"kind": "model", "config": to_dict(thing.config), "about": about or {}}
    else:
        raise TypeError(f"`thing` must be a Bruno or a Posterior; got {type(thing).__name__}.")
    write(Path(path), tensors, header)
    if isinstance(thing, Bruno) and not (half or int8):
        thing.source = str(Path(path).resolve())  # where its posteriors find it again


@overload
def load(
    path: str | Path,
    *,
    model: None = None,
    device: torch.device | str | None = None,
    unchecked: bool = False,
) -> Bruno | Any: ...  # a posterior, for the file of one


@overload
def load(
    path: str | Path, *, model: Bruno, device: torch.device | str | None = None, unchecked: bool = False
) -> Posterior: ...


def load(
    path: str | Path,
    *,
    model: Bruno | None = None,
    device: torch.device | str | None = None,
    unchecked: bool = False,
) -> Bruno | Posterior:
    """Read a file that `save` wrote: a model or a posterior.

    A model is returned frozen (requires_grad=False), so that results keep no graph; call
    `model.requires_grad_()` to train it.

    Args:
        path: the file.
        model: for a posterior, the model that made it. By default, the loaded model with the same
            fingerprint, or else the file or run folder that the model came from.
        device: where to put the result; by default the CPU, or the device of `model`.
        unchecked: also load a file without a checksum.
    """
    where = device or ("cpu" if model is None else model.device)
    tensors, header = read(Path(path), where, unchecked=unchecked)
    if model is None:
        if header["kind"] != "posterior":
            return _loaded(path, tensors, header, where).model
        model = _model_of(path, tensors, header, str(where))
    if header["kind"] == "model":
        raise ValueError(f"`model` must be omitted: {path} is itself a model, not a posterior.")
    if header["kind"] != "posterior":
        raise _wrong_kind(path, header)
    if model.fingerprint() != header.get("model"):
        raise ValueError(
            f"`model` must be the one that made the posterior {path}, {header.get('model')}; "
            f"got {model.fingerprint()}."
        )
    if not tensors.keys() >= set(_EVIDENCE):  # a state has further tensors
        raise ValueError(f"{path}: must hold count, mean and scatter; got {', '.join(tensors) or 'nothing'}.")
    model = known_models.on_device(model, where) if device else model
    evidence = (tensors[name].to(model.device) for name in _EVIDENCE)
    try:
        return Posterior(model, Evidence.checked(model.dim, *evidence))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


class Loaded(NamedTuple):
    """A model from a file, and the metadata that was saved with it."""

    model: Bruno
    about: dict[str, Any]


def load_with_metadata(path: str | Path, device: torch.device | str = "cpu") -> Loaded:
    """Read a model file once: the model as `load` returns it, and the `about` that was saved with it."""
    return _loaded(path, *read(Path(path), device), device)


def _loaded(
    path: str | Path, tensors: dict[str, torch.Tensor], header: dict[str, Any], device: torch.device | str
) -> Loaded:
    if header["kind"] == "posterior":
        made_by = header.get("model")
        raise ValueError(f"`model` must be given to load the posterior {path}, made by {made_by}.")
    if header["kind"] != "model":
        raise _wrong_kind(path, header)
    model = Bruno.from_config(from_dict(ModelConfig, header.get("config") or {}), seed=0)  # replaced below
    dtype = tensors["process.mean"].dtype if "process.mean" in tensors else torch.float
    if dtype not in (torch.float, torch.double):
        raise ValueError(f"{path}: must hold weights in float32 or float64; got {dtype}.")
    tensors |= restore(tensors, dtype)
    tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items() if tensor.dtype == torch.half}
    # Tensors are assigned, not copied, as some buffers have their own precision.
    load_weights(model.to(dtype), tensors, path, assign=True)
    model.source = str(Path(path).resolve())
    about = header.get("about", {})
    return Loaded(model.to(device).requires_grad_(False), about if isinstance(about, dict) else {})


def _model_of(
    path: str | Path, tensors: dict[str, torch.Tensor], header: dict[str, Any], device: str
) -> Bruno:
    """The model that made a posterior, if it is in this process or its file can be found."""
    name, source = header.get("model"), header.get("source")
    if not isinstance(name, str) or "mean" not in tensors or not isinstance(source, str | None):
        raise ValueError(f"`model` must be given to load the posterior {path}, made by {name}.")
    found = known_models.find(name, tensors["mean"].shape[-1], source, device)
    if isinstance(found, known_models.UnknownModel):
        raise ValueError(
            f"`model` must be given to load the posterior {path}, made by {name}: {found.reason}."
        )
    model: Bruno = found
    return model


def load_weights(
    model: Bruno, weights: dict[str, torch.Tensor], path: str | Path, *, assign: bool = False
) -> None:
    """Load weights into a model; raises ValueError unless they are the weights of its config."""
    wanted = model.state_dict()
    wrong = sorted(wanted.keys() ^ weights.keys()) or [
        name
        for name, tensor in weights.items()
        if tensor.shape != wanted[name].shape
        or tensor.is_floating_point() != wanted[name].is_floating_point()
        or tensor.is_complex()
    ]
    if wrong:
        raise ValueError(f"{path}: must hold the weights of its config; {wrong[0]!r} is not one of them.")
    model.load_state_dict(weights, assign=assign)


def read_about(path: str | Path) -> dict[str, Any]:
    """The metadata that was saved with a model; to load the model as well, use `load_with_metadata`."""
    about = read(Path(path), "cpu")[1].get("about", {})
    return about if isinstance(about, dict) else {}


def _wrong_kind(path: str | Path, header: dict[str, Any]) -> ValueError:
    kinds = {"training": "the state of a training run", "index": "the index of a collection"}
    kind = kinds.get(header["kind"], f"of kind {header['kind']!r}")
    return ValueError(f"`path` must be a model or a posterior; {path} is {kind}.")


def write(path: Path, tensors: dict[str, torch.Tensor], header: dict[str, Any]) -> None:
    """Write tensors and a header to a file, atomically."""
    # Contiguous copies: safetensors takes no others.
    here = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    header = {"format": _FORMAT, **header}
    # A single entry makes equal contents equal files: safetensors writes several entries in random order.
    metadata = {"bruno": json.dumps({**header, _CHECKSUM: _checksum(here, header)})}
    with atomic_write(path) as beside:
        mode = beside.stat().st_mode  # safetensors makes its files private
        try:
            save_file(here, beside, metadata)
        except SafetensorError as error:  # raised for a full disk, too
            raise OSError(f"{path}: could not be written: {error}") from error
        beside.chmod(mode)


@contextmanager
def _opened(path: Path) -> Iterator[str]:
    """A name by which safetensors can open a file, as it rejects names that are not UTF-8."""
    if is_utf8(str(path)):
        yield str(path)
        return
    with path.open("rb") as file:
        yield f"/dev/fd/{file.fileno()}"


@contextmanager
def parsing(path: Path, rule: str) -> Iterator[None]:
    """Turn any error in the contents of a file into a ValueError with the path and the rule."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: must be {rule}; it is not, or is damaged: {reason(error)}.") from error


def require(valid: bool, name: str, rule: str) -> None:
    """Raise ValueError unless a part of a file is valid."""
    if not valid:
        raise ValueError(f"`{name}` must be {rule}")


def checked_tensor(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> torch.Tensor:
    """The tensor; raises ValueError unless it is finite floats of this shape, with None for any size."""
    fits = tensor.ndim == len(shape) and all(
        wanted in (None, size) for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    require(fits and tensor.is_floating_point(), name, f"floating point of shape {shape}")
    require(bool(tensor.isfinite().all()), name, "finite")
    return tensor


def checked_whole(name: str, value: Any, least: int = 0) -> int:
    """The value; raises ValueError unless it is a whole number from `least` to 2**53."""
    require(type(value) is int and least <= value <= 2**53, name, f"a whole number of at least {least}")
    return int(value)


def _checksum(tensors: dict[str, torch.Tensor], header: dict[str, Any]) -> int:
    """The checksum of the header and of the names, types, shapes and values of all tensors."""
    result = zlib.crc32(json.dumps(header).encode())
    for name, tensor in sorted(tensors.items()):
        result = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), result)
        result = zlib.crc32(raw_bytes(tensor), result)
    return result


def read(
    path: Path, device: torch.device | str, *, unchecked: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the header that `write` wrote; `unchecked` also accepts a file without a checksum."""
    if not path.exists():
        raise FileNotFoundError(f"`path` must be a file that bruno.save wrote; {path} does not exist.")
    check_regular(path)
    with path.open("rb"):  # the errors of safetensors do not name the file
        pass
    try:
        with _opened(path) as name, safe_open(name, "pt", device=str(device)) as file:
            header = parse_json((file.metadata() or {}).get("bruno", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(f"`path` must be a file that bruno.save wrote; {path}: {error}.") from error
    if not isinstance(header, dict) or header.get("format") != _FORMAT:
        raise ValueError(f"`path` must be a file that bruno.save wrote, of format {_FORMAT}; {path} is not.")
    if not isinstance(header.get("kind"), str):
        raise ValueError(f"`path` must be a file that bruno.save wrote; {path} has no kind.")
    expected = header.pop(_CHECKSUM, None)
    if expected is None and not unchecked:
        raise ValueError(
            f"`path` must have a checksum; {path} has none. If you trust it, load it with unchecked=True."
        )
    if expected not in (None, _checksum(tensors, header)):
        raise ValueError(f"`path` must be as bruno.save wrote it; {path} is damaged: checksum mismatch.")
    return tensors, header
