"""`bruno sample`."""

from __future__ import annotations

import csv
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer
from torch import Tensor

from bruno.cli.opening import Opened, chosen_split, open_model
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
    Temperature,
    check_number,
    console,
    numbers,
    refuse,
    say_passed_over,
)
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.model import Bruno, Samples
from bruno.reporting.plots import BACKGROUND, picture, prefix_sheet, to_uint8
from bruno.reporting.results import Result
from bruno.tasks.generation import grid, prior_samples, samples_by_prefix, spread_by_repeats

_LENGTH = 8
_SHOWN_ROWS = 10  # of a table
_REPEATS = (1, 2, 5, 10, 20)
_FOR_A_VARIANCE = 100  # samples after each number of repeats, at least, of all elements together


def sample(
    run: ModelName,
    given: Annotated[
        list[Path] | None, typer.Option(help="Your own images, or a folder of them; may be repeated.")
    ] = None,
    prior: Annotated[bool, typer.Option("--prior", help="Given nothing at all.")] = False,
    repeats: Annotated[
        bool, typer.Option("--repeats", help="Given one element again and again: the spread shrinks.")
    ] = False,
    samples: Annotated[int, typer.Option(help="How many to draw each time.")] = 8,
    sets: Annotated[int, typer.Option(help="How many sets to draw if no images are given.")] = 1,
    length: Annotated[
        int | None, typer.Option(help=f"Images of each set that is drawn, {_LENGTH} if left out.")
    ] = None,
    prefixes: Annotated[
        str, typer.Option(help="How many of the set to have seen, as 0,1,5 or 480-500; all if left out.")
    ] = "",
    temperature: Temperature = 1.0,
    split: Split = None,
    data: OtherData = None,
    data_dir: DataDir = None,
    invert: Invert = None,
    skip_bad: SkipBad = False,
    checkpoint: Checkpoint = "last",
    device: Device = "auto",
    seed: Seed = 0,
) -> None:
    """Draw more of the same: after each image of a set, from the prior, or given one image repeatedly."""
    if length is not None and (prior or given):
        raise ValueError("`--length` is of sets that are drawn; leave it out with --prior or --given.")
    for option, number in (("--samples", samples), ("--sets", sets), ("--length", length)):
        check_number(option, 1 if number is None else number, 1)
    check_number("--temperature", temperature, 0)
    if prior:
        others = {"--repeats": repeats, "--given": given, "--prefixes": prefixes, "--data": data}
        refuse("`--prior` is given nothing;", others)
    if repeats:
        refuse("`--repeats` has seen an element 1 to 20 times;", {"--prefixes": prefixes})
    if given:
        refuse("`--given` are your own images;", {"--data": data})
    split = chosen_split(split, data, unused=prior or bool(given))
    if sets > 1 and (prior or repeats or given):
        raise ValueError(f"`--sets` must be 1 with --prior, --repeats or --given; got {sets}.")
    opened = open_model(run, checkpoint, device)
    model = opened.model
    noise = torch.Generator(opened.device).manual_seed(seed)
    how = {"generator": noise, "temperature": temperature}
    if prior:
        drawn = _from_nothing(model, samples, how)
    else:
        if given:
            reader = opened.reader(invert=invert, skip_bad=skip_bad)
            x = reader.read_all(given)[0].to(opened.device).unsqueeze(0)
            say_passed_over(reader)
            opened.warn_if_unlike(x)
        else:
            examples = opened.examples(split, data_dir, data, invert=invert)
            x = _sets(examples, opened.device, sets, length, noise)
        if repeats:
            drawn = _from_one_again_and_again(model, x[0], samples, how)
        else:
            seen = numbers("--prefixes", prefixes or f"0-{x.shape[1]}")
            drawn = _from_prefixes(model, x, samples, seen, how)
    _keep(opened, drawn, temperature, seed)


class Drawn(NamedTuple):
    """A result, and the images behind it."""

    result: Result
    samples: Samples
    seen: tuple[int, ...]
    inputs: Tensor | None = None


def _from_nothing(model: Bruno, samples: int, how: dict[str, Any]) -> Drawn:
    drawn = prior_samples(model, samples, **how)
    shown = b""
    if model.levels:
        columns = math.ceil(math.sqrt(samples))
        shown = picture(grid(to_uint8(drawn.images, model.levels), columns, padding=1, background=BACKGROUND))
    result = Result("samples-prior", "Given nothing: samples from the prior", {}, picture=shown)
    return Drawn(result, drawn, (0,))


