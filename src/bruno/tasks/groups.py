"""Held-out groups of clean elements: their latents, and scores of the groups in random orders."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from bruno.checkpoint import checked_tensor, require
from bruno.data.examples import Examples, members_by_label
from bruno.model import Bruno
from bruno.tasks.progress import Progress
from bruno.tasks.robust_evidence import shortfall
from bruno.tasks.stream_evidence import EncodedSets

_MAX_ELEMENTS = 200  # of a group
_SEQUENCES = 600  # random orders of all groups together
_MIN_ORDERS, _MAX_ORDERS = 2, 32  # of each group
_NUMBERS = 2**20  # latent values in all orders, at most; `_MIN_ORDERS` takes precedence
_NUMBERS_AT_A_TIME = 2**20
_IMPUTING = 2**30  # (length · dimensions)² in all orders, at most, if rows are imputed at every position

# Adjusted scores of sets (sets, n), or at each position (sets, n, n).
ScoreFunction = Callable[[EncodedSets], Tensor]


@dataclass(frozen=True, eq=False)
class Groups:
    """Encoded groups of clean elements.

    Attributes:
        latents: latents of all elements, with missing numbers imputed from all elements of the group; empty
            in a calibration that keeps only scores.
        labels: the group of each element.
        usable: whether log p(x) of each element is at least the floor.
        shortfall: how far log p(x) of each element is below the reference, see `shortfall`.
        names: names of the groups.
        ordered: whether the elements of a group follow each other in time. They are then not exchangeable: if
            their level drifts, the next element is less likely than a random one.
        images: the elements themselves, where distances between patches need them; else None.
        rows: the elements with missing numbers as NaN, as streams impute them from earlier elements; None if
            no element has missing numbers, or in a calibration that keeps only scores.
        floor, reference: applied to log p(x) of rows that a stream imputes.
    """

    latents: Float[Tensor, "n_or_none dim"]
    labels: Int[Tensor, " n"]
    usable: Bool[Tensor, " n"]
    shortfall: Float[Tensor, " n"]
    names: tuple[str, ...]
    ordered: bool = False
    images: Tensor | None = None
    rows: Float[Tensor, "n dim"] | None = None
    floor: float = -math.inf
    reference: float = -math.inf

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: Bruno,
        examples: Examples,
        *,
        floor: float = -math.inf,
        reference: float = -math.inf,
        generator: Generator,
        ordered: bool = False,
        keep_images: bool = False,
        progress: Progress | None = None,
    ) -> Groups:
        """Encode examples, at most `_MAX_ELEMENTS` of each class: random ones, or the first if ordered.

        Rows may have missing numbers, if the model can impute them.
        """
        order = torch.arange(len(examples))
        if not ordered:
            order = torch.randperm(len(examples), generator=generator, device=generator.device).cpu()
        groups = members_by_label(examples.labels[order], len(examples.names))
        chosen = order[torch.cat([members[:_MAX_ELEMENTS] for members in groups])]
        latents, log_probs = [], []
        complete, rows = examples.elements, None
        if not model.kind.is_images and bool(complete.isnan().any()):
            complete, rows = model.impute(complete, examples.labels).cpu(), complete[chosen]
        for some in chosen.split(256):
            z, log_det = model.encode(complete[some].to(model.device), on_scales=True)
            latents.append(z.cpu())
            log_probs.append((model.process.log_prob(z) + log_det).cpu())
            if progress is not None:
                progress(sum(map(len, latents)), len(chosen))
        log_prob = torch.cat(log_probs)
        return cls(
            torch.cat(latents),
            examples.labels[chosen],
            log_prob >= floor,
            shortfall(log_prob, reference),
            examples.names,
            ordered,
            examples.elements[chosen] if keep_images else None,
            rows,
            floor,
            reference,
        )

    @classmethod
    def checked(
        cls,
        tensors: dict[str, Tensor],
        names: Any,
        model: Bruno,
        *,
        ordered: bool = False,
        floor: float = -math.inf,
        reference: float = -math.inf,
    ) -> Groups:
        """Groups from the `tensors` and names of a file; raises ValueError if they are invalid."""
        images, rows = tensors.get("images"), tensors.get("rows")
        latents = checked_tensor("latents", tensors["latents"], (None, model.dim))
        labels, usable = tensors["labels"], tensors["usable"]
        shape = (len(labels),) if labels.ndim else ()
        require(isinstance(names, list) and all(isinstance(name, str) for name in names), "names", "texts")
        require(labels.dtype == torch.long and labels.ndim == 1, "labels", "whole numbers")
        require(len(latents) in (0, len(labels)), "latents", "one for each of the labels, or none")
        require(usable.dtype == torch.bool and usable.shape == shape, "usable", "one for each of the labels")
        shortfalls = checked_tensor("shortfall", tensors["shortfall"], shape)
        require(len(labels) > 0 and int(labels.min()) >= 0, "labels", "at least 0")
        require(int(labels.max()) < len(names), "labels", f"below {len(names)}")
        if images is not None:
            wanted = (len(labels), *model.shape)
            require(tuple(images.shape) == wanted, "images", f"of shape {wanted}")
        if rows is not None:
            wanted = (len(labels), model.dim)
            require(model.imputer is not None and tuple(rows.shape) == wanted, "rows", f"of shape {wanted}")
            require(rows.is_floating_point() and not bool(rows.isinf().any()), "rows", "finite or missing")
        groups = cls(
            latents, labels, usable, shortfalls, tuple(names), ordered, images, rows, floor, reference
        )
        require(int(groups.counts.min()) >= 2, "labels", "of at least two elements in each group")
        return groups

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors to write to a file."""
        names = ("latents", "labels", "usable", "shortfall", "images", "rows")
        return {name: tensor for name in names if (tensor := getattr(self, name)) is not None}

    @cached_property
    def members(self) -> tuple[Int[Tensor, " members"], ...]:
        """The positions of the elements of each group, in order."""
        return members_by_label(self.labels, len(self.names))

    @cached_property
    def counts(self) -> Int[Tensor, " groups"]:
        """Number of elements of each group."""
        return torch.bincount(self.labels, minlength=len(self.names))

    def orders(
        self, groups: Int[Tensor, " some"], length: int, orders: int, generator: Generator
    ) -> Int[Tensor, "some orders length"]:
        """Random orders of the elements of groups, as indices; −1 after the last element of a group.

        The first order of an ordered group is the order in time.
        """
        index = torch.full((len(groups), orders, length), -1)
        for place, group in enumerate(groups.tolist()):
            members = self.members[group]
            keys = torch.rand((orders, len(members)), generator=generator, device=generator.device).cpu()
            if self.ordered:
                keys[0] = torch.arange(len(members))
            shuffled = members[keys.argsort(1)[:, :length]]
            index[place, :, : shuffled.shape[1]] = shuffled
        return index

    def scores(
        self, function: ScoreFunction, index: Int[Tensor, "some orders length"], device: torch.device
    ) -> Float[Tensor, "some orders *positions length"]:
        """Scores of sets in these orders, NaN after the last element of a group."""
        sets = index.flatten(0, 1)
        size = max(1, _NUMBERS_AT_A_TIME // (sets.shape[1] * max(self.latents.shape[1:] + sets.shape[1:])))
        parts = []
        for some in sets.split(size):
            scores = function(self._encoded(some, device)).cpu()
            missing = some < 0 if scores.ndim == 2 else (some < 0).unsqueeze(1)
            parts.append(scores.masked_fill(missing, math.nan))
        found = torch.cat(parts)
        return found.view(*index.shape[:2], *found.shape[1:])

    def _encoded(self, index: Int[Tensor, "sets length"], device: torch.device) -> EncodedSets:
        """Sets of these elements; after the last element of a group, elements are not usable."""
        inside, some = index >= 0, index.clamp(min=0)
        rows = None
        if self.rows is not None:
            rows = torch.where(inside.unsqueeze(-1), self.rows[some], 0.0).to(device)
        return EncodedSets(
            self.latents[some].to(device),
            (self.usable[some] & inside).to(device),
            self.shortfall[some].to(device),
            rows,
            self.floor,
            self.reference,
        )

    def number_of_orders(self, groups: int, length: int) -> int:
        """Number of random orders of each group: more if groups are few and elements are small."""
        numbers = length * self.latents.shape[1]
        sequences = min(_SEQUENCES, _NUMBERS // numbers)
        if self.rows is not None:
            sequences = min(sequences, _IMPUTING // numbers**2)
        return min(_MAX_ORDERS, max(_MIN_ORDERS, math.ceil(sequences / groups)))
