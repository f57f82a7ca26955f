import math
import warnings

import pytest
import torch

from bruno.flow.preprocessing import (
    ColumnScales,
    Gaussianise,
    GaussianMixture,
    Logit,
    Standardise,
    dequantise,
    quantise,
)


def drawings(n: int) -> torch.Tensor:
    """Pixels like those of a drawing: four fifths background, the rest shades from 1 to 249."""
    shades = torch.randint(1, 250, (n, 1, 10, 10))
    return torch.where(torch.rand(n, 1, 10, 10) < 0.8, 0, shades).to(torch.uint8)


@pytest.fixture(params=["logit", "gaussianise", "mixture"])
def pixels(request):
    fitted = {"gaussianise": Gaussianise, "mixture": GaussianMixture}
    return Logit() if request.param == "logit" else fitted[request.param]().fit(drawings(500))


def test_channels_in_any_order_of_memory_are_inverted_without_a_warning(pixels):
    z = torch.randn(2, 8, 8, 3, generator=torch.Generator().manual_seed(0)).permute(0, 3, 1, 2)
    torch.set_warn_always(True)  # otherwise torch warns once in a process
    try:
        with warnings.catch_warnings(action="error"):
            x, _ = pixels.inverse(z)
    finally:
        torch.set_warn_always(False)
    assert torch.equal(x, pixels.inverse(z.contiguous())[0])


def test_noise_stays_within_its_integer():
    x = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    noisy = dequantise(x, torch.Generator().manual_seed(0))
    assert ((noisy >= x) & (noisy < x.float() + 1)).all()
    assert torch.equal(quantise(noisy), x)


def test_noise_is_not_rounded_up_to_the_next_integer(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, 1 - 2**-24))
    x = torch.arange(256)
    assert torch.equal(quantise(dequantise(x, torch.Generator())).long(), x)


