"""The index of a collection: its latents, kept in a file and updated when the collection changes."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from bruno.arrays import ArrayLike, as_tensor
from bruno.checkpoint import read, write
from bruno.data import Element, ElementReader, Examples
from bruno.data.archives import file_stamp
from bruno.data.reader import collected
from bruno.files import check_regular
from bruno.model import Bruno
from bruno.tasks.familiarity import Familiarity, UnfamiliarDataWarning
from bruno.tasks.progress import Progress

logger = logging.getLogger(__name__)


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
