"""Retrieval: rank a collection by how well its elements fit a few examples, and measure the quality."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from bruno.arrays import ArrayLike, NumpyResult, as_tensor
from bruno.checks import check_count, check_whole_numbers
from bruno.data import Examples
from bruno.data.sampling import with_rotations
from bruno.model import Bruno
from bruno.process import Evidence
from bruno.tasks.index import Index
from bruno.tasks.metrics import average_precision, mean_and_error, precision_at_k
from bruno.tasks.progress import Progress


@dataclass(frozen=True, eq=False)
class Ranking(NumpyResult):
    """A collection ordered by how well it fits a query.

    Attributes:
        order: indices of the elements in the collection, the best first.
        scores: scores of the elements, in the collection's order.
    """

    order: Int[Tensor, " n"]
    scores: Float[Tensor, " n"]


@torch.no_grad()
def rank(index: Index, model: Bruno, query: ArrayLike) -> Ranking:
    """Rank a collection by log p(x | query) − log p(x), the score of Bayesian sets.

    The Jacobians of the flow cancel, so latents suffice: one predictive density scores the whole collection.

    Args:
        index: the index of the collection.
        model: the model that encoded it.
        query: the examples (n, *shape), n ≥ 1.
    """
    query = as_tensor(query, "query", kind=model.kind)
    if query.ndim != len(model.shape) + 1 or not len(query):
        raise ValueError(
            f"`query` must be elements (n, *{model.shape}) with n of at least 1; "
            f"got shape {tuple(query.shape)}. A single element is query.unsqueeze(0)."
        )
    index.check_model(model)
    z, evidence = index.latents, Evidence.of(model.latents(query))
    scores = model.process.log_prob(z, evidence) - model.process.log_prob(z)
    return Ranking(scores.argsort(descending=True, stable=True), scores)


@dataclass(frozen=True)
class RetrievalQuality(NumpyResult):
    """How well a score finds the rest of a class: means over queries, with standard errors.

    Attributes:
        precision: by k, the fraction of the query's class among the best k.
        precision_error: by k, its standard error.
        average_precision: mean over the elements of the class of the precision at their score.
        average_precision_error: its standard error.
    """

    precision: dict[int, float]
    precision_error: dict[int, float]
    average_precision: float
    average_precision_error: float


@dataclass(frozen=True)
class RetrievalResult(NumpyResult):
    """All methods on the same queries.

    Attributes:
        queries: number of queries.
        shots: elements in each query.
        collection: elements ranked for each query: all but the query and other rotations of its class; the
            minimum over classes.
        chance: precision of a random order, the mean fraction of the query's class in the collection.
        qualities: quality of each method.
    """

    queries: int
    shots: int
    collection: int
    chance: float
    qualities: dict[str, RetrievalQuality]


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
    """Quality of finding the rest of a class from a few of its elements, among all other elements.

    A query is a class drawn uniformly and then some of its elements, without repetition; these are removed
    from the collection. The model's score is compared with the mean distance to the query's elements and the
    distance to the nearest of them, on pixels and on latents.

    Args:
        model: a model, on the device to compute on.
        examples: the collection, encoded once, and its classes.
        queries: number of queries.
        shots: numbers of elements in a query. There is a result for each number, which does not depend on the
            other numbers; larger queries contain the smaller ones.
        at: numbers k of best elements at which to measure the precision.
        rotations: each class is four classes, rotated by multiples of 90 degrees. Other rotations of the
            query's class are excluded from the collection, as a symmetric character looks the same in all.
        generator: source of the queries; on any device.
        progress: called as progress(done, total), in elements encoded, which takes most of the time.
    """
    sizes = _collection_sizes(examples, queries, shots, at, rotations)
    characters = len(examples.names)
    examples = with_rotations(examples) if rotations else examples
    z, process = Index.of(model, examples, progress=progress).latents, model.process
    labels = examples.labels.to(z.device)
    raw = model.normalised(examples.elements.to(z.device)).flatten(1).to(z.dtype)
    spaces, prior = {model.kind.features: raw, "latents": z}, process.log_prob(z)
    rows: dict[int, dict[str, list[list[float]]]] = {shot: {} for shot in shots}
    chances: dict[int, list[float]] = {shot: [] for shot in shots}
    for _ in range(queries):
        members, label = _draw_query(examples, generator)
        members, of_class = members.to(z.device), labels == label
        ranked = of_class | (labels % characters != label % characters)
        for shot, by_method in rows.items():
            chosen = members[:shot]
            fits = {"BRUNO": process.log_prob(z, Evidence.of(z[chosen])) - prior, **_nearness(spaces, chosen)}
            rest = ranked.index_fill(0, chosen, False)
            target = of_class[rest].cpu()
            chances[shot].append(target.double().mean().item())
            for method, fit in fits.items():
                by_method.setdefault(method, []).append(_precisions(target, fit[rest].cpu(), at))
    return tuple(
        RetrievalResult(
            queries,
            shot,
            size,
            sum(chances[shot]) / queries,
            {method: _quality(found, at) for method, found in rows[shot].items()},
        )
        for shot, size in zip(shots, sizes, strict=True)
    )


def _nearness(spaces: dict[str, Tensor], chosen: Int[Tensor, " shot"]) -> dict[str, Tensor]:
    """Negative distances of all elements to the chosen ones, mean and nearest, in each space."""
    found = {}
    for space, points in spaces.items():
        distance = torch.cdist(points, points[chosen])
        found[f"mean distance, {space}"] = -distance.mean(1)
        found[f"nearest distance, {space}"] = -distance.amin(1)
    return found


def _collection_sizes(
    examples: Examples, queries: int, shots: Sequence[int], at: Sequence[int], rotations: bool
) -> list[int]:
    """Elements ranked for each number of shots; raises if the examples are too few."""
    counts = examples.counts
    min_count = int(counts.min())
    if len(counts) < 2:
        raise ValueError(f"`examples` must have at least two classes; got {len(counts)}.")
    check_whole_numbers("shots", shots)
    wrong = [shot for shot in shots if not 1 <= shot < min_count]
    if wrong or not shots:
        raise ValueError(
            f"`shots` must be from 1 to {min_count - 1}, so that one of the {min_count} elements of class "
            f"{examples.names[int(counts.argmin())]!r} is left to find; got {wrong[0] if wrong else 'none'}."
        )
    check_count("queries", queries, 2)  # to estimate a standard error
    rotated = 4 * len(examples) - 3 * int(counts.max())
    sizes = [(rotated if rotations else len(examples)) - shot for shot in shots]
    for k in at:
        if not 1 <= k <= min(sizes):
            raise ValueError(f"`at` must be from 1 to {min(sizes)}, the size of the collection; got {k}.")
    return sizes


def _draw_query(examples: Examples, generator: Generator) -> tuple[Int[Tensor, " members"], int]:
    """A random class: the indices of its elements in random order, and its label."""
    device = generator.device
    label = int(torch.randint(len(examples.names), (1,), generator=generator, device=device))
    members = (examples.labels == label).nonzero().squeeze(1)
    return members[torch.randperm(len(members), generator=generator, device=device).cpu()], label


def _precisions(target: Tensor, score: Tensor, at: Sequence[int]) -> list[float]:
    """Precision at each k, then the average precision."""
    return [*(precision_at_k(target, score, k) for k in at), average_precision(target, score).item()]


def _quality(rows: Sequence[Sequence[float]], at: Sequence[int]) -> RetrievalQuality:
    """Mean and standard error over the `_precisions` of all queries."""
    found = mean_and_error(torch.tensor(rows, dtype=torch.double))
    (*means, average), (*errors, error) = found.mean.tolist(), found.error.tolist()
    return RetrievalQuality(
        dict(zip(at, means, strict=True)), dict(zip(at, errors, strict=True)), average, error
    )