def test_noise_is_reproducible_and_one_half_without_a_generator():
    x = torch.arange(10)
    draws = [dequantise(x, torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*draws)
    assert torch.equal(dequantise(x), x + 0.5)


def test_every_level_survives_the_round_trip_in_float32(pixels):
    x = torch.arange(256).view(256, 1, 1, 1)
    for noise in (0.01, 0.5, 0.99):
        z, _ = pixels((x + noise).float())
        assert torch.equal(quantise(pixels.clamped(pixels.inverse(z)[0])[0]).long(), x)


def test_both_ends_of_the_range_are_finite_and_invertible(pixels):
    x = torch.tensor([[0.0, 256.0]])
    z, log_det = pixels(x)
    assert z.isfinite().all()
    assert log_det.isfinite().all()
    torch.testing.assert_close(pixels.inverse(z)[0], x, rtol=0, atol=1e-2)
    far, astray = pixels.clamped(pixels.inverse(torch.tensor([[-30.0, 30.0]]))[0])
    assert quantise(far).tolist() == [[0, 255]]
    assert not astray.any()


def test_both_tails_are_accurate_in_float32(pixels):
    x = torch.tensor([[1e-4, 0.01, 128.0, 255.99, 256 - 1e-4]])
    z, log_det = pixels(x)
    exact, exact_det = pixels(x.double())
    torch.testing.assert_close(z.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(log_det.double(), exact_det, rtol=1e-6, atol=1e-5)


def test_gaussianised_pixels_are_normal():
    """Bits per pixel under a standard normal are then the entropy of the histogram."""
    x = drawings(500)
    pixels = Gaussianise().fit(x)
    z, log_det = pixels(dequantise(x, torch.Generator().manual_seed(0)).double())
    values = z.flatten()
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 1) < 0.02
    assert abs((values**3).mean()) < 0.05
    bits = -(torch.distributions.Normal(0, 1).log_prob(z).flatten(1).sum(1) + log_det) / (100 * math.log(2))
    shares = x.flatten().long().bincount(minlength=256) / x.numel()
    entropy = -(shares * shares.clamp(min=1e-9).log2()).sum()
    assert 0 <= bits.mean() - entropy < 0.015  # the cost of the 1 % spread over all levels


@pytest.mark.parametrize(
    ("pixels", "cost"),
    [
        (Logit(), 0.594),
        (Logit(alpha=1e-3), 0.309),
        (Logit(alpha=0.05), 0.255),
        (Gaussianise(), 0.143),
        (GaussianMixture(), 0.026),
    ],
    ids=str,
)
def test_the_map_of_pixels_sets_the_cost_of_the_background(pixels, cost):
    """Bits that the best normal density loses on a background pixel: docs/paper-notes.md."""
    u = (torch.arange(200_000).double() + 0.5) / 200_000
    drawing = torch.cat([torch.zeros(813), torch.arange(1, 188)])  # the fraction of background in Omniglot
    if isinstance(pixels, Gaussianise):
        pixels.fit(drawing)
    z, log_det = pixels(u.unsqueeze(1))
    best_normal = 0.5 * math.log(2 * math.pi * math.e * z.var())
    assert (best_normal - log_det.mean()) / math.log(2) == pytest.approx(cost, abs=1e-3)


def test_frequent_levels_and_the_ranges_in_between_have_their_own_normals():
    shades = torch.randint(1, 254, (500, 1, 10, 10))
    kind = torch.rand(500, 1, 10, 10)
    x = torch.where(kind < 0.6, 0, torch.where(kind < 0.9, 255, shades))
    pixels = GaussianMixture().fit(x)
    z = pixels(dequantise(x, torch.Generator().manual_seed(0)).double())[0]
    parts = z[x == 0], z[(x > 0) & (x < 255)], z[x == 255]
    for part, centre in zip(parts, (-2.8, 1.2, 5.2), strict=True):  # 4 apart, with mean 0
        assert part.mean() == pytest.approx(centre, abs=0.1)
        assert 0.85 < part.std() < 1  # cut off two standard deviations from the centre
    assert z.mean() == pytest.approx(0, abs=0.1)
    ordered = torch.linspace(0, 255.999, 10_000).double().unsqueeze(1)
    assert (pixels(ordered)[0].diff(dim=0) > 0).all()


def test_without_frequent_levels_a_mixture_is_a_single_normal():
    x = torch.randint(0, 256, (50, 3, 8, 8))
    noisy = dequantise(x, torch.Generator().manual_seed(0))
    for a, b in zip(GaussianMixture().fit(x)(noisy), Gaussianise().fit(x)(noisy), strict=True):
        torch.testing.assert_close(a, b)


def test_an_unseen_level_keeps_some_probability():
    pixels = Gaussianise().fit(drawings(10))
    assert pixels.shares[255] == pytest.approx(0.01 / 256)
    assert pixels.shares.sum() == pytest.approx(1)
    shares = pixels.shares.clone()
    assert torch.equal(pixels.fit(255 - drawings(10)).shares, shares)  # a second call has no effect
    assert set(pixels.state_dict()) == {"shares", "fitted"}


def test_density_of_pixels_includes_the_rescaling():
    """A logistic latent makes pixels uniform on [0, 256): log p = −log 256, up to α."""
    x = torch.tensor([[3.0], [100.0], [250.0]], dtype=torch.double)
    z, log_det = Logit(alpha=1e-9)(x)
    logistic = torch.nn.functional.logsigmoid(z) + torch.nn.functional.logsigmoid(-z)
    torch.testing.assert_close(logistic.squeeze(1) + log_det, torch.full((3,), -math.log(256)).double())


@pytest.mark.parametrize("far", [1e3, 1e30, torch.inf, torch.nan])
def test_numbers_out_of_range_are_clamped_and_counted(far):
    inside, astray = Logit().clamped(torch.tensor([far, -far, 12.5]))
    assert ((inside >= 0) & (inside < 256)).all()
    assert astray.tolist() == [True, True, False]
    assert inside[2] == 12.5
    standard = Standardise((1,))
    fixed, _ = standard.clamped(torch.tensor([far]))
    assert fixed.isfinite().all() or far == torch.inf


def test_tables_are_standardised():
    x = 5 + 3 * torch.randn(500, 4, dtype=torch.double)
    x[:, 2] = 7.0
    standard = Standardise((4,)).fit(x)
    z, _ = standard(x)
    torch.testing.assert_close(z.mean(0), torch.zeros(4).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(z.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0, 1.0]).double())
    assert "mean" in standard.state_dict()


def test_unix_times_keep_their_minutes():
    times = 1.7e9 + 60 * torch.arange(1000, dtype=torch.double).unsqueeze(1)
    y, _ = Standardise((1,)).fit(times)(times)
    assert len(y.float().unique()) == 1000


@pytest.mark.parametrize("preprocessing", [Standardise, ColumnScales])
def test_a_cast_of_the_model_keeps_the_precision_of_columns(preprocessing):
    times = 1.7e9 + 60 * torch.arange(1000, dtype=torch.double).unsqueeze(1)
    fitted = preprocessing((1,)).fit(times)
    expected = fitted(times)[0]
    for cast in (fitted.float(), fitted.half(), fitted.to("cpu", torch.float32)):
        assert torch.equal(cast(times)[0], expected)


