"""A detector of anomalies for river, which learns a set from a stream, row by row.

It needs the extra `river`: pip install "bruno[river]".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bruno.checks import check_choice, check_count
from bruno.extras import imports_of
from bruno.fit_rows import fit_rows
from bruno.model import Bruno, Encoded, Posterior
from bruno.process import Evidence
from bruno.tasks.explanation import Explanation, explain_scores
from bruno.tasks.set_scores import SetScorer
from bruno.tasks.stream_evidence import START, may_count
from bruno.trained import Trained
from bruno.trained import open as open_trained

with imports_of("river", "`bruno.river`"):
    from river.base import AnomalyDetector

_GROWTH = 1.1  # the cutoff is recomputed whenever the set has grown by this factor


class SetAnomalyDetector(AnomalyDetector):
    """Scores rows given the set of the rows learnt so far; high scores are anomalous.

    The score is −(log p(x | set) − log p(x)) for a trained model, and −log p(x | set) for a small model that
    is trained on the first rows. Scores are 0 before the first row is learnt, and until the small model is
    trained. `score_one` changes nothing. `learn_one` adds a row to the set, in constant time and memory,
    unless the row is an outlier. Missing numbers are imputed from the set; a row with some is not added
    before the set has a complete row. A row without any number scores 0 and is not added.

    Args:
        model: a run folder, a model file, a pretrained model, or the result of `bruno.open`, `bruno.train` or
            `bruno.load`; by default, a small model is trained on the first rows. If the model has no names of
            columns, these are the columns of the first row, in its order.
        warm_up: number of first rows that the small model is trained on.
        criterion: "score", "density" or "auto", as above.
        count_all: add all rows, even outliers.
        steps: optimiser steps of the small model; by default a fifth of `warm_up`, from 10 to 1000.
        seed: seed of all random numbers.

    >>> import random
    >>> random.seed(0)
    >>> detector = SetAnomalyDetector(warm_up=50)
    >>> for _ in range(60):
    ...     detector.learn_one({"heat": random.gauss(20, 1), "load": random.gauss(3, 1)})
    >>> detector.score_one({"heat": 35.0, "load": 3.0}) > detector.score_one({"heat": 20.5, "load": 3.1})
    True
    """

    _evidence: Evidence

    def __init__(
        self,
        model: Trained | Bruno | str | Path | None = None,
        warm_up: int = 200,
        criterion: str = "auto",
        count_all: bool = False,
        steps: int | None = None,
        seed: int = 0,
    ) -> None:
        check_count("warm_up", warm_up, 2)
        check_choice("criterion", criterion, ("auto", "score", "density"))
        self.model = model
        self.warm_up = warm_up
        self.criterion = criterion
        self.count_all = count_all
        self.steps = steps
        self.seed = seed
        self._columns: tuple[str, ...] = ()
        self._rows: list[dict[str, float]] = []  # before the small model is trained
        self._scorer: SetScorer | None = None
        self._first: Encoded | None = None  # the first rows of the set, which are reconsidered together
        self._position = 0  # rows since the set began
        self._cutoff, self._cutoff_at = -math.inf, 0.0

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns in use: those of the model, or of the first rows."""
        return self._columns

    @property
    def posterior(self) -> Posterior | None:
        """The posterior given the set; None before the small model is trained."""
        return None if self._scorer is None else Posterior(self._scorer.model, self._evidence)

    def score_one(self, x: dict[Any, Any]) -> float:
        """How anomalous a row is given the set, in nats; nothing is learnt."""
        row = _numbers(x, self._columns)
        if self._scorer is None or not row:
            return 0.0
        encoded = _encoded(self._scorer, self._evidence, row, self._columns)
        return -self._scorer.scores(encoded, self._evidence).item()

    def learn_one(self, x: dict[Any, Any]) -> None:
        """Add a row to the set, unless it is an outlier."""
        row = _numbers(x, self._columns)
        if not row:
            return
        if self._scorer is None and (opened := self._opened(tuple(x))) is not None:
            self._start(*opened)
            row = _numbers(x, self._columns)
        if self._scorer is None:
            self._rows.append(row)
            if len(self._rows) == self.warm_up:
                self._train()
            return
        self._position += 1
        is_complete = len(row) == len(self._columns)
        if not may_count(is_complete, int(self._evidence.count), self._position - 1):
            return
        encoded = _encoded(self._scorer, self._evidence, row, self._columns)
        if bool(self._scorer.usable(encoded)) and self._counts(self._scorer, encoded):
            self._evidence = self._evidence.add(encoded.z)
        if self._first is not None:
            self._reconsider(self._scorer, encoded)

    def explain_one(self, x: dict[Any, Any]) -> dict[str, float]:
        """Contributions of the columns to `score_one`; high ones make the row an anomaly."""
        row = _numbers(x, self._columns)
        if self._scorer is None or not row:
            return {}
        element = _element(self._scorer.model, self._evidence, row, self._columns)
        found: Explanation = explain_scores(
            self._scorer, self._evidence, element.unsqueeze(0), features=self._columns, seed=self.seed
        )
        return dict(zip(found.features, (-found.contributions[0]).tolist(), strict=True))

    # --- helpers -----------------------------------------------------------------------------------------

    def _opened(self, names: tuple[str, ...]) -> tuple[SetScorer, tuple[str, ...]] | None:
        """The scorer of a given model, and its columns, by default these; None without a model."""
        if self.model is None:
            return None
        given = open_trained(self.model) if isinstance(self.model, str | Path) else self.model
        if not isinstance(given, Trained | Bruno):
            raise TypeError(f"`model` must be a model or the path of one; got {type(given).__name__}.")
        model = given.model if isinstance(given, Trained) else given
        if model.kind.is_images:
            raise ValueError(f"`model` must be a model of rows; got one of images {model.shape}.")
        columns = given.columns if isinstance(given, Trained) else ()
        columns = columns or names
        if len(columns) != model.dim:
            raise ValueError(f"`x` must have {model.dim} columns for this model; got {len(columns)}.")
        criterion: Any = "score" if self.criterion == "auto" else self.criterion
        return SetScorer.of(model, criterion, seed=self.seed), columns

    def _start(self, scorer: SetScorer, columns: tuple[str, ...]) -> None:
        self._scorer, self._columns = scorer, columns
        self._evidence = Evidence.empty(scorer.model.dim, device=scorer.model.device)
        none = torch.zeros((0, scorer.model.dim), device=scorer.model.device)
        self._first = None if self.count_all else Encoded(none, none.sum(1))

    def _train(self) -> None:
        """Train the small model on the first rows, which become the set."""
        columns = tuple(sorted({name for row in self._rows for name in row}))
        values = [[row.get(name, math.nan) for name in columns] for row in self._rows]
        x = torch.tensor(values, dtype=torch.double)
        model = fit_rows(x, steps=self.steps, seed=self.seed, impute=True)
        criterion: Any = "density" if self.criterion == "auto" else self.criterion
        self._start(SetScorer.of(model, criterion, seed=self.seed), columns)
        self._rows, self._first = [], None
        assert self._scorer is not None
        one_set = torch.zeros(len(x), dtype=torch.long)
        encoded = self._scorer.encode(model.impute(x))
        self._evidence = self._scorer.score_sets(encoded, one_set, 1, count_all=self.count_all).evidence[0]

    def _counts(self, scorer: SetScorer, encoded: Encoded) -> bool:
        """Whether a row counts: if it is one of the first rows, or if its score is at least the cutoff."""
        if self.count_all or self._first is not None:
            return True
        count = int(self._evidence.count)
        if count >= self._cutoff_at:
            self._cutoff, self._cutoff_at = scorer.cutoffs(self._evidence).item(), _GROWTH * count + 1
        return bool(scorer.scores(encoded, self._evidence) >= self._cutoff)

    def _reconsider(self, scorer: SetScorer, encoded: Encoded) -> None:
        """Keep the first rows; once there are enough, remove outliers among them from the set."""
        assert self._first is not None
        rows = [torch.cat([old, new.unsqueeze(0)]) for old, new in zip(self._first, encoded, strict=True)]
        self._first = Encoded(*rows)
        if len(self._first.z) >= START:
            one_set = torch.zeros(START, dtype=torch.long, device=encoded.z.device)
            self._evidence = scorer.score_sets(self._first, one_set, 1).evidence[0]
            self._first = None


