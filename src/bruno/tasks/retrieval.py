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
from bruno.model import Bruno
from bruno.process import Evidence

_NUMBERS_AT_A_TIME = 2**22  # of latents scored together, to bound memory: 16 MiB in float32


@dataclass(frozen=True, eq=False)
class Index:
    """A collection, encoded once.

    Attributes:
        latents: of each element.
        names: of each element: a file, an id.
        fingerprint: of the model that encoded it; to another one the latents mean nothing.
    """

    latents: Float[Tensor, "n dim"]
    names: tuple[str, ...]
    fingerprint: str

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
        at_a_time: int = 256,
    ) -> Index:
        """Encode elements (n, *shape), so many at a time.

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
        device = model.process.mean.device
        latents = torch.cat([model.encode(part.to(device)).z for part in x.split(at_a_time)])
        return cls(latents, tuple(names), model.fingerprint())

    def save(self, path: str | Path) -> None:
        """Write to a file, whole or not at all."""
        header = {"kind": "index", "model": self.fingerprint, "names": self.names}
        write(Path(path), {"latents": self.latents}, header)

    @classmethod
    def load(cls, path: str | Path, *, model: Bruno | None = None) -> Index:
        """Read what `save` wrote, on the CPU or where the model is; it must be the one that encoded it."""
        tensors, header = read(Path(path), model.process.mean.device if model else "cpu")
        if header["kind"] != "index":
            raise ValueError(f"`path` must be an index; {path} is a {header['kind']}.")
        index = cls(tensors["latents"], tuple(header["names"]), header["model"])
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
    scores = _scores(model, Evidence.of(model.encode(query).z), index.latents)
    return Ranking(scores.argsort(descending=True, stable=True), scores)


def _scores(model: Bruno, query: Evidence, z: Float[Tensor, "n dim"]) -> Float[Tensor, " n"]:
    """log p(z_i | query) − log p(z_i) for every element of a collection."""
    parts = []
    for part in z.unsqueeze(-2).split(max(1, _NUMBERS_AT_A_TIME // model.dim)):
        given_query = model.process.step_log_prob(part, query)
        parts.append((given_query - model.process.step_log_prob(part)).squeeze(-1))
    return torch.cat(parts)


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
        collection: elements ranked for each: all but the query's.
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
    shots: int,
    at: Sequence[int] = (1, 5, 10),
    generator: Generator,
) -> RetrievalResult:
    """How well the rest of a class is found from a few of its elements, among all other elements.

    Every query is a class drawn uniformly and then `shots` of its elements, none twice; these are taken out
    of the collection. Beside the model's score stand the mean distance to the query's elements and the
    distance to the nearest of them, on pixels and on latents.
    """
    _check(model, examples, queries, shots, at)
    index = Index.of(model, examples)
    z = index.latents
    x = examples.elements.to(z.device)
    # Columns of a table are brought to one scale, which pixels have.
    raw, values = ("pixels", x) if model.levels else ("columns", model.preprocessing(x)[0])
    spaces = {raw: values.flatten(1).to(z.dtype), "latents": z}
    labels = examples.labels.to(z.device)
    relevances: dict[str, list[Tensor]] = {}
    for _ in range(queries):
        chosen, label = _draw(examples, shots, generator)
        chosen = chosen.to(z.device)
        fits = {"BRUNO": _scores(model, Evidence.of(z[chosen]), z)}
        for space, points in spaces.items():
            distance = torch.cdist(points, points[chosen])
            fits[f"mean distance, {space}"] = -distance.mean(1)
            fits[f"nearest distance, {space}"] = -distance.amin(1)
        for method, fit in fits.items():
            fit[chosen] = -torch.inf
            order = fit.argsort(descending=True, stable=True)[:-shots]
            relevances.setdefault(method, []).append((labels[order] == label).cpu())
    stacked = {method: torch.stack(parts) for method, parts in relevances.items()}
    return RetrievalResult(
        queries,
        shots,
        len(examples) - shots,
        stacked["BRUNO"].double().mean().item(),
        {method: _quality(relevant, at) for method, relevant in stacked.items()},
    )


def _check(model: Bruno, examples: Examples, queries: int, shots: int, at: Sequence[int]) -> None:
    counts = examples.counts
    fewest = int(counts.min())
    if len(counts) < 2:
        raise ValueError(
            "`examples` must be of at least two classes, for one to be told apart; there is one."
        )
    if not 1 <= shots < fewest:
        raise ValueError(
            f"`shots` must be from 1 to {fewest - 1}, one less than class "
            f"{examples.names[int(counts.argmin())]!r} has, for one to be found; got {shots}."
        )
    if queries < 2:
        raise ValueError(f"`queries` must be at least 2, for an error to be told; got {queries}.")
    rest = len(examples) - shots
    for k in at:
        if not 1 <= k <= rest:
            raise ValueError(f"`at` must be from 1 to the {rest} elements of the collection; got {k}.")


def _draw(examples: Examples, shots: int, generator: Generator) -> tuple[Int[Tensor, " shots"], int]:
    """A class, and the places of some of its elements."""
    device = generator.device
    label = int(torch.randint(len(examples.names), (1,), generator=generator, device=device))
    members = (examples.labels == label).nonzero().squeeze(1)
    return members[torch.randperm(len(members), generator=generator, device=device)[:shots].cpu()], label


def _quality(relevant: Bool[Tensor, "queries n"], at: Sequence[int]) -> Quality:
    """From whether each place of a ranking, the best first, holds an element of the class."""
    found = relevant.double()
    precision = found.cumsum(1) / torch.arange(1, found.shape[1] + 1)
    average = (precision * found).sum(1) / found.sum(1)
    error = precision.std(0) / len(relevant) ** 0.5
    return Quality(
        {k: precision[:, k - 1].mean().item() for k in at},
        {k: error[k - 1].item() for k in at},
        average.mean().item(),
        average.std().item() / len(relevant) ** 0.5,
    )
