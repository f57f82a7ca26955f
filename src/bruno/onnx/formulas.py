"""Functions that ONNX or its runtimes lack, or compute less accurately, built from elementary operations.

`elementary` replaces torch's functions by these while a graph is traced. Each computes in the dtype of its
argument, and agrees with torch's function to the last few digits of float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Wichura (1988), algorithm AS 241: numerators and denominators, lowest power first, for p near ½, for tails
# down to e^-25, and for tails beyond.
_NEAR = (
    (
        3.3871328727963665,
        133.14166789178438,
        1971.5909503065513,
        13731.69376550946,
        45921.95393154987,
        67265.7709270087,
        33430.57558358813,
        2509.0809287301227,
    ),
    (
        1.0,
        42.31333070160091,
        687.1870074920579,
        5394.196021424751,
        21213.794301586597,
        39307.89580009271,
        28729.085735721943,
        5226.495278852854,
    ),
)
_FAR = (
    (
        1.4234371107496835,
        4.630337846156546,
        5.769497221460691,
        3.6478483247632045,
        1.2704582524523684,
        0.2417807251774506,
        0.022723844989269184,
        0.0007745450142783414,
    ),
    (
        1.0,
        2.053191626637759,
        1.6763848301838038,
        0.6897673349851,
        0.14810397642748008,
        0.015198666563616457,
        0.0005475938084995345,
        1.0507500716444169e-09,
    ),
)
_FURTHEST = (
    (
        6.657904643501103,
        5.463784911164114,
        1.7848265399172913,
        0.29656057182850487,
        0.026532189526576124,
        0.0012426609473880784,
        2.7115555687434876e-05,
        2.0103343992922881e-07,
    ),
    (
        1.0,
        0.599832206555888,
        0.1369298809227358,
        0.014875361290850615,
        0.0007868691311456133,
        1.8463183175100548e-05,
        1.421511758316446e-07,
        2.0442631033899397e-15,
    ),
)
# Hart (1968), as given by West (2005), for |z| up to 7.07; the tail beyond is below 1e-12.
_TAIL = (
    (
        220.206867912376,
        221.213596169931,
        112.079291497871,
        33.912866078383,
        6.37396220353165,
        0.700383064443688,
        0.0352624965998911,
    ),
    (
        440.413735824752,
        793.826512519948,
        637.333633378831,
        296.564248779674,
        86.7807322029461,
        16.064177579207,
        1.75566716318264,
        0.0883883476483184,
    ),
)
_TAIL_UP_TO = 7.07106781186547
_SHIFT = 8  # Stirling's series is used from here on


def ndtri(p: Tensor) -> Tensor:
    """Φ⁻¹(p), the quantile of a standard normal."""
    q = p - 0.5
    near = q * _ratio(0.180625 - q * q, *_NEAR)
    r = (-torch.minimum(p, 1 - p).log()).sqrt()
    far = torch.where(r <= 5, _ratio(r - 1.6, *_FAR), _ratio(r - 5, *_FURTHEST))
    return torch.where(q.abs() <= 0.425, near, q.sign() * far)


def ndtr(z: Tensor) -> Tensor:
    """Φ(z), the distribution function of a standard normal."""
    x = z.abs()
    tail = torch.exp(-0.5 * x * x) * _ratio(x.clamp(max=_TAIL_UP_TO), *_TAIL)
    return torch.where(z > 0, 1 - tail, tail)


def lgamma(x: Tensor) -> Tensor:
    """log Γ(x) for x > 0: Stirling's series at x + 8 minus the logarithm of x·(x+1)···(x+7)."""
    y = x + _SHIFT
    w = 1 / (y * y)
    series = (1 / 12 - w * (1 / 360 - w * (1 / 1260 - w * (1 / 1680 - w / 1188)))) / y
    below = reduce(lambda total, i: total + (x + i).log(), range(1, _SHIFT), x.log())
    return (y - 0.5) * y.log() - y + 0.5 * math.log(2 * math.pi) + series - below


def log1p(x: Tensor) -> Tensor:
    """log(1 + x), accurate for small x (Kahan)."""
    grown = 1 + x
    change = grown - 1
    safe = torch.where(change == 0, 1.0, change)
    return torch.where((change == 0) | x.isinf(), x, grown.log() * (x / safe))


