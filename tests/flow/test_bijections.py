"""Laws of every bijection; a new one is tested by adding one line to BIJECTIONS."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch

from bruno.flow import (
    AffineCoupling,
    Bijection,
    Chain,
    ChannelMixing,
    Channels,
    Checkerboard,
    ConvNetwork,
    ConvRealNVP,
    Coupling,
    DenseNetwork,
    DenseRealNVP,
    FactorOut,
    Flatten,
    OddEven,
    SplineCoupling,
    Splines,
    Squeeze,
    initialise,
)
from bruno.flow.preprocessing import ColumnScales, Gaussianise, GaussianMixture, Logit, Standardise


class Case(NamedTuple):
    bijection: Bijection
    shape: tuple[int, ...]
    draw: object = torch.randn


class Cube(Bijection):
    """A custom bijection: the example of the README."""

    def forward(self, x):
        return x + x**3, torch.log1p(3 * x**2).flatten(1).sum(1)

    def inverse(self, z):
        root = (z.abs() / 2 + (z**2 / 4 + 1 / 27).sqrt()) ** (1 / 3)
        x = z.sign() * (root - 1 / (3 * root))
        return x, -self(x)[1]


def small_conv(shape, **kwargs):
    return ConvRealNVP(shape, **{"filters": 4, "blocks": 1, "dense_units": 8, "dense_couplings": 2, **kwargs})


def spline_network(fixed, moved, bins):
    return ConvNetwork(fixed, moved, 4, 1, per_output=3 * bins + 1)


def skewed(*size, dtype=torch.double):
    """A normal column, a log-normal one, and one with heavy tails on both sides."""
    normal = torch.randn(*size, dtype=dtype)
    return torch.stack([normal[:, 0], (2 * normal[:, 1]).exp(), (2 * normal[:, 2]).sinh()], 1)


def mostly_dark(*size, dtype):
    """Pixels of 256 levels, half of them below level 8."""
    return 256 * torch.rand(*size, dtype=dtype) ** 5


BIJECTIONS = {
    "user's own": lambda: Case(Cube(), (3,)),
    "squeeze": lambda: Case(Squeeze(), (2, 4, 6)),
    "flatten": lambda: Case(Flatten((2, 3)), (2, 3)),
    "factor out": lambda: Case(FactorOut(Cube(), (4, 2, 2)), (4, 2, 2)),
    "factor out, squeezed inside": lambda: Case(FactorOut(Chain([Squeeze(), Cube()]), (2, 4, 4)), (2, 4, 4)),
    "chain": lambda: Case(Chain([Cube(), Cube()]), (2, 2)),
    "checkerboard": lambda: Case(AffineCoupling(Checkerboard(4, 4, 1), ConvNetwork(2, 2, 4, 1)), (2, 4, 4)),
    "channels": lambda: Case(AffineCoupling(Channels(3, 1), ConvNetwork(2, 1, 4, 1)), (3, 2, 2)),
    "diagonal": lambda: Case(
        AffineCoupling(Channels(4, 0, diagonal=True), ConvNetwork(2, 2, 4, 1)), (4, 2, 2)
    ),
    "odd/even": lambda: Case(AffineCoupling(OddEven(5, 1), DenseNetwork(2, 3, 8)), (5,)),
    "spline, checkerboard": lambda: Case(
        SplineCoupling(Checkerboard(4, 4, 1), spline_network(2, 2, bins=3), bins=3, interval=2.0), (2, 4, 4)
    ),
    "spline, channels": lambda: Case(
        SplineCoupling(Channels(3, 1), spline_network(2, 1, bins=8), bins=8), (3, 2, 2)
    ),
    "spline, odd/even": lambda: Case(
        SplineCoupling(OddEven(5, 1), DenseNetwork(2, 3, 8, per_output=7), bins=2, interval=1.0), (5,)
    ),
    "dense, splines": lambda: Case(DenseRealNVP((7,), couplings=3, units=8, splines=Splines()), (7,)),
    "conv, splines in one scale": lambda: Case(small_conv((1, 8, 8), splines=Splines(scales=1)), (1, 8, 8)),
    "conv, splines everywhere": lambda: Case(
        small_conv((1, 8, 8), splines=Splines(bins=4, interval=3.0, dense=True)), (1, 8, 8)
    ),
    "dense, vector of 7": lambda: Case(DenseRealNVP((7,), couplings=3, units=8), (7,)),
    "dense, image": lambda: Case(DenseRealNVP((1, 2, 3), couplings=2, units=8), (1, 2, 3)),
    "conv 8×8": lambda: Case(small_conv((1, 8, 8)), (1, 8, 8)),
    "conv, one scale": lambda: Case(small_conv((1, 4, 4), scales=1), (1, 4, 4)),
    "conv, three scales": lambda: Case(small_conv((1, 8, 8), scales=3), (1, 8, 8)),
    "conv, squeeze first": lambda: Case(small_conv((2, 8, 8), squeeze_first=True), (2, 8, 8)),
    "conv, no weight norm": lambda: Case(small_conv((1, 4, 4), weight_norm=False), (1, 4, 4)),
    "channel mixing": lambda: Case(ChannelMixing(3), (3, 2, 4)),
    "conv, two couplings of a kind": lambda: Case(small_conv((1, 8, 8), depth=2), (1, 8, 8)),
    "conv, mixed channels": lambda: Case(
        small_conv((1, 8, 8), squeeze_first=True, mixing=True, scales=1, splines=Splines(bins=4)), (1, 8, 8)
    ),
    "logit": lambda: Case(Logit(), (1, 3, 3), mostly_dark),
    "gaussianise": lambda: Case(
        Gaussianise().fit(mostly_dark(100, 1, 3, 3, dtype=torch.double)), (1, 3, 3), mostly_dark
    ),
    "mixture": lambda: Case(
        GaussianMixture().fit(mostly_dark(100, 1, 3, 3, dtype=torch.double)), (1, 3, 3), mostly_dark
    ),
    "standardise": lambda: Case(Standardise((3,)).fit(2 + 3 * torch.randn(50, 3)), (3,)),
    "column scales": lambda: Case(ColumnScales((3,)).fit(skewed(500, 3, dtype=torch.double)), (3,), skewed),
    "column scales below the log": lambda: Case(ColumnScales((3,)).fit(skewed(500, 3)), (3,)),
}


@pytest.fixture(params=BIJECTIONS)
def case(request):
    case = BIJECTIONS[request.param]()
    case.bijection.double()
    for parameter in case.bijection.parameters():  # away from the identity
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return case


def test_the_inverse_undoes_the_forward_map(case):
    x = case.draw(5, *case.shape, dtype=torch.double)
    z, log_det = case.bijection(x)
    back, log_det_back = case.bijection.inverse(z)
    assert log_det.shape == log_det_back.shape == (5,)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-9)
    torch.testing.assert_close(log_det_back, -log_det, rtol=1e-9, atol=1e-8)


def test_the_forward_map_undoes_the_inverse(case):
    like = case.bijection(case.draw(1, *case.shape, dtype=torch.double))[0]
    z = torch.randn(5, *like.shape[1:], dtype=torch.double)
    x, _ = case.bijection.inverse(z)
    assert x.shape == (5, *case.shape)
    torch.testing.assert_close(case.bijection(x)[0], z, rtol=0, atol=1e-9)


def test_log_det_matches_the_jacobian(case):
    x = case.draw(1, *case.shape, dtype=torch.double)
    jacobian = torch.autograd.functional.jacobian(lambda x: case.bijection(x)[0], x)
    size = math.prod(case.shape)
    expected = torch.linalg.slogdet(jacobian.reshape(size, size)).logabsdet
    torch.testing.assert_close(case.bijection(x)[1].squeeze(), expected, rtol=1e-9, atol=1e-9)


def test_output_shape_is_the_shape_of_the_output(case):
    z, _ = case.bijection(case.draw(2, *case.shape, dtype=torch.double))
    assert case.bijection.output_shape(case.shape) == z.shape[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "kwargs"),
    [
        ((1, 28, 28), {}),
        ((1, 28, 28), {"squeeze_first": True, "blocks": 4, "dense_units": 512}),
        pytest.param((3, 32, 32), {"blocks": 2}, marks=pytest.mark.long),
        ((1, 28, 28), {"blocks": 2, "splines": Splines(scales=1)}),
        pytest.param(
            (1, 28, 28),
            {"squeeze_first": True, "blocks": 4, "splines": Splines(bins=16, dense=True)},
            marks=pytest.mark.long,
        ),
        pytest.param(
            (3, 32, 32),
            {
                "squeeze_first": True,
                "scales": 3,
                "depth": 5,
                "mixing": True,
                "blocks": 1,
                "splines": Splines(),
            },
            marks=pytest.mark.long,
        ),
    ],
)
def test_full_size_models_invert_in_float32(shape, kwargs):
    flow = ConvRealNVP(shape, **kwargs)
    x = 3 * torch.randn(4, *shape)
    initialise(flow, lambda: flow(x))
    with torch.no_grad():
        for name, parameter in flow.named_parameters():  # outputs as large as after training
            if parameter.count_nonzero() == 0:
                # A random triangular matrix of this size is only well conditioned near the identity.
                scale = 0.01 if "raw_" in name else 0.1
                parameter.copy_(scale * torch.randn_like(parameter))
            assert parameter.isfinite().all(), name
        z, log_det = flow(x)
        assert (z - x.flatten(1)).abs().max() > 0.1
        back, log_det_back = flow.inverse(z)
        torch.testing.assert_close(back, x, rtol=0, atol=1e-3)
        torch.testing.assert_close(log_det_back, -log_det, rtol=1e-4, atol=1e-2)
        sampled = torch.randn_like(z)
        again, _ = flow(flow.inverse(sampled)[0])
        torch.testing.assert_close(again, sampled, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("shape", "flow"),
    [
        ((7,), DenseRealNVP((7,), couplings=3, units=8)),
        ((1, 8, 8), small_conv((1, 8, 8))),
        ((1, 4, 4), small_conv((1, 4, 4), scales=1)),
        ((2, 8, 8), small_conv((2, 8, 8), squeeze_first=True)),
    ],
)
def test_consecutive_couplings_move_complementary_parts(shape, flow):
    passed = []
    for module in flow.modules():
        if isinstance(module, Coupling):
            module.register_forward_pre_hook(lambda coupling, given: passed.append((coupling, *given)))
    flow(torch.randn(1, *shape))  # a fresh coupling is the identity
    pairs = [
        (one.partition.split(x), other.partition.split(y))
        for (one, x), (other, y) in itertools.pairwise(passed)
        if torch.equal(x, y)
    ]
    assert len(pairs) >= 2
    for (kept, moved), (kept_then, moved_then) in pairs:
        assert torch.equal(kept, moved_then)
        assert torch.equal(moved, kept_then)


def test_the_default_flow_has_the_couplings_of_the_paper():
    """Three checkerboard and three channel couplings, four checkerboards at half the size, six dense ones."""
    flow = ConvRealNVP((1, 28, 28), blocks=1, filters=4, dense_units=8)
    kinds = [type(m.partition) for m in flow.modules() if isinstance(m, Coupling)]
    assert kinds == [Checkerboard] * 3 + [Channels] * 3 + [Checkerboard] * 4 + [OddEven] * 6


def test_channels_are_mixed_before_every_coupling_that_divides_them():
    flow = small_conv((1, 8, 8), depth=2, mixing=True)
    kinds = [
        type(m.partition) if isinstance(m, Coupling) else ChannelMixing
        for m in flow.modules()
        if isinstance(m, Coupling | ChannelMixing)
    ]
    assert kinds == [Checkerboard] * 2 + [ChannelMixing, Channels] * 2 + [Checkerboard] * 3 + [OddEven] * 2


@pytest.mark.parametrize(
    ("splines", "convolutional", "dense"),
    [
        (Splines(scales=1), 6, 0),
        (Splines(scales=2), 10, 0),
        (Splines(), 10, 0),
        (Splines(scales=1, dense=True), 6, 6),
    ],
)
def test_splines_are_in_the_chosen_scales(splines, convolutional, dense):
    flow = ConvRealNVP((1, 8, 8), blocks=1, filters=4, dense_units=8, splines=splines)
    has_spline = [isinstance(m, SplineCoupling) for m in flow.modules() if isinstance(m, Coupling)]
    assert has_spline == [i < convolutional for i in range(10)] + [i < dense for i in range(6)]


@pytest.mark.parametrize("mixing", [False, True])
@pytest.mark.parametrize("splines", [None, Splines(dense=True)])
def test_a_fresh_flow_is_near_the_identity(splines, mixing):
    flow = small_conv((1, 8, 8), splines=splines, mixing=mixing)
    x = torch.randn(3, 1, 8, 8)
    z, log_det = flow(x)
    torch.testing.assert_close(log_det, torch.zeros(3), rtol=0, atol=1e-4 if splines else 0)
    torch.testing.assert_close(z.sort(1).values, x.flatten(1).sort(1).values)


def test_checkerboard_is_a_choice_of_channels_after_a_squeeze():
    x = torch.randn(1, 1, 4, 4)
    fixed = Checkerboard(4, 4, 1).split(x)[0]
    by_channels = Channels(4, 0, diagonal=True).split(Squeeze()(x)[0])[0]
    assert torch.equal(fixed[fixed != 0].sort().values, by_channels.flatten().sort().values)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: ConvRealNVP((1, 7, 7)),
            r"even height and width.*got \(1, 7, 7\). Use fewer scales, or resize",
        ),
        (lambda: ConvRealNVP((1, 6, 6), scales=3), r"even height and width.*got \(2, 3, 3\)"),
        (lambda: ConvRealNVP((7,)), r"must be \(channels, height, width\); got \(7,\)"),
        (lambda: ConvRealNVP((1, 8, 8), scales=0), "`scales` must be at least 1; got 0"),
        (lambda: OddEven(1, 0), "`dim` must be at least 2"),
        (lambda: FactorOut(Cube(), (3, 2, 2)), "even number of channels.*got 3"),
        (lambda: Channels(1, 0), "`channels` must be at least 2"),
        (lambda: Logit(alpha=0.7), "`alpha` must be between 0 and 0.5; got 0.7"),
        (lambda: Flatten((1, 2, 8)).output_shape((1, 4, 4)), r"`shape` .*\(1, 2, 8\).*got \(1, 4, 4\)"),
        (
            lambda: FactorOut(Cube(), (4, 2, 2)).output_shape((2, 4, 2)),
            r"`shape` .*\(4, 2, 2\).*got \(2, 4, 2\)",
        ),
        (lambda: Squeeze()(torch.zeros(2, 1, 3, 4)), r"even height and width.*got \(1, 3, 4\)"),
    ],
)
def test_impossible_shapes_are_rejected_with_a_way_out(build, message):
    with pytest.raises(ValueError, match=message):
        build()
