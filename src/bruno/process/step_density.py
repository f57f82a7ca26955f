r"""The log-density of every element given the ones before it, in a handful of passes over memory.

With N elements seen, the predictive of the next one needs its *innovation*, the standardised surprise::

    t_i = (z_i − location_i)/sqrt(k_i),     location_i = m0 + gain_i · Σ_{j<i} (z_j − m0),     gain = r/w

The running sum and the location are float64: where c is close to 1, t is the small difference of two large
numbers, divided by a smaller one. A Gaussian process then has log p = −½ t² − ½ log 2πk. For a Student-t
process let A be ν − 2 + β, which grows by t² with each element; then

    log p = g((ν+N)/2) − ½ log(π k A) − ½ (ν+N+1) ℓ,     ℓ = log1p(t²/A),   g(x) = log Γ(x+½) − log Γ(x)

and because log A is log A_0 plus the sum of the earlier ℓ, *one* logarithm per element is enough:
everything else is a sum over dimensions, or depends on (N, dimension) and not on the batch.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bruno.process.checks import is_traced
from bruno.process.coefficients import (
    Coefficients,
    Parameters,
    coefficients_backward,
    coefficients_for,
    seen_before,
)
from bruno.process.evidence import exclusive_cumsum

# A set is processed in blocks of steps that fit in the cache: in our measurements, touching new memory costs
# ten times as much as computing with cached numbers. float64 work is done in smaller parts, to save memory.
_NUMBERS_IN_A_BLOCK = 2**19
_NUMBERS_IN_A_BLOCK_ON_A_GPU = 2**26  # there the number of kernels matters
_MIN_STEPS_IN_A_BLOCK = 8
_WIDE_NUMBERS = 2**16
_WIDE_NUMBERS_ON_A_GPU = 2**21


class Start(NamedTuple):
    """The contribution of earlier evidence, for each set."""

    given: Int[Tensor, "*counts"]  # N; one number, or one per set
    total: Float[Tensor, "*batch dim"]  # Σ (z_j − m0), float64
    spread: Float[Tensor, "*batch dim"] | None = None  # A_0 = ν − 2 + β; None for a Gaussian process


def step_log_prob(
    z: Float[Tensor, "*batch n dim"], start: Start, parameters: Parameters, weight: Float[Tensor, " dim"]
) -> Float[Tensor, "*batch n"]:
    """log p(z_i | start, z_<i), summed over dimensions with a weight for each, for all i at once."""
    if is_traced():  # the compiler fuses the plain formulas
        return plain_step_log_prob(z, start, parameters, weight)
    return _StepLogProb.apply(z, weight, *start, *parameters)  # type: ignore[no-any-return]


def plain_step_log_prob(z: Tensor, start: Start, parameters: Parameters, weight: Tensor) -> Tensor:
    """`step_log_prob` as plain formulas, differentiated by autograd."""
    seen = seen_before(start.given, 0, z.shape[-2])
    gain, inv_std, constant = coefficients_for(seen, parameters, weight, z.dtype)
    centred = z.double() - parameters.mean
    total = start.total.unsqueeze(-2) + exclusive_cumsum(centred)
    square = ((centred - gain * total).to(z.dtype) * inv_std).square()
    if parameters.excess is None or start.spread is None:
        return constant - 0.5 * square @ weight
    log_growth = torch.log1p(square / (start.spread.unsqueeze(-2) + exclusive_cumsum(square)))
    by_dof, plain = log_growth @ ((2 + parameters.excess).to(z.dtype) * weight), log_growth @ weight
    log_spread = _log_spread(start.spread, parameters, weight)
    return constant - 0.5 * (log_spread + by_dof + seen.to(z.dtype) * plain + plain.cumsum(-1))


def _log_spread(spread: Tensor, parameters: Parameters, weight: Tensor) -> Float[Tensor, "*batch 1"]:
    """Σ_d weight_d · log(A_d/(ν_d − 2)) at the start; this ν − 2 and that of `coefficients_for` cancel."""
    assert parameters.excess is not None
    return ((spread / parameters.excess.detach().to(spread.dtype)).log() @ weight).unsqueeze(-1)


class _StepLogProb(torch.autograd.Function):
    """`plain_step_log_prob` in blocks, with its own backward pass.

    The memory of a block is reused for the next. The backward pass recomputes each block from the running
    sums at its start, unless there is only one block. The gradient of a running sum is a running sum from the
    other end.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, weight: Tensor, *rest: Tensor | None) -> Tensor:
        start, parameters = Start(*rest[:3]), Parameters(*rest[3:])  # type: ignore[arg-type]
        n = z.shape[-2]
        steps = _steps_in_a_block(z)
        work = _Workspace(z[..., :steps, :], parameters.excess is not None)
        total, spread = start.total, start.spread
        # Allocated first: small tensors that stay would fragment the memory that the blocks reuse.
        result = z.new_empty(z.shape[:-1])
        begins = range(0, n, steps)
        starts = _Starts(z, len(begins) - 1 if any(ctx.needs_input_grad) else 0, spread is not None)
        for index, begin in enumerate(begins):
            block = z[..., begin : begin + steps, :]
            if index:
                starts.keep(index, total, spread)
            seen = seen_before(start.given, begin, block.shape[-2])
            tables = coefficients_for(seen, parameters, weight, z.dtype)
            filled = work.fill(block, total, spread, parameters.mean, tables)
            if spread is None:
                surprise = filled.innovation.square() @ weight
            else:
                assert parameters.excess is not None
                by_dof = filled.log_growth @ ((2 + parameters.excess).to(z.dtype) * weight)
                plain = filled.log_growth @ weight
                log_spread = _log_spread(spread, parameters, weight)
                surprise = log_spread + by_dof + seen.to(z.dtype) * plain + plain.cumsum(-1)
                spread = filled.spread[..., -1, :]
            torch.sub(tables.constant, surprise, alpha=0.5, out=result[..., begin : begin + steps])
            if begin + steps < n:  # the workspace is about to be reused
                total, spread = filled.last_total.clone(), None if spread is None else spread.clone()
        ctx.save_for_backward(z, weight, *start, *parameters)
        ctx.starts, ctx.steps = starts, steps
        ctx.tables = tables if len(begins) == 1 else None
        ctx.work, ctx.work_is_current = work, len(begins) == 1
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, weight, *rest = ctx.saved_tensors
        start, parameters = Start(*rest[:3]), Parameters(*rest[3:])
        if torch.is_grad_enabled():  # a gradient of the gradient is wanted: leave it to autograd
            result = plain_step_log_prob(z, start, parameters, weight)
            needed = [t for t in ctx.saved_tensors if t is not None and t.requires_grad]
            grads = iter(torch.autograd.grad(result, needed, grad, create_graph=True))
            return tuple(
                next(grads) if t is not None and t.requires_grad else None for t in ctx.saved_tensors
            )
        grad_z = torch.empty_like(z)
        to_parameters: list[Tensor | None] = [None, None, None]
        carry = _Carry()
        for index, begin in reversed(list(enumerate(range(0, z.shape[-2], ctx.steps)))):
            block, out = (t[..., begin : begin + ctx.steps, :] for t in (z, grad_z))
            block_grad = grad[..., begin : begin + ctx.steps]
            seen = seen_before(start.given, begin, block.shape[-2])
            tables = ctx.tables or coefficients_for(seen, parameters, weight, z.dtype)
            if ctx.work_is_current:
                filled = ctx.work
            else:
                begun = ctx.starts.at(index) if index else start[1:]
                filled = ctx.work.fill(block, *begun, parameters.mean, tables)
            if parameters.excess is None:
                torch.mul(block_grad.unsqueeze(-1), -weight, out=out).mul_(filled.innovation)
            else:
                dof = (2 + parameters.excess).to(z.dtype)
                by_dof = _through_spread(filled, block_grad, seen, dof, weight, carry, out)
                to_parameters[2] = _plus(to_parameters[2], by_dof)
            to_tables = _through_innovations(filled, tables, carry, out)
            grad_constant = _sum_to(block_grad, tables.constant.shape)
            found = coefficients_backward(seen, parameters, weight, *to_tables, grad_constant)
            to_parameters = [_plus(a, b) for a, b in zip(to_parameters, found, strict=True)]
        # log p + ½ log A_0 depends on A_0 and all t² through their ratios alone. By Euler's theorem its
        # gradient by A_0 is −Σ t·∂/∂t / 2A_0; summing over A_0, A_1, … would cancel.
        grad_spread = None
        if start.spread is not None:
            grad_spread = -0.5 * (carry.scaling + grad.sum(-1, keepdim=True) * weight) / start.spread
        ctx.work_is_current = False  # overwritten; another backward pass fills it again
        return grad_z, None, None, carry.total, grad_spread, None, *to_parameters


