"""The base of exchangeable processes: one independent process for every latent dimension."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bruno.arrays import Arrays, as_real_tensor, as_tensor
from bruno.checks import check_whole
from bruno.process.checks import (
    check_devices,
    check_finite,
    check_observations,
    check_range,
    check_type,
    may_look_at_values,
    widened,
)
from bruno.process.coefficients import Parameters, column, without_copies
from bruno.process.distributions import Normal, StudentT, log_gamma_half_step
from bruno.process.element_density import Prediction, element_log_prob
from bruno.process.evidence import Evidence
from bruno.process.step_density import Start, step_log_prob

# Ranges of the parameters: never reached in practice, and narrow enough for float32.
_MAX_LOG_VARIANCE = math.log(1e12)
_MAX_LOGIT_CORRELATION = 15.0  # 1 − c = 3e-7, which float32 still distinguishes from 1
_MIN_LOGIT_CORRELATION = -27.0  # c = 2e-12, which stands for 0

Values = float | Sequence[float | int] | Float[Tensor, " dim"]


class ExchangeableProcess(nn.Module):
    """Base of both processes: each dimension has variance v and covariance r = c·v of any two elements.

    The parameters stay valid under any optimiser step: `raw_variance` is log v and
    `raw_correlation` is logit c. Terms that depend on the parameters alone are computed in float64, so that
    a float32 process loses no precision when c → 1 or ν → 2. Terms that depend on the data keep its type.

    Args:
        dim: number of latent dimensions.
        variance: v > 0, one number or one per dimension.
        correlation: c in [0, 1), one number or one per dimension. A correlation of 0 (stored as 2e-12)
            never changes in training: start above it.
        mean: m0, a buffer: moved and saved with the module, but not trained.
        device: device of the parameters.
        dtype: type of the parameters.
    """

    mean: Tensor

    def __init__(
        self,
        dim: int,
        *,
        variance: Values = 1.0,
        correlation: Values = 0.1,
        mean: Values = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole("dim", dim)
        self.dim = operator.index(dim)
        self._device, self._dtype = device, dtype or torch.get_default_dtype()
        v = self._values("variance", variance)
        c = self._values("correlation", correlation)
        m = self._values("mean", mean)
        check_range("variance", v, v.log().abs() <= _MAX_LOG_VARIANCE + 1e-9, "from 1e-12 to 1e12")
        highest = 1 / (1 + math.exp(-_MAX_LOGIT_CORRELATION))
        check_range("correlation", c, (c >= 0) & (c <= highest + 1e-9), f"from 0 to {highest:.7f}")
        self.raw_variance = self._parameter(v.log())
        self.raw_correlation = self._parameter(c.logit().clamp(min=_MIN_LOGIT_CORRELATION))
        self.register_buffer("mean", m.to(self._device, self._dtype))

    # --- parameters ------------------------------------------------------------------------------------

    @property
    def variance(self) -> Float[Tensor, " dim"]:
        """v, the prior variance of an element."""
        return self._variance_in_double().to(self.mean.dtype)

    @property
    def correlation(self) -> Float[Tensor, " dim"]:
        """c = r/v, the prior correlation of two elements of a set."""
        return self._logit_correlation().sigmoid()

    @property
    def covariance(self) -> Float[Tensor, " dim"]:
        """r, the prior covariance of two elements of a set: the variance between sets."""
        return self.parameters_in_double().r.to(self.mean.dtype)

    @property
    def residual_variance(self) -> Float[Tensor, " dim"]:
        """e = v − r, the variance within a set, accurate even when c is close to 1."""
        return self.parameters_in_double().e.to(self.mean.dtype)

    def parameters_in_double(self) -> Parameters:
        """m0, r, e and, of a Student-t process, ν − 2, in float64: the parameters in the formulas."""
        v = self._variance_in_double()
        logit = self._logit_correlation().double()
        return Parameters(self.mean.double(), v * logit.sigmoid(), v * (-logit).sigmoid())

    def correlated(self, threshold: float) -> Bool[Tensor, " dim"]:
        """Mask of the dimensions whose correlation exceeds a threshold: those informative about a set."""
        return self.correlation > threshold

    # --- densities -------------------------------------------------------------------------------------

    def predictive(self, evidence: Evidence, *, dtype: torch.dtype | None = None) -> StudentT | Normal:
        """The distribution of the next element of a set with this evidence, batch shape (*batch, dim).

        Its numbers have the dtype of the parameters, or the given one.
        """
        self._check_evidence(evidence)
        return self._predictive(evidence, dtype or self.mean.dtype)

    def step_log_prob(
        self,
        z: Float[Tensor, "*batch n dim"] | Arrays,
        evidence: Evidence | None = None,
        *,
        dimensions: Bool[Tensor, " dim"] | Arrays | None = None,
        validate: bool = True,
    ) -> Float[Tensor, "*any n"]:
        """log p(z_i | evidence, z_1..z_{i−1}), summed over dimensions, for all i at once.

        Args:
            z: sets in any order of their elements; the batch broadcasts with that of `evidence`.
            evidence: evidence observed before the first element; none by default.
            dimensions: mask of the dimensions to keep.
            validate: check for NaN and infinity, and use float64 where squares overflow. Waits for the
                device, so training, which has its own check, turns it off.
        """
        return self._guarded(self._steps, z, evidence, dimensions, validate)

    def log_prob(
        self,
        z: Float[Tensor, "*batch dim"] | Arrays,
        evidence: Evidence | None = None,
        *,
        dimensions: Bool[Tensor, " dim"] | Arrays | None = None,
        validate: bool = True,
    ) -> Float[Tensor, "*any"]:
        """log p(z | evidence) of single elements, each the next one of its set; log p(z) without evidence.

        The first step of `step_log_prob`, with the same arguments: q elements (q, 1, dim) given k sets are
        (q, k). Without gradients the memory does not grow with q·k·dim.
        """
        z = as_real_tensor(z, "z", device=self.mean.device)
        if not z.ndim:
            raise ValueError(f"`z` must end in {self.dim} dimensions; got one number.")
        return self._guarded(self._first_step, z.unsqueeze(-2), evidence, dimensions, validate)

    def joint_log_prob(
        self,
        z: Float[Tensor, "*batch n dim"] | Arrays,
        evidence: Evidence | None = None,
        *,
        dimensions: Bool[Tensor, " dim"] | Arrays | None = None,
        validate: bool = True,
    ) -> Float[Tensor, "*any"]:
        """log p(z_1..z_n | evidence) in closed form: the sum of all steps, from two sufficient statistics."""
        return self._guarded(self._joint_of_set, z, evidence, dimensions, validate)

    def leave_one_out_log_prob(
        self,
        z: Float[Tensor, "*batch n dim"] | Arrays,
        evidence: Evidence | None = None,
        *,
        dimensions: Bool[Tensor, " dim"] | Arrays | None = None,
        validate: bool = True,
    ) -> Float[Tensor, "*any n"]:
        """log p(z_i | evidence, all z_j with j ≠ i), for all i at once and in O(n).

        The evidence of the others is merged from the elements before i and the elements after i. These are
        sums of non-negative terms; subtracting an outlier instead would cancel the rest.
        """
        return self._guarded(self._leave_one_out, z, evidence, dimensions, validate)

    # --- implementation --------------------------------------------------------------------------------

    def _predictive(self, evidence: Evidence, dtype: torch.dtype) -> StudentT | Normal:
        raise NotImplementedError

    def _joint(self, evidence: Evidence) -> Float[Tensor, "*batch dim"]:
        """log-density of the set with this evidence, for each dimension, in float64."""
        raise NotImplementedError

    def _guarded(
        self,
        density: Callable[[Tensor, Evidence | None, Tensor], Tensor],
        z: Tensor | Arrays,
        evidence: Evidence | None,
        dimensions: Tensor | Arrays | None,
        validate: bool,
    ) -> Tensor:
        """A density of checked arguments; if it is not finite, look for the cause."""
        z = self._checked(z, evidence)
        weight = self._weight(z, dimensions)
        with torch.autocast(z.device.type, enabled=False):  # it would lower the precision of sums
            result = density(z, evidence, weight)
            if validate and may_look_at_values(result) and not math.isfinite(result.sum().item()):
                check_finite(z, "z")
                # The input is finite, but its square overflows float32; float64 holds it.
                result = density(z.double().clamp(-1e150, 1e150), evidence, weight.double()).to(z.dtype)
        return result

    def _joint_of_set(self, z: Tensor, evidence: Evidence | None, weight: Tensor) -> Tensor:
        own = Evidence.of(z, validate=False)
        joint = self._joint(own if evidence is None else evidence + own)
        if evidence is not None:
            joint = joint - self._joint(evidence)
        return joint.to(z.dtype) @ weight

    def _leave_one_out(self, z: Tensor, evidence: Evidence | None, weight: Tensor) -> Tensor:
        after = Evidence.prefixes(z.flip(-2), validate=False)
        after = Evidence(after.count.flip(-1), after.mean.flip(-2), after.scatter.flip(-2))
        others = Evidence.prefixes(z, validate=False) + after
        if evidence is not None:
            others = others + evidence.unsqueeze()
        # In float64: far from 0 or with c close to 1, z − location is the small difference of large numbers.
        density = self._predictive(others, torch.double).log_prob(z.double())
        return (density @ weight.double()).to(z.dtype)

    def _first_step(self, z: Tensor, evidence: Evidence | None, weight: Tensor) -> Float[Tensor, "*any"]:
        if evidence is None:
            evidence = Evidence.empty(self.dim, device=z.device)
        parameters = self.parameters_in_double()
        predict = partial(self._prediction, parameters=parameters, weight=weight)
        inputs = (z, evidence.mean, evidence.scatter, *parameters)
        differentiated = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)
        return element_log_prob(z.squeeze(-2), evidence, predict, differentiated=differentiated)

    def _prediction(self, evidence: Evidence, parameters: Parameters, weight: Tensor) -> Prediction:
        """The prediction for the next element of each set, in the dtype of the weights of dimensions."""
        location, square = self._location_and_variance(evidence, parameters)
        excess, wide, dtype = parameters.excess, weight.double(), weight.dtype
        if excess is None:
            constant, power = -0.5 * (2 * math.pi * square).log(), wide
        else:
            dof = 2 + excess + column(evidence.count)
            square = square * (excess + self._quadratic_form(evidence, parameters))
            constant = log_gamma_half_step(dof / 2) - 0.5 * (math.pi * square).log()
            power = (dof + 1) * wide
        constant = (constant * wide).sum(-1)
        inv_scale, constant, power = (part.to(dtype) for part in (square.rsqrt(), constant, power))
        return Prediction(location, inv_scale, constant, power, is_student=excess is not None)

    def _steps(self, z: Tensor, evidence: Evidence | None, weight: Tensor) -> Float[Tensor, "*batch n"]:
        parameters = self.parameters_in_double()
        if evidence is None:
            start = Start(
                torch.zeros((), dtype=torch.long, device=z.device), torch.zeros_like(parameters.mean)
            )
            beta = None
        else:
            batch = torch.broadcast_shapes(z.shape[:-2], evidence.batch_shape)
            z = z.expand(*batch, *z.shape[-2:])
            total = column(evidence.count) * (evidence.mean - parameters.mean)
            given = without_copies(evidence.count)
            start = Start(given.expand(z.shape[:-2]) if given.ndim else given, total)
            beta = self._quadratic_form(evidence, parameters)
        per_set = (*z.shape[:-2], self.dim)
        start = start._replace(total=start.total.expand(per_set))
        if parameters.excess is not None:
            spread = parameters.excess if beta is None else parameters.excess + beta
            start = start._replace(spread=spread.to(z.dtype).expand(per_set))
        return step_log_prob(z, start, parameters, weight)

    def _logit_correlation(self) -> Tensor:
        return self.raw_correlation.clamp(_MIN_LOGIT_CORRELATION, _MAX_LOGIT_CORRELATION)

    def _variance_in_double(self) -> Tensor:
        return self.raw_variance.double().clamp(-_MAX_LOG_VARIANCE, _MAX_LOG_VARIANCE).exp()

    def _location_and_variance(self, evidence: Evidence, parameters: Parameters) -> tuple[Tensor, Tensor]:
        """Location and k of the next element: mean and variance of the Gaussian process."""
        _, r, e, _ = parameters
        count = column(evidence.count)
        w = e + count * r
        location = parameters.mean + count * r / w * (evidence.mean - parameters.mean)
        return location, e * (w + r) / w

    def _quadratic_form(self, evidence: Evidence, parameters: Parameters) -> Float[Tensor, "*batch dim"]:
        """beta = M2/e + N·(z̄ − m0)²/w: a sum of non-negative terms."""
        mean, r, e, _ = parameters
        count = column(evidence.count)
        return evidence.scatter / e + count / (e + count * r) * (evidence.mean - mean).square()

    def _checked(self, z: Tensor | Arrays, evidence: Evidence | None) -> Tensor:
        z = check_observations(z, self.dim, device=self.mean.device)
        check_devices(self.mean, z=z)
        if evidence is not None:
            self._check_evidence(evidence)
            try:
                torch.broadcast_shapes(z.shape[:-2], evidence.batch_shape)
            except RuntimeError:
                raise ValueError(
                    f"`evidence` must have a batch that broadcasts with {tuple(z.shape[:-2])} of `z`; "
                    f"got {tuple(evidence.batch_shape)}."
                ) from None
        z = widened(z)
        return z.to(torch.promote_types(z.dtype, self.mean.dtype))

    def _check_evidence(self, evidence: Evidence) -> None:
        check_type("evidence", evidence, Evidence)
        check_devices(self.mean, evidence=evidence.mean)
        if evidence.dim != self.dim:
            raise ValueError(f"`evidence` must have {self.dim} dimensions; got {evidence.dim}.")

    def _weight(self, z: Tensor, dimensions: Tensor | Arrays | None) -> Tensor:
        """1 for each dimension to keep, 0 for the others."""
        if dimensions is None:
            return z.new_ones(self.dim)
        dimensions = as_tensor(dimensions, "dimensions", device=z.device)
        if dimensions.dtype != torch.bool or dimensions.shape != (self.dim,):
            raise ValueError(
                f"`dimensions` must be a bool mask of shape ({self.dim},), such as process.correlated(0.1); "
                f"got {dimensions.dtype} of shape {tuple(dimensions.shape)}."
            )
        check_devices(z, dimensions=dimensions)
        return dimensions.to(z.dtype)

    def _values(self, name: str, values: Values) -> Float[Tensor, " dim"]:
        tensor = torch.as_tensor(values, dtype=torch.double)
        if tensor.shape not in ((), (1,), (self.dim,)):
            raise ValueError(
                f"`{name}` must be one number or {self.dim} of them; got shape {tuple(tensor.shape)}."
            )
        return check_finite(tensor.expand(self.dim).clone(), name)

    def _parameter(self, values: Tensor) -> nn.Parameter:
        return nn.Parameter(values.to(self._device, self._dtype))

    def extra_repr(self) -> str:
        """The number of dimensions."""
        return f"dim={self.dim}"
