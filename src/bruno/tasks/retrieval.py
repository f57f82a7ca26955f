"""Retrieval: rank a collection by how well its elements fit a few examples, and measure the quality."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from bruno.arrays import ArrayLike, NumpyResult, as_tensor
from bruno.checkpoint import read, write
from bruno.config import check_count
from bruno.data import Element, ElementReader, Examples
from bruno.data.archives import file_stamp
from bruno.data.reader import collected
from bruno.data.sampling import with_rotations
from bruno.files import check_regular
from bruno.model import Bruno
from bruno.process import Evidence
from bruno.tasks.familiarity import Familiarity, UnfamiliarDataWarning
from bruno.tasks.metrics import average_precision, mean_and_error, precision_at_k
from bruno.tasks.progress import Progress
from bruno.tasks.scorers import part_size

logger = logging.getLogger(__name__)

# --- index -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Index:
    """An encoded collection.

    Attributes:
        latents: latents of each element.
        names: name of each element, such as a file or an id.
        fingerprint: fingerprint of the model that encoded it; the latents are useless to other models.
        source: identifies the state of the collection when it was encoded; any string.
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
        collection: Examples | ArrayLike,
        names: Sequence[str] | None = None,
        *,
        source: str = "",
        batch_size: int = 256,
        progress: Progress | None = None,
    ) -> Index:
        """Encode elements (n, *shape), `batch_size` at a time.

        Without names, an example is named class/position and an element of a tensor by its position.
        `progress` is called as progress(done, total), in elements.
        """
        given = collection.elements if isinstance(collection, Examples) else collection
        x = as_tensor(given, "collection", kind=model.kind)
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
        _check_names(names, len(x))  # before encoding, which may take hours
        latents: list[Tensor] = []
        for some in x.split(batch_size):
            latents.append(model.latents(some, batch_size=batch_size))
            if progress is not None:
                progress(sum(map(len, latents)), len(x))
        return cls(torch.cat(latents), tuple(names), model.fingerprint(), source)

    def save(self, path: str | Path) -> None:
        """Write to a file atomically."""
        header = {"kind": "index", "model": self.fingerprint, "names": self.names, "source": self.source}
        write(Path(path), {"latents": self.latents}, header)

    @classmethod
    def load(cls, path: str | Path, *, model: Bruno | None = None) -> Index:
        """Read a saved index to the CPU or, with `model`, to its device. The model must have encoded it."""
        tensors, header = read(Path(path), model.device if model else "cpu")
        if header["kind"] != "index":
            raise ValueError(f"`path` must be an index; {path} is a {header['kind']}.")
        latents, names = tensors.get("latents"), header.get("names")
        if latents is None or latents.ndim != 2 or not latents.is_floating_point():
            raise ValueError(f"`path` must hold latents (n, dim); {path} does not.")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"`path` must hold the names of its elements; {path} does not.")
        index = cls(latents, tuple(names), str(header.get("model")), str(header.get("source", "")))
        if model is not None:
            index.check_model(model)
        return index

    def check_model(self, model: Bruno) -> None:
        """Raise unless this model encoded the collection."""
        if model.fingerprint() != self.fingerprint:
            raise ValueError(
                f"`model` must be the one that encoded the index, {self.fingerprint}; got "
                f"{model.fingerprint()}. Encode the collection again with Index.of."
            )


def _check_names(names: Sequence[str], n: int) -> None:
    if len(names) != n:
        raise ValueError(f"`names` must have one for each of {n} elements; got {len(names)}.")


# --- an index on disk ------------------------------------------------------------------------------------


def open_index(
    model: Bruno,
    reader: ElementReader,
    collection: str | Path,
    path: str | Path | None = None,
    *,
    familiarity: Familiarity | None = None,
    progress: Progress | None = None,
) -> tuple[Index, bool]:
    """The index of a folder or file, and whether it was encoded now.

    The index is kept in a file and read from there as long as the collection's files and the reader's
    settings are the same. Names are the paths of the elements, starting with `collection` as given; in the
    file they are relative to it, so that a collection may be moved with its index.

    Args:
        model: encodes the collection.
        reader: reads elements in the shape of the model. Elements that it skips are reported by a warning.
        collection: a folder of images or of CSV files, or one file.
        path: the index file; by default beside the collection, with a name that contains the model's
            fingerprint. A given file that is not a valid index of this model raises, and is not
            overwritten. If the index cannot be written, a warning is given.
        familiarity: if given, used to warn about images unlike the training data.
        progress: called as progress(done, total), first in files read, then in elements encoded.
    """
    collection = Path(collection)
    folder = collection if collection.is_dir() else collection.parent
    files = reader.files(collection) if collection.is_dir() else [collection]
    source = _state_of(reader, files, folder)
    if path is not None and not Path(path).parent.is_dir():
        raise ValueError(f"`path` must be in an existing folder; got {path}.")
    file = _default_path(collection, model) if path is None else Path(path)
    if file.exists():
        check_regular(file)  # before the collection is encoded, which may take a long time
        kept = _kept(file, model, required=path is not None)
        if kept and kept.source == source:
            return _with_folder(kept, folder), False
        logger.info("%s, the settings of the reader or the index changed: encoding again", collection)
    index = _encode(model, reader, collection, files, source, familiarity, progress)
    try:
        index.save(file)
        logger.info("encoded %d elements, saved in %s", len(index), file)
    except OSError as error:  # ranking does not need the file
        warnings.warn(f"the index of {collection} could not be written: {error}", stacklevel=2)
    return _with_folder(index, folder), True


