"""`bruno retrieve`."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor

from bruno.cli.opening import Opened, chosen_split, measured_on, open_model
from bruno.cli.options import (
    Checkpoint,
    DataDir,
    Device,
    Invert,
    ModelName,
    OtherData,
    Seed,
    SkipBad,
    Split,
    check_number,
    console,
    numbers,
    progress_bar,
    refuse,
)
from bruno.data import Element, Examples
from bruno.reporting.plots import BACKGROUND, Measured, dots, picture, to_uint8
from bruno.reporting.results import Result
from bruno.tasks.generation import grid
from bruno.tasks.retrieval import Index, Quality, measure_retrieval, rank

_COLUMNS = 10  # of the contact sheet
_SHOTS = "1,5"  # to measure with
_QUERIES = 200


def retrieve(
    run: ModelName,
    query: Annotated[Path | None, typer.Option(help="A folder of examples of what to look for.")] = None,
    collection: Annotated[
        Path | None, typer.Option(help="What to look in: a folder, or a CSV for rows.")
    ] = None,
    index: Annotated[
        Path | None, typer.Option(help="Where the encoded collection is kept; beside it if left out.")
    ] = None,
    top: Annotated[int, typer.Option(help="How many to show.")] = 40,
    measure: Annotated[
        bool, typer.Option("--measure", help="How well it works on held-out classes, beside distances.")
    ] = False,
    shot: Annotated[
        str | None,
        typer.Option(help=f"To measure: numbers of examples in a query; {_SHOTS} if left out."),
    ] = None,
    queries: Annotated[
        int | None, typer.Option(help=f"To measure: how many; {_QUERIES} if left out.")
    ] = None,
    split: Split = None,
    data: OtherData = None,
    data_dir: DataDir = None,
    invert: Invert = None,
    skip_bad: SkipBad = False,
    checkpoint: Checkpoint = "last",
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """What fits these examples? Ranks a collection, encoded once, by log p(x | query) − log p(x)."""
    check_number("--top", top, 1)
    if not measure:
        given = {"--shot": shot, "--queries": queries, "--data": data}
        refuse("nothing is measured here; add --measure, or", given)
    queries = _QUERIES if queries is None else queries
    check_number("--queries", queries, 1)
    if measure:
        others = {"--query": query, "--collection": collection, "--index": index}
        refuse("`--measure` draws its own queries;", others)
    split = chosen_split(split, data, unused=not measure)
    if index and not index.parent.is_dir():
        raise ValueError(f"`--index` must be in a folder that is there; there is no {index.parent}.")
    opened = open_model(run, checkpoint, device)
    if measure:
        examples = opened.examples(split, data_dir, data, invert=invert, classes=2)
        opened.keep(
            _quality(
                opened,
                examples,
                numbers("--shot", _SHOTS if shot is None else shot),
                queries,
                seed,
                measured_on(split, opened.at_hand(data, data_dir)),
            ),
            seed,
        )
        return
    if query is None or collection is None:
        raise ValueError("`--query` and `--collection` must both be given, or --measure; got neither or one.")
    reader = opened.reader(invert=invert, skip_bad=skip_bad)
    wanted = reader.read_all([query])[0].to(opened.device)
    if reader.skipped:
        console.print(f"left out {len(reader.skipped)} of the query that could not be read")
    opened.warn_if_unlike(wanted, what="the query's images are")
    encoded, anew = _encoded(opened, collection, index, invert, skip_bad)
    ranking = rank(encoded, opened.model, wanted)
    best = ranking.order[:top].tolist()
    names, scores = [encoded.names[i] for i in best], ranking.scores[best].tolist()
    sheet = b""
    if opened.model.levels:
        found = torch.stack([element.x for element in reader.read(names)])
        if not anew:  # then no others were read
            opened.warn_if_unlike(found, what="what was found is")
        sheet = picture(
            _contact_sheet(to_uint8(wanted.cpu(), opened.model.levels), to_uint8(found, opened.model.levels))
        )
    rows = tuple(
        (str(i), f"{s:+.1f}", n) for i, (n, s) in enumerate(zip(names, scores, strict=True), start=1)
    )
    values = {"query": str(query), "collection": len(encoded), "names": names, "scores": scores}
    note = "Top: what was asked for. Below: the best of the collection, row by row." if sheet else ""
    result = Result("retrieval", "What fits best", values, ("rank", "score", "element"), rows, note, sheet)
    opened.keep(result, seed)


def _encoded(
    opened: Opened, collection: Path, index: Path | None, invert: bool | None, skip_bad: bool
) -> tuple[Index, bool]:
    """The collection's latents: from the index if it has these very files, else made anew, and kept.

    It knows them by their place in the collection, from wherever that is named.
    """
    above = collection if collection.is_dir() else collection.parent
    reader = opened.reader(invert=invert, skip_bad=skip_bad)
    files = reader.files(collection) if collection.is_dir() else [collection]
    source = hashlib.sha256(
        repr((reader.invert, skip_bad, [_state(file, above) for file in files])).encode()
    ).hexdigest()
    path = index or _beside(collection, opened)
    if path.is_file():
        kept = _kept(path, opened, theirs=index is not None)
        if kept and kept.source == source:
            return _from_above(kept, above), False
        console.print(
            f"{collection} has changed, or how to read it, or its index: encoding it again", soft_wrap=True
        )
    elements: list[Element] = []
    with progress_bar("files") as progress:
        for number, file in enumerate(files, start=1):
            elements += reader.read([file])
            progress(number, len(files))
    if not elements:
        raise ValueError(f"`--collection` must hold something that can be read; {collection} does not.")
    if reader.skipped:
        console.print(
            f"left out {len(reader.skipped)} that could not be read, first {reader.skipped[0]}",
            soft_wrap=True,
        )
    x = torch.stack([element.x for element in elements])
    opened.warn_if_unlike(x, what="the collection's images are")
    inside = [str(Path(element.name).relative_to(above)) for element in elements]
    with progress_bar("elements") as progress:
        made = Index.of(opened.model, x, inside, source=source, progress=progress)
    try:
        made.save(path)
        console.print(f"encoded {len(made)} once, kept in {path}", soft_wrap=True)
    except OSError as error:  # to rank does not take a file
        console.print(f"encoded {len(made)}, and not kept: {error}", soft_wrap=True)
    return _from_above(made, above), True


def _kept(path: Path, opened: Opened, theirs: bool) -> Index | None:
    """An index that is there, if it is whole: one that the user named is theirs, and not written over."""
    try:
        return Index.load(path, model=opened.model)
    except ValueError as error:
        if theirs:
            raise ValueError(f"{error} Name another file with --index, or delete this one.") from error
        return None


def _from_above(index: Index, above: Path) -> Index:
    """With names as the collection was named now."""
    return replace(index, names=tuple(str(above / name) for name in index.names))


def _beside(collection: Path, opened: Opened) -> Path:
    """A file for this collection as this very model sees it."""
    path = collection.resolve()
    return path.with_name(f"{path.name}-{opened.model.fingerprint()[:8]}.index")


def _state(file: Path, above: Path) -> tuple[str, int, int]:
    """What changes when a file does."""
    if not file.exists() and not file.is_symlink():
        raise FileNotFoundError(f"{file}: there is no such file or folder.")
    facts = file.stat() if file.exists() else file.lstat()  # a link may dangle
    return str(file.relative_to(above)), facts.st_size, facts.st_mtime_ns


def _contact_sheet(query: Tensor, found: Tensor) -> np.ndarray:
    top, below = (grid(images, _COLUMNS, padding=1, background=BACKGROUND) for images in (query, found))
    between = np.full((3, *top.shape[1:]), BACKGROUND, np.uint8)
    return np.concatenate([top, between, below])


def _quality(
    opened: Opened, examples: Examples, shots: tuple[int, ...], queries: int, seed: int, where: str
) -> Result:
    with progress_bar("elements") as progress:
        found = measure_retrieval(
            opened.model,
            examples,
            queries=queries,
            shots=shots,
            rotations=opened.rotations,
            generator=torch.Generator().manual_seed(seed),
            progress=progress,
        )
    rows = tuple((method, *(_row(part.qualities[method]) for part in found)) for method in found[0].qualities)
    chance = ("chance", *(f"{part.chance:.3f}" for part in found))
    by_shots = {f"{part.shots} example{'s' * (part.shots != 1)}": part.qualities.values() for part in found}
    columns = ("mean average precision (precision at 1, 5, 10)", *by_shots)
    note = f"{queries} queries in a collection of {found[0].collection} elements of {where}; "
    note += "in the picture ± standard errors."
    values = {"by_shots": [asdict(part) for part in found]}
    panels = {
        "mean average precision": {
            name: [Measured(q.average_precision, q.average_precision_error) for q in some]
            for name, some in by_shots.items()
        }
    }
    for k in next(iter(found[0].qualities.values())).precision:
        panels[f"precision at {k}"] = {
            name: [Measured(q.precision[k], q.precision_error[k]) for q in some]
            for name, some in by_shots.items()
        }
    shown = dots(list(found[0].qualities), panels)
    name, title = f"retrieval-quality-{where}", f"Finding the rest of a class, {where}"
    return Result(name, title, values, columns, (*rows, chance), note, shown)


def _row(quality: Quality) -> str:
    at = ", ".join(f"{value:.2f}" for value in quality.precision.values())
    return f"{quality.average_precision:.3f} ({at})"
