"""Checks of the arguments of the process, with errors that say how to fix them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bruno.arrays import ArrayLike, as_real_tensor


def check_observations(z: ArrayLike, dim: int | None = None, *, device: torch.device | None = None) -> Tensor:
    """`z` as a floating-point tensor of shape (*batch, n, dim) with n ≥ 1; arrays go to `device`."""
    z = as_real_tensor(z, "z", device=device)
    if z.ndim < 2:
        raise ValueError(
            f"`z` must have shape (*batch, n, dim); got {tuple(z.shape)}. "
            "A single observation is z[..., None, :]."
        )
    if dim is not None and z.shape[-1] != dim:
        raise ValueError(f"`z` must have {dim} dimensions last; got shape {tuple(z.shape)}.")
    if 0 in z.shape:
        raise ValueError(
            f"`z` must hold at least one observation; got shape {tuple(z.shape)}. "
            "The evidence of no observations is Evidence.empty(dim)."
        )
    return z


def check_type(name: str, value: Any, *wanted: type) -> None:
    """Raise unless `value` is an instance of one of the classes."""
    if not isinstance(value, wanted):
        names = " or ".join(kind.__name__ for kind in wanted)
        raise TypeError(f"`{name}` must be of type {names}; got {type(value).__name__}.")


def check_generator(generator: Any) -> None:
    """Raise unless `generator` is None or a generator of torch."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"`generator` must be a torch.Generator; got {type(generator).__name__}. "
            "One with a seed is torch.Generator().manual_seed(0)."
        )


def check_range(name: str, values: Tensor, valid: Tensor, rule: str) -> None:
    """Raise unless all values of a parameter are `valid`; `rule` says which are."""
    if not valid.all():
        raise ValueError(f"`{name}` must be {rule}; got {values[~valid][0].item():g}.")


def check_finite(z: Tensor, name: str) -> Tensor:
    """Raise if `z` has NaN or infinity.

    This synchronises with the GPU, so the check is skipped while a graph is compiled or captured.
    """
    if may_look_at_values(z) and not torch.isfinite(z).all():
        place = (~torch.isfinite(z)).nonzero()[0].tolist()
        raise ValueError(f"`{name}` must be finite; got {z[tuple(place)].item()} at index {tuple(place)}.")
    return z


def may_look_at_values(z: Tensor) -> bool:
    """Whether Python may branch on the values of `z` here."""
    return not (is_traced() or (z.is_cuda and torch.cuda.is_current_stream_capturing()))


def is_traced() -> bool:
    """Whether torch.compile or a torch.func transform is active: neither supports our own backward passes."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def check_devices(reference: Tensor, /, **others: Tensor) -> None:
    """Raise unless all tensors are on the device of the reference."""
    for name, other in others.items():
        if other.device != reference.device:
            raise ValueError(
                f"`{name}` must be on the same device as the rest, {reference.device}; got {other.device}. "
                f"Move it with {name}.to({str(reference.device)!r})."
            )


def widened(z: Tensor) -> Tensor:
    """`z`, converted to float32 if it is bfloat16 or float16, which are too short for sums of squares."""
    return z.float() if z.dtype in (torch.bfloat16, torch.float16) else z
