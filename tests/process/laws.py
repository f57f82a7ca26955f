"""References for the process: the paper's recurrence, plain linear algebra, and mpmath."""

import mpmath
import torch
from torch import Tensor

from bruno import GaussianProcess, StudentTProcess

PROCESSES = {
    "student-t": lambda dim, **kwargs: StudentTProcess(dim, **{"dof": 7.0, **kwargs}),
    "gaussian": GaussianProcess,
}


def varied(name: str, dim: int = 5, **kwargs) -> torch.nn.Module:
    """A float64 process whose dimensions all differ."""
    ramp = torch.linspace(0, 1, dim, dtype=torch.double)
    settings = {"variance": 0.3 + 2 * ramp, "correlation": 0.02 + 0.9 * ramp, "mean": ramp - 0.4}
    if name == "student-t":
        settings["dof"] = 2.3 + 20 * ramp
    return PROCESSES[name](dim, **{**settings, **kwargs}, dtype=torch.double)


def by_dimension(process, z: Tensor, method: str = "step_log_prob", **kwargs) -> Tensor:
    """The terms that the process adds up over dimensions, through one-hot masks."""
    masks = torch.eye(process.dim, dtype=torch.bool, device=z.device)
    return torch.stack([getattr(process, method)(z, dimensions=mask, **kwargs) for mask in masks], -1)


def paper_recurrence(process, z: Tensor) -> Tensor:
    """Equations 12 ff. of the paper (main text), step by step, in float64."""
    v, rho, mu_0 = process.variance, process.covariance, process.mean
    student = isinstance(process, StudentTProcess)
    nu_0 = process.dof if student else torch.full_like(v, torch.inf)
    mu, var, beta, s = mu_0, v, torch.zeros_like(v), torch.zeros_like(v)
    b_before = torch.zeros_like(v)
    steps = []
    for n, x in enumerate(z.unbind(-2), start=1):
        if student:
            nu = nu_0 + n - 1
            scaled = var * (nu_0 + beta - 2) / (nu - 2)
            log_p = (
                torch.lgamma((nu + 1) / 2) - torch.lgamma(nu / 2) - 0.5 * ((nu - 2) * torch.pi * scaled).log()
            )
            log_p = log_p - (nu + 1) / 2 * (1 + (x - mu) ** 2 / (scaled * (nu - 2))).log()
        else:
            log_p = torch.distributions.Normal(mu, var.sqrt()).log_prob(x)
        steps.append(log_p.sum(-1))
        d = rho / (v + rho * (n - 1))
        mu, var = (1 - d) * mu + d * x, (1 - d) * var + d * (v - rho)
        centred = x - mu_0
        a = (v + rho * (n - 2)) / ((v - rho) * (v + rho * (n - 1)))
        b = -rho / ((v - rho) * (v + rho * (n - 1)))
        beta = beta + (a - b) * centred**2 + b * (s + centred) ** 2 - b_before * s**2
        s, b_before = s + centred, b
    return torch.stack(steps, -1)


def multivariate_log_prob(process, z: Tensor) -> Tensor:
    """Equation 4 with the full covariance matrix, O(n³): joint log-density of sets (*batch, n, dim)."""
    n = z.shape[-2]
    eye = torch.eye(n, dtype=z.dtype)
    v, rho = process.variance[:, None, None], process.covariance[:, None, None]
    K = rho + (v - rho) * eye
    centred = (z - process.mean).transpose(-1, -2)
    beta = (centred * torch.linalg.solve(K, centred.unsqueeze(-1)).squeeze(-1)).sum(-1)
    if not isinstance(process, StudentTProcess):
        return (-0.5 * (beta + torch.logdet(K) + n * torch.log(torch.tensor(2 * torch.pi)).double())).sum(-1)
    nu = process.dof
    constant = torch.lgamma((nu + n) / 2) - torch.lgamma(nu / 2) - n / 2 * ((nu - 2) * torch.pi).log()
    return (constant - 0.5 * torch.logdet(K) - (nu + n) / 2 * torch.log1p(beta / (nu - 2))).sum(-1)


def step_log_prob_to_50_digits(dof, v, e, z: list[float]) -> list[float]:
    """log p(z_i | z_<i) of one dimension in mpmath, from running sums; e is v − r to full precision."""
    with mpmath.workdps(50):
        dof, v, e = (mpmath.mpf(x) for x in (dof, v, e))
        r, total, squares, result = v - e, mpmath.mpf(0), mpmath.mpf(0), []
        for n, x in enumerate(map(mpmath.mpf, z)):
            w = e + n * r
            k = e * (v + n * r) / w
            location = r * total / w
            beta = (squares - r * total**2 / w) / e
            spread = k * (dof - 2 + beta)
            result.append(
                mpmath.loggamma((dof + n + 1) / 2)
                - mpmath.loggamma((dof + n) / 2)
                - mpmath.log(mpmath.pi * spread) / 2
                - (dof + n + 1) / 2 * mpmath.log1p((x - location) ** 2 / spread)
            )
            total, squares = total + x, squares + x * x
        return [float(x) for x in result]


def leave_one_out_log_prob_to_50_digits(dof, v, e, z: list[float]) -> list[float]:
    """log p(z_i | all others) of one dimension in mpmath; an infinite `dof` is a Gaussian process."""
    with mpmath.workdps(50):
        v, e, values = mpmath.mpf(v), mpmath.mpf(e), [mpmath.mpf(x) for x in z]
        r, n = v - e, len(values) - 1
        total, squares = mpmath.fsum(values), mpmath.fsum(x * x for x in values)
        w = e + n * r
        k = e * (v + n * r) / w
        result = []
        for x in values:
            before = total - x
            residual = x - r * before / w
            if dof == mpmath.inf:
                result.append(-(residual**2 / k + mpmath.log(2 * mpmath.pi * k)) / 2)
                continue
            beta = (squares - x * x - r * before**2 / w) / e
            spread, nu = k * (mpmath.mpf(dof) - 2 + beta), mpmath.mpf(dof) + n
            result.append(
                mpmath.loggamma((nu + 1) / 2)
                - mpmath.loggamma(nu / 2)
                - mpmath.log(mpmath.pi * spread) / 2
                - (nu + 1) / 2 * mpmath.log1p(residual**2 / spread)
            )
        return [float(x) for x in result]
