"""Few-shot classification, as an estimator of scikit-learn."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from sklearn.base import ClassifierMixin  # type: ignore[import-untyped]
from sklearn.utils.multiclass import check_classification_targets  # type: ignore[import-untyped]
from sklearn.utils.validation import check_is_fitted, column_or_1d  # type: ignore[import-untyped]
from torch import Tensor

from bruno.checks import check_choice
from bruno.model import Bruno, Encoded, Posterior
from bruno.process import Evidence
from bruno.sklearn.base import Array, SetEstimator
from bruno.sklearn.sample import RowSample, extended
from bruno.tasks.set_scores import SetScorer, grouped_evidence
from bruno.tasks.temperature import best_temperature
from bruno.text import arguments_renamed
from bruno.trained import Trained


class FewShotClassifier(ClassifierMixin, SetEstimator):  # type: ignore[misc]
    """Classifies rows by the posteriors of the classes, each given a few examples.

    `fit` conditions a trained model on the examples of each class; no weight changes. `partial_fit` adds
    examples, or a new class, and `forget` removes examples exactly, in time that does not depend on the
    number of examples so far.

    P(class | x) is the softmax of log p(x | examples of the class)/T + log prior. T is fitted to examples
    that the model was not trained on, each given all others of its class. For "none of these", the density
    is that of an element of a new class, log p(x).

    Args:
        model: a run folder, a model file, a pretrained model, or the result of `bruno.open`, `bruno.train` or
            `bruno.load`; by default, a small model is trained on the first examples.
        prior: "uniform", "empirical" for the frequencies of the examples, or the probability of each class in
            the order of the sorted labels, without `none_label`, in any unit.
        temperature: T; "auto" to fit it.
        none_prior: prior probability that a row belongs to none of the classes. Above 0, `classes_`
            includes `none_label`.
        none_label: the label of "none of these"; by default -1, or "none of these" if labels are text.
        steps: optimiser steps of the small model; by default a fifth of the number of rows, from 10 to 1000.
        random_state: seed of all random numbers.
        device: device of a model that the estimator opens or trains: "cpu", "cuda", "cuda:NUMBER" or "auto".

    Attributes:
        model_: the model.
        classes_: the labels, sorted.
        evidence_: evidence of the examples of each class, in the order of `labels_`.
        labels_: the labels without `none_label`, in the order of their first example.
        temperature_: T.

    >>> rows = np.random.default_rng(0).normal(size=(40, 2)) + 6 * np.repeat([[0.0], [1.0]], 20, 0)
    >>> classifier = FewShotClassifier().fit(rows, ["low"] * 20 + ["high"] * 20)
    >>> classifier.predict([[0.1, -0.2], [6.1, 5.9]]).tolist()
    ['low', 'high']
    """

    def __init__(
        self,
        model: Trained | Bruno | str | Path | None = None,
        *,
        prior: Any = "uniform",
        temperature: float | str = "auto",
        none_prior: float = 0.0,
        none_label: Any = None,
        steps: int | None = None,
        random_state: Any = 0,
        device: str = "cpu",
    ) -> None:
        super().__init__(model, steps=steps, random_state=random_state, device=device)
        self.prior = prior
        self.temperature = temperature
        self.none_prior = none_prior
        self.none_label = none_label

    labels_: Array
    evidence_: Evidence
    _sample: RowSample

    # --- examples ----------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any) -> FewShotClassifier:
        """Condition the model on the examples X of classes y."""
        return self._fit(X, y, None)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> FewShotClassifier:
        """Add examples; labels may be new. The first call is `fit`.

        Args:
            X: the examples.
            y: their labels.
            classes: labels of all classes, if some have no examples yet. The density of a class without
                examples is that of a new class.

        Raises:
            ValueError: if rows or labels are rejected. The estimator is then unchanged.
        """
        if not hasattr(self, "evidence_"):
            return self._fit(X, y, classes)
        x, y = self._validated_with_labels(X, y)
        labels, which = self._numbered(self.labels_, y, classes)
        before = extended(self.evidence_, len(labels))
        encoded = self._encoded(x, before[which])
        unseen = torch.ones_like(which, dtype=torch.bool)
        added = grouped_evidence(encoded.z, which, len(labels), unseen)
        self._take(labels, before + added, self._sample.adding(encoded, which, unseen))
        return self

    def forget(self, X: Any, y: Any) -> FewShotClassifier:
        """Remove examples X of classes y that were added before; a class without examples is removed.

        Raises:
            ValueError: if a row was not added before; nothing is changed then.
        """
        check_is_fitted(self)
        x, y = self._validated_with_labels(X, y)
        if np.isnan(x).any():
            raise ValueError("`X` must be complete: an imputed row cannot be removed exactly; got NaN.")
        unknown = sorted(set(np.unique(y)) - set(self.labels_))
        if unknown:
            raise ValueError(f"`y` must be labels of examples that were added; got {unknown[0]!r}.")
        _, which = self._numbered(self.labels_, y, None)
        encoded = self._encoded(x, self.evidence_[which])
        gone = torch.ones_like(which, dtype=torch.bool)
        with arguments_renamed({"other": "X"}):
            evidence = self.evidence_ - grouped_evidence(encoded.z, which, len(self.labels_), gone)
        kept = (evidence.count > 0) | (self.evidence_.count == 0)
        if not bool(kept.any()):
            raise ValueError(f"`X` must leave at least one example; got all {len(x)}.")
        sample = self._sample.without(encoded.z, which)
        sample = sample.only(kept[sample.labels])
        sample = replace(sample, labels=(kept.cumsum(0) - 1)[sample.labels])
        self._take(self.labels_[kept.cpu().numpy()], evidence[kept], sample)
        return self

    # --- predictions -------------------------------------------------------------------------------------

    def predict(self, X: Any) -> Array:
        """The most probable label of each row."""
        most = self.predict_log_proba(X).argmax(1)
        return np.asarray(self.classes_[most])

    def predict_proba(self, X: Any) -> Array:
        """Probabilities (n, classes), in the order of `classes_`."""
        return np.exp(self.predict_log_proba(X))

    @torch.no_grad()
    def predict_log_proba(self, X: Any) -> Array:
        """Logarithms of the probabilities."""
        check_is_fitted(self)
        x = self._elements(self.model_, self._validated(X))
        evidence = extended(self.evidence_, len(self.labels_) + bool(self.none_prior))
        missing = x.isnan().flatten(1).any(1)
        log_scores = torch.empty((len(x), len(evidence.count)), dtype=torch.double, device=self.model_.device)
        if not bool(missing.all()):
            log_scores[~missing] = self._log_scores(self._scorer.encode(x[~missing]).z, evidence)
        if bool(missing.any()):
            log_scores[missing] = self._imputed_scores(x[missing], evidence)
        found = (log_scores / self.temperature_ + self._log_prior.to(log_scores.device)).log_softmax(1)
        return found.cpu().numpy()[:, self._order]

    # --- helpers -----------------------------------------------------------------------------------------

    def _fit(self, X: Any, y: Any, classes: Any) -> FewShotClassifier:
        self._check_parameters()
        given = self._given()
        self._remember(given)
        x, y = self._validated_with_labels(X, y, reset=True, least=2 if given is None else 1)
        known, numbers = np.unique(y, return_inverse=True)
        held_out = self._held_out(len(x), given)
        self.model_ = self._model_for(given, x[~held_out], numbers[~held_out])
        self._scorer = SetScorer(self.model_)
        labels, which = self._numbered(known, y, classes)
        elements = self.model_.impute(self._elements(self.model_, x), which)
        encoded, every = self._scorer.encode(elements), torch.ones_like(which, dtype=torch.bool)
        unseen = torch.from_numpy(held_out if given is None else ~held_out).to(which.device)
        sample = RowSample.empty(self.model_, self._seed()).adding(encoded, which, unseen)
        self._take(labels, grouped_evidence(encoded.z, which, len(labels), every), sample)
        return self

    def _check_parameters(self) -> None:
        if not (isinstance(self.none_prior, Real) and 0 <= self.none_prior < 1):
            raise ValueError(f"`none_prior` must be at least 0 and below 1; got {self.none_prior!r}.")
        if isinstance(self.prior, str):
            check_choice("prior", self.prior, ("uniform", "empirical"))
        if isinstance(self.temperature, str):
            check_choice("temperature", self.temperature, ("auto",))
        elif not (isinstance(self.temperature, Real) and self.temperature > 0):
            raise ValueError(f"`temperature` must be above 0, or 'auto'; got {self.temperature!r}.")

    def _validated_with_labels(
        self, X: Any, y: Any, *, reset: bool = False, least: int = 1
    ) -> tuple[Array, Array]:
        x, y = self._validated(X, y, reset=reset, least=least)
        check_classification_targets(y)
        return x, column_or_1d(y, warn=True)

    def _numbered(self, known: Array, y: Array, classes: Any) -> tuple[Array, Int[Tensor, " n"]]:
        """The known labels, then new ones of `y` and `classes`; and the position of each of `y` in them."""
        fresh = np.setdiff1d(y if classes is None else np.union1d(y, np.asarray(classes)), known)
        labels = np.concatenate([known, fresh]) if len(fresh) else known
        order = np.argsort(labels, kind="stable")
        numbers = order[np.searchsorted(labels, y, sorter=order)]
        return labels, torch.from_numpy(numbers).to(self.model_.device)

    def _encoded(self, x: Array, evidence: Evidence) -> Encoded:
        """Latents of rows, whose missing numbers are imputed given the evidence of each."""
        posterior = Posterior(self.model_, evidence)
        return self._scorer.encode(self._complete(posterior, self._elements(self.model_, x)))

    def _log_scores(
        self, z: Float[Tensor, "n dim"], evidence: Evidence, own: Int[Tensor, " n"] | None = None
    ) -> Float[Tensor, "n classes"]:
        """log p(z | examples) of all classes; a row of class `own` is first removed from its class."""
        process = self.model_.process
        found = process.log_prob(z.unsqueeze(1), evidence).double()
        if own is not None:
            alone = process.log_prob(z, evidence[own] - Evidence.single(z)).double()
            found[torch.arange(len(z), device=z.device), own] = alone
        return found

    def _imputed_scores(self, x: Float[Tensor, "n *shape"], evidence: Evidence) -> Float[Tensor, "n classes"]:
        """log p(x | examples) of all classes, with missing numbers imputed from each class."""
        scores = []
        for one in (evidence[i] for i in range(len(evidence.count))):
            z, log_det = self._scorer.encode(self._complete(Posterior(self.model_, one), x))
            scores.append(self.model_.process.log_prob(z, one) + log_det)
        return torch.stack(scores, 1).double()

    @torch.no_grad()
    def _take(self, labels: Array, evidence: Evidence, sample: RowSample) -> None:
        """Replace the examples of all classes, with the prior and the temperature that follow from them.

        Everything that may be rejected is computed before the first assignment.
        """
        names = labels
        if self.none_prior:
            names = np.concatenate([names, np.array([self._none_label(labels)])])
        order = np.argsort(names, kind="stable")
        log_prior = torch.log(torch.from_numpy(self._prior_of_classes(labels, evidence)))
        fit = self.temperature == "auto"
        temperature = self._fitted(evidence, sample) if fit else float(self.temperature)
        self.labels_, self.evidence_, self._sample = labels, evidence, sample
        self.classes_, self._order, self._log_prior = names[order], order, log_prior
        self.temperature_ = temperature

    def _fitted(self, evidence: Evidence, sample: RowSample) -> float:
        """The temperature fitted to examples that were not trained on; 1 if none of them is misclassified."""
        has_others = evidence.count[sample.labels] > 1
        sample = sample.only(sample.marked & has_others)
        if len(evidence.count) < 2 or not len(sample.labels):
            return 1.0
        z = sample.encoded.z.to(self.model_.process.mean.dtype)
        log_scores = self._log_scores(z, evidence, sample.labels)
        if bool((log_scores.argmax(1) == sample.labels).all()):
            return 1.0
        return best_temperature(sample.labels, log_scores)

    def _prior_of_classes(self, labels: Array, evidence: Evidence) -> Array:
        """The prior of the labels, then of "none of these"."""
        if isinstance(self.prior, str):
            counts = evidence.count.double().cpu().numpy()
            weights = np.ones(len(labels)) if self.prior == "uniform" else np.maximum(counts, 1)
        else:
            weights = np.asarray(self.prior, dtype=np.float64)
            if weights.shape != labels.shape or not (weights > 0).all():
                raise ValueError(
                    f"`prior` must be a positive number for each of {len(labels)} classes; got {self.prior}."
                )
            weights = weights[np.argsort(np.argsort(labels, kind="stable"))]
        weights = weights / weights.sum() * (1 - self.none_prior)
        return np.append(weights, self.none_prior) if self.none_prior else weights

    def _none_label(self, labels: Array) -> Any:
        label = self.none_label
        if label is None:
            label = -1 if labels.dtype.kind in "biuf" else "none of these"
        if label in set(labels):
            raise ValueError(f"`none_label` must not be the label of a class; got {label!r}.")
        return label