def _numbers(x: Mapping[str, Any], columns: tuple[str, ...]) -> dict[str, float]:
    """The numbers of a row without missing ones: of these columns, or of all if none are known yet."""
    if x and columns and not any(name in x for name in columns):
        raise ValueError(f"`x` must have at least one of the columns {columns}; got {tuple(x)}.")
    row = {}
    for name, value in x.items():
        if value is None or (columns and name not in columns):
            continue
        try:
            row[name] = float(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"`x` must hold numbers; got {value!r} in column {name!r}. Select columns of numbers, or "
                "encode this one."
            ) from None
    return {name: value for name, value in row.items() if not math.isnan(value)}


def _element(model: Bruno, evidence: Evidence, row: Mapping[str, float], columns: tuple[str, ...]) -> Tensor:
    """A row as an element; missing columns are imputed."""
    missing = [name for name in columns if name not in row]
    if missing and model.imputer is None:
        raise ValueError(f"`x` must have all columns, as the model cannot impute; got no {missing[0]!r}.")
    values = [row.get(name, math.nan) for name in columns]
    element = torch.tensor(values, dtype=torch.double, device=model.device)
    return Posterior(model, evidence).impute(element) if missing else element


def _encoded(
    scorer: SetScorer, evidence: Evidence, row: Mapping[str, float], columns: tuple[str, ...]
) -> Encoded:
    with torch.no_grad():
        return scorer.model.encode(_element(scorer.model, evidence, row, columns), on_scales=True)
