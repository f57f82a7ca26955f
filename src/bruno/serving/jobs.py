"""The jobs of requests, for `run_together`: score, sample, classify, rank, and changes of sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bruno.flow.preprocessing import ColumnScales, dequantise, quantise
from bruno.posterior import Posterior
from bruno.process import Evidence
from bruno.serving.sets import Sets
from bruno.serving.settings import RequestError
from bruno.serving.steps import Computer, Decode, Density, Encode, Job, Outcome, run_together
from bruno.streams.codec import SetRecord
from bruno.tasks.classification import (
    Classification,
    class_probabilities,
    log_prior_of,
    with_p_values,
)
from bruno.tasks.temperature import fit_temperature_to_groups
from bruno.text import numbered
from bruno.trained import Trained

_MAX_WAYS, _MAX_SHOTS = 20, 20  # limits of the episodes that a temperature is fitted to

Given = str | Tensor | None  # a set: its id, its elements, or None for the prior


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of elements, their log p(x | set), and the size of the set."""

    scores: Float[np.ndarray, " n"]
    log_probs: Float[np.ndarray, " n"]
    seen: int


class ServedModel:
    """A model with its sets, and the jobs that it runs.

    The jobs run in one thread, by `run`: a batch reads and changes the store without locks, and its changes
    are one transaction.

    Args:
        trained: the model.
        store: the file of its sets, or ":memory:".
        batch: elements that are encoded or decoded at a time.
    """

    def __init__(self, trained: Trained, store: str | Path, batch: int) -> None:
        self.trained, self.model = trained, trained.model
        self.is_images, self._imputes = self.model.kind.is_images, self.model.imputer is not None
        self._calibration = trained.ready_calibration()
        self.is_calibrated = self._calibration is not None
        self._computer = Computer(self.model, batch)
        self.sets = Sets(self.model, store)
        self._temperature = lru_cache(maxsize=64)(self._fitted_temperature)
        self._empty = SetRecord.of(Evidence.empty(self.model.dim))

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Run jobs together, and commit their changes before any answer is returned."""
        outcomes = run_together(jobs, self._computer.compute)
        self.sets.commit()
        return outcomes

    # --- jobs --------------------------------------------------------------------------------------------

    def score(self, x: Tensor, given: Given) -> Job:
        """`Scores` of elements (n, *shape) given a set."""
        known = yield from self._known(given)
        z, log_det = yield Encode(self._complete(x, known))
        prior, density = (yield Density(z, [self._empty, known])).T
        return Scores(density - prior, density + log_det, int(known.count))

    def rank(self, x: Tensor, given: Given) -> Job:
        """`Scores` of elements (n, *shape) given a set, and the indices of the elements, the best first."""
        found = yield from self.score(x, given)
        return found, np.argsort(-found.scores, kind="stable")

    def sample(self, given: Given, n: int, temperature: float, seed: int | None) -> Job:
        """n samples of the next element of a set: images as integers, rows as numbers.

        Given images are dequantised with noise, as in training.
        """
        generator = torch.Generator(self.model.device)
        generator.seed() if seed is None else generator.manual_seed(seed)
        if isinstance(given, Tensor) and self.is_images:
            given = dequantise(given.to(self.model.device), generator).cpu()
        known = yield from self._known(given)
        posterior = self._posterior(known)
        x = yield Decode(posterior.sample_latents(n, generator=generator, temperature=temperature))
        return (quantise(x, self.model.levels) if self.model.levels else x).cpu().numpy()

    def classify(
        self,
        x: Tensor,
        support: Mapping[str, Given],
        prior: Sequence[float] | None = None,
        temperature: float | None = None,
        none_rate: float = 0.01,
    ) -> Job:
        """The `Classification` of elements (n, *shape) into classes, each a set."""
        log_prior = log_prior_of(prior, len(support))
        classes = []
        for given in support.values():
            classes.append((yield from self._known(given)))
        log_scores, before, log_prob = yield from self._class_scores(x, classes)
        shots = tuple(int(one.count) for one in classes)
        if temperature is None:
            temperature = self._temperature(min(len(shots), _MAX_WAYS), min(*shots, _MAX_SHOTS))
        probabilities = class_probabilities(log_scores, log_prior, temperature)
        found = Classification(
            probabilities,
            log_scores,
            log_scores - before,
            log_prob,
            probabilities.argmax(1),
            classes=tuple(support),
            names=numbered(len(x)),
            support=shots,
            temperature=temperature,
            queries=x,
            kind=self.model.kind,
        )
        return found if self._calibration is None else with_p_values(found, self._calibration, none_rate)

    def add(self, id: str, x: Tensor, key: str, digest: bytes) -> Job:
        """Add elements (n, *shape) to a set, only once per key; the answer has the size of the set."""
        if (before := self.sets.answered(key, digest)) is not None:
            return before
        z, _ = yield Encode((yield from self._complete_to_add(x, self.sets.get(id) or self._empty)))

        def change() -> dict[str, Any]:
            count = self.sets.add(id, z, incomplete=self._is_incomplete(x))
            return {"id": id, "count": count, "added": len(x)}

        return self.sets.once(key, digest, change)

    def remove(self, id: str, x: Tensor, key: str, digest: bytes) -> Job:
        """Remove elements (n, *shape) that were added to a set before, only once per key."""
        if (before := self.sets.answered(key, digest)) is not None:
            return before
        if self._is_incomplete(x):
            raise RequestError(
                422,
                "`elements` must have no missing numbers to be removed: those in their place were imputed "
                "from the set as it was then. To remove such a row, delete the set and add the others again.",
            )
        z, _ = yield Encode(x)

        def change() -> dict[str, Any]:
            return {"id": id, "count": self.sets.remove(id, z), "removed": len(x)}

        return self.sets.once(key, digest, change)

    def delete(self, id: str, key: str, digest: bytes) -> Job:
        """Delete a set, only once per key."""

        def change() -> dict[str, Any]:
            self.sets.delete(id)
            return {"id": id, "count": 0}

        return _at_once(lambda: self.sets.once(key, digest, change))

    def describe(self, id: str) -> Job:
        """The size of a set."""
        return _at_once(lambda: {"id": id, "count": int(self.sets[id].count)})

    def list(self, after: str, limit: int) -> Job:
        """The ids of sets after one of them, in order, and the number of all sets."""
        return _at_once(lambda: {"ids": self.sets.ids(after, limit), "count": len(self.sets)})

    # --- parts -------------------------------------------------------------------------------------------

    def _known(self, given: Given) -> Job:
        """The state of a set."""
        if given is None:
            return self._empty
        if isinstance(given, str):
            return self.sets[given]
        latents = yield Encode(self.model.impute(given) if self._is_incomplete(given) else given)
        return SetRecord.of(Evidence.of(torch.from_numpy(latents.z)))

    def _is_incomplete(self, x: Tensor) -> bool:
        return self._imputes and bool(np.isnan(x.numpy()).any())

    def _complete(self, x: Tensor, known: SetRecord) -> Tensor:
        """Rows with their missing numbers imputed given a set; other elements as they are."""
        return self._posterior(known).impute(x).cpu() if self._is_incomplete(x) else x

    def _complete_to_add(self, x: Tensor, known: SetRecord) -> Job:
        """Rows to add to a set, with their missing numbers imputed from the set and from all of these rows.

        Raises 422 if no complete row is among them and the set is empty: the numbers would be guesses at the
        level of the set, and as evidence, they would make outliers of complete rows.
        """
        if not self._is_incomplete(x):
            return x
        complete = x[~x.isnan().any(1)]
        if known.count:
            if len(complete):
                latents = yield Encode(complete)
                known = SetRecord.of(known.evidence.add(torch.from_numpy(latents.z)))
            return self._complete(x, known)
        if not len(complete):
            raise RequestError(
                422,
                "`elements` must have a row without missing numbers, as the set has no row to impute from; "
                f"got {len(x)} incomplete. Add a complete row first, or in the same request.",
            )
        return self.model.impute(x)

    def _posterior(self, known: SetRecord) -> Posterior:
        return Posterior(self.model, known.evidence.to(self.model.device))

    def _class_scores(self, x: Tensor, classes: Sequence[SetRecord]) -> Job:
        """log p(z | class), log p(z) and log p(x), all (n, classes), as in `bruno.tasks.classify`.

        Rows with missing numbers have latents for each class: their log p(z | class) includes the Jacobian.
        """
        n, ways = len(x), len(classes)
        missing = x.isnan().flatten(1).any(1) if x.is_floating_point() else torch.zeros(n, dtype=torch.bool)
        if bool(missing.any()):
            filled = torch.stack([self._complete(x, one) for one in classes], 1)
        else:
            filled = x.unsqueeze(1)
        z, log_det = yield Encode(filled.flatten(0, 1))
        if isinstance(scales := self.model.preprocessing, ColumnScales):
            log_det = log_det - scales.scale_log_det(filled.flatten(0, 1).to(self.model.device)).cpu().numpy()
        z, log_det = z.reshape(n, -1, z.shape[-1]), log_det.reshape(n, -1)
        columns = []
        for place in range(z.shape[1]):
            own = classes if z.shape[1] == 1 else [classes[place]]
            columns.append((yield Density(z[:, place], [self._empty, *own])))
        prior = np.stack([column[:, 0] for column in columns], 1)
        given = np.concatenate([column[:, 1:] for column in columns], 1)
        omitted = np.where(missing.numpy()[:, None], 0.0, log_det)
        before = np.broadcast_to(prior + log_det - omitted, (n, ways))
        log_prob = np.broadcast_to(prior + log_det, (n, ways))
        found = (given + log_det - omitted, before, log_prob)
        return tuple(torch.from_numpy(np.array(part)) for part in found)

    def _fitted_temperature(self, way: int, shot: int) -> float:
        """The temperature for this way and shot, fitted to the calibration; 1 without a calibration."""
        if self._calibration is None or shot < 1:
            return 1.0
        generator = torch.Generator().manual_seed(0)
        found = fit_temperature_to_groups(
            self.model, self._calibration.groups, way=way, shot=shot, generator=generator
        )
        return 1.0 if found is None else found.temperature


def _at_once(answer: Callable[[], Any]) -> Job:
    """A job without steps."""
    return answer()
    yield  # it is a generator nevertheless
