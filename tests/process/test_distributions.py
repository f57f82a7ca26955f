import mpmath
import pytest
import scipy.stats
import torch

from bruno.process import Normal, StudentT
from bruno.process.distributions import log_gamma_half_step, log_gamma_step

DOFS = [2.1, 3.0, 5.0, 30.0, 1e3, 1e6]


@pytest.mark.parametrize("dof", DOFS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_are_student_t(dof, dtype):
    distribution = StudentT(*torch.tensor([dof, 1.5, 0.7], dtype=dtype))
    sample = distribution.sample((40_000,), generator=torch.Generator().manual_seed(1))
    assert scipy.stats.kstest(sample.double().numpy(), scipy.stats.t(dof, 1.5, 0.7).cdf).pvalue > 1e-3


@pytest.mark.parametrize("dof", [5.0, 30.0, 1e3, 1e6])
def test_samples_have_the_right_moments(dof):
    distribution = StudentT(*torch.tensor([dof, 1.5, 0.7], dtype=torch.double))
    sample = distribution.sample((400_000,), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(sample.mean(), distribution.mean, rtol=0, atol=0.01)
    torch.testing.assert_close(sample.var(), distribution.variance, rtol=0.03, atol=0)


def test_the_published_sampler_is_not_student_t():
    """Algorithm 1 as printed has a stray 1/r, so ours differs from it."""
    a, b = torch.rand(2, 40_000, dtype=torch.double)
    r, nu = torch.maximum(a, b), 5.0
    printed = torch.cos(2 * torch.pi * torch.minimum(a, b) / r) * torch.sqrt(nu / r**2 * (r ** (-4 / nu) - 1))
    assert scipy.stats.kstest(printed.numpy(), scipy.stats.t(nu).cdf).pvalue < 1e-6


@pytest.mark.parametrize("distribution", [StudentT(torch.tensor(3.0), 1.0, 2.0), Normal(1.0, 2.0)])
class TestEveryPredictive:
    def test_a_generator_repeats_its_samples(self, distribution):
        draws = [distribution.sample((5,), generator=torch.Generator().manual_seed(3)) for _ in range(2)]
        assert torch.equal(*draws)
        assert not torch.equal(
            draws[0], distribution.sample((5,), generator=torch.Generator().manual_seed(4))
        )

    def test_common_samples_of_a_batch_are_those_of_each_member_alone(self, distribution):
        batch = distribution.expand((2, 4, 3))
        batch.loc = torch.arange(8.0).view(2, 4, 1).expand(2, 4, 3)

        def samples(part):
            return part.sample((5,), generator=torch.Generator().manual_seed(3), common=True)

        together, alone = samples(batch), samples(distribution.expand((3,)))
        deviations = (alone - distribution.loc).view(5, 1, 1, 3)
        torch.testing.assert_close(together - batch.loc, deviations.expand(5, 2, 4, 3))

    def test_composes_with_torch(self, distribution):
        rows = torch.distributions.Independent(distribution.expand((2, 3)), 1)
        assert rows.sample((4,)).shape == (4, 2, 3)
        assert rows.log_prob(torch.zeros(2, 3)).shape == (2,)
        exp = torch.distributions.TransformedDistribution(distribution, torch.distributions.ExpTransform())
        x = torch.tensor(0.7)
        torch.testing.assert_close(exp.log_prob(x.exp()), distribution.log_prob(x) - x)

    def test_densities_of_arrays_and_lists_are_those_of_tensors(self, distribution):
        values = torch.tensor([-1.0, 0.0, 2.0])
        expected = distribution.log_prob(values)
        for given in (values.numpy(), values.tolist(), list(values), [-1, 0, 2]):
            torch.testing.assert_close(distribution.log_prob(given), expected, check_dtype=False)
        torch.testing.assert_close(distribution.log_prob(2.0), expected[2], check_dtype=False)

    def test_samples_carry_gradients(self, distribution):
        scale = torch.tensor(2.0, requires_grad=True)
        arguments = [
            scale if name == "scale" else getattr(distribution, name) for name in distribution.arg_constraints
        ]
        sample = type(distribution)(*arguments).rsample(generator=torch.Generator().manual_seed(0))
        sample.backward()
        torch.testing.assert_close(scale.grad, ((sample - distribution.loc) / 2).detach())


def test_extreme_samples_are_finite(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **kwargs: torch.zeros(shape))
    assert StudentT(torch.tensor(2.1), 0.0, 1.0).sample((3,)).isfinite().all()


@pytest.mark.parametrize("dof", [2.01, 3.0, 30.0, 1e3, 1e6, 1e8])
def test_density_is_accurate_in_float32(dof):
    distribution = StudentT(torch.tensor(dof), 0.3, 0.8)
    x = torch.linspace(-30, 30, 61)
    nu, loc, scale = (float(t) for t in (distribution.df, distribution.loc, distribution.scale))
    exact = (
        scipy.stats.t(nu, loc, scale).logpdf(x.double().numpy())
        if dof < 1e5
        else _t_log_prob(nu, loc, scale, x)
    )
    exact = torch.as_tensor(exact)
    error = (distribution.log_prob(x).double() - exact).abs() / (1 + exact.abs())
    assert error.max() < 1e-6


def _t_log_prob(nu, loc, scale, x):
    with mpmath.workdps(50):
        c = mpmath.loggamma((mpmath.mpf(nu) + 1) / 2) - mpmath.loggamma(mpmath.mpf(nu) / 2)
        c -= mpmath.log(nu * mpmath.pi) / 2 + mpmath.log(scale)
        return [
            float(c - (nu + 1) / 2 * mpmath.log1p(((v - loc) / scale) ** 2 / nu))
            for v in map(mpmath.mpf, x.tolist())
        ]


def test_log_gamma_differences_are_accurate_to_12_digits():
    xs = [1.0, 1.5, 7.3, 20.0, 333.0, 999.9, 1000.0, 1000.1, 1e4, 5e7]
    x = torch.tensor(xs, dtype=torch.double)
    with mpmath.workdps(50):
        half = [float(mpmath.loggamma(mpmath.mpf(v) + 0.5) - mpmath.loggamma(v)) for v in xs]
        far = [
            [float(mpmath.loggamma(mpmath.mpf(v) + s) - mpmath.loggamma(v)) for v in xs]
            for s in (0.5, 10, 2500.5)
        ]
    torch.testing.assert_close(
        log_gamma_half_step(x), torch.tensor(half, dtype=torch.double), rtol=0, atol=2e-12
    )
    for step, exact in zip((0.5, 10, 2500.5), far, strict=True):
        result = log_gamma_step(x, torch.tensor(step))
        torch.testing.assert_close(result, torch.tensor(exact, dtype=torch.double), rtol=1e-14, atol=4e-12)


def test_log_gamma_differences_have_correct_gradients():
    x = torch.tensor([1.2, 30.0, 900.0, 1100.0], dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(log_gamma_half_step, x)
    assert torch.autograd.gradcheck(lambda x: log_gamma_step(x, torch.tensor(4.5)), x)
