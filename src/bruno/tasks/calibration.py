"""Calibration of decisions on held-out groups: their latents, and their scores in streams and batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from bruno.checkpoint import check_tensor, check_whole, parsing, read, require, write
from bruno.checks import check_choice
from bruno.data.examples import Examples, members_by_label
from bruno.model import Bruno
from bruno.tasks.batch_criteria import BATCH_CRITERIA, BatchCriterion, SetScale, patch_scores
from bruno.tasks.conformal import LEVELS, GroupScores
from bruno.tasks.keep_out import Cutoffs, EncodedSets, batch_scores, scores_of_the_rest, shortfall
from bruno.tasks.progress import Progress

_KEPT_OUT = 0.01  # fraction of clean elements below the cutoffs
_LONGEST = 128  # calibrated positions of a stream; later positions use the scores of the last one
_MAX_ELEMENTS = 200  # of a group
_SEQUENCES = 600  # random orders of all groups together
_BATCH_ELEMENTS = 120  # elements of each group in all its batches, at least
_PATCH_SETS = 64  # sets of all groups together whose patches are compared, approximately
_MIN_ORDERS, _MAX_ORDERS = 2, 32  # of each group
_NUMBERS = 2**20  # latent values in all orders, at most; `_MIN_ORDERS` takes precedence
_NUMBERS_AT_A_TIME = 2**20
_IMPUTING = 2**30  # (length · dimensions)² in all orders, at most, if rows are imputed at every position

# Adjusted scores of sets (sets, n), or at each position (sets, n, n).
Scores = Callable[[EncodedSets], Tensor]


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
        floor, reference: of log p(x), for rows with missing numbers.
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
            z, log_det = model.encode(complete[some].to(model.device))
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
        self, function: Scores, index: Int[Tensor, "some orders length"], device: torch.device
    ) -> Float[Tensor, "some orders *positions length"]:
        """Scores of sets in these orders, NaN after the last element of a group."""
        sets = index.flatten(0, 1)
        size = max(1, _NUMBERS_AT_A_TIME // (sets.shape[1] * max(self.latents.shape[1:] + sets.shape[1:])))
        parts = []
        for some in sets.split(size):
            scores = function(self._encoded(some, device)).cpu()
            lacks = some < 0 if scores.ndim == 2 else (some < 0).unsqueeze(1)
            parts.append(scores.masked_fill(lacks, math.nan))
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


@dataclass(frozen=True, eq=False)
class GroupCalibration:
    """The scores of clean elements of held-out groups, in streams and batches.

    Attributes:
        model: the model.
        groups: the encoded groups.
        cutoffs: cutoffs of the evidence, set on other data.
        floor: log p(x) below which an element is out-of-distribution, set on other data.
        reference: log p(x) of a typical element, set on other data; −∞ for images, see `shortfall`.
        data: name of the data of the groups.
        unseen: whether the groups were not trained on and the cutoffs were set on other data.
        seed: seed of the random orders.
        criterion: criterion for batches of images, chosen on other data: "score" for standardised scores
            (`SetScale`), "patches" for distances between patches (`patch_scores`). Scores of rows are not
            standardised.
    """

    model: Bruno
    groups: Groups
    cutoffs: Cutoffs
    floor: float
    data: str
    unseen: bool
    seed: int = 0
    reference: float = -math.inf
    criterion: BatchCriterion = "score"
    _kept: dict[tuple[str, int], GroupScores] = field(default_factory=dict)

    def stream(self, *, count_all: bool = False) -> GroupScores:
        """Scores of the groups as streams, by position: the number of elements before."""
        name = ("counted" if count_all else "stream", 0)
        if name not in self._kept:
            cutoffs = None if count_all else self.cutoffs
            self._kept[name] = stream_group_scores(self.model, self.groups, cutoffs, self.seed, self.unseen)
        return self._kept[name]

    def support(self) -> GroupScores:
        """Scores given n elements that all count, by n; missing numbers are imputed from the whole group."""
        if self.groups.rows is None:
            return self.stream(count_all=True)
        if (name := ("support", 0)) not in self._kept:
            groups = replace(self.groups, rows=None)
            self._kept[name] = stream_group_scores(self.model, groups, None, self.seed, self.unseen)
        return self._kept[name]

    def batch(self, size: int, *, count_all: bool = False) -> GroupScores:
        """Scores of random subsets of the groups as batches of this size.

        If fewer than half of the groups are that large, the size of the median group is used, and all
        p-values are estimated.
        """
        size = min(size, int(self.groups.counts.median()))
        name = ("batch counted" if count_all else "batch", size)
        if self.criterion == "patches":  # every image is compared with all others
            name = ("patches", size)
        if name not in self._kept:
            self._kept[name] = self._batch_scores(size, None if count_all else self.cutoffs)
        return self._kept[name]

    def by_score(self) -> GroupCalibration:
        """The calibration whose batches are judged by scores."""
        return replace(self, criterion="score")

    def _batch_scores(self, size: int, cutoffs: Cutoffs | None) -> GroupScores:
        groups, generator = self.groups, _generator(self.model, self.seed)
        large = (groups.counts >= size).nonzero().flatten()
        orders = min(groups.number_of_orders(len(large), size), math.ceil(_BATCH_ELEMENTS / size))
        if self.criterion == "patches":
            orders = min(orders, math.ceil(_PATCH_SETS / len(large)))
        index = groups.orders(large, size, orders, generator)

        def function(sets: EncodedSets) -> Tensor:
            return sets.adjusted(batch_scores(self.model, sets.z, cutoffs, sets.usable)[0])

        if self.criterion == "patches":
            assert groups.images is not None
            scores = patch_scores(groups.images[index].to(self.model.device)).cpu()
        else:
            scores = groups.scores(function, index, self.model.device)
            if self.model.kind.is_images:
                scores = SetScale.of(scores).standardised(scores)
        return GroupScores.of(
            torch.tensor([size - 1]),
            scores.flatten(1).unsqueeze(0),
            int(groups.counts[large].sum()),
            unseen=self.unseen,
            incomplete=groups.rows is not None,
        )

    def of_scores_alone(self) -> GroupCalibration:
        """The calibration without the latents, from which the elements could be reconstructed.

        It has the scores of streams, and of batches of any size. Scores are rounded down to half precision,
        so that p-values are never too low.
        """
        for count_all in (False, True):
            self.stream(count_all=count_all)
            for size in range(2, int(self.groups.counts.median()) + 1):
                self.batch(size, count_all=count_all)
        groups = replace(self.groups, latents=self.groups.latents[:0], images=None, rows=None)
        kept = {name: replace(one, scores=_rounded_down(one.scores)) for name, one in self._kept.items()}
        return replace(self, groups=groups, _kept=kept)

    # --- files -------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write to a file, atomically, with the scores of streams and of all batch sizes used so far."""
        self.stream()
        tables = [(*name, one.elements) for name, one in self._kept.items()]
        header = {
            "kind": "calibration",
            "model": self.model.fingerprint(),
            "names": self.groups.names,
            "cutoffs": self.cutoffs.by_count,
            "rate": self.cutoffs.rate,
            "floor": None if self.floor == -math.inf else self.floor,
            "reference": None if self.reference == -math.inf else self.reference,
            "data": self.data,
            "unseen": self.unseen,
            "seed": self.seed,
            "ordered": self.groups.ordered,
            "criterion": self.criterion,
            "incomplete": self.stream().incomplete,
            "tables": tables,
        }
        tensors = {
            "latents": self.groups.latents,
            "labels": self.groups.labels,
            "usable": self.groups.usable,
            "shortfall": self.groups.shortfall,
        }
        if self.groups.images is not None:
            tensors["images"] = self.groups.images
        if self.groups.rows is not None:
            tensors["rows"] = self.groups.rows
        for i, one in enumerate(self._kept.values()):
            tensors |= {f"positions.{i}": one.positions, f"scores.{i}": one.scores}
        write(path, tensors, header)

    @classmethod
    def load(cls, path: Path, model: Bruno) -> GroupCalibration:
        """Read a file that `save` wrote for the same model; raises ValueError if it is another file."""
        tensors, header = read(path, "cpu")
        if header.get("kind") != "calibration":
            raise ValueError(f"{path}: must be a calibration; got a {header.get('kind')}.")
        newest = "criterion" if model.kind.is_images else "incomplete" if model.imputer else "tables"
        if "tables" not in header or newest not in header:
            raise ValueError(f"{path}: must be of this version; got an older one. Calibrate again.")
        if header.get("model") != model.fingerprint():
            raise ValueError(
                f"{path}: must be of this model, {model.fingerprint()}; got one of {header.get('model')}. "
                "Calibrate again."
            )
        with parsing(path, "a calibration that `bruno calibrate` saved"):
            return cls(
                model,
                _parse_groups(tensors, header, model),
                Cutoffs(_numbers("cutoffs", header["cutoffs"]), *_numbers("rate", [header["rate"]])),
                _bound(header, "floor"),
                str(header["data"]),
                bool(header["unseen"]),
                check_whole("seed", header["seed"]),
                _bound(header, "reference"),
                _parse_criterion(tensors, header),
                dict(_parse_tables(tensors, header)),
            )


