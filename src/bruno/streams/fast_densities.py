"""Single elements in numpy, for `Detector`: several times faster than torch for rows of a dense flow."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from bruno.model import Bruno, Encoded
from bruno.process import Evidence
from bruno.streams.densities import RowDensities
from bruno.streams.encoder import RowEncoder
from bruno.tasks.stream_evidence import ElementDensities


def densities_of(model: Bruno) -> ElementDensities:
    """The fastest densities of single elements of a model: `FastDensities` if possible, else the model's."""
    return FastDensities(model) if RowEncoder.supports(model) else ElementDensities(model)


class FastDensities(ElementDensities):
    """`ElementDensities` in numpy: latents have the type of the model, densities are float64."""

    def __init__(self, model: Bruno) -> None:
        super().__init__(model)
        self._encode, self._densities = RowEncoder(model, on_scales=True), RowDensities(model.process)
        self._type = model.process.mean.dtype

    def encode(self, x: Float[Tensor, " dim"]) -> Encoded:  # noqa: D102
        z, log_det = self._encode(x.detach().numpy()[None])
        return Encoded(torch.from_numpy(z[0]).to(self._type), torch.from_numpy(log_det)[0])

    def prior(self, z: Float[Tensor, " dim"]) -> Float[Tensor, ""]:  # noqa: D102
        return torch.from_numpy(self._densities.prior(z.double().numpy()))

    def given(self, z: Float[Tensor, " dim"], evidence: Evidence) -> Float[Tensor, ""]:  # noqa: D102
        count, mean, scatter = evidence.count.item(), evidence.mean.numpy(), evidence.scatter.numpy()
        return torch.from_numpy(self._densities(z.double().numpy(), float(count), mean, scatter))

    def scores_of(self, z: Float[Tensor, "n dim"]) -> Callable[[Tensor], Tensor]:  # noqa: D102
        sets = z.double().numpy()[None]
        prior = self._densities.prior(sets[0])
        within = self._densities.scores_within
        return lambda inside: torch.from_numpy(within(sets, inside.numpy()[None], prior)[0])