def test_extreme_values_are_clamped_so_that_squares_are_finite():
    standardise = Standardise((2,)).fit(torch.randn(50, 2))
    y, _ = standardise(torch.tensor([[3e38, -3e38], [1e5, 0.0]]))
    assert y[0].tolist() == [1e9, -1e9]
    torch.testing.assert_close(standardise.inverse(y)[0][1], torch.tensor([1e5, 0.0]).double())


# --- scales of columns --------------------------------------------------------------------------------------


def columns(n: int = 2000) -> torch.Tensor:
    """Columns: normal, far from 0, log-normal, heavy-tailed, counts, multiples of 0.5, constant."""
    g = torch.Generator().manual_seed(0)
    normal = torch.randn(n, 7, generator=g, dtype=torch.double)
    return torch.stack(
        [
            normal[:, 0],
            1450 + 12 * normal[:, 1],
            normal[:, 2].exp(),
            10 + normal[:, 3] / torch.rand(n, generator=g, dtype=torch.double),
            torch.poisson(torch.full((n,), 3.0), generator=g).double(),
            0.5 * (3 * normal[:, 5]).round(),
            torch.full((n,), 7.0, dtype=torch.double),
        ],
        1,
    )


def test_the_scale_of_each_column_is_chosen_from_data():
    scales = ColumnScales((7,)).fit(columns())
    assert scales.kinds[:4] == ("linear", "linear", "log", "asinh")
    assert scales.kinds[5:] == ("linear", "linear")
    assert scales.step.tolist() == [0, 0, 0, 0, 1, 0.5, 1]
    z, _ = scales(columns())
    torch.testing.assert_close(z.std(0, correction=0)[:6], torch.ones(6).double())


def test_rows_with_holes_choose_the_same_scales():
    x = columns()
    holed = x.masked_fill(torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.1, torch.nan)
    scales = ColumnScales((7,)).fit(holed)
    assert scales.kinds == ColumnScales((7,)).fit(x).kinds
    torch.testing.assert_close(scales.mean, ColumnScales((7,)).fit(x).mean, atol=0.1, rtol=0.05)


def test_dequantisation_noise_has_the_width_of_the_step():
    x = columns()
    scales = ColumnScales((7,)).fit(x)
    noise = scales.dequantise(x, torch.Generator().manual_seed(0)) - x
    assert (noise[:, :4] == 0).all()
    for i, step in ((4, 1.0), (5, 0.5), (6, 1.0)):
        assert noise[:, i].abs().max() <= step / 2
        assert noise[:, i].var().item() == pytest.approx(step**2 / 12, rel=0.1)


def test_decoded_numbers_are_rounded_to_the_step():
    scales = ColumnScales((7,)).fit(columns())
    x, astray = scales.clamped(torch.full((1, 7), 2.3).double())
    assert x[0, 4:].tolist() == [2, 2.5, 2]
    assert not astray.any()
    x, astray = scales.clamped(torch.full((1, 7), torch.inf).double())
    assert x.isfinite().all()
    assert astray.all()


def test_decoded_numbers_are_the_decimals_that_were_read():
    x = torch.randint(0, 60, (500, 1), generator=torch.Generator().manual_seed(0)) * 0.3 + 3.0
    scales = ColumnScales((1,)).fit(x.double().mul(10).round() / 10)
    assert scales.step.item() == 0.3
    found = scales.clamped(3.6 + 0.1 * torch.rand(50, 1, dtype=torch.double))[0]
    assert set(found.flatten().tolist()) == {3.6}
    large = ColumnScales((1,)).fit(1e15 + torch.arange(9.0, dtype=torch.double).unsqueeze(1))
    assert large.clamped(torch.tensor([[1e15 + 3.2]], dtype=torch.double))[0].item() == 1e15 + 3


def test_unix_times_and_finely_rounded_numbers_have_no_step():
    times = 1.7e9 + 60 * torch.arange(1000, dtype=torch.double).unsqueeze(1)
    scales = ColumnScales((1,)).fit(times)
    assert scales.step.item() == 0
    assert len(scales(times)[0].float().unique()) == 1000
    assert ColumnScales((1,)).fit((times / 7).round(decimals=2)).step.item() == 0


@pytest.mark.parametrize("kind", [Standardise, ColumnScales])
@pytest.mark.parametrize("value", [0.1, 0.3, 1e-3, 7.0, 1.7e9 + 0.1])
def test_a_constant_column_is_recognised_in_spite_of_rounding(kind, value):
    for count in range(2, 60):
        rows = torch.full((count, 3), value, dtype=torch.double)
        rows[:, 1] = torch.randn(count)
        plain = kind((3,)).fit(rows)
        assert (plain.deviation > 1e-6).all()
        rows[0, 0] = torch.nan
        assert torch.equal(kind((3,)).fit(rows).deviation[0], plain.deviation[0])
