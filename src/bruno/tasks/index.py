"""The index of a collection: its latents, kept in a file and updated when the collection changes."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bruno.arrays import ArrayLike, as_tensor
from bruno.checkpoint import read, write
from bruno.checks import check_count
from bruno.data import Element, ElementReader, Examples
from bruno.data.archives import file_stamp
from bruno.data.reader import collected
from bruno.files import check_regular
from bruno.model import Bruno
from bruno.tasks.familiarity import Familiarity, UnfamiliarDataWarning
from bruno.tasks.progress import Progress
from bruno.text import numbered

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Index:
    """An encoded collection.

    Attributes:
        latents: latents of each element.
        names: name of each element, such as a file or an id.
        fingerprint: fingerprint of the model that encoded it; the latents are useless to other models.
        source: identifies how the collection was read; any string.
        files: the files that the elements were read from, with their stamps; empty if there are none.
        file_of: the place in `files` of the file of each element.
    """

    latents: Float[Tensor, "n dim"]
    names: tuple[str, ...]
    fingerprint: str
    source: str = ""
    files: tuple[tuple[str, str], ...] = ()
    file_of: Int[Tensor, " n"] | None = None

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

        Without names, an example is named class/number and an element of a tensor by its number, from 1.
        `progress` is called as progress(done, total), in elements.
        """
        check_count("batch_size", batch_size)
        given = collection.elements if isinstance(collection, Examples) else collection
        x = as_tensor(given, "collection", kind=model.kind)
        if tuple(x.shape[1:]) != model.shape or not len(x):
            raise ValueError(
                f"`collection` must be elements (n, *{model.shape}) with n of at least 1 for this model; "
                f"got shape {tuple(x.shape)}."
            )
        if names is None:
            names = numbered(len(x))
            if isinstance(collection, Examples):
                classes = [collection.names[label] for label in collection.labels.tolist()]
                names = [f"{name}/{number}" for name, number in zip(classes, names, strict=True)]
        _check_names(names, len(x))  # before encoding, which may take hours
        latents: list[Tensor] = []
        for some in x.split(batch_size):
            latents.append(model.latents(some, batch_size=batch_size))
            if progress is not None:
                progress(sum(map(len, latents)), len(x))
        return cls(torch.cat(latents), tuple(names), model.fingerprint(), source)

    def save(self, path: str | Path) -> None:
        """Write to a file atomically."""
        header: dict[str, Any] = {
            "kind": "index",
            "model": self.fingerprint,
            "names": self.names,
            "source": self.source,
        }
        tensors = {"latents": self.latents}
        if self.file_of is not None:
            tensors["file_of"], header["files"] = self.file_of, self.files
        write(Path(path), tensors, header)

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
        files, file_of = _parse_files(path, header.get("files", []), tensors.get("file_of"), len(latents))
        index = cls(
            latents, tuple(names), str(header.get("model")), str(header.get("source", "")), files, file_of
        )
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


