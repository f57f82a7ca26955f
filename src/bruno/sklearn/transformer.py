"""Latents of rows, as a transformer of scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin  # type: ignore[import-untyped]
from sklearn.utils.validation import check_array, check_is_fitted  # type: ignore[import-untyped]

from bruno.model import Posterior
from bruno.process import Evidence
from bruno.sklearn.base import Array, SetEstimator, group_labels


class LatentTransformer(ClassNamePrefixFeaturesOutMixin, TransformerMixin, SetEstimator):  # type: ignore[misc]
    """Transforms rows to latents; in each dimension, the latents of a set are Gaussian or Student-t.

    Args:
        model: a run folder, a model file, a pretrained model, or the result of `bruno.open`, `bruno.train` or
            `bruno.load`; by default, a small model is trained on the rows.
        steps: optimiser steps of the small model; by default a fifth of the number of rows, from 10 to 1000.
        random_state: seed of all random numbers.
        device: device of a model that the estimator opens or trains: "cpu", "cuda", "cuda:NUMBER" or "auto".

    Attributes:
        model_: the model.
        evidence_: evidence of all rows of `fit`, from which missing numbers are imputed.

    >>> rows = np.random.default_rng(0).normal(size=(40, 3))
    >>> transformer = LatentTransformer().fit(rows)
    >>> latents = transformer.transform(rows)
    >>> latents.shape, bool(np.allclose(transformer.inverse_transform(latents), rows))
    ((40, 3), True)
    """

    def fit(self, X: Any, y: Any = None, groups: Any = None) -> LatentTransformer:
        """Open the model, or train a small one.

        Args:
            X: rows (n, columns), a frame, or images (n, *shape).
            y: ignored.
            groups: the set of each row, for the training; by default all rows are one set.
        """
        given = self._given()
        x = self._begin(X, given)
        labels, _ = group_labels(groups, len(x), None)
        self.model_ = self._model_for(given, x, labels)
        elements = self.model_.impute(self._elements(self.model_, x), torch.from_numpy(labels))
        self.evidence_ = Evidence.of(self.model_.latents(elements))
        self._n_features_out = self.model_.dim
        return self

    def transform(self, X: Any) -> Array:
        """Latents (n, dim)."""
        check_is_fitted(self)
        elements = self._elements(self.model_, self._validated(X))
        elements = self._complete(Posterior(self.model_, self.evidence_), elements)
        return self.model_.latents(elements).double().cpu().numpy()

    def inverse_transform(self, X: Any) -> Array:
        """Rows (n, columns) from latents."""
        check_is_fitted(self)
        z = check_array(X, dtype=np.float64)
        return self.model_.decode(z).flatten(1).double().cpu().numpy()
