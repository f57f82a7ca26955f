"""Outlier detection in complete batches by a trained model, each element given all others of its set."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from bruno.arrays import NumpyResult
from bruno.checks import check_omitted, check_rate, check_real
from bruno.data import Element
from bruno.data.columns import consecutive_sets
from bruno.data.reader import collected
from bruno.kinds import Images, Kind
from bruno.model import Bruno, Posterior
from bruno.tasks.anomaly import JudgedSet, Judgement, judge_batch
from bruno.tasks.batch_criteria import BatchCriterion
from bruno.tasks.calibration import GroupCalibration
from bruno.tasks.explanation import Explanation, PatchExplanation
from bruno.tasks.progress import Progress
from bruno.tasks.stream_summary import EXTREMES, NamedJudgement, StreamSummary
from bruno.trained.base import Source, warn_of_unreadable
from bruno.trained.calibration import CalibrationJobs, report_basis
from bruno.trained.data import Data
from bruno.trained.explanation import OutlierExplainer
from bruno.trained.outliers import Outliers
from bruno.trained.stream_elements import grouped_elements

_log = logging.getLogger(__name__)

RATE = 0.01  # of false alarms, by default
_MISSING_NUMBERS = (
    "%d of %d sets have missing numbers, which the held-out groups do not have: p-values of these sets are "
    "estimated"
)


@dataclass(frozen=True, eq=False)
class BatchJudgement(NumpyResult):
    """The judgements of a batch, each element given all others of its set, in the order of the batch.

    Attributes:
        summary: the judgements.
        kind: kind of the elements.
        rate: the false-alarm rate; None with a fixed threshold or a false-discovery rate.
        advice: the command that calibrates on clean data.
        criterion: what the p-values compare: "score", or "patches", the distances between patches of pixels.
        explanation: explanation of the most unusual outliers, by patches if these were judged; None if not
            requested, or if there are no outliers.
        has_consecutive_sets: whether the sets are consecutive rows of a table without a group column.
    """

    summary: StreamSummary
    kind: Kind
    rate: float | None
    advice: str
    criterion: BatchCriterion = "score"
    explanation: Explanation | PatchExplanation | None = None
    has_consecutive_sets: bool = False

    @property
    def judgements(self) -> list[NamedJudgement]:
        """The judgements of all elements, in the order of the batch, with names and groups."""
        return list(self.summary.latest)

    @property
    def outliers(self) -> Outliers:
        """The most unusual outliers, at most 24, with the columns that explain them; see `judgements`."""
        return Outliers.of("anomaly-batch", self.summary, self.kind)


class _Batch(NamedTuple):
    """A batch, ready to be judged.

    Attributes:
        elements: the elements with the names of their sets, and their missing numbers imputed.
        sets: the positions of the elements of each set.
        incomplete: whether each element had missing numbers.
        has_consecutive_sets: whether the sets are consecutive rows.
    """

    elements: list[Element]
    sets: list[list[int]]
    incomplete: list[bool]
    has_consecutive_sets: bool


class _Place(NamedTuple):
    """The judged set of an element, and its place in the set."""

    own: JudgedSet
    place: int


class BatchJobs(CalibrationJobs):
    """The outlier detection of a trained model in complete batches."""

    def judge_batch(
        self,
        batch: Source | Iterable[Element],
        *,
        rate: float | None = None,
        threshold: float | None = None,
        count_all: bool = False,
        false_discovery_rate: float | None = None,
        explain: bool = False,
        data: Data | None = None,
        one_set: bool = False,
        group: str | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> BatchJudgement:
        """Judge each element of a complete batch given all others of its set.

        The elements with the lowest scores are removed from the set first, so that outliers do not hide each
        other. Rows that name a group belong to the set of that group; other elements are one set. If training
        had no group column, 20 consecutive rows are a set, as in training.

        Args:
            batch: files, folders, arrays or elements; at least two elements.
            rate: false-alarm rate; 0.01 by default.
            threshold: flag scores below this instead of calibrating.
            count_all: condition on every other element; by default, outliers are excluded from the evidence.
            false_discovery_rate: flag by Benjamini–Hochberg at this rate, in each set, instead of `rate`.
            explain: explain the 24 most unusual outliers, each given the evidence of its judgement.
            data: calibrate on this instead of the calibration that is kept with the model.
            one_set: judge all elements as one set, even if the model was trained on several.
            group: the group column, if it has another name than in training.
            invert: turn dark ink into bright ink; as in training by default.
            skip_bad: skip files that cannot be read.
            seed: seed of the random orders of the groups.
            progress: called as progress(done, total).
        """
        rate = checked_rate(rate, threshold, data, false_discovery_rate)
        reading: dict[str, Any] = {"invert": invert, "skip_bad": skip_bad}
        read, calibration = self._read_batch(batch, one_set, group, **reading), None
        if threshold is None:
            calibration = self.calibration(data, seed=seed, progress=progress, **reading)
        decision: Any = {"rate": rate, "false_discovery_rate": false_discovery_rate, "count_all": count_all}
        judge = partial(judge_batch, self.model, threshold=threshold, calibration=calibration, **decision)
        places = self._judge_sets(read, judge)
        if calibration is not None:
            _log_basis(calibration, read, **decision)
        judged = [own[place] for own, place in places]
        given = self._given(places, judged)
        summary = _summary(read.elements, judged, one_set, given)
        explanation = self._explained(summary, places, calibration, seed) if explain else None
        if explanation is not None:
            for one, parts in zip(summary.most_unusual, explanation.by_feature, strict=True):
                judged[one.position - 1] = replace(one.judgement, contributions=parts)
            summary = _summary(read.elements, judged, one_set, given)
        asked = rate if calibration and false_discovery_rate is None else None
        criterion, in_order = calibration.criterion if calibration else "score", read.has_consecutive_sets
        advice = self.calibration_command
        return BatchJudgement(summary, self.kind, asked, advice, criterion, explanation, in_order)

    def _read_batch(
        self,
        batch: Source | Iterable[Element],
        one_set: bool,
        group: str | None,
        invert: bool | None,
        skip_bad: bool,
    ) -> _Batch:
        reader = self.reader(invert=invert, skip_bad=skip_bad, group=group)
        elements = collected(grouped_elements(self, batch, reader, one_set, invert, "batch"))
        warn_of_unreadable(reader)
        if len(elements) < 2:
            raise ValueError(f"`batch` must have at least two elements; got {len(elements)}.")
        consecutive = self.has_consecutive_sets and not one_set and not any(one.group for one in elements)
        if consecutive:
            elements = _in_consecutive_sets(elements)
        incomplete = torch.stack([one.x for one in elements]).isnan().flatten(1).any(1).tolist()
        elements = _completed(self.model, elements, one_set)
        self.warn_if_unfamiliar(torch.stack([one.x for one in elements]))
        return _Batch(elements, list(_members(elements, one_set).values()), incomplete, consecutive)

    def _judge_sets(self, batch: _Batch, judge: Callable[..., JudgedSet]) -> list[_Place]:
        """The judgement of each element, in its set; an element alone is not judged."""
        places: dict[int, _Place] = {}
        for members in batch.sets:
            if len(members) < 2:
                places[members[0]] = _Place(JudgedSet.unjudged(self.model), 0)
                continue
            x = torch.stack([batch.elements[i].x for i in members]).to(self.device)
            own = judge(x, imputed=any(batch.incomplete[i] for i in members))
            places |= {i: _Place(own, place) for place, i in enumerate(members)}
        return [places[i] for i in range(len(places))]

    def _given(self, places: list[_Place], judged: list[Judgement]) -> dict[int, Posterior]:
        """The posteriors by which the most unusual outliers were judged, by position."""
        outliers = [i for i, one in enumerate(judged) if one.outlier]
        shown = sorted(outliers, key=lambda i: judged[i].sort_key)[:EXTREMES]
        return {i: places[i].own.given(self.model, places[i].place) for i in shown}

    def _explained(
        self, summary: StreamSummary, places: list[_Place], calibration: GroupCalibration | None, seed: int
    ) -> Explanation | PatchExplanation | None:
        """What makes the most unusual outliers unusual; None if there are no outliers."""
        outliers, kind = summary.most_unusual, self.kind
        judged_in = (places[one.position - 1] for one in outliers)
        maps = [own.patches[place] for own, place in judged_in if own.patches is not None]
        if maps and isinstance(kind, Images):
            x = torch.stack([one.x for one in outliers])
            names = tuple(one.name for one in outliers)
            return PatchExplanation(torch.stack(maps), x, kind, names, summary.outliers)
        reference = calibration.reference if calibration else -math.inf
        return OutlierExplainer(self.columns, reference, seed).explain(summary)


def checked_rate(
    rate: float | None,
    threshold: float | None,
    data: Data | None,
    false_discovery_rate: float | None = None,
) -> float:
    """The rate of false alarms; raises ValueError for arguments that contradict each other."""
    if false_discovery_rate is not None:
        check_rate("false_discovery_rate", false_discovery_rate)
        check_omitted("`false_discovery_rate` decides what is flagged;", rate=rate, threshold=threshold)
    if threshold is not None:
        check_real("threshold", threshold)
        check_omitted("`threshold` leaves nothing to calibrate;", rate=rate, data=data)
    rate = RATE if rate is None else rate
    check_rate("rate", rate)
    return rate


def _summary(
    elements: list[Element], judged: list[Judgement], one_set: bool, given: Mapping[int, Posterior]
) -> StreamSummary:
    """The summary of the judgements; `given` are the posteriors of the most unusual outliers."""
    summary = StreamSummary(latest=None)
    for i, (element, judgement) in enumerate(zip(elements, judged, strict=True)):
        summary.add(element.name, element.x, judgement, "" if one_set else element.group, given.get(i))
    return summary


def _log_basis(
    calibration: GroupCalibration,
    batch: _Batch,
    *,
    rate: float,
    false_discovery_rate: float | None,
    count_all: bool,
) -> None:
    """Log which rates are exact in the largest set, and whether missing numbers make p-values estimates."""
    largest = max(map(len, batch.sets))
    if largest < 2:
        return
    scores = calibration.batch(largest, count_all=count_all)
    report_basis(scores, rate, len(calibration.groups.names), largest - 1, false_discovery_rate)
    incomplete = sum(any(batch.incomplete[i] for i in members) for members in batch.sets)
    if incomplete and not scores.incomplete:
        _log.info(_MISSING_NUMBERS, incomplete, len(batch.sets))


def _completed(model: Bruno, elements: list[Element], one_set: bool) -> list[Element]:
    """The elements with their missing numbers imputed from all elements of the same set."""
    labels = torch.zeros(len(elements), dtype=torch.long)
    for label, members in enumerate(_members(elements, one_set).values()):
        labels[members] = label
    x = model.impute(torch.stack([element.x for element in elements]), labels)
    return [element._replace(x=row) for element, row in zip(elements, x, strict=True)]


def _in_consecutive_sets(elements: list[Element]) -> list[Element]:
    """The elements with the names of sets of consecutive rows."""
    names, labels = consecutive_sets(len(elements))
    return [one._replace(group=names[label]) for one, label in zip(elements, labels, strict=True)]


def _members(elements: list[Element], one_set: bool) -> dict[str, list[int]]:
    """Positions of the elements of each set, by its name."""
    members: dict[str, list[int]] = {}
    for i, element in enumerate(elements):
        members.setdefault("" if one_set else element.group, []).append(i)
    return members
