"""What every function of the process asks of its tensors, with errors that say how to comply."""

from __future__ import annotations

import torch
from torch import Tensor


def check_observations(z: Tensor, dim: int | None = None, name: str = "z") -> Tensor:
    """`z` is floating point and of shape (*batch, n, dim) with n ≥ 1."""
    if not isinstance(z, Tensor):
        raise TypeError(f"`{name}` must be a torch.Tensor; got {type(z).__name__}.")
    if not z.is_floating_point():
        raise TypeError(f"`{name}` must be floating point; got {z.dtype}. Use {name}.float().")
    if z.ndim < 2:
        raise ValueError(
            f"`{name}` must have shape (*batch, n, dim); got {tuple(z.shape)}. "
            f"A single observation is {name}.unsqueeze(-2)."
        )
    if dim is not None and z.shape[-1] != dim:
        raise ValueError(f"`{name}` must have {dim} dimensions last; got shape {tuple(z.shape)}.")
    if 0 in z.shape:
        raise ValueError(
            f"`{name}` must hold at least one observation; got shape {tuple(z.shape)}. "
            "No observations at all are Evidence.empty(dim)."
        )
    return z


def check_finite(z: Tensor, name: str) -> Tensor:
    """`z` has no NaN and no infinity.

    The look at the values waits for the device, so it is left out where nothing may wait: while a graph
    is compiled or captured.
    """
    if may_look_at_values(z) and not torch.isfinite(z).all():
        place = (~torch.isfinite(z)).nonzero()[0].tolist()
        raise ValueError(f"`{name}` must be finite; got {z[tuple(place)].item()} at index {tuple(place)}.")
    return z


def may_look_at_values(z: Tensor) -> bool:
    """Whether Python may branch on the values of `z` here."""
    return not (is_traced() or (z.is_cuda and torch.cuda.is_current_stream_capturing()))


def is_traced() -> bool:
    """Whether torch.compile or a transform of torch.func is at work: neither sees into a backward of ours."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def check_devices(reference: Tensor, /, **others: Tensor) -> None:
    """All tensors live on the device of the reference."""
    for name, other in others.items():
        if other.device != reference.device:
            raise ValueError(
                f"`{name}` must be on the same device as the rest, {reference.device}; got {other.device}. "
                f"Move it with {name}.to({str(reference.device)!r})."
            )


def widened(z: Tensor) -> Tensor:
    """Half precision is too short for sums of squares: bfloat16 and float16 go on as float32."""
    return z.float() if z.dtype in (torch.bfloat16, torch.float16) else z
