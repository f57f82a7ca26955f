"""Outlier detection in sets, as an estimator of scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from sklearn.base import OutlierMixin  # type: ignore[import-untyped]
from sklearn.utils.metaestimators import available_if  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted  # type: ignore[import-untyped]

from bruno.checks import check_choice, check_rate
from bruno.model import Bruno, Encoded, Posterior
from bruno.process import Evidence
from bruno.sklearn.base import Array, SetEstimator, group_labels
from bruno.sklearn.sample import RowSample, extended
from bruno.tasks.explanation import Explanation, explain_scores
from bruno.tasks.set_scores import SetScorer, grouped_evidence, positions_by_label
from bruno.tasks.stream_summary import far_more_flagged
from bruno.trained import Trained

_NARROW_SMALL_MODEL, _NARROW_GIVEN_MODEL = 0.1, 0.5  # smallest exponents of p-values
_LEFT_OUT_DIVISOR = 20  # the least likely twentieth of the rows is left out of the training of a small model
_FEW = 3  # a set of fewer rows has no majority
_Value = TypeVar("_Value")


def _for_new_rows(detector: SetOutlierDetector) -> bool:
    if not detector.novelty:
        raise AttributeError(
            "this method is for new rows: `novelty` must be True; got False. With novelty=False, fit_predict "
            "judges the rows of the set itself."
        )
    return True


def _for_the_set(detector: SetOutlierDetector) -> bool:
    if detector.novelty:
        raise AttributeError(
            "fit_predict judges the rows of the set itself: `novelty` must be False; got True. Use "
            "fit(X).predict(new)."
        )
    return True


class SetOutlierDetector(OutlierMixin, SetEstimator):  # type: ignore[misc]
    """Detects rows that do not belong to their set.

    As in LocalOutlierFactor, `novelty` decides which rows are judged. With novelty=False, `fit_predict`
    judges the rows of the set itself, each given all others; outliers are excluded from the evidence, so that
    they cannot hide each other. With novelty=True, `predict`, `score_samples` and `decision_function` judge
    new rows given the set, row by row, and do not change the set; `partial_fit` adds rows to it.

    Args:
        model: a run folder, a model file, a pretrained model, or the result of `bruno.open`, `bruno.train` or
            `bruno.load`, conditioned on the rows; by default, a small model is trained on the rows.
        novelty: judge new rows instead of the rows of the set.
        contamination: "auto" to flag rows with a p-value of at most `rate`; or the fraction of the rows of
            the set to flag, up to 0.5.
        rate: false-alarm rate for contamination="auto". p-values come from the calibration that is kept with
            the model (`bruno calibrate`); otherwise from draws of the model given the set, corrected on rows
            that the model was not trained on.
        criterion: "score" is log p(x | set) − log p(x), "density" is log p(x | set). By default, the density
            if the small model is trained on a single set, as it cannot learn how sets differ; else the score.
        count_all: all rows are in the evidence for the others, even outliers.
        steps: optimiser steps of the small model; by default a fifth of the number of rows, from 10 to 1000.
        random_state: seed of all random numbers.
        device: device of a model that the estimator opens or trains: "cpu", "cuda", "cuda:NUMBER" or "auto".

    Attributes:
        model_: the model.
        groups_: names of the sets; empty if all rows are one set.
        evidence_: evidence of the rows that count, one for each set.
        offset_: the score below which a row is an outlier; with `groups`, one for each set.
        scores_: scores of the rows of `fit`, each given all others of its set that count.
        p_values_: p-values of the rows of `fit`.
        in_evidence_: whether each row of `fit` is in the evidence.

    >>> rows = np.random.default_rng(0).normal(size=(60, 2))
    >>> rows[7] = 9.0
    >>> found = SetOutlierDetector().fit_predict(rows)
    >>> int(found[7])
    -1
    """

    def __init__(
        self,
        model: Trained | Bruno | str | Path | None = None,
        *,
        novelty: bool = False,
        contamination: float | str = "auto",
        rate: float = 0.05,
        criterion: str = "auto",
        count_all: bool = False,
        steps: int | None = None,
        random_state: Any = 0,
        device: str = "cpu",
    ) -> None:
        super().__init__(model, steps=steps, random_state=random_state, device=device)
        self.novelty = novelty
        self.contamination = contamination
        self.rate = rate
        self.criterion = criterion
        self.count_all = count_all

    # --- fit ---------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any = None, groups: Any = None) -> SetOutlierDetector:
        """Condition the model on sets of rows.

        Args:
            X: rows (n, columns), a frame, or images (n, *shape).
            y: ignored.
            groups: the set of each row; by default all rows are one set.
        """
        self._check_parameters()
        given = self._given()
        x = self._begin(X, given)
        labels, self.groups_ = group_labels(groups, len(x), None)
        held_out = self._held_out(len(x), given)
        self.model_ = self._robust_model(given, x[~held_out], labels[~held_out])
        scorer, sets = self._new_scorer(given), max(1, len(self.groups_))
        which = torch.from_numpy(labels).to(self.model_.device)
        encoded = scorer.encode(self.model_.impute(self._elements(self.model_, x), which))
        scored = scorer.score_sets(encoded, which, sets, count_all=self.count_all)
        unseen = torch.from_numpy(held_out if given is None else ~held_out).to(which.device)
        least = _NARROW_SMALL_MODEL if given is None else _NARROW_GIVEN_MODEL
        self._scorer = scorer.fitted(scored.scores[unseen], which[unseen], scored.evidence, least=least)
        if not self.count_all:  # again, with the cutoffs of corrected p-values
            scored = self._scorer.score_sets(encoded, which, sets)
        self.evidence_ = scored.evidence
        self.scores_, self.in_evidence_ = (
            scored.scores.double().cpu().numpy(),
            scored.in_evidence.cpu().numpy(),
        )
        self._sample = RowSample.empty(self.model_, self._seed()).adding(encoded, which, scored.in_evidence)
        by_set = [torch.from_numpy(self.scores_[own]) for _, own in positions_by_label(labels)]
        self._nulls = self._scorer.null_distributions(
            self.evidence_, batch=not self.novelty, rate=self.rate, by_set=by_set
        )
        self._rate = self.rate
        self._thresholds = [null.threshold(self.rate) for null in self._nulls]
        self.offset_ = self._fitted_offset(lambda: self.scores_)
        self.p_values_ = self._p_values(self.scores_, labels)
        if given is not None and self.contamination == "auto":
            self._warn_of_misfit(given, labels, getattr(X, "columns", ()))
        return self

    @available_if(_for_new_rows)  # type: ignore[untyped-decorator]
    def partial_fit(self, X: Any, y: Any = None, groups: Any = None) -> SetOutlierDetector:
        """Add rows to their sets, which may be new; the first call is `fit`.

        Rows with a p-value of at most 1 % under the model are excluded, unless `count_all` is set.

        Raises:
            ValueError: if rows or groups are rejected. The estimator is then unchanged.
        """
        if not hasattr(self, "evidence_"):
            return self.fit(X, y, groups)
        x = self._validated(X)
        labels, names = group_labels(groups, len(x), self.groups_)
        sets, which = max(1, len(names)), torch.from_numpy(labels).to(self.model_.device)
        before = extended(self.evidence_, sets)
        encoded = self._encoded(x, Posterior(self.model_, before[which]))
        changed, own = which.unique(return_inverse=True)
        in_evidence = self._counts(encoded, own, before[changed])
        evidence = before + grouped_evidence(encoded.z, which, sets, in_evidence)
        if self.rate != self._rate:  # set since: all sets must have thresholds for one rate
            changed = torch.arange(sets, device=changed.device)
        nulls = self._scorer.null_distributions(evidence[changed], batch=False, rate=self.rate)
        thresholds = [null.threshold(self.rate) for null in nulls]
        self.groups_, self.evidence_, self._rate = names, evidence, self.rate
        self._sample = self._sample.adding(encoded, which, in_evidence)
        self._nulls = _replaced(self._nulls, changed.tolist(), nulls)
        self._thresholds = _replaced(self._thresholds, changed.tolist(), thresholds)
        self.offset_ = self._fitted_offset(self._scores_of_sample)
        return self

    @available_if(_for_the_set)  # type: ignore[untyped-decorator]
    def fit_predict(self, X: Any, y: Any = None, groups: Any = None) -> Array:
        """Fit, and return −1 for the rows that are outliers of their set and 1 for all others."""
        self.fit(X, y, groups)
        labels, _ = group_labels(groups, len(self.scores_), self.groups_)
        return np.where(self.scores_ < self._offsets(labels), -1, 1)

    # --- new rows ----------------------------------------------------------------------------------------

    @available_if(_for_new_rows)  # type: ignore[untyped-decorator]
    def predict(self, X: Any, groups: Any = None) -> Array:
        """−1 for outliers and 1 for all others, given their sets."""
        return np.where(self.decision_function(X, groups) < 0, -1, 1)

    @available_if(_for_new_rows)  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any, groups: Any = None) -> Array:
        """Scores minus `offset_`: negative for outliers."""
        scores, labels = self._scores(X, groups)
        return scores - self._offsets(labels)

    @available_if(_for_new_rows)  # type: ignore[untyped-decorator]
    def score_samples(self, X: Any, groups: Any = None) -> Array:
        """Scores of rows given their sets, in nats; the lower, the more abnormal."""
        return self._scores(X, groups)[0]

    @available_if(_for_new_rows)  # type: ignore[untyped-decorator]
    def p_values(self, X: Any, groups: Any = None) -> Array:
        """Probability of a score at most as low as that of each row, for an element of its set."""
        return self._p_values(*self._scores(X, groups))

    @available_if(_for_new_rows)  # type: ignore[untyped-decorator]
    def explain(self, X: Any, groups: Any = None, *, permutations: int = 128) -> Explanation:
        """Contributions of columns to the scores of rows; see `bruno.tasks.explain`."""
        x, labels = self._rows_and_labels(X, groups)
        evidence = self.evidence_[torch.from_numpy(labels).to(self.model_.device)]
        return explain_scores(
            self._scorer,
            evidence,
            self._complete(Posterior(self.model_, evidence), self._elements(self.model_, x)),
            features=tuple(getattr(self, "feature_names_in_", self._columns)),
            permutations=permutations,
            seed=self._seed(),
        )

    # --- helpers -----------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        check_rate("rate", self.rate)
        check_choice("criterion", self.criterion, ("auto", "score", "density"))
        if isinstance(self.contamination, str):
            check_choice("contamination", self.contamination, ("auto",))
        elif not isinstance(self.contamination, Real):
            raise TypeError(f"`contamination` must be 'auto' or a number; got {self.contamination!r}.")
        elif not 0 < self.contamination <= 0.5:
            raise ValueError(f"`contamination` must be 'auto' or in (0, 0.5]; got {self.contamination}.")

    def _robust_model(self, given: Trained | Bruno | None, x: Array, labels: Array) -> Bruno:
        """The given model, or a small model, which is trained again without the least likely rows.

        A model that was trained on an outlier expects more elements like it.
        """
        model = self._model_for(given, x, labels)
        left_out = len(x) // _LEFT_OUT_DIVISOR
        if given is not None or not left_out:
            return model
        which = torch.from_numpy(labels).to(model.device)
        scorer = SetScorer(model, "density")
        encoded = scorer.encode(model.impute(self._elements(model, x), which))
        scores = scorer.score_sets(encoded, which, int(labels.max()) + 1, count_all=True).scores
        kept = np.sort(scores.cpu().numpy().argsort(kind="stable")[left_out:])
        return self._model_for(None, x[kept], labels[kept])

    def _new_scorer(self, given: Trained | Bruno | None) -> SetScorer:
        criterion = self.criterion
        if criterion == "auto":
            criterion = "density" if given is None and not len(self.groups_) else "score"
        calibration = given.kept_calibration() if isinstance(given, Trained) else None
        return SetScorer.of(self.model_, criterion, calibration, self._seed())  # type: ignore[arg-type]

    def _warn_of_misfit(self, given: Trained | Bruno, labels: Array, columns: Sequence[Any]) -> None:
        """Warn if far more rows are flagged than requested; `columns` are those of the frame."""
        outliers = int((self.scores_ < self._offsets(labels)).sum())
        found = far_more_flagged(outliers, len(labels), self.rate)
        if not found:
            return
        reason = "the model or its calibration does not fit these sets, or they are faulty"
        remedy = "Check the data and `groups`"
        if isinstance(given, Trained) and given.group in columns and not len(self.groups_):
            reason = "`groups` is missing, so all rows are one set"
            remedy = f"Use groups=X[{given.group!r}]"
        warnings.warn(f"{found}: {reason}. {remedy}.", stacklevel=3)

    def _rows_and_labels(self, X: Any, groups: Any) -> tuple[Array, Array]:
        """New rows, validated, and the index of the set of each."""
        check_is_fitted(self)
        x = self._validated(X)
        labels, names = group_labels(groups, len(x), self.groups_)
        if len(names) > len(self.groups_):
            known = ", ".join(map(str, self.groups_[:5]))
            raise ValueError(
                f"`groups` must be sets of `fit` ({known}, …); got {names[len(self.groups_)]!r}. Add a "
                "new set with partial_fit."
            )
        return x, labels

    def _scores(self, X: Any, groups: Any) -> tuple[Array, Array]:
        """Scores of new rows, and the index of the set of each."""
        x, labels = self._rows_and_labels(X, groups)
        evidence = self.evidence_[torch.from_numpy(labels).to(self.model_.device)]
        encoded = self._encoded(x, Posterior(self.model_, evidence))
        given = self.evidence_[0] if len(self.evidence_.count) == 1 else evidence
        return self._scorer.scores(encoded, given).double().cpu().numpy(), labels

    def _encoded(self, x: Array, posterior: Posterior) -> Encoded:
        return self._scorer.encode(self._complete(posterior, self._elements(self.model_, x)))

    def _counts(self, encoded: Encoded, labels: torch.Tensor, evidence: Evidence) -> torch.Tensor:
        """Which new rows count, given the evidence of their sets so far.

        In a large set, rows with a usual score count. In a small set, the typical rows among the new ones
        count, or all of them if they are few.
        """
        usable = self._scorer.usable(encoded)
        if self.count_all:
            return usable
        small = evidence.count < _FEW
        cutoffs = self._scorer.cutoffs(evidence).masked_fill(small, -torch.inf)
        in_evidence = usable & (self._scorer.scores(encoded, evidence[labels]) >= cutoffs[labels])
        alone = (small & (labels.bincount(minlength=len(small)) >= _FEW))[labels]
        if bool(alone.any()):
            part = Encoded(encoded.z[alone], encoded.log_det[alone])
            in_evidence[alone] = self._scorer.score_sets(part, labels[alone], len(small)).in_evidence
        return in_evidence

    def _scores_of_sample(self) -> Array:
        """Scores of the kept sample of rows, each given all others of its set."""
        kept = self._sample
        scores = self._scorer.leave_one_out(kept.encoded, kept.labels, kept.marked, self.evidence_)
        return scores.double().cpu().numpy()

    def _fitted_offset(self, scores: Callable[[], Array]) -> float | Array:
        """The offset of all sets as a quantile of scores, or of each set by its p-values."""
        if self.contamination != "auto":
            return float(np.percentile(scores(), 100 * float(self.contamination)))
        return np.array(self._thresholds) if len(self.groups_) else self._thresholds[0]

    def _offsets(self, labels: Array) -> Array:
        return np.broadcast_to(self.offset_, max(1, len(self.groups_)))[labels]

    def _p_values(self, scores: Array, labels: Array) -> Array:
        p = np.ones(len(scores))
        for label, own in positions_by_label(labels):
            p[own] = self._nulls[label].p_values(scores[own])
        return p


def _replaced(values: list[_Value], places: Sequence[int], by: Sequence[_Value]) -> list[_Value]:
    """The values with those at some places replaced; a place may follow the last one."""
    found = dict(enumerate(values)) | dict(zip(places, by, strict=True))
    return [found[place] for place in range(len(found))]
