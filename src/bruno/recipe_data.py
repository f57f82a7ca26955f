"""The examples of a recipe: its training data, its held-out splits, and a recipe that fits the data."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve
from jaxtyping import Float
from torch import Tensor

from bruno.checks import check_choice
from bruno.config import DataConfig, Recipe
from bruno.data import DATASETS, Examples, check_source, load_examples
from bruno.data.columns import BLOCK
from bruno.data.datasets import SPLITS, split_by_class, split_dataset
from bruno.data.frames import read_frame
from bruno.data.images import has_colour
from bruno.data.related_columns import Related, related_columns
from bruno.data.table_format import TableFormat
from bruno.files import atomic_write
from bruno.model import Bruno

_log = logging.getLogger(__name__)
_FAR = 20  # values this many widths of a column's central 90 % from its median are reported
_APART = 3  # a repeated value this many ranges of all other values away from them marks missing values
_FEW_SETS, _FEW_ROWS = 10, 20  # to train on
_FEW_STEPS = 19  # from row to row, which rarely all increase by chance
_NAMED = 12  # columns that a warning names
_KEPT_FRAME = re.compile(r"data-[0-9a-f]{12}\.npz")


def is_path(data: str | None) -> bool:
    """Whether a data argument is the path of user data, not the name of a known dataset."""
    return data is not None and data not in DATASETS


def unseen_split(*recipes: Recipe) -> str:
    """The split with classes that no recipe trains on."""
    return "test" if any(recipe.data.split == "trainval" for recipe in recipes) else "validation"


class RecipeData:
    """The data of a recipe, read once for all splits.

    Args:
        recipe: names the data and the settings to read them with.
        data_dir: the folder of published datasets; $BRUNO_DATA by default.
    """

    def __init__(self, recipe: Recipe, data_dir: str | Path | None = None) -> None:
        self.recipe, self.data_dir = recipe, data_dir
        self._examples: dict[bool, Examples] = {}  # in the size of the model, and in their original size

    def with_recipe(self, recipe: Recipe) -> RecipeData:
        """The same data for a recipe that was fitted to them, without reading files again."""
        other = RecipeData(recipe, self.data_dir)
        other._examples = self._examples
        return other

    def __getstate__(self) -> dict[str, Any]:
        """The state without the examples, as a trained model is sent to other processes without its data."""
        return {**self.__dict__, "_examples": {}}

    def split(self, split: str, *, original: bool = False) -> Examples:
        """The examples of a split, in the size of the model or in their `original` size.

        `data.classes` limits training only: held-out splits have all classes.
        """
        check_choice("split", split, SPLITS)
        examples, data = self._read(original), self.recipe.data
        if split != "all":
            is_own = is_path(data.name)
            examples = (
                split_by_class(examples, split) if is_own else split_dataset(data.name, examples, split)
            )
        if data.skip_bad and is_path(data.name):
            examples = _without_small_classes(examples, self.recipe)
        if data.classes and split.startswith("train"):
            examples = examples.select(data.classes)
        return examples

    def training(self) -> Examples:
        """The examples to train on; with `data.original` in their original size, downsampled in each step."""
        return self.split(self.recipe.data.split, original=self.recipe.data.original)

    def _read(self, original: bool) -> Examples:
        if original in self._examples:
            return self._examples[original]
        data = self.recipe.data
        drawings = data.drawings and is_path(data.name)  # known datasets are read as published
        check_source(data.name, data.group, data.columns, data.format)
        examples = load_examples(
            data.name,
            "all",
            data_dir=self.data_dir,
            size=data.size or None,
            original=original,
            grey=not data.colour,
            group=data.group,
            columns=data.columns,
            table_format=data.format,
            missing=self.recipe.missing == "impute",
            skip_bad=data.skip_bad,
            drawings=drawings,
            invert=data.invert or None,
        )
        # Small classes are skipped after the split, so that all other classes stay in their split.
        skip_small = data.skip_bad and is_path(data.name)
        kept = _without_small_classes(examples, self.recipe) if skip_small else examples
        warn_of_skipped(kept, data.name)
        self._examples[original] = examples.inverted() if data.invert and not drawings else examples
        return self._examples[original]


def _without_small_classes(examples: Examples, recipe: Recipe) -> Examples:
    """The classes that training can use: those with enough elements, or at least two if none has enough."""
    return examples.with_at_least(recipe.train.min_count).with_at_least(2)


def with_absolute_path(recipe: Recipe) -> Recipe:
    """The recipe with the absolute path of user data, so that a run can be used from any folder."""
    if not is_path(recipe.data.name):
        return recipe
    return evolve(recipe, data=evolve(recipe.data, name=os.path.realpath(recipe.data.name)))


def keep_frame(frame: Any, recipe: Recipe, folder: Path) -> Recipe:
    """Write the rows of a frame into a run folder, and return the recipe that reads them from there.

    The name of the file depends on its content, so a second run never replaces the data of the first.
    """
    data = recipe.data
    missing = recipe.missing == "impute"
    examples = read_frame(frame, data.group, data.columns, data.skip_bad, missing)
    warn_of_skipped(examples, "the frame")
    log_columns(examples, data, "the frame")
    rows, names = examples.elements.numpy(), np.array(examples.names)[examples.labels.numpy()]
    digest = hashlib.sha256(rows.tobytes() + names.tobytes()).hexdigest()[:12]
    path = folder / f"data-{digest}.npz"  # as `_KEPT_FRAME`
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as beside, beside.open("wb") as file:
            np.savez_compressed(file, rows=rows, labels=names, columns=np.array(examples.columns))
    return evolve(recipe, data=evolve(data, name=str(path.resolve()), columns=examples.columns))


def has_consecutive_sets(recipe: Recipe) -> bool:
    """Whether the sets are consecutive rows of a table: it has no group column."""
    name = Path(recipe.data.name)
    labelled = name.suffix == ".npz" and not _KEPT_FRAME.fullmatch(name.name)
    return is_path(recipe.data.name) and not recipe.data.group and not labelled


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
            "%s: no group column (data.group), so consecutive rows form sets: %d sets of %d rows",
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


def imputed(examples: Examples, model: Bruno, generator: torch.Generator | None = None) -> Examples:
    """The examples with missing numbers of rows imputed from their classes; drawn if a generator is given."""
    return replace(examples, elements=model.impute(examples.elements, examples.labels, generator))


def fitted_to(recipe: Recipe, examples: Examples, explicit: Collection[str] = ()) -> Recipe:
    """The recipe with `way`, `queries` and `set_size` reduced to the classes and elements of the examples.

    `restyle` is 0 unless the images are larger than those of the model. Settings in `explicit`, which the
    user gave, such as "train.way", stay the same; training raises an error if they do not fit.
    """
    train, smallest = recipe.train, int(examples.counts.min())
    if "train.way" not in explicit:
        train = evolve(train, way=max(2, min(train.way, len(examples.names))))
    if "train.queries" not in explicit:
        train = evolve(train, queries=max(1, min(train.queries, smallest - train.shot)))
    if "train.restyle" not in explicit and not recipe.data.original:
        train = evolve(train, restyle=0.0)
    if smallest < train.set_size and "train.set_size" not in explicit:
        name = examples.names[int(examples.counts.argmin())]
        if smallest < 2:
            raise ValueError(
                f"`data` must have at least 2 elements in every class; {name!r} has {smallest}. Add more, or "
                "skip small classes (data.skip_bad=true)."
            )
        larger = int(examples.counts.max()) > smallest and not recipe.data.skip_bad
        remedy = "; data.skip_bad=true skips small classes" if larger else ""
        _log.info(
            "set size %d instead of %d: class %r has %d elements%s",
            smallest,
            train.set_size,
            name,
            smallest,
            remedy,
        )
        train = evolve(train, set_size=smallest)
    return evolve(recipe, train=train)


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


def check_enough_rows(rows: Examples, data: DataConfig) -> None:
    """Raise if a table is too small to learn anything from; warn if it has few sets."""
    if rows.is_images:
        return
    sets, dim = len(rows.names), rows.shape[0]
    enough = max(_FEW_SETS, dim)
    least = max(_FEW_ROWS, 4 * dim)
    if sets < 2:
        remedy = (
            f"Omit the group column (data.group): each {BLOCK} consecutive rows then form a set."
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
            f"{sets} sets to train on are TOO FEW for {dim} column{'s' * (dim > 1)}: the model cannot learn "
            f"how sets differ, and its scores may be far off. {enough} would be enough. log p(x), how "
            "unlikely a row is among all rows, is still useful.",
            stacklevel=2,
        )


def has_few_sets(rows: Examples) -> bool:
    """Whether a table has so few sets that a run of the usual length memorises them."""
    return not rows.is_images and len(rows.names) < 2 * max(_FEW_SETS, rows.shape[0])


def warn_of_far_numbers(rows: Examples) -> None:
    """Warn about columns whose scale depends on extreme values, such as −999 for a missing value."""
    if rows.is_images:
        return
    names = rows.columns or tuple(map(str, range(1, rows.shape[0] + 1)))
    for name, column in zip(names, rows.elements.T, strict=True):
        ordered = column[~column.isnan()].sort().values
        if not len(ordered):
            continue
        if (mark := _placeholder(ordered)) is not None:
            count = int((ordered == mark).sum())
            warnings.warn(
                f"column {name!r} has {count} cells ({count / len(rows):.0%}) equal to {mark:g}, far from "
                "all others. If they mark missing values, leave them empty.",
                stacklevel=2,
            )
        elif (extreme := _extreme(ordered)) is not None:
            warnings.warn(
                f"column {name!r} has a few extreme values, such as {extreme:g}, which may determine its "
                "scale. If they mark missing values, leave them empty.",
                stacklevel=2,
            )


def warn_of_related_columns(rows: Examples) -> None:
    """Warn about columns that are almost functions of others: a model learns little besides that."""
    if rows.is_images:
        return
    names = rows.columns or tuple(map(str, range(1, rows.shape[0] + 1)))
    for one in related_columns(rows.elements.numpy()):
        warnings.warn(f"{_relation(one, names)} (`data.columns`).", stacklevel=2)


def warn_of_counters(rows: Examples) -> None:
    """Warn about columns that increase from row to row in every set, as row numbers and times do."""
    if rows.is_images:
        return
    names = rows.columns or tuple(map(str, range(1, rows.shape[0] + 1)))
    for i, name in enumerate(names):
        steps = torch.cat([_steps(rows.elements[members, i]) for members in rows.by_class()])
        if len(steps) >= _FEW_STEPS and bool((steps > 0).all()):
            warnings.warn(
                f"column {name!r} increases from row to row in every set, as a row number or a time does: "
                "rows of later files may be far from all rows of training. Leave it out: "
                f"{_setting_without(name, names)} (`data.columns`).",
                stacklevel=2,
            )


def _steps(numbers: Float[Tensor, " n"]) -> Float[Tensor, " steps"]:
    """The differences between consecutive numbers that are not missing."""
    return numbers[~numbers.isnan()].diff()


def _setting_without(column: str, names: Sequence[str]) -> str:
    """The setting that leaves a column out."""
    kept = ", ".join(f'"{name}"' for name in names if name != column)
    return f"--set 'data.columns=[{kept}]'" if len(names) <= _NAMED else "--set 'data.columns=[…]'"


def _relation(found: Related, names: Sequence[str]) -> str:
    """How a column is related to others, and the way out."""
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
        f"Leave one of them out: {_setting_without(column, names)}"
    )


def _extreme(ordered: Tensor) -> float | None:
    """The value that is furthest from the median, if it is far from the central 90 %."""
    margin, median = len(ordered) // 20, ordered[len(ordered) // 2]
    central = ordered[-1 - margin] - ordered[margin]
    far = (ordered - median).abs()
    return ordered[far.argmax()].item() if 0 < central < far.max() / _FAR else None


def _placeholder(ordered: Tensor) -> float | None:
    """The lowest or highest value, if it occurs often and is far outside the range of all other values."""
    for mark in (ordered[0], ordered[-1]):
        others = ordered[ordered != mark]
        if len(ordered) - len(others) < max(3, len(ordered) // 100) or len(others) < 2:
            continue
        if (others - mark).abs().min() > _APART * (others[-1] - others[0]) > 0:
            return mark.item()
    return None
