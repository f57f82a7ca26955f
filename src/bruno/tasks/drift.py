"""p-values within one set, by ranks of leave-one-out scores, and a test for change in a stream."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bruno.model import Bruno
from bruno.process import Evidence

RANKS = 128  # elements that a new one is ranked among
_BETS = (-1.9, 0.0, 1.9)  # slopes of the bets on p-values; negative ones bet on low p-values
_JUMP = 0.01  # fraction of the wealth that is redistributed over all bets before each p-value
_LEVEL = 0.01  # probability of a false alarm over a stream of any length


class WithinPValue(NamedTuple):
    """The p-value of an element within its set.

    Attributes:
        p: (1 + number of ranked elements with a score at most this low)/(number of ranked elements + 1).
        uniform: the same with the density log p(x | others) in place of the score, and ties broken at random,
            which makes it uniform. If a set drifts, densities become low, while scores may stay high.
    """

    p: float
    uniform: float


@dataclass(frozen=True, eq=False)
class WithinSet:
    """A set in which every element counts, with a uniform random sample of its latents to rank among.

    If the elements of a set and a new element are exchangeable, the rank of the new element's leave-one-out
    score among those of the set is uniform: P(p ≤ a) ≤ a for any model. The set must not be training data,
    and no element may be selected by its score, so this does not hold if outliers are excluded. The smallest
    p is 1/(m + 1) for m ranked elements.

    Attributes:
        evidence: evidence of all elements.
        sample: latents of at most `RANKS` elements, chosen independently of their values.
    """

    evidence: Evidence
    sample: Float[Tensor, "m dim"]

    @classmethod
    def empty(cls, dim: int, device: torch.device | str = "cpu") -> WithinSet:
        """A set without elements."""
        return cls(Evidence.empty(dim, device=device), torch.zeros((0, dim), device=device))

    @torch.no_grad()
    def p_value(self, model: Bruno, z: Float[Tensor, " dim"]) -> WithinPValue:
        """The p-value of a new element: the rank of its score among those of the sample."""
        if not len(self.sample):
            return WithinPValue(1.0, self._random())
        density = model.process.log_prob(z, self.evidence)
        others = self.evidence.add(z).reshape(1) - Evidence.single(self.sample)
        densities = model.process.log_prob(self.sample, others)
        alone = model.process.log_prob(torch.cat([self.sample, z.unsqueeze(0)]))
        scores, score = densities - alone[:-1], density - alone[-1]
        below, ties = int((densities < density).sum()), int((densities == density).sum())
        count = len(self.sample) + 1
        p = (1 + int((scores <= score).sum())) / count
        return WithinPValue(p, (below + self._random() * (1 + ties)) / count)

    def add(self, z: Float[Tensor, " dim"]) -> WithinSet:
        """The set with another element, which takes a random place of the sample (reservoir sampling)."""
        seen, sample = int(self.evidence.count), self.sample
        if seen < RANKS:
            sample = torch.cat([sample, z.unsqueeze(0)])
        elif (place := int(self._random() * (seen + 1))) < RANKS:
            sample = sample.clone()
            sample[place] = z
        return WithinSet(self.evidence.add(z), sample)

    def _random(self) -> float:
        """A random number that depends only on the number of elements so far."""
        generator = torch.Generator().manual_seed(int(self.evidence.count))
        return torch.rand((2,), generator=generator, dtype=torch.double)[1].item()


@dataclass(frozen=True)
class DriftTest:
    """A test for change in a stream: bets against uniform p-values, which win only if the stream changes.

    The wealth is a martingale (Vovk's Simple Jumper) that starts at 1. If the elements are exchangeable, the
    probability that it ever reaches 100 is at most 1 %. Random outliers at a constant rate are exchangeable.

    Attributes:
        wealth: logarithm of the wealth on each bet.
        position: position of the latest element with a p-value, from 1.
        gain: logarithm of the gain of the bet on low p-values since that gain was last 0.
        since: position at which that gain was last 0, after which the stream seems to have changed.
        detected: position at which the wealth reached 1/level; 0 if it did not.
    """

    wealth: tuple[float, ...] = (-math.log(len(_BETS)),) * len(_BETS)
    position: int = 0
    gain: float = 0.0
    since: int = 0
    detected: int = 0

    @property
    def changed_at(self) -> int | None:
        """Position of the first element after the change, about; None if no change was detected."""
        return self.since + 1 if self.detected else None

    def add(self, p: float, position: int | None = None) -> DriftTest:
        """The test after another p-value; `position` of its element if some elements have no p-value."""
        position = self.position + 1 if position is None else position
        if self.detected:
            return replace(self, position=position)
        total = _log_sum(self.wealth)
        spread = [
            _log_sum((math.log1p(-_JUMP) + own, math.log(_JUMP / len(_BETS)) + total)) for own in self.wealth
        ]
        wealth = tuple(
            own + math.log(1 + slope * (p - 0.5)) for own, slope in zip(spread, _BETS, strict=True)
        )
        gain = max(0.0, self.gain + math.log(1 + _BETS[0] * (p - 0.5)))
        detected = position if _log_sum(wealth) >= -math.log(_LEVEL) else 0
        return DriftTest(wealth, position, gain, self.since if gain else position, detected)


def _log_sum(values: tuple[float, ...]) -> float:
    most = max(values)
    return most + math.log(sum(math.exp(value - most) for value in values))
