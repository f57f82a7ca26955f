"""The steps of requests on a model; steps of several requests are computed together.

A job is a generator: it yields the steps that it needs, receives their results, and returns its answer.
`run_together` advances several jobs in turn, and computes all encodings, densities or decodings that they
wait for in one call of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bruno.model import Bruno
from bruno.streams.codec import SetRecord
from bruno.streams.densities import RowDensities
from bruno.streams.encoder import Latents, encoder_of

_NUMBERS = 2**20  # of latents whose densities are computed at a time


@dataclass(frozen=True, eq=False)
class Encode:
    """A step whose result is the latents of elements (n, *shape)."""

    x: Tensor


@dataclass(frozen=True, eq=False)
class Decode:
    """A step whose result is the elements of latents (n, dim)."""

    z: Tensor


@dataclass(frozen=True, eq=False)
class Density:
    """A step whose result is log p(z | set), (n, sets), of latents (n, dim) given each set."""

    z: Float[np.ndarray, "n dim"]
    sets: Sequence[SetRecord]


Step: TypeAlias = Encode | Decode | Density
Job: TypeAlias = Generator[Step, Any, Any]


class Outcome(NamedTuple):
    """The answer of a job, or its error."""

    answer: Any = None
    error: Exception | None = None


class Computer:
    """Computes steps of a model; steps of one type are computed together.

    A row of a dense flow has the same latents and densities in any batch, bit for bit; other elements have
    the same up to rounding.

    Args:
        model: a frozen model.
        batch: elements that are encoded or decoded at a time.
    """

    def __init__(self, model: Bruno, batch: int) -> None:
        self.model, self._batch = model, batch
        self._encode = encoder_of(model)
        self._densities = RowDensities(model.process)
        self._functions: dict[type[Step], Callable[[list[Any]], list[Any]]] = {
            Encode: self._encoded,
            Decode: self._decoded,
            Density: self._density,
        }

    def compute(self, steps: Sequence[Step]) -> list[Any]:
        """The results of steps, in order; an exception in place of one that fails."""
        results: list[Any] = [None] * len(steps)
        for kind, function in self._functions.items():
            places = [i for i, step in enumerate(steps) if type(step) is kind]
            some = [steps[i] for i in places]
            for i, result in zip(places, _each(function, some), strict=True):
                results[i] = result
        return results

    def _encoded(self, steps: list[Encode]) -> list[Latents]:
        # In numpy: torch would release the GIL, and then wait to get it back.
        x = torch.from_numpy(np.concatenate([step.x.numpy() for step in steps]))
        parts = [self._encode(x[i : i + self._batch]) for i in range(0, len(x), self._batch)]
        z, log_det = (np.concatenate(some) for some in zip(*parts, strict=True))
        return [Latents(z[own], log_det[own]) for own in _consecutive([len(step.x) for step in steps])]

    @torch.no_grad()
    def _decoded(self, steps: list[Decode]) -> list[Tensor]:
        z = torch.cat([step.z for step in steps])
        x = torch.cat([self.model.decode(part) for part in z.split(self._batch)])
        return list(x.split([len(step.z) for step in steps]))

    def _density(self, steps: list[Density]) -> list[Float[np.ndarray, "n sets"]]:
        """log p(z | set) of all pairs of latents and sets, computed as one batch of pairs."""
        pairs = [(step.z, one) for step in steps for one in step.sets]
        z = np.concatenate([z for z, _ in pairs])
        sizes = [len(z) for z, _ in pairs]
        count = np.repeat([one.count for _, one in pairs], sizes)
        mean = np.repeat([one.mean for _, one in pairs], sizes, 0)
        scatter = np.repeat([one.scatter for _, one in pairs], sizes, 0)
        size = max(1, _NUMBERS // self.model.dim)
        places = [slice(i, i + size) for i in range(0, len(z), size)]
        found = np.concatenate(
            [self._densities(z[some], count[some], mean[some], scatter[some]) for some in places]
        )
        own = _consecutive([len(step.z) * len(step.sets) for step in steps])
        return [found[some].reshape(len(step.sets), -1).T for some, step in zip(own, steps, strict=True)]


def _consecutive(sizes: Iterable[int]) -> list[slice]:
    """Slices of these sizes, one after the other."""
    return [slice(start, end) for start, end in pairwise((0, *accumulate(sizes)))]


def _each(function: Callable[[list[Any]], list[Any]], steps: list[Any]) -> list[Any]:
    """Compute steps together or, if that fails, one by one, so that no request makes another fail."""
    if not steps:
        return []
    try:
        return function(steps)
    except Exception as error:
        if len(steps) == 1:
            return [error]
        return [result for step in steps for result in _each(function, [step])]


def run_together(jobs: Iterable[Job], compute: Callable[[list[Step]], list[Any]]) -> list[Outcome]:
    """Run jobs to completion; steps that they wait for at the same time are computed together."""
    running = list(jobs)
    outcomes: list[Outcome | None] = [None] * len(running)
    results: dict[int, Any] = dict.fromkeys(range(len(running)))
    while results:
        waiting: dict[int, Step] = {}
        for i, result in results.items():
            advanced = _advance(running[i], result)
            if isinstance(advanced, Outcome):
                outcomes[i] = advanced
            else:
                waiting[i] = advanced
        results = dict(zip(waiting, compute(list(waiting.values())), strict=True))
    return [outcome for outcome in outcomes if outcome is not None]


def _advance(job: Job, result: Any) -> Step | Outcome:
    """The next step of a job, or its outcome."""
    try:
        return job.throw(result) if isinstance(result, Exception) else job.send(result)
    except StopIteration as end:
        return Outcome(end.value)
    except Exception as error:
        return Outcome(error=error)
