"""Splines against the scalar formula, and for extreme numbers and parameters."""

import math

import pytest
import torch

from bruno.flow import Checkerboard, ConvNetwork, SplineCoupling, set_network_dtype
from bruno.flow.spline import _bins, _gather, _select, inverse_spline, parameter_count, spline

B = 5.0


def random_parameters(bins, *shape, scale=1.0, dtype=torch.double):
    return scale * torch.randn(shape[0], parameter_count(bins), *shape[1:], dtype=dtype)


def scalar_spline(x, parameters, bins, interval=B):
    """(y, log dy/dx) of one number in float64, by a search for its bin."""
    if abs(x) >= interval:
        return x, 0.0

    def lengths(raw):
        fractions = torch.softmax(torch.tensor(raw, dtype=torch.double), 0)
        return (2 * interval * (1e-3 + (1 - bins * 1e-3) * fractions)).tolist()

    widths, heights = lengths(parameters[:bins]), lengths(parameters[bins : 2 * bins])
    offset = math.log(math.expm1(1 - 1e-3))
    slopes = [1.0, *(1e-3 + math.log1p(math.exp(raw + offset)) for raw in parameters[2 * bins :]), 1.0]
    left, bottom, k = -interval, -interval, 0
    while k < bins - 1 and x >= left + widths[k]:
        left, bottom, k = left + widths[k], bottom + heights[k], k + 1
    w, h, d, e = widths[k], heights[k], slopes[k], slopes[k + 1]
    s, t = h / w, (x - left) / w
    denominator = s + (e + d - 2 * s) * t * (1 - t)
    y = bottom + h * (s * t**2 + d * t * (1 - t)) / denominator
    slope = s**2 * (e * t**2 + 2 * s * t * (1 - t) + d * (1 - t) ** 2) / denominator**2
    return y, math.log(slope)


@pytest.mark.parametrize("bins", [2, 3, 8, 16])
def test_splines_agree_with_the_scalar_formula(bins):
    x, parameters = 4 * torch.randn(50, 1, dtype=torch.double), random_parameters(bins, 50, 1)
    y, log_slope = spline(x, parameters, B)
    for i in range(50):
        expected = scalar_spline(x[i].item(), parameters[i, :, 0].tolist(), bins)
        assert (y[i].item(), log_slope[i].item()) == pytest.approx(expected, rel=1e-11, abs=1e-11)


@pytest.mark.parametrize("bins", [3, 8])
def test_zero_parameters_give_the_identity(bins):
    x = torch.linspace(-7, 7, 301).unsqueeze(1)
    for function in (spline, inverse_spline):
        y, log_slope = function(x, torch.zeros(301, parameter_count(bins), 1), B)
        torch.testing.assert_close(y, x, rtol=0, atol=2e-6)
        torch.testing.assert_close(log_slope, torch.zeros_like(x), rtol=0, atol=2e-6)


@pytest.mark.parametrize("size", [B, 6.0, 1e6, 1e30])
def test_numbers_outside_the_interval_do_not_change(size):
    x, parameters = torch.tensor([[size], [-size]]), random_parameters(8, 2, 1, scale=3, dtype=torch.float)
    for function in (spline, inverse_spline):
        y, log_slope = function(x, parameters, B)
        assert torch.equal(y, x)
        assert not log_slope.any()


def test_a_spline_is_increasing():
    x = torch.linspace(-6, 6, 2000, dtype=torch.double)
    y, _ = spline(x.expand(20, -1), random_parameters(8, 20, 1, scale=2).expand(-1, -1, 2000), B)
    assert (y.diff(dim=1) > 0).all()


def test_a_spline_inverts_in_float32():
    x = torch.linspace(-6, 6, 5000).unsqueeze(1)
    parameters = random_parameters(8, 5000, 1, scale=0.5, dtype=torch.float)
    y, log_slope = spline(x, parameters, B)
    back, log_slope_back = inverse_spline(y, parameters, B)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-4)
    torch.testing.assert_close(log_slope_back, -log_slope, rtol=0, atol=1e-3)


def test_a_spline_passes_through_its_knots():
    parameters = random_parameters(8, 1, 1)
    for knot in _bins(parameters, B):
        y, _ = spline(knot.left, parameters, B)
        torch.testing.assert_close(y, knot.bottom)
        torch.testing.assert_close(inverse_spline(knot.bottom, parameters, B)[0], knot.left)


@pytest.mark.parametrize("by", ["left", "bottom"])
@pytest.mark.parametrize("bins", [2, 8])
def test_both_ways_to_find_a_bin_agree(bins, by):
    x, parameters = 4 * torch.randn(30, 2, 3, dtype=torch.double), random_parameters(bins, 30, 2, 3, scale=3)
    x = x.clamp(-B, B)
    gathered, selected = _gather(x, parameters, B, by), _select(x, _bins(parameters, B), by)
    for name, value in gathered._asdict().items():
        torch.testing.assert_close(value, getattr(selected, name), msg=name)


@pytest.mark.parametrize("function", [spline, inverse_spline])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_gradients_are_finite(function, scale):
    x = torch.cat([torch.linspace(-6, 6, 101), torch.tensor([-B, 0.0, B, 1e6, -1e30])]).unsqueeze(1)
    x = x.requires_grad_()
    parameters = random_parameters(8, *x.shape, scale=scale, dtype=torch.float).requires_grad_()
    y, log_slope = function(x, parameters, B)
    (y.clamp(-10, 10).sum() + log_slope.sum()).backward()
    assert y.isfinite().all()
    assert log_slope.isfinite().all()
    assert x.grad.isfinite().all()
    assert parameters.grad.isfinite().all()


def test_the_part_that_stays_is_unchanged_and_excluded_from_the_log_det():
    coupling = SplineCoupling(Checkerboard(4, 4, 1), ConvNetwork(2, 2, 4, 1, per_output=10), bins=3)
    for parameter in coupling.parameters():
        parameter.data.add_(0.5 * torch.randn_like(parameter))
    x = torch.randn(3, 2, 4, 4)
    fixed = coupling.partition.split(x)[0]
    z, log_det = coupling(x)
    assert torch.equal(coupling.partition.split(z)[0], fixed)
    moved, output = coupling.partition.split(x)[1], coupling._output(fixed)
    log_slope = coupling.transform(moved, output)[1] * (1 - coupling.partition.mask)
    torch.testing.assert_close(log_det, log_slope.flatten(1).sum(1))


def test_a_spline_is_float32_if_its_network_is_bfloat16():
    coupling = SplineCoupling(Checkerboard(4, 4, 1), ConvNetwork(1, 1, 4, 1, per_output=25))
    for parameter in coupling.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    x = torch.randn(3, 1, 4, 4)
    set_network_dtype(coupling, torch.bfloat16)
    z, log_det = coupling(x)
    assert z.dtype == log_det.dtype == torch.float32
    torch.testing.assert_close(coupling.inverse(z)[0], x, rtol=0, atol=1e-5)
