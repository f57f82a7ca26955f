"""The examples of a recipe: its training data, its held-out splits, and a recipe that fits the data."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve

from bruno.checks import check_choice
from bruno.components import check_takes_rows
from bruno.config import Recipe
from bruno.data import DATASETS, Examples, check_source, load_examples
from bruno.data.datasets import SPLITS, split_by_class, split_dataset
from bruno.data.frames import read_frame
from bruno.data.images import common_backdrop
from bruno.data.quality import log_columns, warn_of_skipped
from bruno.data.tables import is_table
from bruno.files import atomic_write
from bruno.model import Bruno
from bruno.text import arguments_renamed

_log = logging.getLogger(__name__)
_KEPT_FRAME = re.compile(r"data-[0-9a-f]{12}\.npz")
# The settings behind the arguments of `load_examples`, by which errors of a recipe name them.
_SETTINGS = {
    name: f"data.{name}"
    for name in ("group", "columns", "skip_bad", "size", "original", "drawings", "invert")
} | {"table_format": "data.format"}


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

    def held_out(self) -> Examples | None:
        """The examples of the classes that training does not use; None if there are none.

        Of user data, these are the classes of all held-out splits.
        """
        found = self.split("all" if is_path(self.recipe.data.name) else unseen_split(self.recipe))
        return found.without(self.split(self.recipe.data.split).names)

    def _read(self, original: bool) -> Examples:
        if original in self._examples:
            return self._examples[original]
        data = self.recipe.data
        drawings = data.drawings and is_path(data.name)  # known datasets are read as published
        group = "" if _is_kept_frame(data.name) else data.group  # its labels are the groups
        with arguments_renamed(_SETTINGS):
            check_source(data.name, group, data.columns, data.format)
            if is_path(data.name):
                _check_kind(self.recipe)
            examples = load_examples(
                data.name,
                "all",
                data_dir=self.data_dir,
                size=data.size or None,
                original=original,
                grey=not data.colour,
                group=group,
                columns=data.columns,
                table_format=data.format,
                missing=self.recipe.missing == "impute",
                skip_bad=data.skip_bad,
                drawings=drawings,
                invert=data.invert or None,
                backdrop=data.backdrop,
            )
        # Small classes are skipped after the split, so that all other classes stay in their split.
        skip_small = data.skip_bad and is_path(data.name)
        kept = _without_small_classes(examples, self.recipe) if skip_small else examples
        warn_of_skipped(kept, data.name)
        self._examples[original] = examples.inverted() if data.invert and not drawings else examples
        return self._examples[original]


def _check_kind(recipe: Recipe) -> None:
    """Raise if user data are rows but the recipe is for images, or the other way round."""
    path = Path(recipe.data.name)
    if is_table(path) and not path.is_dir():
        check_takes_rows(recipe.flow)
    elif path.suffix.lower() != ".npz" and (recipe.missing != "reject" or recipe.scales != "linear"):
        raise ValueError(
            f"`data.name` must be a table or a frame for this recipe, which is for rows; got {path}. The "
            "preset 'images' is for images."
        )


def _without_small_classes(examples: Examples, recipe: Recipe) -> Examples:
    """The classes that training can use: those with enough elements, or at least two if none has enough."""
    return examples.with_at_least(recipe.train.min_count).with_at_least(2)


def with_absolute_path(recipe: Recipe) -> Recipe:
    """The recipe with the absolute path of user data, so that a run can be used from any folder."""
    if not is_path(recipe.data.name):
        return recipe
    return evolve(recipe, data=evolve(recipe.data, name=os.path.realpath(recipe.data.name)))


def with_backdrop(recipe: Recipe, explicit: Collection[str] = ()) -> Recipe:
    """The recipe with one backdrop for all transparent images of class folders, unless the user set it."""
    data, path = recipe.data, Path(recipe.data.name)
    if data.backdrop or data.drawings or "data.backdrop" in explicit or not is_path(data.name):
        return recipe
    if path.suffix.lower() == ".npz" or not path.exists() or (is_table(path) and not path.is_dir()):
        return recipe
    return evolve(recipe, data=evolve(data, backdrop=common_backdrop(path)))


def keep_frame(frame: Any, recipe: Recipe, folder: Path) -> Recipe:
    """Write the rows of a frame into a run folder, and return the recipe that reads them from there.

    The name of the file depends on its content, so a second run never replaces the data of the first.
    """
    data = recipe.data
    missing = recipe.missing == "impute"
    check_takes_rows(recipe.flow)
    with arguments_renamed(_SETTINGS):
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
    kept = evolve(data, name=str(path.resolve()), columns=examples.columns, format="")
    return evolve(recipe, data=kept)


def has_consecutive_sets(recipe: Recipe) -> bool:
    """Whether the sets are consecutive rows of a table: it has no group column."""
    name = recipe.data.name
    labelled = Path(name).suffix.lower() == ".npz" and not _is_kept_frame(name)
    return is_path(name) and not recipe.data.group and not labelled


def _is_kept_frame(name: str) -> bool:
    """Whether data are the rows of a frame that `keep_frame` wrote."""
    return _KEPT_FRAME.fullmatch(Path(name).name) is not None


def imputed(examples: Examples, model: Bruno, generator: torch.Generator | None = None) -> Examples:
    """The examples with missing numbers of rows imputed from their classes; drawn if a generator is given."""
    return replace(examples, elements=model.impute(examples.elements, examples.labels, generator))


def learn_columns(model: Bruno, examples: Examples, seed: int) -> Examples:
    """Fit the scales of columns and the imputer to all rows; return the rows with missing numbers drawn."""
    if model.kind.is_images:
        return examples
    model.fit_preprocessing(examples.elements, examples.labels)
    if model.imputer is None:
        return examples
    return imputed(examples, model, torch.Generator().manual_seed(seed))


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
                "skip small classes (`data.skip_bad`)."
            )
        larger = int(examples.counts.max()) > smallest and not recipe.data.skip_bad
        remedy = "; `data.skip_bad` skips small classes" if larger else ""
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
