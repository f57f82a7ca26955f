"""A learnt linear map of channels."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bruno.flow.bijection import Bijection, Transformed


class ChannelMixing(Bijection):
    """An invertible 1 × 1 convolution (Kingma & Dhariwal 2018): z = W·x at every position.

    W = L·U is a product of triangular matrices: L has ones on its diagonal, U has exp(s). Therefore,
    log |det W| = Σ s at each position, and the inverse takes two triangular solves. W starts as the identity,
    so that a flow starts as it would without the mixing. Between couplings, it learns which channels the next
    coupling moves.

    >>> z, log_det = ChannelMixing(3)(torch.ones(2, 3, 4, 4))
    >>> bool((z == 1).all()), log_det.tolist()
    (True, [0.0, 0.0])
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.raw_lower = nn.Parameter(torch.zeros(channels, channels))
        self.raw_upper = nn.Parameter(torch.zeros(channels, channels))
        self.log_scale = nn.Parameter(torch.zeros(channels))

    @property
    def lower(self) -> Float[Tensor, "channels channels"]:
        """L."""
        return self.raw_lower.tril(-1) + torch.ones_like(self.log_scale).diag()

    @property
    def upper(self) -> Float[Tensor, "channels channels"]:
        """U."""
        return self.raw_upper.triu(1) + self.log_scale.exp().diag()

    def forward(self, x: Float[Tensor, "batch channels height width"]) -> Transformed:  # noqa: D102
        z = (self.lower @ self.upper) @ x.flatten(2)
        return z.view_as(x), self._log_det(x)

    def inverse(self, z: Float[Tensor, "batch channels height width"]) -> Transformed:  # noqa: D102
        y = torch.linalg.solve_triangular(self.lower, z.flatten(2), upper=False, unitriangular=True)
        x = torch.linalg.solve_triangular(self.upper, y, upper=True)
        return x.view_as(z), -self._log_det(z)

    def _log_det(self, x: Tensor) -> Float[Tensor, " batch"]:
        return (x[0, 0].numel() * self.log_scale.sum()).expand(x.shape[0])
