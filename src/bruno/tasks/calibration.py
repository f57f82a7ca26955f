"""Calibration of decisions: the scores of held-out groups in streams and batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bruno.checkpoint import checked_whole, parsing, read, require, write
from bruno.checks import check_choice, check_count
from bruno.data.sampling import seeded_generator
from bruno.model import Bruno
from bruno.tasks.batch_criteria import BATCH_CRITERIA, BatchCriterion, SetScale, patch_scores
from bruno.tasks.conformal import GroupScores
from bruno.tasks.groups import Groups
from bruno.tasks.robust_evidence import Cutoffs, batch_scores
from bruno.tasks.stream_evidence import EncodedSets, scores_of_the_rest

_VERSION = 2  # 1 had other scores of rows
_EXCLUDED = 0.01  # fraction of clean elements below the cutoffs
_LONGEST = 128  # calibrated positions of a stream; later positions use the scores of the last one
_BATCH_ELEMENTS = 120  # elements of each group in all its batches, at least
_PATCH_SETS = 64  # sets of all groups together whose patches are compared, approximately


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
        check_count("size", size, 2)  # a single element has nothing to be compared with
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
        groups, generator = self.groups, seeded_generator(self.seed, self.model.device)
        if not bool(groups.usable.any()):
            raise _no_usable_element(groups)
        large = (groups.counts >= size).nonzero().flatten()
        orders = min(groups.number_of_orders(len(large), size), math.ceil(_BATCH_ELEMENTS / size))
        if self.criterion == "patches":
            orders = min(orders, math.ceil(_PATCH_SETS / len(large)))
        index = groups.orders(large, size, orders, generator)

        def function(sets: EncodedSets) -> Tensor:
            scores = batch_scores(self.model, sets.z, cutoffs, sets.usable, sets.shortfall)[0]
            return scores.masked_fill(~sets.usable, -math.inf)

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
            "version": _VERSION,
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
        tensors = self.groups.tensors
        for i, one in enumerate(self._kept.values()):
            tensors |= {f"positions.{i}": one.positions, f"scores.{i}": one.scores}
        write(path, tensors, header)

    @classmethod
    def load(cls, path: Path, model: Bruno) -> GroupCalibration:
        """Read a file that `save` wrote for the same model; raises ValueError if it is another file."""
        tensors, header = read(path, "cpu")
        if header.get("kind") != "calibration":
            raise ValueError(f"{path}: must be a calibration; got a {header.get('kind')}.")
        # Calibrations of images are the same in both versions.
        is_newest = "criterion" in header if model.kind.is_images else header.get("version") == _VERSION
        if "tables" not in header or not is_newest:
            raise ValueError(f"{path}: must be of this version; got an older one. Calibrate again.")
        if header.get("model") != model.fingerprint():
            raise ValueError(
                f"{path}: must be of this model, {model.fingerprint()}; got one of {header.get('model')}. "
                "Calibrate again."
            )
        with parsing(path, "a calibration that `bruno calibrate` saved"):
            floor, reference = _bound(header, "floor"), _bound(header, "reference")
            ordered = bool(header.get("ordered", False))
            return cls(
                model,
                Groups.checked(
                    tensors, header["names"], model, ordered=ordered, floor=floor, reference=reference
                ),
                Cutoffs(_numbers("cutoffs", header["cutoffs"]), *_numbers("rate", [header["rate"]])),
                floor,
                str(header["data"]),
                bool(header["unseen"]),
                checked_whole("seed", header["seed"]),
                reference,
                _parse_criterion(tensors, header),
                dict(_parse_tables(tensors, header)),
            )


def _parse_criterion(tensors: dict[str, Tensor], header: dict[str, Any]) -> BatchCriterion:
    criterion: BatchCriterion = header.get("criterion", "score")
    check_choice("criterion", criterion, BATCH_CRITERIA)
    require(criterion == "score" or "images" in tensors, "images", "those of the patches")
    return criterion


def _parse_tables(
    tensors: dict[str, Tensor], header: dict[str, Any]
) -> Iterator[tuple[tuple[str, int], GroupScores]]:
    in_streams, in_batches = bool(header.get("incomplete", False)), "rows" in tensors
    for i, (name, size, elements) in enumerate(header["tables"]):
        require(isinstance(name, str), "tables", "a name, a size and a number of elements")
        incomplete = in_batches if name.startswith("batch") else in_streams
        found = GroupScores.checked(
            tensors[f"positions.{i}"],
            tensors[f"scores.{i}"],
            checked_whole("tables", elements, 1),
            groups=len(header["names"]),
            unseen=bool(header["unseen"]),
            incomplete=incomplete,
        )
        yield (name, checked_whole("tables", size)), found


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
    index = groups.orders(every, length, orders, seeded_generator(seed, model.device))

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
            raise _no_usable_element(groups)
        # No row is complete, and groups are small.
        return stream_group_scores(model, replace(groups, rows=None), cutoffs, seed, unseen)
    return GroupScores.of(
        torch.arange(1, length)[judged],
        by_position[judged],
        len(groups.labels),
        unseen=unseen,
        incomplete=groups.rows is not None,
    )


def _no_usable_element(groups: Groups) -> ValueError:
    return ValueError(
        f"`data` must have elements like the training data, to calibrate on; all {len(groups.labels)} are "
        "out-of-distribution. Check units and columns."
    )


def fixed_cutoffs(model: Bruno, groups: Groups) -> Cutoffs:
    """Cutoffs with 1 % of the clean elements of groups below them, smooth over positions."""
    scores = stream_group_scores(model, groups, None, unseen=False)
    counts = range(1, int(scores.positions[-1]) + 1)
    return Cutoffs(tuple(scores.threshold(n, _EXCLUDED) for n in counts), _EXCLUDED)
