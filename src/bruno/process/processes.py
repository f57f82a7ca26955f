"""Exchangeable Student-t and Gaussian processes, with the parameters and the densities of each."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from bruno.process.checks import check_range
from bruno.process.coefficients import Parameters, column
from bruno.process.distributions import Normal, StudentT, log_gamma_step
from bruno.process.evidence import Evidence
from bruno.process.exchangeable import ExchangeableProcess, Values

# The range of ν − 2, as wide as those of the other parameters.
_MIN_DOF_EXCESS = 1e-4
_MAX_LOG_DOF_EXCESS = math.log(1e9)


class GaussianProcess(ExchangeableProcess):
    """Every dimension of a set is jointly normal, with variance v and covariance r of any two elements.

    The next element after N observations is normal with::

        w = e + N·r     location = m0 + N·r/w · (z̄ − m0)     variance k = e·(v + N·r)/w
    """

    def _predictive(self, evidence: Evidence, dtype: torch.dtype) -> Normal:
        location, k = self._location_and_variance(evidence, self.parameters_in_double())
        return Normal(location.to(dtype), k.sqrt().to(dtype), validate_args=False)

    def _joint(self, evidence: Evidence) -> Tensor:
        parameters = self.parameters_in_double()
        _, r, e, _ = parameters
        count = column(evidence.count)
        volume = count * (2 * math.pi * e).log() + torch.log1p(count * r / e)
        return -0.5 * (volume + self._quadratic_form(evidence, parameters))


class StudentTProcess(ExchangeableProcess):
    """Every dimension of a set is jointly Student-t (Shah et al. 2014), with ν > 2 degrees of freedom.

    The next element after N observations is Student-t with the location and k of `GaussianProcess` and::

        beta = M2/e + N·(z̄ − m0)²/w     dof = ν + N     variance = (ν + beta − 2)/(ν + N − 2) · k

    so a set with more scatter than expected has wider predictions. `raw_dof` is log(ν − 2 − 1e-4).

    Args:
        dim: number of latent dimensions.
        dof: ν > 2, one number or one per dimension.
        variance: v > 0, as above.
        correlation: c in [0, 1), as above.
        mean: m0, as above; not trained.
        device: device of the parameters.
        dtype: type of the parameters.

    >>> process = StudentTProcess(1, dof=5.0, correlation=0.8)
    >>> seen = Evidence.of(torch.tensor([[2.0], [2.2], [1.9]]))
    >>> predictive = process.predictive(seen)
    >>> round(predictive.mean.item(), 3), predictive.df.item()
    (1.877, 8.0)
    >>> bool(process.log_prob(torch.tensor([2.0]), seen) > process.log_prob(torch.tensor([-2.0]), seen))
    True
    """

    def __init__(
        self,
        dim: int,
        *,
        dof: Values = 1000.0,
        variance: Values = 1.0,
        correlation: Values = 0.1,
        mean: Values = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            dim, variance=variance, correlation=correlation, mean=mean, device=device, dtype=dtype
        )
        nu = self._values("dof", dof)
        excess = nu - 2 - _MIN_DOF_EXCESS
        check_range("dof", nu, (excess > 0) & (nu <= 1e9), f"above {2 + _MIN_DOF_EXCESS} and at most 1e9")
        self.raw_dof = self._parameter(excess.log())

    @property
    def dof(self) -> Float[Tensor, " dim"]:
        """ν, the degrees of freedom."""
        return (2 + self._excess_in_double()).to(self.mean.dtype)

    def _predictive(self, evidence: Evidence, dtype: torch.dtype) -> StudentT:
        parameters = self.parameters_in_double()
        location, k = self._location_and_variance(evidence, parameters)
        excess = self._excess_in_double()
        dof = 2 + excess + column(evidence.count)
        scale = k.sqrt() * ((excess + self._quadratic_form(evidence, parameters)) / dof).sqrt()
        return StudentT(dof.to(dtype), location.to(dtype), scale.to(dtype), validate_args=False)

    def _joint(self, evidence: Evidence) -> Tensor:
        parameters = self.parameters_in_double()
        _, r, e, _ = parameters
        excess = self._excess_in_double()
        half, count = (2 + excess) / 2, column(evidence.count)
        volume = count * (math.pi * excess * e).log() + torch.log1p(count * r / e)
        growth = torch.log1p(self._quadratic_form(evidence, parameters) / excess)
        return log_gamma_step(half, count / 2) - 0.5 * volume - (half + count / 2) * growth

    def parameters_in_double(self) -> Parameters:  # noqa: D102
        return super().parameters_in_double()._replace(excess=self._excess_in_double())

    def _excess_in_double(self) -> Tensor:
        return _MIN_DOF_EXCESS + self.raw_dof.double().clamp(max=_MAX_LOG_DOF_EXCESS).exp()
