"""Muon (Jordan et al. 2024): AdamW, with orthogonalised updates of matrices."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

# Coefficients of the quintic p(s) = a·s + b·s³ + c·s⁵; iterating it moves every s in (0, 1] close to 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5
_MOMENTUM = 0.95
_ADAM_SIZE = 0.2  # root mean square of a typical update of Adam, as a fraction of the learning rate


class Muon(torch.optim.AdamW):
    """Updates parameter groups with `orthogonal=True` by orthogonalised momentum, all others like AdamW.

    With the gradient G of a matrix, its momentum M and the singular value decomposition U S Vᵀ of Nesterov's
    update, a step is::

        M <- β M + (1 − β) G,     U S Vᵀ = β M + (1 − β) G
        W <- (1 − rate·decay) W − rate · 0.2 · sqrt(max(rows, columns)) · U Vᵀ

    All directions of a matrix learn at the same rate, however small their gradients are. The factor before
    U Vᵀ gives updates the size of Adam's, so that Adam's learning rates and weight decay can be kept. The
    kernel of a convolution is treated as a matrix of output channels by all its inputs.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take one step; if `found_inf` is set and true, change nothing, as a fused AdamW does.

        `closure` computes the gradients and returns the loss, which is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        for group in groups:
            if group.get("orthogonal"):
                self._step_matrices(group)
        self.param_groups = [group for group in groups if not group.get("orthogonal")]
        try:
            super().step()
        finally:
            self.param_groups = groups
        return loss

    def _step_matrices(self, group: dict[str, Any]) -> None:
        """Update all matrices of one shape together, as there are dozens of small ones."""
        by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
        for weight in group["params"]:
            if weight.grad is not None:
                by_shape[weight.shape].append(weight)
        for shape, weights in by_shape.items():
            momenta = [self._momentum(weight) for weight in weights]
            gradient = torch.stack([weight.grad for weight in weights])  # type: ignore[misc]
            rate, before = group["lr"], torch.stack(momenta)
            momentum = before.lerp(gradient, 1 - _MOMENTUM)
            size = _ADAM_SIZE * math.sqrt(max(shape[0], shape[1:].numel()))
            update = size * orthogonalised(gradient.lerp(momentum, _MOMENTUM).flatten(2)).view_as(gradient)
            found_inf = getattr(self, "found_inf", None)
            if found_inf is not None:
                rate = rate * (1 - found_inf)
                update = torch.where(found_inf > 0, 0.0, update)
                momentum = torch.where(found_inf > 0, before, momentum)
            torch._foreach_copy_(momenta, list(momentum))
            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
            torch._foreach_sub_(weights, list(rate * update))

    def _momentum(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if not state:  # AdamW restores only states with a step
            state |= {"step": torch.zeros((), device=weight.device), "momentum": torch.zeros_like(weight)}
        momentum: Tensor = state["momentum"]
        return momentum


def orthogonalised(x: Float[Tensor, "count rows columns"]) -> Float[Tensor, "count rows columns"]:
    """U Vᵀ of the singular value decompositions U S Vᵀ, approximately: singular values become 0.7 to 1.2.

    Newton-Schulz iterations: x <- a·x + b·(x xᵀ) x + c·(x xᵀ)² x, in bfloat16 on a GPU.
    """
    y = x.bfloat16() if x.is_cuda else x
    wide = y if y.shape[1] <= y.shape[2] else y.mT  # the smaller product
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(_ITERATIONS):
        square = wide @ wide.mT
        # Three kernels per iteration: a step launches hundreds of small kernels of a few microseconds.
        factor = torch.baddbmm(square, square, square, beta=_B, alpha=_C)
        wide = torch.baddbmm(wide, factor, wide, beta=_A)
    result: Tensor = wide if y.shape[1] <= y.shape[2] else wide.mT
    return result.to(x.dtype)
