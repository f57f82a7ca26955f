"""The functions of a model that are exported: modules with only tensor arguments, traced into graphs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bruno.model import Bruno
from bruno.process import Evidence, StudentTProcess


class Function(nn.Module):
    """A function of a model, with the names of its arguments and results.

    `arguments` are examples of one element and one set; axis names mark the dynamic axes.
    """

    outputs: tuple[str, ...] = ()

    def __init__(self, model: Bruno) -> None:
        super().__init__()
        self.model = model

    def arguments(self) -> dict[str, Argument]:
        """The arguments by name, in order."""
        raise NotImplementedError

    def _elements(self) -> dict[str, Argument]:
        kind = torch.float32 if self.model.kind.is_images else torch.float64
        return {"x": Argument(torch.full((2, *self.model.shape), 0.5, dtype=kind), {0: "batch"})}

    def _latents(self) -> dict[str, Argument]:
        return {"z": Argument(torch.zeros(2, self.model.dim), {0: "batch"})}

    def _evidence(self) -> dict[str, Argument]:
        numbers = torch.ones(3, self.model.dim, dtype=torch.double)
        return {
            "count": Argument(torch.tensor([1, 2, 3]), {0: "sets"}),
            "mean": Argument(numbers, {0: "sets"}),
            "scatter": Argument(numbers, {0: "sets"}),
        }


@dataclass(frozen=True)
class Argument:
    """An example of an argument, and the names of its dynamic axes."""

    example: Tensor
    axes: dict[int, str]


class Encode(Function):
    """Latents of elements, and the log-det of the map to them."""

    outputs = ("z", "log_det")

    def arguments(self) -> dict[str, Argument]:  # noqa: D102
        return self._elements()

    def forward(self, x: Float[Tensor, "batch *shape"]) -> tuple[Tensor, Tensor]:  # noqa: D102
        z, log_det = self.model.encode(x, validate=False)
        return z, log_det


class Decode(Function):
    """Elements from latents, in the range of the data."""

    outputs = ("x",)

    def arguments(self) -> dict[str, Argument]:  # noqa: D102
        return self._latents()

    def forward(self, z: Float[Tensor, "batch dim"]) -> Tensor:  # noqa: D102
        preprocessing = self.model.preprocessing
        y = self.model.flow.inverse(z)[0]
        return preprocessing.clamped(preprocessing.inverse(y)[0])[0]


class ScoreLatents(Function):
    """Scores of latents given each set, (batch, sets), and the log-density of the latents given no set."""

    outputs: tuple[str, ...] = ("score", "log_prior")

    def arguments(self) -> dict[str, Argument]:  # noqa: D102
        return self._latents() | self._evidence()

    def forward(  # noqa: D102
        self,
        z: Float[Tensor, "batch dim"],
        count: Int[Tensor, " sets"],
        mean: Float[Tensor, "sets dim"],
        scatter: Float[Tensor, "sets dim"],
    ) -> tuple[Tensor, Tensor]:
        log_prior = self._log_prob(z, Evidence.empty(self.model.dim, (1,), device=z.device))
        given = self._log_prob(z, Evidence(count, mean, scatter))
        return (given - log_prior).to(z.dtype), log_prior.squeeze(1).to(z.dtype)

    def _log_prob(self, z: Tensor, evidence: Evidence) -> Float[Tensor, "batch sets"]:
        """log p(z | set) by the predictive in float64; tracing would fix the shapes in `process.log_prob`."""
        predictive = self.model.process.predictive(evidence, dtype=torch.double)
        return predictive.log_prob(z.double().unsqueeze(1)).sum(-1)


class Score(ScoreLatents):
    """Scores of elements given each set, log p(x | set) − log p(x) in nats: (batch, sets)."""

    outputs = ("score",)

    def arguments(self) -> dict[str, Argument]:  # noqa: D102
        return self._elements() | self._evidence()

    def forward(self, x: Tensor, count: Tensor, mean: Tensor, scatter: Tensor) -> Tensor:  # type: ignore[override]  # noqa: D102
        return super().forward(self.model.encode(x, validate=False).z, count, mean, scatter)[0]


class Predict(Function):
    """The predictive distribution of latents: location, scale and degrees of freedom, (sets, dim) each.

    A Gaussian process has infinite degrees of freedom.
    """

    outputs = ("location", "scale", "dof")

    def arguments(self) -> dict[str, Argument]:  # noqa: D102
        return self._evidence()

    def forward(  # noqa: D102
        self,
        count: Int[Tensor, " sets"],
        mean: Float[Tensor, "sets dim"],
        scatter: Float[Tensor, "sets dim"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        predictive = self.model.process.predictive(Evidence(count, mean, scatter))
        dof = getattr(predictive, "df", torch.full_like(predictive.loc, torch.inf))
        return predictive.loc, predictive.scale, dof


class SampleLatents(Function):
    """Samples of latents from given random numbers, (n, sets, dim).

    `noise` replaces the random numbers of the sampler: uniform on (0, 1), (2, n, sets, dim), for a Student-t
    process; normal, (n, sets, dim), for a Gaussian one. `temperature` scales the spread around the location.
    """

    outputs = ("z",)

    def arguments(self) -> dict[str, Argument]:  # noqa: D102
        pair = (2,) if isinstance(self.model.process, StudentTProcess) else ()
        noise = torch.full((*pair, 4, 3, self.model.dim), 0.5)
        axes = {len(pair): "samples", len(pair) + 1: "sets"}
        temperature = Argument(torch.ones(()), {})
        return self._evidence() | {"noise": Argument(noise, axes), "temperature": temperature}

    def forward(  # noqa: D102
        self,
        count: Int[Tensor, " sets"],
        mean: Float[Tensor, "sets dim"],
        scatter: Float[Tensor, "sets dim"],
        noise: Float[Tensor, "*pair samples sets dim"],
        temperature: Float[Tensor, ""],
    ) -> Tensor:
        predictive = self.model.process.predictive(Evidence(count, mean, scatter))
        with given_noise(noise):
            z = predictive.sample((noise.shape[-3],))
        return predictive.loc + temperature * (z - predictive.loc)


FUNCTIONS: dict[str, Callable[[Bruno], Function]] = {
    "encode": Encode,
    "decode": Decode,
    "score": Score,
    "score_latents": ScoreLatents,
    "predict": Predict,
    "sample_latents": SampleLatents,
}


def given_noise(noise: Tensor) -> AbstractContextManager[Any]:
    """Context in which `torch.rand` and `torch.randn` return these numbers."""
    return _GivenNoise(noise)


class _GivenNoise(TorchFunctionMode):
    def __init__(self, noise: Tensor) -> None:
        super().__init__()
        self.noise = noise

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.noise if func in (torch.rand, torch.randn) else func(*args, **(kwargs or {}))