def _encode(
    model: Bruno,
    reader: ElementReader,
    collection: Path,
    files: Sequence[Path],
    source: str,
    familiarity: Familiarity | None,
    progress: Progress | None,
) -> Index:
    """Read and encode all files of a collection; names are relative to its folder."""
    skipped = len(reader.skipped)
    elements = collected(_read_files(reader, files, progress))
    if not elements:
        raise ValueError(f"`collection` must hold at least one readable element; got {collection} with none.")
    if new := reader.skipped[skipped:]:
        warnings.warn(f"skipped {len(new)} unreadable elements of {collection}, first {new[0]}", stacklevel=3)
    x = torch.stack([element.x for element in elements])
    if familiarity is not None and (reason := familiarity.check(x)):
        warnings.warn(
            f"{collection} is unlike the training data of the model: {reason}",
            UnfamiliarDataWarning,
            stacklevel=3,
        )
    folder = collection if collection.is_dir() else collection.parent
    names = [str(Path(element.name).relative_to(folder)) for element in elements]
    return Index.of(model, x, names, source=source, progress=progress)


def _read_files(reader: ElementReader, files: Sequence[Path], progress: Progress | None) -> Iterator[Element]:
    for number, file in enumerate(files, start=1):
        yield from reader.read([file])
        if progress is not None:
            progress(number, len(files))


def _kept(file: Path, model: Bruno, *, required: bool) -> Index | None:
    """The index in a file; None if it is invalid and not required."""
    try:
        return Index.load(file, model=model)
    except ValueError as error:
        if required:
            raise ValueError(f"{error} Choose another `path`, or delete this file.") from error
        return None


def _with_folder(index: Index, folder: Path) -> Index:
    return replace(index, names=tuple(str(folder / name) for name in index.names))


def _default_path(collection: Path, model: Bruno) -> Path:
    path = Path(os.path.realpath(collection))
    return path.with_name(f"{path.name}-{model.fingerprint()[:8]}.index")


def _state_of(reader: ElementReader, files: Sequence[Path], folder: Path) -> str:
    """A digest that changes if a file or a setting of the reader changes."""
    settings = (reader.invert, reader.drawings, reader.skip_bad, reader.group, reader.columns)
    stamps = [(str(file.relative_to(folder)), file_stamp(file)) for file in files]
    return hashlib.sha256(repr((settings, stamps)).encode()).hexdigest()


# --- ranking ---------------------------------------------------------------------------------------------


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
    given_query = _log_prob(model, index.latents, Evidence.of(model.latents(query)))
    scores = given_query - _log_prob(model, index.latents)
    return Ranking(scores.argsort(descending=True, stable=True), scores)


def _log_prob(model: Bruno, z: Float[Tensor, "n dim"], query: Evidence | None = None) -> Float[Tensor, " n"]:
    """log p(z_i | query) for every element of a collection; log p(z_i) without a query."""
    parts = z.split(part_size(model.dim, z.device))
    return torch.cat([model.process.log_prob(part, query) for part in parts])


# --- quality ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RetrievalQuality:
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
class RetrievalResult:
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
        shots: numbers of elements in a query, with a result for each that does not depend on the others:
            larger queries contain the smaller ones.
        at: numbers k of best elements at which to measure the precision.
        rotations: every class counts four times, rotated by multiples of 90 degrees. Other rotations of the
            query's class are excluded from the collection: a symmetric character looks the same in all.
        generator: source of the queries; on any device.
        progress: called as progress(done, total), in elements encoded, which takes most of the time.
    """
    sizes = _collection_sizes(examples, queries, shots, at, rotations)
    characters = len(examples.names)
    if rotations:
        examples = with_rotations(examples)
    z = Index.of(model, examples, progress=progress).latents
    labels = examples.labels.to(z.device)
    raw = model.normalised(examples.elements.to(z.device)).flatten(1).to(z.dtype)
    spaces, prior = {model.kind.features: raw, "latents": z}, _log_prob(model, z)
    rows: dict[int, dict[str, list[list[float]]]] = {shot: {} for shot in shots}
    chances: dict[int, list[float]] = {shot: [] for shot in shots}
    for _ in range(queries):
        members, label = _draw_query(examples, generator)
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


def _collection_sizes(
    examples: Examples, queries: int, shots: Sequence[int], at: Sequence[int], rotations: bool
) -> list[int]:
    """Elements ranked for each number of shots; raises if the examples are too few."""
    counts = examples.counts
    min_count = int(counts.min())
    if len(counts) < 2:
        raise ValueError(f"`examples` must have at least two classes; got {len(counts)}.")
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
