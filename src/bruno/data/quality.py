"""What is checked, logged and warned about in user data, before a model is trained on it."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from bruno.config import DataConfig
from bruno.data.columns import BLOCK
from bruno.data.examples import Examples
from bruno.data.images import has_colour
from bruno.data.related_columns import Related, related_columns
from bruno.data.table_format import TableFormat

_log = logging.getLogger(__name__)
_FAR = 20  # values this many widths of a column's central 90 % from its median are reported
_APART = 3  # a repeated value this many ranges of all other values away from them marks missing values
_FEW_SETS, _FEW_ROWS = 10, 20  # to train on
_FEW_STEPS = 19  # from row to row, which rarely all increase by chance
_NAMED = 12  # columns that a warning names

# --- how data were read ----------------------------------------------------------------------------------


def log_columns(examples: Examples, data: DataConfig, name: str) -> None:
    """Log which columns of a table are used, which are not, and how the table was read."""
    if examples.is_images or not examples.columns:
        return
    used, ignored = examples.columns, examples.ignored
    parts = [f"using {len(used)} of {len(used) + len(ignored)} columns: {', '.join(used)}"]
    parts += [f"ignored: {', '.join(ignored)}"] * bool(ignored)
    words = TableFormat(**TableFormat.parse(examples.table_format)).describe()
    parts += [f"read as {words}"] * bool(words)
    _log.info("%s: %s", name, "; ".join(parts))
    if not data.group:
        _log.info(
            "%s: no group column (`data.group`), so consecutive rows form sets: %d sets of %d rows",
            name,
            len(examples.names),
            int(examples.counts[0]),
        )


def log_lost_colour(examples: Examples, data: DataConfig) -> None:
    """Log if colours of user images are not used, as a defect may only differ in colour."""
    path = Path(data.name)
    is_grey = examples.is_images and examples.shape[0] == 1 and not data.drawings
    if is_grey and path.suffix.lower() != ".npz" and has_colour(path):
        _log.info("%s: the images have colours, which are not used; data.colour=true keeps them", path.name)


def log_scales(kinds: Sequence[str], steps: Sequence[float], columns: Sequence[str]) -> None:
    """Log the columns that are not on a linear scale, or that have a step."""
    names = columns or [str(i) for i in range(1, len(kinds) + 1)]
    parts = [f"{name} ({kind})" for name, kind in zip(names, kinds, strict=True) if kind != "linear"]
    stepped = [f"{name} (steps of {step:g})" for name, step in zip(names, steps, strict=True) if step]
    if parts or stepped:
        _log.info(
            "scales of columns, chosen from the data: %s; scales=linear keeps all linear",
            ", ".join([*parts, *stepped]),
        )


def warn_of_skipped(examples: Examples, data: str | Path) -> None:
    """Warn about files, rows and classes that a reader skipped."""
    small = [name for name in examples.skipped if re.search(r" \(only \d+\)$", name)]
    bad = [name for name in examples.skipped if name not in small]
    if bad:
        elements = f"{len(bad)} unreadable element{'s' * (len(bad) > 1)}"
        warnings.warn(f"{data}: skipped {elements}, first {bad[0]}.", stacklevel=2)
    if small:
        plural = "es" * (len(small) > 1)
        warnings.warn(
            f"{data}: skipped {len(small)} class{plural} with too few elements, first {small[0]}.",
            stacklevel=2,
        )


# --- whether data are enough -----------------------------------------------------------------------------


def warn_of_one_class(images: Examples) -> None:
    """Warn if all images to train on are of one class."""
    if images.is_images and len(images.names) == 1:
        warnings.warn(
            f"Only one training class, {images.names[0]!r}: the model cannot learn how classes differ, so it "
            "cannot tell others apart, and its scores may be far off. Add classes. log p(x), how unlikely an "
            "image is among all, is still useful.",
            stacklevel=2,
        )


def check_enough_rows(rows: Examples, data: DataConfig) -> None:
    """Raise if a table is too small to learn anything from; warn if it has few sets."""
    if rows.is_images:
        return
    sets, dim = len(rows.names), rows.shape[0]
    enough = max(_FEW_SETS, dim)
    least = max(_FEW_ROWS, 4 * dim)
    if sets < 2:
        remedy = (
            f"Omit the group column (`data.group`): each {BLOCK} consecutive rows then form a set."
            if data.group and len(rows) >= 2 * BLOCK
            else f"{enough} sets would be enough."
        )
        raise ValueError(f"`data` must have at least 2 sets to learn how sets differ; got {sets}. {remedy}")
    if len(rows) < least:
        raise ValueError(
            f"`data` must have at least {least} rows to train on for {dim} column{'s' * (dim > 1)}; got "
            f"{len(rows)}. {enough} sets of {BLOCK} rows would be enough."
        )
    if sets < enough:
        warnings.warn(
            f"Only {sets} training sets: too few for {dim} column{'s' * (dim > 1)}. The model cannot learn "
            f"how sets differ, and its scores may be far off. {enough} sets would be enough. log p(x), how "
            "unlikely a row is among all rows, is still useful.",
            stacklevel=2,
        )


def has_few_sets(rows: Examples) -> bool:
    """Whether a table has so few sets that a run of the usual length memorises them."""
    return not rows.is_images and len(rows.names) < 2 * max(_FEW_SETS, rows.shape[0])


# --- columns that mislead a model ------------------------------------------------------------------------


def warn_of_far_numbers(rows: Examples, kinds: Sequence[str]) -> None:
    """Warn about columns whose scale depends on extreme values, such as −999 for a missing value.

    `kinds` are the scales of the columns: large values are not extreme on a log scale.
    """
    for name, column, kind in zip(_names_of(rows), rows.elements.T, kinds, strict=True):
        given = column[~column.isnan()]
        if not len(given):
            continue
        if (mark := _placeholder(given.sort().values)) is not None:
            count = int((given == mark).sum())
            warnings.warn(
                f"column {name!r} has {count} cells ({count / len(rows):.0%}) equal to {mark:g}, far from "
                "all others. If they mark missing values, leave them empty.",
                stacklevel=2,
            )
        elif (place := _extreme(given.log() if kind == "log" else given)) is not None:
            warnings.warn(
                f"column {name!r} has a few extreme values, such as {given[place].item():g}, which may "
                "determine its scale. If they mark missing values, leave them empty.",
                stacklevel=2,
            )


def warn_of_misleading_columns(rows: Examples) -> None:
    """Warn about columns that count rows, and about columns that are almost functions of others.

    A model learns little besides such a function. All warnings name the same columns to keep.
    """
    if rows.is_images:
        return
    names = _names_of(rows)
    counters = [i for i in range(len(names)) if _is_counter(rows, i)]
    others = [i for i in range(len(names)) if i not in counters]
    related = [
        Related(others[one.column], tuple(others[i] for i in one.others), one.circle)
        for one in related_columns(rows.elements[:, others].numpy())
    ]
    left_out = {*counters, *(one.column for one in related if not one.circle)}
    kept = ", ".join(f'"{name}"' for i, name in enumerate(names) if i not in left_out)
    setting = f"--set 'data.columns=[{kept if len(names) <= _NAMED else '…'}]'"
    for i in counters:
        warnings.warn(
            f"column {names[i]!r} increases from row to row in every set, as a row number or a time does: "
            f"rows of later files may be far from all rows of training. Leave it out: {setting} "
            "(`data.columns`).",
            stacklevel=2,
        )
    for one in related:
        warnings.warn(f"{_relation(one, names, setting)} (`data.columns`).", stacklevel=2)


def _is_counter(rows: Examples, column: int) -> bool:
    """Whether a column increases from row to row in every set."""
    steps = torch.cat([_steps(rows.elements[members, column]) for members in rows.by_class()])
    return len(steps) >= _FEW_STEPS and bool((steps > 0).all())


def _names_of(rows: Examples) -> tuple[str, ...]:
    """The names of the columns; their numbers, from 1, if they have none."""
    return rows.columns or tuple(map(str, range(1, rows.shape[0] + 1)))


def _steps(numbers: Float[Tensor, " n"]) -> Float[Tensor, " steps"]:
    """The differences between consecutive numbers that are not missing."""
    return numbers[~numbers.isnan()].diff()


def _relation(found: Related, names: Sequence[str], setting: str) -> str:
    """How a column is related to others, and the way out: this setting leaves it out."""
    column, others = names[found.column], [names[i] for i in found.others]
    if found.circle:
        return (
            f"columns {others[0]!r} and {column!r} lie on a circle, as the sine and cosine of a time do, "
            "which hides other faults. Use the plain time instead, such as the hour"
        )
    listed = ", ".join(map(repr, others[:_NAMED]))
    more = f" and {len(others) - _NAMED} others" if len(others) > _NAMED else ""
    return (
        f"column {column!r} is almost exactly a linear function of {listed}{more}, which hides other faults. "
        f"Leave one of them out: {setting}"
    )


def _extreme(values: Tensor) -> int | None:
    """The position of the value that is furthest from the median, if it is far from the central 90 %."""
    ordered = values.sort().values
    margin, median = len(ordered) // 20, ordered[len(ordered) // 2]
    central = ordered[-1 - margin] - ordered[margin]
    far = (values - median).abs()
    return int(far.argmax()) if 0 < central < far.max() / _FAR else None


def _placeholder(ordered: Tensor) -> float | None:
    """The lowest or highest value, if it occurs often and is far outside the range of all other values."""
    for mark in (ordered[0], ordered[-1]):
        others = ordered[ordered != mark]
        if len(ordered) - len(others) < max(3, len(ordered) // 100) or len(others) < 2:
            continue
        if (others - mark).abs().min() > _APART * (others[-1] - others[0]) > 0:
            return mark.item()
    return None