def _parse_criterion(tensors: dict[str, Tensor], header: dict[str, Any]) -> BatchCriterion:
    criterion: BatchCriterion = header.get("criterion", "score")
    check_choice("criterion", criterion, BATCH_CRITERIA)
    require(criterion == "score" or "images" in tensors, "images", "those of the patches")
    return criterion


def _parse_groups(tensors: dict[str, Tensor], header: dict[str, Any], model: Bruno) -> Groups:
    names, images, rows = header["names"], tensors.get("images"), tensors.get("rows")
    latents = check_tensor("latents", tensors["latents"], (None, model.dim))
    labels, usable = tensors["labels"], tensors["usable"]
    shape = (len(labels),) if labels.ndim else ()
    require(isinstance(names, list) and all(isinstance(name, str) for name in names), "names", "texts")
    require(labels.dtype == torch.long and labels.ndim == 1, "labels", "whole numbers")
    require(len(latents) in (0, len(labels)), "latents", "one for each of the labels, or none")
    require(usable.dtype == torch.bool and usable.shape == shape, "usable", "one for each of the labels")
    lacking = check_tensor("shortfall", tensors["shortfall"], shape)
    require(len(labels) > 0 and int(labels.min()) >= 0, "labels", "at least 0")
    require(int(labels.max()) < len(names), "labels", f"below {len(names)}")
    if images is not None:
        wanted = (len(labels), *model.shape)
        require(tuple(images.shape) == wanted, "images", f"of shape {wanted}")
    if rows is not None:
        wanted = (len(labels), model.dim)
        require(model.imputer is not None and tuple(rows.shape) == wanted, "rows", f"of shape {wanted}")
        require(rows.is_floating_point() and not bool(rows.isinf().any()), "rows", "finite or missing")
    ordered = bool(header.get("ordered", False))
    levels = _bound(header, "floor"), _bound(header, "reference")
    groups = Groups(latents, labels, usable, lacking, tuple(names), ordered, images, rows, *levels)
    require(int(groups.counts.min()) >= 2, "labels", "of at least two elements in each group")
    return groups


