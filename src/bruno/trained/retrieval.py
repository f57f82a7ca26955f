"""Ranking of a collection by a trained model, and its evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bruno.arrays import NumpyResult
from bruno.checks import check_whole, check_whole_numbers
from bruno.data.sampling import seeded_generator
from bruno.kinds import Kind
from bruno.tasks import Progress
from bruno.tasks.index import Index, open_index
from bruno.tasks.retrieval import RetrievalResult, measure_retrieval, rank
from bruno.text import arguments_renamed
from bruno.trained.base import Source
from bruno.trained.data import Data, TrainedData

_PRECISION_AT = (1, 5, 10)  # numbers of best elements at which the precision is measured


@dataclass(frozen=True, eq=False)
class Retrieved(NumpyResult):
    """The elements of a collection with the highest scores given a query, the highest first.

    Attributes:
        query: the examples, (n, *shape).
        names: names of the elements found.
        scores: log p(x | query) − log p(x) of each element, in nats.
        found: the elements, (top, *shape); None for rows.
        collection: number of elements that were ranked.
        kind: kind of the elements.
        order: positions of the elements found in the collection, from 0: ``x[list(found.order)]``.
    """

    query: Tensor
    names: tuple[str, ...]
    scores: tuple[float, ...]
    found: Tensor | None
    collection: int
    kind: Kind
    order: tuple[int, ...]


@dataclass(frozen=True)
class RetrievalEvaluation(NumpyResult):
    """How well the rest of a class is found, and the name of the data it was measured on."""

    data: str
    results: tuple[RetrievalResult, ...]


class RetrievalJobs(TrainedData):
    """The retrieval jobs of a trained model; see `Trained` for `split`, `data` and `invert`."""

    def retrieve(
        self,
        query: Source,
        collection: Source,
        *,
        index: str | Path | None = None,
        top: int = 40,
        invert: bool | None = None,
        skip_bad: bool = False,
        progress: Progress | None = None,
    ) -> Retrieved:
        """Rank a collection by log p(x | query) − log p(x).

        Args:
            query: a few examples: files, folders, arrays.
            collection: the path of a folder of images or of a CSV, which is encoded once; or elements in
                memory, such as arrays, which are encoded each time and named by their positions from 1.
            index: file for an encoded folder or CSV; by default beside it.
            top: number of elements to return.
            invert: turn dark ink into bright ink; as in training by default.
            skip_bad: skip files that cannot be read.
            progress: called as progress(done, total).
        """
        check_whole("top", top)
        examples = self.read_set(query, name="query", invert=invert, skip_bad=skip_bad)
        reader = self.reader(invert=invert, skip_bad=skip_bad)
        elements, encoded_now = None, True
        if isinstance(collection, str | Path):
            with arguments_renamed({"path": "index"}):
                encoded, encoded_now = open_index(
                    self.model, reader, collection, index, familiarity=self.familiarity, progress=progress
                )
        elif index is not None:
            raise ValueError(f"`index` must be omitted for a collection that is not a path; got {index}.")
        else:
            elements, names, _ = self.read(collection, invert=invert, skip_bad=skip_bad, name="collection")
            encoded = Index.of(self.model, elements, names, progress=progress)
        ranking = rank(encoded, self.model, examples.to(self.device))
        best = ranking.order[:top].tolist()
        names, found = tuple(encoded.names[i] for i in best), None
        if self.model.kind.is_images and elements is not None:
            found = elements[best]
        elif self.model.kind.is_images:
            found = torch.stack([element.x for element in reader.read(names)])
            if not encoded_now:  # encoding checks the whole collection
                self.warn_if_unfamiliar(found, what="the images found are")
        scores = tuple(ranking.scores[best].tolist())
        return Retrieved(examples, names, scores, found, len(encoded), self.model.kind, tuple(best))

    def measure_retrieval(
        self,
        *,
        shots: Sequence[int] = (1, 5),
        queries: int = 200,
        split: str | None = None,
        data: Data | None = None,
        classes: Sequence[str] | None = None,
        invert: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> RetrievalEvaluation:
        """Mean average precision of retrieving the rest of a class, compared with nearest neighbours."""
        selected = self._select(split, data, classes, invert, min_classes=2)
        check_whole_numbers("shots", shots)
        fewest = len(selected.examples) - max(shots, default=0)  # in a collection, without rotations
        found = measure_retrieval(
            self.model,
            selected.examples,
            queries=queries,
            shots=shots,
            at=[k for k in _PRECISION_AT if k <= fewest],
            rotations=self.rotations,
            generator=seeded_generator(seed),
            progress=progress,
        )
        return RetrievalEvaluation(selected.name, found)
