"""A bounded sample of encoded rows, and evidence with further sets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bruno.model import Bruno, Encoded
from bruno.process import Evidence

_SAMPLE = 2000  # rows
_SAME = 1e-4  # latents of a row that is encoded again differ by less than this, relative to their size


@dataclass(frozen=True, eq=False)
class RowSample:
    """A uniform random sample of encoded rows, independent of their values: the rows with the lowest keys.

    Attributes:
        encoded: the rows.
        labels: the set of each row.
        marked: a flag of each row: whether it counts, or whether the model was not trained on it.
        keys: a random number for each row.
        seen: number of rows so far.
        seed: seed of the keys.
    """

    encoded: Encoded
    labels: Int[Tensor, " n"]
    marked: Bool[Tensor, " n"]
    keys: Float[Tensor, " n"]
    seen: int
    seed: int

    @classmethod
    def empty(cls, model: Bruno, seed: int) -> RowSample:
        """A sample of no rows."""
        none = torch.zeros(0, dtype=torch.double, device=model.device)
        encoded = Encoded(none.new_zeros((0, model.dim)), none)
        return cls(encoded, none.long(), none.bool(), none.cpu(), 0, seed)

    def adding(
        self, encoded: Encoded, labels: Int[Tensor, " new"], marked: Bool[Tensor, " new"]
    ) -> RowSample:
        """The sample after new rows."""
        generator = torch.Generator().manual_seed((self.seed + self.seen) % 2**63)
        keys = torch.cat([self.keys, torch.rand(len(labels), generator=generator, dtype=torch.double)])
        kept = keys.argsort()[:_SAMPLE].sort().values
        place = kept.to(labels.device)
        return RowSample(
            Encoded(*(torch.cat(pair)[place] for pair in zip(self.encoded, encoded, strict=True))),
            torch.cat([self.labels, labels])[place],
            torch.cat([self.marked, marked])[place],
            keys[kept],
            self.seen + len(labels),
            self.seed,
        )

    def only(self, kept: Bool[Tensor, " n"]) -> RowSample:
        """The sample with only the rows that are kept."""
        return replace(
            self,
            encoded=Encoded(*(part[kept] for part in self.encoded)),
            labels=self.labels[kept],
            marked=self.marked[kept],
            keys=self.keys[kept.cpu()],
        )

    def without(self, z: Float[Tensor, "gone dim"], labels: Int[Tensor, " gone"]) -> RowSample:
        """The sample without these rows, if it has them; a row is found as the nearest one of its set."""
        kept = torch.ones_like(self.marked)
        for one, label in zip(z, labels, strict=True):
            gaps = (self.encoded.z - one).abs().amax(1) / (1 + one.abs().max())
            gaps = gaps.masked_fill(~kept | (self.labels != label), torch.inf)
            if len(gaps) and bool(gaps.min() < _SAME):
                kept[gaps.argmin()] = False
        return self.only(kept)


def extended(evidence: Evidence, sets: int) -> Evidence:
    """The evidence with further, empty sets."""
    empty = Evidence.empty(evidence.dim, (sets - len(evidence.count),), device=evidence.mean.device)
    return Evidence(
        torch.cat([evidence.count, empty.count]),
        torch.cat([evidence.mean, empty.mean]),
        torch.cat([evidence.scatter, empty.scatter]),
    )
