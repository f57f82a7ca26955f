"""The part of a predictive distribution that depends on the process alone: tables by position and dimension.

With N elements seen, w = e + N·r and k = e·(w + r)/w, the location is m0 + gain·Σ (z_j − m0) with gain = r/w,
and the part of log p that does not depend on data is −½ log 2πk for a Gaussian process, and for a Student-t
process g((ν+N)/2) − ½ log(πk(ν−2)) with g(x) = log Γ(x+½) − log Γ(x).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bruno.process.distributions import log_gamma_half_step, log_gamma_half_step_slope


class Parameters(NamedTuple):
    """The parameters in the formulas, each (dim,) and in float64."""

    mean: Tensor  # m0
    r: Tensor  # covariance of two elements
    e: Tensor  # variance of an element, minus r
    excess: Tensor | None = None  # ν − 2, more accurate near 0 than ν; None if Gaussian


class Coefficients(NamedTuple):
    """Tables that do not depend on the data; (n, dim), or with batch axes if counts differ."""

    gain: Float[Tensor, "*positions dim"]  # float64
    inv_std: Float[Tensor, "*positions dim"]  # 1/sqrt(k)
    constant: Float[Tensor, "*positions"]  # summed over dimensions


def without_copies(count: Tensor) -> Tensor:
    """A count stored once for the whole batch (as by `Evidence.of`) as a single number."""
    shared = count.ndim > 0 and count.numel() > 0 and not any(count.stride())
    return count[(0,) * count.ndim] if shared else count


def column(count: Tensor) -> Tensor:
    """A count in float64, ready to broadcast over dimensions."""
    return without_copies(count).double().unsqueeze(-1)


def seen_before(count: Tensor, begin: int, n: int) -> Float[Tensor, "*counts n"]:
    """N before each of n elements, in float64."""
    return count.double().unsqueeze(-1) + torch.arange(
        begin, begin + n, dtype=torch.double, device=count.device
    )


def coefficients_for(
    seen: Float[Tensor, "*counts n"], parameters: Parameters, weight: Tensor, dtype: torch.dtype
) -> Coefficients:
    """The tables for elements with N others before them, computed in float64."""
    _, r, e, excess = parameters
    seen_and_next = torch.cat([seen, seen[..., -1:] + 1], -1)
    w = e + seen_and_next.unsqueeze(-1) * r
    k = e * (w[..., 1:, :] / w[..., :-1, :])
    weight = weight.double()
    if excess is None:
        constant = -0.5 * (2 * math.pi * k).log() @ weight
    else:
        # ½ log A is split in two: ½ log(ν − 2) here and ½ log(A/(ν − 2)) with the data.
        volume = (math.pi * excess.detach() * k).log() @ weight
        constant = _log_gamma_half_steps(2 + excess, seen, weight) - 0.5 * volume
    return Coefficients(r / w[..., :-1, :], k.rsqrt().to(dtype), constant.to(dtype))


def coefficients_backward(
    seen: Float[Tensor, "*counts n"],
    parameters: Parameters,
    weight: Tensor,
    scaling: Float[Tensor, "*positions dim"],
    grad_gain: Float[Tensor, "*positions dim"],
    grad_constant: Float[Tensor, "*positions"],
) -> list[Tensor | None]:
    """The gradients of r, e and ν − 2 from those of the tables; scaling is inv_std times its gradient."""
    _, r, e, excess = parameters
    weight, grad_constant, seen_column = weight.double(), grad_constant.double(), seen.unsqueeze(-1)
    w = torch.addcmul(e, seen_column, r)
    by_log_k = -0.5 * (scaling + grad_constant.unsqueeze(-1) * weight)
    direct = grad_gain / w
    by_w = torch.addcmul(by_log_k, direct, r).div_(-w)
    by_next_w = by_log_k / (w + r)
    to_r = direct.addcmul_(seen_column, by_w).addcmul_(seen_column + 1, by_next_w)
    to_e = (by_log_k / e).add_(by_w).add_(by_next_w)
    grads = [to_r.sum_to_size(r.shape), to_e.sum_to_size(e.shape)]
    if excess is None:
        return [*grads, None]
    dof = 2 + excess
    sign = _signs(seen)
    signed = sign * grad_constant
    whole = signed.sum(-1, keepdim=True)
    by_first = log_gamma_half_step_slope((dof + seen[..., :1]) / 2) * (0.5 * whole)
    by_logs = (sign * (whole - signed.cumsum(-1))).unsqueeze(-1) / (dof + seen_column)
    return [*grads, weight * (by_first.sum_to_size(dof.shape) - by_logs.sum_to_size(dof.shape))]


def _log_gamma_half_steps(dof: Tensor, seen: Tensor, weight: Tensor) -> Float[Tensor, "*counts n"]:
    """Σ_d weight_d · g((ν_d + N)/2) for consecutive N, where g(x) = log Γ(x+½) − log Γ(x).

    g(x + ½) = log x − g(x), so the first N needs gamma functions and the others an alternating sum.
    """
    first = log_gamma_half_step((dof + seen[..., :1]) / 2) @ weight
    logs = ((dof + seen[..., :-1].unsqueeze(-1)) / 2).log() @ weight
    sign = _signs(seen)
    return sign * torch.cat([first.unsqueeze(-1), -sign[:-1] * logs], -1).cumsum(-1)


def _signs(seen: Tensor) -> Float[Tensor, " n"]:
    """The alternating signs +1, −1, +1 and so on."""
    return 1 - 2 * (torch.arange(seen.shape[-1], dtype=seen.dtype, device=seen.device) % 2)
