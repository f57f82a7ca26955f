"""float32 against 50 digits: errors are a few last bits for all parameters and data."""

import copy
import math

import pytest
import torch
from laws import PROCESSES, leave_one_out_log_prob_to_50_digits, step_log_prob_to_50_digits

from bruno import Evidence, GaussianProcess, StudentTProcess

N = 2000
SHORT = 400  # steps of the shorter sequences
ELEMENTS = 20  # of a set from which one is left out
TOLERANCE = 1e-5
MORE_DOFS = (3.0, 30.0, 1e6)

DATA = {
    "standard normal": lambda: torch.randn(N),
    "tight around an offset": lambda: 3 + 0.01 * torch.randn(N),
    "all the same": lambda: torch.full((N,), 1.7),
    "all zero": lambda: torch.zeros(N),
    "one outlier": lambda: torch.randn(N).index_fill(0, torch.tensor([N // 2]), 300.0),
    "outlier first": lambda: torch.randn(N).index_fill(0, torch.tensor([0]), -80.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("steps", [SHORT, pytest.param(N, marks=pytest.mark.long)])
@pytest.mark.parametrize("correlation", [0.0, 0.1, 0.9, 0.9999])
@pytest.mark.parametrize(
    "dof", [2.01, 1e3, 1e8, *(pytest.param(nu, marks=pytest.mark.long) for nu in MORE_DOFS)]
)
def test_steps_are_accurate(dof, correlation, steps):
    process = StudentTProcess(1, dof=dof, correlation=correlation)
    process.requires_grad_(False)
    effective = copy.deepcopy(process).double()  # the same parameters in float64
    parameters = [float(p) for p in (effective.dof, effective.variance, effective.residual_variance)]
    middle = slice((N - steps) // 2, (N + steps) // 2)  # the outliers are in the middle and at the start
    data = {kind: draw()[:steps] if "first" in kind else draw()[middle] for kind, draw in DATA.items()}
    z = torch.stack(list(data.values())).unsqueeze(-1)
    result = process.step_log_prob(z).double()
    for kind, row, sequence in zip(data, result, z.squeeze(-1).tolist(), strict=True):
        exact = torch.tensor(step_log_prob_to_50_digits(*parameters, sequence), dtype=torch.double)
        error = (row - exact).abs() / (1 + exact.abs())
        worst = int(error.argmax())
        assert error[worst] < TOLERANCE, f"{kind}, step {worst}: {row[worst]}, exact {exact[worst]}"


FAR = {
    **{kind: lambda draw=draw: draw()[:ELEMENTS] for kind, draw in DATA.items() if kind != "one outlier"},
    "one outlier": lambda: torch.randn(ELEMENTS).index_fill(0, torch.tensor([7]), 300.0),
    "far from 0": lambda: 1e4 + 0.01 * torch.randn(ELEMENTS),
    "far from 0, all the same": lambda: torch.full((ELEMENTS,), 1e4),
    "two elements": lambda: torch.tensor([1e4, 1e4 + 0.01]).repeat(ELEMENTS // 2),
}


@pytest.mark.parametrize("variance", [1e-12, 1.0, 1e6])
@pytest.mark.parametrize("correlation", [0.0, 0.9, 0.9999, 0.9999996])
@pytest.mark.parametrize("dof", [2.01, 1e3, 1e8, math.inf])
def test_leaving_one_out_is_accurate(dof, correlation, variance):
    settings = {"correlation": correlation, "variance": variance}
    process = GaussianProcess(1, **settings) if dof == math.inf else StudentTProcess(1, dof=dof, **settings)
    effective = copy.deepcopy(process.requires_grad_(False)).double()
    nu = math.inf if dof == math.inf else float(effective.dof)
    parameters = [nu, float(effective.variance), float(effective.residual_variance)]
    data = {kind: draw() for kind, draw in FAR.items()}
    z = torch.stack(list(data.values())).unsqueeze(-1)
    result = process.leave_one_out_log_prob(z)
    assert result.dtype == torch.float32
    for kind, row, sequence in zip(data, result.double(), z.squeeze(-1).tolist(), strict=True):
        exact = torch.tensor(leave_one_out_log_prob_to_50_digits(*parameters, sequence), dtype=torch.double)
        error = (row - exact).abs() / (1 + exact.abs())
        worst = int(error.argmax())
        assert error[worst] < TOLERANCE, f"{kind}, element {worst}: {row[worst]}, exact {exact[worst]}"


@pytest.mark.parametrize("offset", [0.0, 30.0, 1e4])
@pytest.mark.parametrize("correlation", [0.1, 0.9, 0.999, 0.999999])
@pytest.mark.parametrize("dof", [2.1, 10.0, 1e3, 1e6, math.inf])
def test_elements_given_evidence_are_accurate(dof, correlation, offset):
    """log p(z | evidence) in float32 is the step density in float64, to the last bits of float32."""
    settings = {"correlation": correlation}
    process = GaussianProcess(1, **settings) if dof == math.inf else StudentTProcess(1, dof=dof, **settings)
    wide = copy.deepcopy(process).double()
    std = math.sqrt(1 - correlation)
    distances = std * torch.tensor([0.0, 0.1, 1.0, -3.0, 30.0])
    z = torch.cat([offset + distances, torch.tensor([0.0, -offset])]).unsqueeze(-1)
    for n in (0, 1, 20, 500, 10**6):
        mean, scatter = (torch.full((1,), x).double() for x in (offset + 0.3 * std, n * std**2))
        evidence = Evidence(torch.tensor(n), mean, scatter) if n else Evidence.empty(1)
        exact = wide.step_log_prob(z.unsqueeze(-2).double(), evidence).squeeze(-1)
        error = (process.log_prob(z, evidence) - exact).abs() / (1 + exact.abs())
        assert error.max() < 1.5e-6, n


@pytest.mark.parametrize("name", PROCESSES)
def test_gradients_given_evidence_are_accurate(name):
    process = PROCESSES[name](3, correlation=[0.1, 0.99, 0.99999])
    z, earlier = 30 + 0.01 * torch.randn(8, 3), 30 + 0.01 * torch.randn(5, 3)
    found = []
    for dtype in (torch.float32, torch.double):
        inputs = z.to(dtype).requires_grad_(), earlier.to(dtype).requires_grad_()
        loss = process.to(dtype).log_prob(inputs[0], Evidence.of(inputs[1])).sum()
        found.append(torch.autograd.grad(loss, (*inputs, *process.parameters())))
    for grad, exact in zip(*found, strict=True):
        assert (grad - exact).norm() < 1e-5 * exact.norm()


def test_steps_are_accurate_where_the_papers_recurrence_is_not():
    """beta in float32 at n = 500, c = 0.999: the paper's recurrence even loses the sign."""
    process = StudentTProcess(1, correlation=0.999)
    z = 3 + 0.003 * torch.randn(500, 1)
    beta = process._quadratic_form(Evidence.of(z), process.parameters_in_double())
    exact = process._quadratic_form(Evidence.of(z.double()), process.parameters_in_double())
    torch.testing.assert_close(beta, exact, rtol=1e-5, atol=0)
    v, rho = process.variance, process.covariance
    published, s, b_before = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    for n, x in enumerate(z, start=1):
        a, b = (q / ((v - rho) * (v + rho * (n - 1))) for q in (v + rho * (n - 2), -rho))
        published = published + (a - b) * x**2 + b * (s + x) ** 2 - b_before * s**2
        s, b_before = s + x, b
    assert (published - exact).abs() > 0.1 * exact


@pytest.mark.parametrize("name", PROCESSES)
@pytest.mark.parametrize("scale", [1e-38, 1e-20, 1e10, 1e20, 3e38])
def test_finite_input_never_gives_nan(name, scale):
    process = PROCESSES[name](3)
    z = (torch.randn(4, 30, 3) * scale).clamp(-3e38, 3e38)
    for method in ("step_log_prob", "log_prob", "joint_log_prob", "leave_one_out_log_prob"):
        assert not getattr(process, method)(z).isnan().any(), method


def test_a_common_offset_costs_no_precision_across_blocks(monkeypatch):
    monkeypatch.setattr("bruno.process.step_density._NUMBERS_IN_A_BLOCK", 100)
    process = StudentTProcess(1, correlation=0.9999)
    z = 3 + 0.01 * torch.randn(1000, 1)
    exact = copy.deepcopy(process).double().step_log_prob(z.double())
    error = (process.step_log_prob(z) - exact).abs() / (1 + exact.abs())
    assert error.max() < TOLERANCE


@pytest.mark.parametrize("dof", [2.1, 30.0, 1e3, 1e4])
def test_gradients_are_accurate(dof):
    """The gradient of dof must not be computed as the small difference of large terms."""
    process = StudentTProcess(3, dof=dof, correlation=[0.01, 0.5, 0.99])
    wide = copy.deepcopy(process).double()
    z = torch.randn(20, 10, 3)
    for p, x in ((process, z), (wide, z.double())):
        p.step_log_prob(x).square().mean().backward()
    for name, parameter in wide.named_parameters():
        grad = process.get_parameter(name).grad.double()
        assert (grad - parameter.grad).norm() < 1e-2 * parameter.grad.norm(), name
