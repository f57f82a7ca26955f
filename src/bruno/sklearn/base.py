"""The base of all estimators: their model, and the validation of rows and sets."""

from __future__ import annotations

import math
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bruno.checks import check_count
from bruno.data.columns import check_not_all_missing
from bruno.devices import resolve_device
from bruno.extras import imports_of
from bruno.fit_rows import fit_rows
from bruno.model import Bruno, Posterior
from bruno.trained import Trained
from bruno.trained import open as open_trained

with imports_of("sklearn", "`bruno.sklearn`"):  # version 1.6 added validate_data
    from sklearn.base import BaseEstimator  # type: ignore[import-untyped]
    from sklearn.utils import check_random_state  # type: ignore[import-untyped]
    from sklearn.utils.validation import (  # type: ignore[import-untyped]
        check_consistent_length,
        column_or_1d,
        validate_data,
    )

Array = NDArray[Any]
_HELD_OUT_DIVISOR = 4  # a quarter of the rows is held out, to correct the p-values of the small model
_FEW_ROWS = 8  # too few to hold out any


class SetEstimator(BaseEstimator):  # type: ignore[misc]
    """Base of the estimators, with a model that is given, or a small model that is trained on the rows.

    A given model is never trained. `clone` shares the model, and does not copy its weights.

    Args:
        model: a run folder, a model file, a pretrained model, or the result of `bruno.open`, `bruno.train` or
            `bruno.load`; by default, a small model is trained on the rows.
        steps: optimiser steps of the small model; by default a fifth of the number of rows, from 10 to 1000.
        random_state: seed of all random numbers.
        device: device of a model that the estimator opens or trains: "cpu", "cuda", "cuda:NUMBER" or "auto".
    """

    def __init__(
        self,
        model: Trained | Bruno | str | Path | None = None,
        *,
        steps: int | None = None,
        random_state: Any = 0,
        device: str = "cpu",
    ) -> None:
        self.model = model
        self.steps = steps
        self.random_state = random_state
        self.device = device

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True  # missing numbers are imputed
        return tags

    # --- model -------------------------------------------------------------------------------------------

    def _given(self) -> Trained | Bruno | None:
        """The model that was given, opened if it is a path or a name; None if one is to be trained."""
        if self.steps is not None:
            check_count("steps", self.steps)
        if isinstance(self.model, str | Path):
            return open_trained(self.model, device=self.device)
        if self.model is not None and not isinstance(self.model, Trained | Bruno):
            raise TypeError(
                "`model` must be a path, a pretrained model, or an object of bruno.open, bruno.train or "
                f"bruno.load; got {type(self.model).__name__}."
            )
        return self.model

    def _seed(self) -> int:
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _begin(self, x: Any, given: Trained | Bruno | None) -> Array:
        """Validate the first rows, and remember their columns."""
        self._remember(given)
        found: Array = self._validated(x, reset=True, least=2 if given is None else 1)
        return found

    def _remember(self, given: Trained | Bruno | None) -> None:
        """Remember the columns and the shape of a given model."""
        self._columns = given.columns if isinstance(given, Trained) else ()
        self._shape = () if given is None else (given.model if isinstance(given, Trained) else given).shape

    def _model_for(self, given: Trained | Bruno | None, x: Array, labels: Array | None) -> Bruno:
        """The given model, or a small one trained on the rows."""
        if given is not None:
            return given.model if isinstance(given, Trained) else given
        device = resolve_device(self.device)
        return fit_rows(x, labels, steps=self.steps, seed=self._seed(), device=device)

    def _held_out(self, rows: int, given: Trained | Bruno | None) -> Array:
        """A random quarter of the rows, which the small model is not trained on; none with a given model."""
        held_out = np.zeros(rows, dtype=bool)
        if given is None and rows >= _FEW_ROWS:
            order = np.random.default_rng(self._seed()).permutation(rows)
            held_out[order[: rows // _HELD_OUT_DIVISOR]] = True
        return held_out

    # --- rows --------------------------------------------------------------------------------------------

    def _validated(self, x: Any, y: Any = "no_validation", *, reset: bool = False, least: int = 1) -> Any:
        """Rows (n, columns) or images (n, *shape), and the labels if there are any.

        Columns of a frame are selected by name.
        """
        if self._columns and hasattr(x, "columns"):
            missing = [name for name in self._columns if name not in set(x.columns)]
            if missing:
                raise ValueError(f"`X` must have the columns of the model; got no {', '.join(missing)}.")
            x = x[list(self._columns)]
        images = len(self._shape) > 1
        found = validate_data(
            self,
            x,
            y,
            reset=reset,
            dtype="numeric" if images else np.float64,
            ensure_all_finite="allow-nan",
            ensure_min_samples=least,
            allow_nd=images,
        )
        x = found[0] if isinstance(found, tuple) else found
        if self._shape and math.prod(x.shape[1:]) != math.prod(self._shape):
            raise ValueError(
                f"`X` must have {math.prod(self._shape)} columns for a model of shape {self._shape}; got "
                f"{x.shape[1]} features."
            )
        if not images:
            check_not_all_missing(np.isnan(x), "X")
        return found

    def _elements(self, model: Bruno, x: Array) -> Tensor:
        """Rows as elements (n, *shape) of the model; for images, whole numbers are levels of pixels."""
        elements = torch.from_numpy(np.ascontiguousarray(x)).reshape(-1, *model.shape)
        whole = model.kind.is_images and bool((elements == elements.round()).all())
        return elements.long() if whole else elements

    def _complete(self, posterior: Posterior, x: Tensor) -> Tensor:
        """Elements with their missing numbers imputed from their sets; raises if the model cannot impute."""
        if not x.is_floating_point() or not bool(x.isnan().any()):
            return x
        if posterior.model.imputer is None:
            raise ValueError("`X` must be complete, as the rows of `fit` were; got missing numbers (NaN).")
        return posterior.impute(x)


def group_labels(groups: Any, rows: int, known: Array | None) -> tuple[Array, Array]:
    """The index of the set of each row, and the names of the sets: known sets first, then new ones.

    Without groups, all rows are one set, which has no name.
    """
    if groups is None:
        if known is not None and len(known):
            raise ValueError(
                f"`groups` must name the set of each row, as in `fit`; got None for {rows} rows."
            )
        return np.zeros(rows, dtype=np.int64), np.array([], dtype=object)
    if known is not None and not len(known):
        raise ValueError("`groups` must be omitted, as in `fit`; got some.")
    values = column_or_1d(np.asarray(groups), warn=False)
    if len(values) != rows:
        check_consistent_length(np.zeros(rows), values)
    # Of a list, numpy would turn a missing name among texts into the text "nan".
    for i, name in enumerate(groups if isinstance(groups, list | tuple) else values):
        if _is_missing(name):
            raise ValueError(f"`groups` must name the set of every row; row {i + 1} has {name!r}.")
    fresh = np.unique(values) if known is None else np.setdiff1d(values, known)
    names = fresh if known is None else np.concatenate([known, fresh])
    order = np.argsort(names, kind="stable")
    return order[np.searchsorted(names, values, sorter=order)], names


def _is_missing(name: Any) -> bool:
    """Whether a name is None, NaN, or the missing value of pandas, which cannot be compared."""
    return name is None or type(name).__name__ == "NAType" or bool(name != name)