def _parse_files(
    path: str | Path, files: Any, file_of: Tensor | None, n: int
) -> tuple[tuple[tuple[str, str], ...], Tensor | None]:
    """The files of an index and the place of each element's file; raises if they do not fit each other."""
    if file_of is None:
        return (), None
    pairs = isinstance(files, list) and all(
        isinstance(one, list) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], str)
        for one in files
    )
    places = file_of.shape == (n,) and file_of.dtype == torch.long
    if not (pairs and places) or (n and not 0 <= int(file_of.min()) <= int(file_of.max()) < len(files)):
        raise ValueError(f"`path` must hold the file of each element; {path} does not.")
    return tuple((name, stamp) for name, stamp in files), file_of


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
    """The index of a folder or file, and whether any of it was encoded now.

    The index is kept in a file. As long as the reader's settings are the same, only new and changed files are
    encoded. Names are the paths of the elements, starting with `collection` as given; in the
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
    folder = _folder_of(collection)
    paths = reader.files(collection) if collection.is_dir() else [collection]
    files = {str(file.relative_to(folder)): file_stamp(file) for file in paths}
    source = _settings_of(reader)
    if path is not None and not Path(path).parent.is_dir():
        raise ValueError(f"`path` must be in an existing folder; got {path}.")
    file = _default_path(collection, model) if path is None else Path(path)
    kept = None
    if file.exists():
        check_regular(file)  # before the collection is encoded, which may take a long time
        kept = _kept(file, model, required=path is not None)
        if kept is None or kept.source != source:
            reason = "the index is not valid" if kept is None else "the settings of the reader changed"
            _log.info("%s: %s; encoding again", collection, reason)
            kept = None
    known = dict(kept.files) if kept else {}
    if kept and known == files:
        return _with_folder(kept, folder), False
    changed = [name for name, stamp in files.items() if known.get(name) != stamp]
    skipped = len(reader.skipped)
    new = _read_files(reader, folder, changed, progress)
    index = _updated(model, kept, new, files, source, progress)
    if not len(index):
        raise ValueError(f"`collection` must hold at least one readable element; got {collection} with none.")
    _warn_of(collection, reader.skipped[skipped:], new.elements, familiarity)
    try:
        index.save(file)
        _log.info("encoded %d of %d elements, saved in %s", len(new.elements), len(index), file)
    except OSError as error:  # ranking does not need the file
        warnings.warn(f"the index of {collection} could not be written: {error}", stacklevel=2)
    return _with_folder(index, folder), True


class _Read(NamedTuple):
    """Elements, and the file of each relative to the folder of the collection."""

    elements: list[Element]
    files: list[str]


def _read_files(
    reader: ElementReader, folder: Path, files: Sequence[str], progress: Progress | None
) -> _Read:
    """Read files of a collection, whose paths and elements are named relative to its folder."""
    origins = []

    def read() -> Iterator[Element]:
        for number, file in enumerate(files, start=1):
            for element in reader.read([folder / file]):
                origins.append(file)
                yield element._replace(name=str(Path(element.name).relative_to(folder)))
            if progress is not None:
                progress(number, len(files))

    return _Read(collected(read()), origins)


def _warn_of(
    collection: Path, skipped: Sequence[str], elements: Sequence[Element], familiarity: Familiarity | None
) -> None:
    """Warn about elements that were skipped, and about images unlike the training data."""
    if skipped:
        first = skipped[0]
        warnings.warn(
            f"skipped {len(skipped)} unreadable elements of {collection}, first {first}", stacklevel=3
        )
    if familiarity is None or not elements:
        return
    if reason := familiarity.check(torch.stack([element.x for element in elements])):
        warnings.warn(
            f"{collection} is unlike the training data of the model: {reason}",
            UnfamiliarDataWarning,
            stacklevel=3,
        )


def _updated(
    model: Bruno,
    kept: Index | None,
    new: _Read,
    files: dict[str, str],
    source: str,
    progress: Progress | None,
) -> Index:
    """The kept index without the files that changed, and the new elements, in the order of the files."""
    place = {name: number for number, name in enumerate(files)}
    latents = [torch.empty(0, model.dim, dtype=model.process.mean.dtype, device=model.device)]
    names: list[str] = []
    places = [torch.empty(0, dtype=torch.long)]
    if kept is not None and kept.file_of is not None:
        same = [place[name] if files.get(name) == stamp else -1 for name, stamp in kept.files]
        file_of = torch.tensor(same)[kept.file_of.cpu()]
        still = (file_of >= 0).nonzero().flatten()
        latents.append(kept.latents[still.to(kept.latents.device)])
        names += [kept.names[i] for i in still.tolist()]
        places.append(file_of[still])
    if new.elements:
        latents.append(Index.of(model, _complete(model, new), progress=progress).latents)
        names += [element.name for element in new.elements]
        places.append(torch.tensor([place[file] for file in new.files]))
    file_of = torch.cat(places)
    order = file_of.argsort(stable=True)
    return Index(
        torch.cat(latents)[order.to(model.device)],
        tuple(names[i] for i in order.tolist()),
        model.fingerprint(),
        source,
        tuple(files.items()),
        file_of[order],
    )


def _complete(model: Bruno, new: _Read) -> Tensor:
    """Elements (n, *shape); missing numbers of a row are imputed from its group, or else from the prior.

    Only rows of the same file are used, so that the index does not depend on which files changed since.
    """
    sets: dict[tuple[str, str], int] = {}
    owners = zip(new.files, (element.group or element.name for element in new.elements), strict=True)
    labels = [sets.setdefault(owner, len(sets)) for owner in owners]
    return model.impute(torch.stack([element.x for element in new.elements]), torch.tensor(labels))


def _folder_of(collection: Path) -> Path:
    return collection if collection.is_dir() else collection.parent


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


def _settings_of(reader: ElementReader) -> str:
    """A digest that changes if a setting of the reader changes."""
    settings = (reader.invert, reader.drawings, reader.skip_bad, reader.group, reader.columns)
    return hashlib.sha256(repr(settings).encode()).hexdigest()
