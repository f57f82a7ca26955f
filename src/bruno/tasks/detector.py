"""Outlier detection along streams, one element at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bruno.arrays import ArrayLike, as_tensor
from bruno.checks import check_rate, check_whole
from bruno.model import Bruno, Posterior
from bruno.tasks.anomaly import Judgement, default_cutoffs
from bruno.tasks.calibration import GroupCalibration
from bruno.tasks.conformal import GroupScores
from bruno.tasks.robust_evidence import Cutoffs, shortfall
from bruno.tasks.stream_evidence import START, ElementDensities, StreamEvidence, may_count


class DetectorStep(NamedTuple):
    """The judgement of an element, the state after it, its latents, and whether it is in the evidence."""

    judgement: Judgement
    state: StreamEvidence
    z: Float[Tensor, " dim"]
    in_evidence: bool


@dataclass(frozen=True, eq=False)
class Detector:
    """Judges the elements of a stream one at a time; the state of a stream has a bounded size.

    Unless `count_all` is set, outliers are excluded from the evidence. They then do not blur it, but the
    detector does not adapt to a permanent change of the stream either.

    Attributes:
        model: a model of such sets.
        threshold: the score below which an element is an outlier; at 0, the evidence makes an element neither
            more nor less likely. Or the scores of clean groups, for p-values; see `calibrated`.
        rate: false-alarm rate: with p-values, an element with p ≤ rate is an outlier.
        cutoffs: an element with a lower score is excluded from the evidence; by default, the threshold.
        count_all: every element is added to the evidence, whatever its score.
        warm_up: number of first elements that are not judged, at least 1.
        floor: an element with a lower log p(x) is out-of-distribution, see `density_floor`. It is an outlier,
            even as the first element, and always excluded from the evidence, as all later inliers would look
            like outliers otherwise.
        reference: log p(x) of a typical element; the shortfall of log p(x) below it is subtracted from the
            score, see `shortfall`.
        window: number of latest elements that form a set, from 2 to 20; by default, all elements do. For sets
            of consecutive rows.
        within: made for judgements by ranks within a set, with a threshold that flags nothing.
        densities: encodes elements and computes their densities; by default, the model does.
    """

    model: Bruno
    threshold: float | GroupScores = 0.0
    rate: float = 0.01
    cutoffs: Cutoffs | None = None
    count_all: bool = False
    warm_up: int = 1
    floor: float = -math.inf
    reference: float = -math.inf
    window: int | None = None
    within: bool = False
    densities: ElementDensities | None = None

    def __post_init__(self) -> None:
        rule = f"`threshold` must be a number, or scores of clean groups; got {self.threshold!r}."
        try:
            if not isinstance(self.threshold, GroupScores) and math.isnan(self.threshold):
                raise ValueError(rule)
        except TypeError:
            raise TypeError(rule) from None
        check_rate("rate", self.rate)
        check_whole("warm_up", self.warm_up)  # the first element has no evidence
        if self.window is not None and not 2 <= self.window <= START:
            raise ValueError(f"`window` must be from 2 to {START} elements; got {self.window}.")
        if math.isnan(self.floor) or self.floor == math.inf:
            raise ValueError(f"`floor` must be a number, or -inf for none; got {self.floor}.")
        if self.cutoffs is None and not self.count_all:
            object.__setattr__(self, "cutoffs", default_cutoffs(self.threshold))

    @classmethod
    def calibrated(
        cls, calibration: GroupCalibration, *, rate: float = 0.01, count_all: bool = False, **settings: Any
    ) -> Detector:
        """A detector with the p-values, cutoffs, floor and reference of a calibration.

        `settings` are further attributes, such as `window`.
        """
        return cls(
            calibration.model,
            calibration.stream(count_all=count_all),
            rate=rate,
            cutoffs=calibration.cutoffs,
            count_all=count_all,
            floor=calibration.floor,
            reference=calibration.reference,
            **settings,
        )

    def begin(self, posterior: Posterior | None = None) -> StreamEvidence:
        """The state before the first element, or with the evidence of a posterior."""
        if posterior is None:
            return StreamEvidence.empty(self.model.dim, device=self.model.device)
        if not self.model.is_same(posterior.model):
            raise ValueError("`posterior` must be of the detector's model; got one with other weights.")
        if posterior.evidence.batch_shape:
            shape = tuple(posterior.evidence.batch_shape)
            raise ValueError(f"`posterior` must be of one set; got a batch of shape {shape}.")
        return StreamEvidence.of(posterior.evidence)

    def after_typical(self, typical: ArrayLike) -> StreamEvidence:
        """The state after typical elements (n, *shape), which are not judged.

        Outliers among them are excluded from the evidence, as in a stream.
        """
        state = self.begin()
        for x in as_tensor(typical, "typical", kind=self.model.kind):
            state = self.step(state, x).state
        return state

    def watch(self, stream: Iterable[ArrayLike], posterior: Posterior | None = None) -> Iterator[Judgement]:
        """Judge elements (*shape) as they arrive, each before the next is requested.

        `posterior` is the state before the first, by default the prior.
        """
        state = self.begin(posterior)
        for x in stream:
            judgement, state, *_ = self.step(state, x)
            yield judgement

    @torch.no_grad()
    def step(self, state: StreamEvidence, x: ArrayLike) -> DetectorStep:
        """Judge one element (*shape) in a state, see `begin`; for callers who save states.

        Missing numbers of a row, NaN, are imputed from the elements that count, if the model can.
        """
        x = as_tensor(x, kind=self.model.kind)
        if x.shape != self.model.shape:
            raise ValueError(
                f"`x` must be one element of shape {self.model.shape}; got {tuple(x.shape)}. "
                "For a complete batch use judge_batch."
            )
        by = self.densities or ElementDensities(self.model)
        missing = self.model.imputer is not None and bool(x.isnan().any())
        if missing:
            state, x = replace(state, incomplete=True), Posterior(self.model, state.evidence).impute(x)
        z, log_det = by.encode(x)
        prior = by.prior(z)
        ood, score = prior + log_det < self.floor, by.given(z, state.evidence) - prior
        usable = ~ood & may_count(not missing, state.evidence.count, state.position)
        cutoffs = None if self.count_all else self.cutoffs
        less = shortfall(prior + log_det, self.reference)
        after = state.add(self.model, z, score, cutoffs, usable, less, self.window, by.scores_of)
        if state.incomplete:
            after = replace(after, incomplete=True)
        judgement = self._judge((score - less).item(), bool(ood), state)
        return DetectorStep(judgement, after, z, bool(after.decided[-1]))

    def _judge(self, score: float, ood: bool, state: StreamEvidence) -> Judgement:
        seen, given = int(state.evidence.count), -math.inf if ood else score
        if state.position < self.warm_up or not seen:
            return Judgement(score, seen, None, ood, ood)
        if not isinstance(self.threshold, GroupScores):
            return Judgement(score, seen, float(self.threshold), ood or score < self.threshold, ood)
        p, basis = self.threshold.p_value(given, state.position, self.rate)
        if state.incomplete and not self.threshold.incomplete:  # the groups were never imputed
            basis = "estimated"
        threshold = self.threshold.threshold(state.position, self.rate)
        return Judgement(score, seen, threshold, ood or p <= self.rate, ood, p, basis)
