"""What of a collection fits a few examples: the Bayesian-sets score of all of it, and how well that works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from bruno.checkpoint import read, write
from bruno.data import Examples
from bruno.data.sampling import with_rotations
from bruno.model import Bruno
from bruno.process import Evidence
from bruno.tasks import Progress
from bruno.tasks.scorers import part_size


@dataclass(frozen=True, eq=False)
class Index:
    """A collection, encoded once.

    Attributes:
        latents: of each element.
        names: of each element: a file, an id.
        fingerprint: of the model that encoded it; to another one the latents mean nothing.
        source: what the collection was, in its keeper's words: by it a change can be seen.
    """

    latents: Float[Tensor, "n dim"]
    names: tuple[str, ...]
    fingerprint: str
    source: str = ""

    def __post_init__(self) -> None:
        _check_names(self.names, len(self.latents))

    def __len__(self) -> int:
        return len(self.names)

    @classmethod
    @torch.no_grad()
    def of(
        cls,
        model: Bruno,
        collection: Examples | Tensor,
        names: Sequence[str] | None = None,
        *,
        source: str = "",
        batch_size: int = 256,
        progress: Progress | None = None,
    ) -> Index:
        """Encode elements (n, *shape), so many at a time; `progress` is told (done, all) after each time.

        Without names, an example is called class/place and an element of a tensor by its place.
        """
        x = collection.elements if isinstance(collection, Examples) else collection
        if tuple(x.shape[1:]) != model.shape or not len(x):
            raise ValueError(
                f"`collection` must be elements (n, *{model.shape}) with n of at least 1 for this model; "
                f"got shape {tuple(x.shape)}."
            )
        if names is None:
            names = [str(place) for place in range(len(x))]
            if isinstance(collection, Examples):
                classes = [collection.names[label] for label in collection.labels.tolist()]
                names = [f"{name}/{place}" for name, place in zip(classes, names, strict=True)]
        _check_names(names, len(x))  # before the hours that encoding may take
        latents: list[Tensor] = []
        for some in x.split(batch_size):
            latents.append(model.latents(some, batch_size=batch_size))
            if progress is not None:
                progress(sum(map(len, latents)), len(x))
        return cls(torch.cat(latents), tuple(names), model.fingerprint(), source)

    def save(self, path: str | Path) -> None:
        """Write to a file, whole or not at all."""
        header = {"kind": "index", "model": self.fingerprint, "names": self.names, "source": self.source}
        write(Path(path), {"latents": self.latents}, header)

    @classmethod
    def load(cls, path: str | Path, *, model: Bruno | None = None) -> Index:
        """Read what `save` wrote, on the CPU or where the model is; it must be the one that encoded it."""
        tensors, header = read(Path(path), model.process.mean.device if model else "cpu")
        if header["kind"] != "index":
            raise ValueError(f"`path` must be an index; {path} is a {header['kind']}.")
        index = cls(tensors["latents"], tuple(header["names"]), header["model"], header.get("source", ""))
        if model is not None:
            index.check_model(model)
        return index

    def check_model(self, model: Bruno) -> None:
        """Raise unless this very model encoded the collection."""
        if model.fingerprint() != self.fingerprint:
            raise ValueError(
                f"`model` must be the one that encoded the index, {self.fingerprint}; got "
                f"{model.fingerprint()}. Encode the collection again with Index.of."
            )


def _check_names(names: Sequence[str], n: int) -> None:
    if len(names) != n:
        raise ValueError(f"`names` must be one for each of {n} elements; got {len(names)}.")


@dataclass(frozen=True, eq=False)
class Ranking:
    """A collection by how well it fits a query.

    Attributes:
        order: the places of the elements in the collection, the best first.
        scores: of the elements, in the collection's order.
    """

    order: Int[Tensor, " n"]
    scores: Float[Tensor, " n"]


@torch.no_grad()
def rank(index: Index, model: Bruno, query: Tensor) -> Ranking:
    """Rank all of a collection by log p(x | query) − log p(x), the score of Bayesian sets.

    The Jacobians of the flow cancel, so latents are all it takes: one predictive density for the whole.

    Args:
        index: of the collection.
        model: that encoded it.
        query: the examples (n, *shape), n ≥ 1.
    """
    if query.ndim != len(model.shape) + 1 or not len(query):
        raise ValueError(
            f"`query` must be elements (n, *{model.shape}) with n of at least 1; "
            f"got shape {tuple(query.shape)}. A single one is query.unsqueeze(0)."
        )
    index.check_model(model)
    given_query = _log_prob(model, index.latents, Evidence.of(model.latents(query)))
    scores = given_query - _log_prob(model, index.latents)
    return Ranking(scores.argsort(descending=True, stable=True), scores)


def _log_prob(model: Bruno, z: Float[Tensor, "n dim"], query: Evidence | None = None) -> Float[Tensor, " n"]:
    """log p(z_i | query) for every element of a collection; log p(z_i) without a query."""
    parts = z.split(part_size(model.dim, z.device))
    return torch.cat([model.process.log_prob(part, query) for part in parts])


# --- quality ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Quality:
    """How well a score finds the rest of a class; errors are standard errors, from one query to another.

    Attributes:
        precision: by k, the share of the query's class among the best k.
        precision_error: by k.
        average_precision: the precision at the place of each element of the class, its mean over those and
            over the queries.
        average_precision_error: of that.
    """

    precision: dict[int, float]
    precision_error: dict[int, float]
    average_precision: float
    average_precision_error: float


@dataclass(frozen=True)
class RetrievalResult:
    """All methods on the same queries.

    Attributes:
        queries: how many.
        shots: elements in each.
        collection: elements ranked for each: all but the query's, and but those of its class rotated another
            way; the min_count, where that differs from class to class.
        chance: the precision of a random order, the mean share of the query's class in the collection.
        qualities: by method.
    """

    queries: int
    shots: int
    collection: int
    chance: float
    qualities: dict[str, Quality]


@torch.no_grad()
def measure_retrieval(
    model: Bruno,
    examples: Examples,
    *,
    queries: int,
    shots: Sequence[int],
    at: Sequence[int] = (1, 5, 10),
    rotations: bool = False,
    generator: Generator,
    progress: Progress | None = None,
) -> tuple[RetrievalResult, ...]:
    """How well the rest of a class is found from a few of its elements, among all other elements.

    Every query is a class drawn uniformly and then some of its elements, none twice; these are taken out of
    the collection. Beside the model's score stand the mean distance to the query's elements and the distance
    to the nearest of them, on pixels and on latents.

    Args:
        model: on the device where the work is to be done.
        examples: the collection, encoded once, and its classes.
        queries: how many.
        shots: numbers of elements in a query. There is a result for each, as if it had been asked for alone:
            larger queries hold the smaller ones.
        at: numbers k of best elements to look at.
        rotations: every class counts four times, rotated by multiples of 90 degrees. A class rotated another
            way is left out of the collection for its queries: that of a symmetric character looks the same.
        generator: of the queries; on any device.
        progress: called as progress(done, all), in elements encoded: most of the work.
    """
    sizes = _collection_sizes(examples, queries, shots, at, rotations)
    characters = len(examples.names)
    if rotations:
        examples = with_rotations(examples)
    z = Index.of(model, examples, progress=progress).latents
    x, labels = examples.elements.to(z.device), examples.labels.to(z.device)
    # Columns of a table are brought to one scale, which pixels have.
    raw, values = ("pixels", x) if model.levels else ("columns", model.preprocessing(x)[0])
    spaces = {raw: values.flatten(1).to(z.dtype), "latents": z}
    prior = _log_prob(model, z)
    rows: dict[int, dict[str, list[Tensor]]] = {shot: {} for shot in shots}
    for _ in range(queries):
        members, label = _draw(examples, generator)
        members, of_class = members.to(z.device), labels == label
        ranked = of_class | (labels % characters != label % characters)
        for shot, by_method in rows.items():
            chosen = members[:shot]
            fits = {"BRUNO": _log_prob(model, z, Evidence.of(z[chosen])) - prior}
            for space, points in spaces.items():
                distance = torch.cdist(points, points[chosen])
                fits[f"mean distance, {space}"] = -distance.mean(1)
                fits[f"nearest distance, {space}"] = -distance.amin(1)
            rest = ranked.index_fill(0, chosen, False)
            for method, fit in fits.items():
                order = fit[rest].argsort(descending=True, stable=True)
                by_method.setdefault(method, []).append(_precisions(of_class[rest][order].cpu(), at))
    return tuple(
        RetrievalResult(
            queries,
            shot,
            size,
            torch.stack(rows[shot]["BRUNO"])[:, -1].mean().item(),
            {method: _quality(torch.stack(found), at) for method, found in rows[shot].items()},
        )
        for shot, size in zip(shots, sizes, strict=True)
    )


def _collection_sizes(
    examples: Examples, queries: int, shots: Sequence[int], at: Sequence[int], rotations: bool
) -> list[int]:
    """How many elements are ranked, for each number of shots, if all that is asked for can be measured."""
    counts = examples.counts
    min_count = int(counts.min())
    if len(counts) < 2:
        raise ValueError("`examples` must be of at least two classes, to tell one apart; there is one.")
    wrong = [shot for shot in shots if not 1 <= shot < min_count]
    if wrong or not shots:
        raise ValueError(
            f"`shots` must be from 1 to {min_count - 1}, one less than class "
            f"{examples.names[int(counts.argmin())]!r} has, for one to be found; "
            f"got {wrong[0] if wrong else 'none'}."
        )
    if queries < 2:
        raise ValueError(f"`queries` must be at least 2, for an error to be told; got {queries}.")
    rotated = 4 * len(examples) - 3 * int(counts.max())
    sizes = [(rotated if rotations else len(examples)) - shot for shot in shots]
    for k in at:
        if not 1 <= k <= min(sizes):
            raise ValueError(f"`at` must be from 1 to the {min(sizes)} elements of the collection; got {k}.")
    return sizes


def _draw(examples: Examples, generator: Generator) -> tuple[Int[Tensor, " members"], int]:
    """A class, and the places of its elements in random order."""
    device = generator.device
    label = int(torch.randint(len(examples.names), (1,), generator=generator, device=device))
    members = (examples.labels == label).nonzero().squeeze(1)
    return members[torch.randperm(len(members), generator=generator, device=device).cpu()], label


def _precisions(relevant: Bool[Tensor, " n"], at: Sequence[int]) -> Float[Tensor, " measures"]:
    """Of one ranking, the precision among the best k, for each k; its average precision; that of all.

    `relevant` tells whether each place, the best first, holds an element of the class.
    """
    found = relevant.double()
    precision = found.cumsum(0) / torch.arange(1, len(found) + 1)
    average = (precision * found).sum() / found.sum()
    return torch.stack([*(precision[k - 1] for k in at), average, precision[-1]])


def _quality(rows: Float[Tensor, "queries measures"], at: Sequence[int]) -> Quality:
    """From the `_precisions` of each query."""
    *means, average, _ = rows.mean(0).tolist()
    *errors, error, _ = (rows.std(0) / len(rows) ** 0.5).tolist()
    return Quality(dict(zip(at, means, strict=True)), dict(zip(at, errors, strict=True)), average, error)