def _parse_tables(
    tensors: dict[str, Tensor], header: dict[str, Any]
) -> Iterator[tuple[tuple[str, int], GroupScores]]:
    in_streams, in_batches = bool(header.get("incomplete", False)), "rows" in tensors
    for i, (name, size, elements) in enumerate(header["tables"]):
        require(isinstance(name, str), "tables", "a name, a size and a number of elements")
        incomplete = in_batches if name.startswith("batch") else in_streams
        scores = _parse_scores(tensors[f"positions.{i}"], tensors[f"scores.{i}"], len(header["names"]))
        found = GroupScores(*scores, check_whole("tables", elements, 1), bool(header["unseen"]), incomplete)
        yield (name, check_whole("tables", size)), found


def _parse_scores(positions: Tensor, scores: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    require(positions.dtype == torch.long and positions.ndim == 1, "positions", "whole numbers")
    require(len(positions) > 0 and int(positions[0]) > 0, "positions", "at least 1")
    require(bool((positions.diff() > 0).all()), "positions", "increasing")
    require(scores.is_floating_point() and scores.ndim == 3, "scores", "(positions, groups, levels)")
    wanted = (len(positions), groups, LEVELS)
    require(tuple(scores.shape) == wanted, "scores", f"of shape {wanted}")
    missing = scores.isnan()
    require(torch.equal(missing.any(-1), missing.all(-1)), "scores", "NaN for all levels of a group, or none")
    require(not bool(missing.all(-1).all(-1).any()), "scores", "of at least one group at each position")
    require(not bool((scores == math.inf).any()), "scores", "below infinity")
    return positions, scores.float()


def _bound(header: dict[str, Any], name: str) -> float:
    """A number of a header; −∞ if the header does not have it."""
    return -math.inf if header[name] is None else _numbers(name, [header[name]])[0]


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    """Checked numbers of a header, as Python's JSON also accepts NaN and infinity."""
    valid = isinstance(values, list) and all(type(value) in (int, float) for value in values)
    require(valid and all(-math.inf <= value < math.inf for value in values), name, "numbers")
    return tuple(map(float, values))


def _rounded_down(scores: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
    """Scores in half precision, none of them higher than before."""
    exact = scores.numpy()
    half = exact.astype(np.float16)
    return torch.from_numpy(np.where(half > exact, np.nextafter(half, np.float16(-np.inf)), half))


def stream_group_scores(
    model: Bruno, groups: Groups, cutoffs: Cutoffs | None, seed: int = 0, unseen: bool = True
) -> GroupScores:
    """Scores of groups as streams, with a distribution at every position after the first.

    If the elements are exchangeable, each element that is still to come could be the next one, so all of them
    are scored, in random orders. If they are ordered, only the next element in time is scored. Missing
    numbers are imputed from the elements before, as in a new stream; but from the whole group if no element
    could be judged otherwise.
    """
    length = min(_LONGEST, int(groups.counts.max()))
    if length < 2:
        raise ValueError(
            f"`groups` must have at least two elements in one group; got {len(groups.names)} of one element."
        )
    every = torch.arange(len(groups.names))
    orders = 1 if groups.ordered else groups.number_of_orders(len(every), length)
    index = groups.orders(every, length, orders, _generator(model, seed))

    def function(sets: EncodedSets) -> Tensor:
        return scores_of_the_rest(model, sets, cutoffs)

    scores = groups.scores(function, index, model.device)
    if groups.ordered:
        scores = scores.masked_fill(~torch.eye(length, dtype=torch.bool), math.nan)
    scores = scores[:, :, 1:]
    by_position = scores.permute(2, 0, 1, 3).flatten(2)
    judged = (~by_position.isnan()).flatten(1).any(1)
    if not bool(judged.any()):
        if groups.rows is None:
            raise ValueError(
                "`data` must have elements like the training data, to calibrate on; all "
                f"{len(groups.labels)} are out-of-distribution. Check units and columns."
            )
        # No row is complete, and groups are small.
        return stream_group_scores(model, replace(groups, rows=None), cutoffs, seed, unseen)
    return GroupScores.of(
        torch.arange(1, length)[judged],
        by_position[judged],
        len(groups.labels),
        unseen=unseen,
        incomplete=groups.rows is not None,
    )


def fixed_cutoffs(model: Bruno, groups: Groups, *, rate: float = _KEPT_OUT, seed: int = 0) -> Cutoffs:
    """Cutoffs with a fraction `rate` of the clean elements of groups below them, smooth over positions."""
    scores = stream_group_scores(model, groups, None, seed, unseen=False)
    return Cutoffs(tuple(scores.threshold(n, rate) for n in range(1, int(scores.positions[-1]) + 1)), rate)


def _generator(model: Bruno, seed: int) -> Generator:
    return torch.Generator(model.device).manual_seed(seed)