def _from_one_again_and_again(model: Bruno, x: Tensor, samples: int, how: dict[str, Any]) -> Drawn:
    """The spread is a mean over all elements, each by itself; the first is shown."""
    each = max(samples, math.ceil(_FOR_A_VARIANCE / len(x)), 2)
    spreads = [spread_by_repeats(model, element, _REPEATS, samples=each, **how) for element in x]
    by_element = [spread.variance for spread in spreads]
    variance = [statistics.fmean(column) for column in zip(*by_element, strict=True)]
    first, above = spreads[0], x[:1].expand(len(_REPEATS), *model.shape)
    element, scale = ("image", "pixel, from 0 to 1") if model.levels else ("row", "column, in training 1")
    result = Result(
        "samples-repeats",
        f"The same {element} again and again",
        {"variance": variance, "by_element": by_element},
        ("times seen", f"mean variance of a {scale}, over {len(x)} {element}{'s' * (len(x) != 1)}"),
        tuple((str(n), f"{v:.4f}") for n, v in zip(_REPEATS, variance, strict=True)),
        "Top: the first image. Below: samples once it was seen so often." * (model.levels > 0),
        _by_column(model, [(above, first.samples)], _REPEATS, samples),
    )
    return Drawn(result, first.samples, first.repeats, x[:1])


def _from_prefixes(
    model: Bruno, sets: Tensor, samples: int, lengths: tuple[int, ...], how: dict[str, Any]
) -> Drawn:
    """Of several sets, the samples have a dimension more."""
    if 0 in lengths[1:]:
        raise ValueError("`--prefixes` must have 0 first, if at all; it comes later.")
    check_number("--prefixes", max(lengths), 0, sets.shape[1])
    found = [samples_by_prefix(model, x, samples, lengths=lengths, **how).samples for x in sets]
    above = sets[:, [n - 1 for n in lengths if n]]  # the elements that were seen last
    shown = _by_column(model, list(zip(above, found, strict=True)), lengths)
    note = "Top: the images of the set, one by one. Below each: samples once it was seen, and all before it."
    x = torch.stack([drawn.x for drawn in found]).squeeze(0)
    samples_of_all = Samples(x, sum(drawn.clamped for drawn in found), model.levels)
    result = Result("samples", "More of the same", {}, note=note if shown else "", picture=shown)
    return Drawn(result, samples_of_all, lengths, sets.squeeze(0))


def _by_column(
    model: Bruno, sets: list[tuple[Tensor, Samples]], seen: tuple[int, ...], most: int | None = None
) -> bytes:
    """A column for each number of elements seen, the last of them above it; rows have no picture.

    For each set: the elements above the columns, and the samples in them, of which at most so many are shown.
    """
    if not model.levels:
        return b""
    images = [(above, drawn.images[:, :most]) for above, drawn in sets]
    return prefix_sheet([(to_uint8(a, model.levels), to_uint8(b, model.levels)) for a, b in images], seen)


def _sets(
    examples: Examples, device: torch.device, sets: int, length: int | None, generator: torch.Generator
) -> Tensor:
    """(sets, length, *shape), each set of another class."""
    check_number("--sets", sets, 1, len(examples.names))
    sampler = SetSampler(examples, device=device)
    length = min(_LENGTH, sampler.min_count) if length is None else length
    sampler.check_set_size(length, "--length")
    return sampler.tasks(1, sets, length, generator)[0]


def _as_rows(drawn: Drawn, digits: int) -> list[tuple[str, ...]]:
    """Of every row that was drawn: which set it is for, how many of that were seen, and its numbers."""
    *_, samples, dim = drawn.samples.x.shape
    by_set = drawn.samples.x.reshape(-1, len(drawn.seen), samples, dim).tolist()
    return [
        (str(number), str(seen), *(f"{value:.{digits}g}" for value in row))
        for number, columns in enumerate(by_set, start=1)
        for seen, rows in zip(drawn.seen, columns, strict=True)
        for row in rows
    ]


def _keep(opened: Opened, drawn: Drawn, temperature: float, seed: int) -> None:
    """Picture and numbers beside the model, the images themselves as npz, rows of a table as CSV too."""
    values = {"seen": drawn.seen, "temperature": temperature, "clamped": drawn.samples.clamped}
    result = replace(drawn.result, values={**drawn.result.values, **values})
    header = ("set", "seen", *(opened.columns or map(str, range(1, opened.model.dim + 1))))
    if not opened.model.levels and not result.rows:
        rows = tuple(_as_rows(drawn, 6))
        note = f"The last {_SHOWN_ROWS} of {len(rows)} rows that were drawn." * (len(rows) > _SHOWN_ROWS)
        result = replace(result, columns=header, rows=rows[-_SHOWN_ROWS:], note=note)
    opened.keep(result, seed)
    if not opened.model.levels:
        table = opened.folder / "results" / f"{result.name}.csv"
        with table.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *_as_rows(drawn, 10)])
        console.print(f"all rows: {table}", soft_wrap=True)
    drawn_elements = drawn.samples.images if opened.model.levels else drawn.samples.x
    arrays: dict[str, Any] = {"samples": drawn_elements.cpu().numpy(), "seen": np.array(drawn.seen)}
    if drawn.inputs is not None:
        arrays["inputs"] = drawn.inputs.cpu().numpy()
    path = opened.folder / "results" / f"{drawn.result.name}.npz"
    np.savez_compressed(path, **arrays)
    console.print(f"the samples themselves: {path}", soft_wrap=True)