class _Workspace:
    """Memory for one block of steps, and the values that its backward pass needs."""

    def __init__(self, z: Tensor, student: bool) -> None:
        *batch, n, dim = z.shape
        self.total = torch.empty_like(z)  # Σ_{j<i} (z_j − m0)
        self.last_total = torch.empty((*batch, dim), dtype=torch.double, device=z.device)  # to the end
        self.innovation = torch.empty_like(z)  # t
        if student:
            self.spread = z.new_empty((*batch, n + 1, dim))  # A_0..A_n
            self.log_growth = torch.empty_like(z)  # ℓ
        self.rows = _rows(z)
        self.wide = torch.empty((2, *z[self.rows[0]].shape), dtype=torch.double, device=z.device)

    def fill(
        self, z: Tensor, total: Tensor, spread: Tensor | None, mean: Tensor, tables: Coefficients
    ) -> _Workspace:
        work = self._fitted_to(z.shape[-2])
        for some in self.rows:
            gain = tables.gain if tables.gain.ndim == 2 else tables.gain[some]
            work.fill_innovations(some, z[some], total[some], mean, gain)
        innovation = work.innovation.mul_(tables.inv_std)
        if spread is not None:
            work.spread[..., 0, :] = spread
            torch.mul(innovation, innovation, out=work.spread[..., 1:, :])
            running_sum_(work.spread)
            torch.mul(innovation, innovation, out=work.log_growth)
            work.log_growth.div_(work.spread[..., :-1, :]).log1p_()
        return work

    def fill_innovations(
        self, some: slice | EllipsisType, z: Tensor, total: Tensor, mean: Tensor, gain: Tensor
    ) -> None:
        """z_i − location_i and the running sums of some sets, computed in float64."""
        size = ... if some is ... else slice(len(z))
        running, residual = self.wide[0][size], self.wide[1][size]
        residual.copy_(z)
        if z.device.type != "cpu" or mean.any():  # m0 is usually 0, which saves a pass over memory
            residual -= mean
        running[..., 0, :] = total
        running[..., 1:, :] = residual[..., :-1, :]
        running_sum_(running)
        self.last_total[some] = running[..., -1, :] + residual[..., -1, :]
        self.innovation[some] = residual.addcmul_(running, gain, value=-1)
        self.total[some] = running

    def _fitted_to(self, n: int) -> _Workspace:
        """The workspace for n steps: the last block may have fewer than the others."""
        if n == self.total.shape[-2]:
            return self
        fitted = object.__new__(_Workspace)
        vars(fitted).update(vars(self))
        for name in ("total", "innovation", "spread", "log_growth", "wide"):
            if name in vars(self):
                setattr(fitted, name, getattr(self, name)[..., : n + (name == "spread"), :])
        return fitted


