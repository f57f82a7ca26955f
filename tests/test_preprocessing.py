import math

import pytest
import torch

from bruno.preprocessing import Logit, Standardise, dequantise, quantise


def test_noise_stays_within_its_integer():
    x = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    noisy = dequantise(x, torch.Generator().manual_seed(0))
    assert ((noisy >= x) & (noisy < x.float() + 1)).all()
    assert torch.equal(quantise(noisy), x)


def test_a_generator_repeats_its_noise_and_none_means_the_middle():
    x = torch.arange(10)
    draws = [dequantise(x, torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*draws)
    assert torch.equal(dequantise(x), x + 0.5)


def test_every_level_survives_the_round_trip_in_float32():
    x = torch.arange(256).view(256, 1, 1, 1)
    logit = Logit()
    for noise in (0.01, 0.5, 0.99):
        z, _ = logit((x + noise).float())
        assert torch.equal(quantise(logit.clamped(logit.inverse(z)[0])[0]).long(), x)


def test_both_tails_keep_their_digits_in_float32():
    x = torch.tensor([[1e-4, 0.01, 128.0, 255.99, 256 - 1e-4]])
    z, log_det = Logit()(x)
    exact, exact_det = Logit()(x.double())
    torch.testing.assert_close(z.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(log_det.double(), exact_det, rtol=1e-6, atol=1e-5)


def test_density_of_pixels_includes_the_rescaling():
    """A logistic latent makes pixels uniform on [0, 256): log p = −log 256, up to α."""
    x = torch.tensor([[3.0], [100.0], [250.0]], dtype=torch.double)
    z, log_det = Logit(alpha=1e-9)(x)
    logistic = torch.nn.functional.logsigmoid(z) + torch.nn.functional.logsigmoid(-z)
    torch.testing.assert_close(logistic.squeeze(1) + log_det, torch.full((3,), -math.log(256)).double())


@pytest.mark.parametrize("far", [1e3, 1e30, torch.inf, torch.nan])
def test_what_went_astray_is_put_back_and_counted(far):
    inside, astray = Logit().clamped(torch.tensor([far, -far, 12.5]))
    assert ((inside >= 0) & (inside < 256)).all()
    assert astray.tolist() == [True, True, False]
    assert inside[2] == 12.5
    standard = Standardise((1,))
    fixed, _ = standard.clamped(torch.tensor([far]))
    assert fixed.isfinite().all() or far == torch.inf


def test_tables_are_standardised():
    x = 5 + 3 * torch.randn(500, 4)
    x[:, 2] = 7.0
    standard = Standardise((4,)).fit(x)
    z, _ = standard(x)
    torch.testing.assert_close(z.mean(0), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(z.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0, 1.0]))
    assert "mean" in standard.state_dict()
