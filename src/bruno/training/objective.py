"""The training objective: bits/dim of sets, and cross-entropy of episodes."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from bruno.config import TrainConfig
from bruno.model import Bruno
from bruno.process import Evidence, ExchangeableProcess


def episode_log_probs(
    process: ExchangeableProcess, z: Float[Tensor, "batch way n dim"], shot: int
) -> Float[Tensor, "batch way queries way"]:
    """log p(query j of class i | support of class k) for all i, j and k of each episode.

    The first `shot` elements of a class are its support, all others are queries. The density is that of the
    latents, as the Jacobian of a query is the same for every class.
    """
    support, query = z[:, :, :shot], z[:, :, shot:]
    batch, way = support.shape[:2]
    classes = Evidence.of(support, validate=False).reshape(batch, 1, 1, way)
    return process.predictive(classes).log_prob(query.unsqueeze(3)).sum(-1)


class Objective(nn.Module):
    """Bits/dim of sets, cross-entropy of episodes, or their weighted sum.

    It is a module, so that DistributedDataParallel can wrap it, and takes dequantised elements. The weight of
    the cross-entropy is a tensor, whose value can change in a captured CUDA graph.
    """

    def __init__(self, model: Bruno, config: TrainConfig, discriminative: Float[Tensor, ""]) -> None:
        super().__init__()
        self.model, self.config, self.discriminative = model, config, discriminative

    def forward(
        self,
        sets: Float[Tensor, "batch n *shape"] | None,
        episodes: Float[Tensor, "episodes way each *shape"] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, bits/dim and accuracy; bits/dim is NaN without sets, accuracy NaN without episodes."""
        missing = self.model.process.mean.new_full((), math.nan)
        loss, bits, accuracy = torch.zeros_like(missing), missing, missing
        log_prob = None if sets is None else self.model.log_prob(sets, validate=False)
        if episodes is not None:
            z, log_det = self.model.encode(episodes, validate=False)
            scores = episode_log_probs(self.model.process, z, self.config.shot)
            target = torch.arange(scores.shape[1], device=z.device)[:, None].expand(scores.shape[:3])
            cross_entropy = F.cross_entropy(scores.flatten(0, 2), target.flatten())
            loss = loss + self.discriminative * cross_entropy
            accuracy = (scores.argmax(3) == target).float().mean()
            if self.config.shared:
                log_prob = self.model.process.step_log_prob(z, validate=False) + log_det
        if log_prob is not None:
            bits = self.model.bits_per_dim(log_prob).mean()
            loss = loss + self.config.generative * bits
        return loss, bits, accuracy