class _Starts:
    """The running sums at the start of each block after the first, for the backward pass."""

    def __init__(self, z: Tensor, blocks: int, student: bool) -> None:
        shape = (blocks, *z.shape[:-2], z.shape[-1])
        self.total = torch.empty(shape, dtype=torch.double, device=z.device)
        self.spread = z.new_empty(shape) if student else None

    def keep(self, index: int, total: Tensor, spread: Tensor | None) -> None:
        if len(self.total):
            self.total[index - 1] = total
            if self.spread is not None:
                self.spread[index - 1] = spread  # type: ignore[assignment]

    def at(self, index: int) -> tuple[Tensor, Tensor | None]:
        return self.total[index - 1], None if self.spread is None else self.spread[index - 1]


class _Carry:
    """Gradients that later blocks pass to earlier ones, and the first block to the start."""

    total: Tensor | None = None  # gradient of Σ (z_j − m0)
    spread: Tensor | None = None  # twice the gradient of A through later elements
    scaling: Tensor | None = None  # Σ t · gradient of t
    next_grad: Tensor | None = None  # G of the element after the block


def _through_spread(
    work: _Workspace, grad: Tensor, seen: Tensor, dof: Tensor, weight: Tensor, carry: _Carry, out: Tensor
) -> Float[Tensor, " dim"]:
    """Write the gradient of t to `out`, and that of A at the start to the carry; return that of ν.

    With G the incoming gradient, the loss depends on log A_i by −½ (ν + N_i + 1)(G_i − G_{i+1}), from the
    density of this element and of the next; t_i enters A_i and every later A.
    """
    power = -(dof + (seen + 1).to(grad.dtype).unsqueeze(-1)) * weight
    change = grad.clone()
    change[..., :-1].sub_(grad[..., 1:])
    if carry.next_grad is not None:
        change[..., -1].sub_(carry.next_grad)
    slope = torch.mul(change.unsqueeze(-1), power, out=out).div_(work.spread[..., 1:, :])
    if carry.spread is not None:
        slope[..., -1, :].add_(carry.spread)
    running_sum_(slope, backwards=True)  # now twice the gradient of t_i²
    carry.spread = slope[..., 0, :].clone()
    carry.next_grad = grad[..., 0]
    by_dimension = grad.reshape(-1) @ work.log_growth.reshape(-1, weight.shape[0])
    slope.mul_(work.innovation)
    return -0.5 * weight * by_dimension


