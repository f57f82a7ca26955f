"""Summaries of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bruno.model import Samples
from bruno.reporting.figure import minus
from bruno.reporting.images import BACKGROUND, grid, png, prefix_sheet, to_uint8
from bruno.reporting.results import Result
from bruno.reporting.summaries.base import summarise
from bruno.tasks.generation import SetSamples, SpreadByRepeats
from bruno.text import numbered
from bruno.trained.generation import SpeckEvaluation, WrittenSamples

_ROWS = 10  # of a table of samples
_SHOWN = 40  # samples in a picture of specks


@summarise.register
def _(outcome: Samples) -> Result:
    values = {"seen": (0,), "clamped": outcome.clamped}
    picture = b""
    if outcome.is_images:
        columns = math.ceil(math.sqrt(len(outcome.x)))
        images = to_uint8(outcome.images, outcome.levels)
        picture = png(grid(images, columns, padding=1, background=BACKGROUND))
    result = Result("samples-prior", "Samples from the prior", values, picture=picture)
    if outcome.is_images:
        return result
    return _with_rows(result, outcome.x[None, None], (0,), outcome.columns)


@summarise.register
def _(outcome: SetSamples) -> Result:
    samples, seen = outcome.samples, outcome.lengths
    result = Result("samples", "More of the same", {"seen": seen, "clamped": samples.clamped})
    if not samples.is_images:
        return _with_rows(result, samples.x, seen, samples.columns)
    inputs, drawn = (to_uint8(x, samples.levels) for x in (outcome.inputs, samples.images))
    shown = inputs[:, [n - 1 for n in seen if n]]  # the last element of each prefix
    return replace(
        result,
        note="Top: the elements of the set. Below each: samples given this element and all before it.",
        picture=prefix_sheet(list(zip(shown, drawn, strict=True)), seen),
    )


@summarise.register
def _(written: WrittenSamples) -> Result:
    result = summarise(written.outcome)
    if written.shown == written.count:
        return result
    note = f"{written.shown:,} of {written.count:,} samples; all are in {written.paths[0].name}."
    if result.picture:
        return replace(result, note=f"{result.note} The picture shows {note}".strip())
    return replace(result, note=f"The last {len(result.rows)} of the first {note}")


@summarise.register
def _(outcome: SpreadByRepeats) -> Result:
    samples, repeats, count = outcome.samples, outcome.repeats, len(outcome.inputs)
    noun, scale = ("image", "pixel, from 0 to 1") if samples.is_images else ("row", "column, standardised")
    picture = b""
    if samples.is_images:
        first = to_uint8(outcome.inputs[:1], samples.levels).expand(len(repeats), -1, -1, -1)
        drawn = to_uint8(samples.images[0, :, :_ROWS], samples.levels)
        picture = prefix_sheet([(first, drawn)], repeats)
    return Result(
        "samples-repeats",
        f"Samples given the same {noun} repeatedly",
        {"seen": repeats, "variance": outcome.variance, "by_element": outcome.by_element},
        ("times seen", f"mean variance of a {scale}, over {count} {noun}{'s' * (count != 1)}"),
        tuple((str(n), f"{v:.4f}") for n, v in zip(repeats, outcome.variance, strict=True)),
        "Top: the first image. Below: samples after it was seen that many times." * samples.is_images,
        picture,
    )


@summarise.register
def _(outcome: SpeckEvaluation) -> Result:
    found, data = outcome.result, outcome.data
    first = found.with_speck.double().argsort(descending=True, stable=True)[:_SHOWN]
    images = to_uint8(found.images[first], found.levels)
    settings = f"given {found.given} image{'s' * (found.given != 1)} of a class"
    if found.temperature != 1:
        settings += f", at temperature {found.temperature:g}"
    return Result(
        f"specks-{data}",
        f"Specks in samples, on {data}",
        {
            "split": data,
            "share": found.share,
            "error": found.error,
            "samples": found.samples,
            "given": found.given,
            "temperature": found.temperature,
            "data_share": found.data_share,
            "data_images": found.data_images,
        },
        ("", "with specks %", "images"),
        (
            ("samples", f"{100 * found.share:.1f} ± {100 * found.error:.1f}", f"{found.samples:,}"),
            (data, f"{100 * found.data_share:.1f}", f"{found.data_images:,}"),
        ),
        f"A speck is an isolated dot of one or two bright pixels. Samples {settings}; ± standard error. "
        f"In the picture: {len(images)} samples, those with specks first.",
        png(grid(images, 10, padding=1, background=BACKGROUND)),
    )


def class_samples_picture(outcome: SetSamples) -> bytes:
    """A row for each class: the elements given, a gap, and samples."""
    given = to_uint8(outcome.inputs, outcome.samples.levels)
    drawn = to_uint8(outcome.samples.images[:, 0], outcome.samples.levels)
    gap = torch.full_like(given[:, :1], BACKGROUND)
    rows = torch.cat([given, gap, drawn], 1)
    return png(grid(rows.flatten(0, 1), rows.shape[1], padding=1, background=BACKGROUND))


def _short(value: float) -> str:
    """A number with four significant digits, or all digits before the decimal point."""
    return minus(f"{value:.0f}" if 1e3 <= abs(value) < 1e7 else f"{value:.4g}")


def _with_rows(result: Result, x: Tensor, seen: Sequence[int], names: Sequence[str]) -> Result:
    """A result on rows of a table: the last samples as text."""
    rows = [
        (str(number), str(n), *map(_short, row))
        for number, prefixes in enumerate(x.tolist(), start=1)
        for n, some in zip(seen, prefixes, strict=True)
        for row in some
    ]
    columns = ("set", "seen", *(names or numbered(x.shape[-1])))
    note = f"The last {_ROWS} of {len(rows)} samples." * (len(rows) > _ROWS)
    return replace(result, columns=columns, rows=tuple(rows[-_ROWS:]), note=note)