def expm1(x: Tensor) -> Tensor:
    """exp(x) − 1, accurate for small x (Kahan)."""
    grown = x.exp()
    change = grown - 1
    log = torch.where((change == 0) | (grown == 0) | grown.isinf(), 1.0, grown).log()
    ratio = x / torch.where(log == 0, 1.0, log)
    return torch.where(change == 0, x, torch.where((grown == 0) | grown.isinf(), change, change * ratio))


def asinh(x: Tensor) -> Tensor:
    """log(x + √(x² + 1)), accurate for small x."""
    size = x.abs()
    return x.sign() * log1p(size + size * (size / (1 + hypot(x, full_like(x, 1.0)))))


def sinh(x: Tensor) -> Tensor:
    """(exp(x) − exp(−x))/2."""
    return 0.5 * (x.exp() - (-x).exp())


def hypot(x: Tensor, y: Tensor) -> Tensor:
    """√(x² + y²) without overflow; one of the two must not be 0."""
    large, small = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    return large * (1 + (small / large) * (small / large)).sqrt()


def addcdiv(x: Tensor, numerator: Tensor, denominator: Tensor, *, value: float = 1.0) -> Tensor:
    """x + value·numerator/denominator."""
    return x + value * (numerator / denominator)


def full_like(x: Tensor, value: float) -> Tensor:
    """A tensor of one value in the shape of x; `torch.full_like` would be traced with a fixed shape."""
    return torch.where(x.isnan(), torch.tensor(value, dtype=x.dtype, device=x.device), value)


def diag(x: Float[Tensor, " n"]) -> Float[Tensor, "n n"]:
    """The diagonal matrix of a vector."""
    return x * torch.eye(len(x), dtype=x.dtype, device=x.device)


def logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """log(exp(x) + exp(y))."""
    return torch.maximum(x, y) + log1p((-(x - y).abs()).exp())


def searchsorted(edges: Float[Tensor, " n"], x: Tensor, *, right: bool = False) -> Tensor:
    """Number of sorted edges at or below each x."""
    assert right
    return (edges <= x.unsqueeze(-1)).to(torch.long).sum(-1)


def weight_norm(direction: Tensor, magnitude: Tensor, dim: int = 0) -> Tensor:
    """magnitude · direction/|direction|, with one length for each index of the first axis."""
    assert dim == 0
    axes = tuple(range(1, direction.ndim))
    length: Tensor = torch.linalg.vector_norm(direction, dim=axes, keepdim=True)
    return direction * (magnitude / length)


def solve_triangular(
    matrix: Float[Tensor, "n n"], b: Tensor, *, upper: bool, unitriangular: bool = False
) -> Tensor:
    """x with matrix·x = b, solved row by row, as the few rows are channels."""
    count = matrix.shape[0]
    solved: dict[int, Tensor] = {}
    for i in reversed(range(count)) if upper else range(count):
        rest = reduce(lambda total, j, i=i: total - matrix[i, j] * solved[j], solved, b[..., i, :])  # type: ignore[misc]
        solved[i] = rest if unitriangular else rest / matrix[i, i]
    return torch.stack([solved[i] for i in range(count)], -2)


def _ratio(x: Tensor, numerator: Sequence[float], denominator: Sequence[float]) -> Tensor:
    """The quotient of two polynomials, lowest power first, by Horner's rule."""

    def polynomial(coefficients: Sequence[float]) -> Tensor:
        *rest, last = coefficients
        return reduce(lambda total, c: total * x + c, reversed(rest[:-1]), last * x + rest[-1])

    return polynomial(numerator) / polynomial(denominator)


REPLACED: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.special.ndtri: ndtri,
    torch.special.ndtr: ndtr,
    torch.lgamma: lgamma,
    torch.log1p: log1p,
    torch.expm1: expm1,
    torch.Tensor.asinh: asinh,
    torch.Tensor.sinh: sinh,
    torch.hypot: hypot,
    torch.addcdiv: addcdiv,
    torch.Tensor.diag: diag,
    torch.full_like: full_like,
    torch.ones_like: lambda x: full_like(x, 1.0),
    torch.zeros_like: lambda x: full_like(x, 0.0),
    torch.Tensor.logaddexp: logaddexp,
    torch.searchsorted: searchsorted,
    torch._weight_norm: weight_norm,
    torch.linalg.solve_triangular: solve_triangular,
}


class elementary(TorchFunctionMode):  # noqa: N801
    """Context in which torch's functions are computed by the formulas of this module.

    >>> with elementary():
    ...     torch.special.ndtr(torch.zeros(1))
    tensor([0.5000])
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return REPLACED.get(func, func)(*args, **(kwargs or {}))