def _through_innovations(
    work: _Workspace, tables: Coefficients, carry: _Carry, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """Turn the gradient of t into the gradient of z, in place; store the total's gradient in the carry.

    Returns the inputs of the tables' gradients: t times the gradient of t, and the gradient of gain.
    """
    gain, inv_std, _ = tables
    scaling = work.innovation.mul_(grad)
    carry.scaling = _plus(carry.scaling, scaling.sum(-2))
    by_inv_std = _sum_to(scaling, inv_std.shape).to(torch.double, copy=True)  # its memory is reused
    residual = grad.mul_(inv_std)  # the gradient of z_i − location_i
    grad_gain = -_sum_to(work.total.mul_(residual), gain.shape).double()
    # z_j enters every later location: add Σ_{i>j} −gain_i · residual_i.
    later = torch.mul(residual, -gain.to(residual.dtype), out=work.innovation)
    if carry.total is not None:
        later[..., -1, :].add_(carry.total)
        grad[..., -1, :].add_(carry.total)
    running_sum_(later, backwards=True)
    grad[..., :-1, :].add_(later[..., 1:, :])
    carry.total = later[..., 0, :].clone()
    return by_inv_std, grad_gain


def running_sum_(x: Float[Tensor, "*batch n dim"], backwards: bool = False) -> None:
    """Cumulative sum over the elements of a set, in place, from the first (or backwards from the last).

    On a CPU `torch.cumsum` processes one column after the other. Adding whole rows takes a third of the
    time: first within √n blocks of √n rows, all blocks at once, then from block to block.
    """
    n = x.shape[-2]
    if x.device.type != "cpu":
        x.copy_(x.flip(-2).cumsum(-2).flip(-2) if backwards else x.cumsum(-2))
        return
    rows = math.isqrt(n)
    whole = n - n % rows
    order = reversed if backwards else iter
    last = 0 if backwards else -1
    blocks = (x[..., n - whole :, :] if backwards else x[..., :whole, :]).unflatten(-2, (-1, rows))
    rest = x[..., : n - whole + 1, :] if backwards else x[..., whole - 1 :, :]
    for before, row in pairwise(order(blocks.unbind(-2))):
        row.add_(before)
    for before, block in pairwise(order(blocks.unbind(-3))):
        block.add_(before[..., last, :].unsqueeze(-2))
    for before, row in pairwise(order(rest.unbind(-2))):
        row.add_(before)


def _steps_in_a_block(z: Tensor) -> int:
    n, numbers_a_step = z.shape[-2], z[..., 0, :].numel()
    numbers = _NUMBERS_IN_A_BLOCK if z.device.type == "cpu" else _NUMBERS_IN_A_BLOCK_ON_A_GPU
    steps = max(_MIN_STEPS_IN_A_BLOCK, numbers // numbers_a_step)
    return n if n < 2 * steps else steps


def _rows(z: Tensor) -> list[slice | EllipsisType]:
    """Slices of the batch, small enough to limit the memory of float64 work."""
    if z.ndim != 3:
        return [...]
    numbers = _WIDE_NUMBERS if z.device.type == "cpu" else _WIDE_NUMBERS_ON_A_GPU
    rows = max(1, numbers // z[0].numel())
    return [slice(begin, begin + rows) for begin in range(0, len(z), rows)]


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum, with None counted as 0."""
    return b if a is None else a if b is None else a + b


def _sum_to(x: Tensor, shape: torch.Size) -> Tensor:
    """Sum over the axes along which a tensor of this shape was broadcast."""
    return x if x.shape == shape else x.sum_to_size(shape)
