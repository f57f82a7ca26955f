"""The elementary formulas against torch's functions."""

import pytest
import torch

from bruno.onnx.formulas import elementary

WIDE = torch.logspace(-30, 30, 201, dtype=torch.double)
FUNCTIONS = {
    "ndtr": (torch.special.ndtr, torch.linspace(-9, 9, 201, dtype=torch.double)),
    "ndtri": (torch.special.ndtri, torch.logspace(-200, -1e-3, 201, dtype=torch.double)),
    "lgamma": (torch.lgamma, torch.logspace(-4, 3, 201, dtype=torch.double)),
    "log1p": (torch.log1p, torch.cat([WIDE, -WIDE[:99], torch.tensor([0.0, torch.inf])])),
    "expm1": (torch.expm1, torch.cat([WIDE.clamp(max=700), -WIDE, torch.tensor([0.0])])),
    "asinh": (torch.Tensor.asinh, torch.cat([WIDE, -WIDE])),
    "sinh": (torch.Tensor.sinh, torch.linspace(-50, 50, 201, dtype=torch.double)),
    "hypot": (lambda x: torch.hypot(x, torch.ones_like(x)), torch.cat([WIDE * 1e200, -WIDE])),
    "logaddexp": (lambda x: x.logaddexp(torch.zeros_like(x)), torch.cat([WIDE, -WIDE])),
    "searchsorted": (
        lambda x: torch.searchsorted(torch.linspace(0, 1, 7, dtype=x.dtype), x, right=True),
        torch.linspace(-1, 2, 60, dtype=torch.double),
    ),
    "weight norm": (lambda x: torch._weight_norm(x.view(3, 67), x[:3].view(3, 1), 0), WIDE[:201]),
    "solve lower": (
        lambda x: torch.linalg.solve_triangular(x[:9].view(3, 3).tril() + 2, x[:6].view(3, 2), upper=False),
        torch.linspace(1, 2, 9, dtype=torch.double),
    ),
    "solve upper, with ones": (
        lambda x: torch.linalg.solve_triangular(
            x.view(3, 3).triu(1), x[:6].view(3, 2), upper=True, unitriangular=True
        ),
        torch.linspace(1, 2, 9, dtype=torch.double),
    ),
    "addcdiv": (lambda x: torch.addcdiv(x, x, x + 1, value=0.5), WIDE),
    "diag": (lambda x: x.diag(), WIDE[:5]),
    "full": (lambda x: torch.full_like(x, 3.0), torch.tensor([1.0, torch.inf, torch.nan])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_formula_agrees_with_torch_to_the_last_digits(name):
    function, x = FUNCTIONS[name]
    with elementary():
        result = function(x)
    assert result.dtype == function(x).dtype
    assert torch.allclose(result, function(x), rtol=1e-12, atol=1e-12, equal_nan=True)
