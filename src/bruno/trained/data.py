"""A trained model with its data: the splits of its own dataset, or other examples of the same shape."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bruno.arrays import ArrayLike, is_frame
from bruno.checks import check_choice
from bruno.data import Examples, check_source, is_available, load_examples, load_path
from bruno.data.datasets import SPLITS
from bruno.data.frames import read_frame
from bruno.data.quality import warn_of_skipped
from bruno.data.sampling import seeded_generator
from bruno.data.tables import is_table
from bruno.kinds import Images
from bruno.recipe_data import RecipeData, imputed, is_path
from bruno.trained.base import TrainedModel

Data = str | Path | ArrayLike  # a known dataset, the path of user data, or a frame

_log = logging.getLogger(__name__)
_NAMED_CLASSES = 10  # the name of a result has at most this many of the chosen classes


class Selection(NamedTuple):
    """Examples, and the name by which results refer to them."""

    examples: Examples
    name: str


class TrainedData(TrainedModel):
    """A trained model with its recipe and its data."""

    def examples(
        self,
        split: str | None = None,
        *,
        data: Data | None = None,
        classes: Sequence[str] | None = None,
        invert: bool | None = None,
        min_classes: int = 1,
    ) -> Examples:
        """Examples with the model's shape and levels.

        Args:
            split: split of the data: train, validation, trainval, test or all; test by default.
            data: use this instead of the model's own data: a known dataset, or user data, of which all
                classes are used: a path or a frame.
            classes: use only these classes; all by default.
            invert: turn dark ink into bright ink in user images; as in training by default.
            min_classes: raise if there are fewer classes.

        Raises:
            ValueError: if the model has no data, or the elements do not fit the model.
        """
        return self._select(split, data, classes, invert, min_classes).examples

    def _select(
        self,
        split: str | None = None,
        data: Data | None = None,
        classes: Sequence[str] | None = None,
        invert: bool | None = None,
        min_classes: int = 1,
        impute: bool = True,
        group: str | None = None,
        skip_bad: bool | None = None,
    ) -> Selection:
        own = is_own(data)
        if invert and not own:
            raise ValueError("`invert` is for your own images; name them with `data`, or omit it.")
        if split is not None:
            check_choice("split", split, SPLITS)
        if split and own:
            raise ValueError(
                f"`split` is for known datasets; all of {data_label(data)} is used. Omit it; got {split!r}."
            )
        data, split = self._available(data), split or "test"
        if data is not None:
            examples = self._other_examples(data, split, invert, group, skip_bad)
        elif self.recipe is not None:
            examples = self._recipe_data.split(split)
        else:
            raise ValueError(f"`data` must be given: {self.folder} does not record its training data.")
        if classes is not None:
            examples = examples.select(classes)
        if len(examples.names) < min_classes:
            found = f"the {split} split" if data is None else data_label(data)
            raise ValueError(
                f"`data` must have at least {min_classes} classes; {found} has {len(examples.names)}. Name "
                "other data, or a larger split."
            )
        examples = examples.with_levels(self.model.levels)
        examples = imputed(examples, self.model) if impute else examples
        if own:
            self.warn_if_unfamiliar(examples.elements)
        return Selection(examples, _data_name(data, split, () if classes is None else classes))

    @property
    def calibration_command(self) -> str:
        """The command that calibrates the model on clean data, which the user has to name."""
        name = self.pretrained or str(self.folder)
        if not self.is_pretrained and not (self.folder / "recipe.json").is_file():
            source = Path(self.model.source or f"{name}.safetensors")  # the model file
            name = str(source.relative_to(Path.cwd()) if source.is_relative_to(Path.cwd()) else source)
        return f"bruno calibrate {name} {'CLEAN' if self.kind.is_images else 'CLEAN.csv'}"

    @cached_property
    def _recipe_data(self) -> RecipeData:
        assert self.recipe is not None
        return self.data or RecipeData(self.recipe, self.data_dir)

    def _available(self, data: Data | None) -> Data | None:
        """The data to use: `data` itself, where None means the model's own, or "drawn".

        A pretrained model of drawings can be tried without its dataset: "drawn", the built-in characters,
        takes its place.
        """
        if data is None and self.lacks_its_data and self.recipe:
            name = self.recipe.data.name
            if self.has_no_sets:
                raise ValueError(
                    f"`data` must be given: {name} is not on this machine. Name its folder (`data_dir`), or "
                    f"name {name} itself (`data`) to download it."
                )
            _log.info(
                "%s is not on this machine; using the built-in characters (drawn). Name its folder "
                "(`data_dir`), or name %s itself (`data`) to download it.",
                name,
                name,
            )
            return "drawn"
        return data

    @property
    def has_no_sets(self) -> bool:
        """Whether there are no sets to try the model on: its dataset is missing, and nothing replaces it."""
        return self.lacks_its_data and not (self.recipe and self.recipe.data.drawings)

    @property
    def lacks_its_data(self) -> bool:
        """Whether the model is pretrained and its dataset is not on this machine."""
        if not (self.is_pretrained and self.recipe):
            return False
        folder = None if self.data_dir is None else Path(self.data_dir)
        return not is_available(self.recipe.data.name, folder)

    def _other_examples(
        self, data: Data, split: str, invert: bool | None, group: str | None, skip_bad: bool | None
    ) -> Examples:
        """Examples of other data than the model's own, if they have the model's shape."""
        if is_frame(data):
            return self._frame_examples(data, skip_bad, group=group)
        assert isinstance(data, str | Path)  # as `is_own` has checked
        if data == "drawn" and not (self.recipe and self.recipe.data.name == data):
            split = "all"  # the model has seen none of them
        if not str(data):
            raise ValueError(f"`data` must be a dataset or a path; got {data!r}.")
        check_source(data)
        if is_path(str(data)):
            examples = self._user_examples(Path(data), invert, group, skip_bad)
        else:
            own = self.recipe is not None and self.recipe.data.name == data
            foreign = not own and data != "drawn"  # built-in characters already look like Omniglot's
            examples = load_examples(str(data), split, data_dir=self.data_dir)
            if self.normalises and foreign and examples.shape == self.model.shape:
                examples = load_examples(str(data), split, data_dir=self.data_dir, drawings=True)
        if examples.shape != self.model.shape:
            raise ValueError(
                f"`data` must have elements of the model's shape {self.model.shape}; {data} has "
                f"{examples.shape}."
            )
        return examples

    def _frame_examples(
        self, frame: Any, skip_bad: bool | None = None, name: str = "data", group: str | None = None
    ) -> Examples:
        """The rows of a frame by the group column; numbers may be missing."""
        if self.kind.is_images:
            raise TypeError(f"`{name}` must be images for this model; got {type(frame).__name__}.")
        skip_bad = self._skips_bad if skip_bad is None else skip_bad
        missing = self.model.imputer is not None
        examples = read_frame(frame, self.group if group is None else group, self.columns, skip_bad, missing)
        warn_of_skipped(examples, "the frame")
        return examples

    def _user_examples(
        self, path: Path, invert: bool | None, group: str | None, skip_bad: bool | None
    ) -> Examples:
        kind, drawings = self.model.kind, self.normalises
        if kind.is_images and is_table(path) and not path.is_dir():
            raise ValueError(f"`data` must be images for this model; got {path}, a table.")
        if group is None:
            group = "" if path.suffix.lower() == ".npz" else self.group  # an npz has labels
        examples = load_path(
            path,
            size=kind.size if isinstance(kind, Images) else None,
            grey=not isinstance(kind, Images) or kind.is_grey,
            group=group,
            columns=self.columns,
            prefer=self._table_format,
            missing=self.model.imputer is not None,
            skip_bad=self._skips_bad if skip_bad is None else skip_bad,
            drawings=drawings,
            invert=self._polarity(invert) if drawings else None,
            backdrop=self.backdrop,
        )
        warn_of_skipped(examples, path)
        return examples.inverted() if self._inverts(invert) and not drawings else examples

    @property
    def _skips_bad(self) -> bool:
        """Whether training skipped elements that cannot be read."""
        return self.recipe is not None and self.recipe.data.skip_bad

    def _generator(self, seed: int) -> torch.Generator:
        return seeded_generator(seed, self.device)


def is_own(data: Data | None) -> bool:
    """Whether data are the user's own, a path or a frame; raises TypeError unless they can be read."""
    if not (data is None or isinstance(data, str | Path) or is_frame(data)):
        raise TypeError(f"`data` must be a known dataset, a path or a frame; got {type(data).__name__}.")
    return is_frame(data) or (data is not None and is_path(str(data)))


def data_label(data: Data | None) -> str:
    """The name of data in messages."""
    return "the frame" if is_frame(data) else str(data)


def _data_name(data: Data | None, split: str, classes: Sequence[str]) -> str:
    """The name of results: the split, the name of data that are not the model's own, and chosen classes."""
    if is_frame(data):
        name = "frame"
    elif data is not None and (is_own(data) or data == "drawn"):
        stem = Path(str(data)).stem
        name = f"data-{stem}" if stem in SPLITS else stem  # not the name of results on the model's own data
    else:
        name = split if data is None else f"{data}-{split}"
    return "-".join([name, *(re.sub(r"\W", "_", label) for label in classes[:_NAMED_CLASSES])])


def available_set_size(examples: Examples, wanted: int, least: int = 1) -> int:
    """The wanted set size, or the number of elements of the smallest class if it has fewer."""
    smallest = int(examples.counts.min())
    name = examples.names[int(examples.counts.argmin())]
    if smallest < least:
        raise ValueError(
            f"`data` must have at least {least} elements in every class; {name!r} has {smallest}. Remove it."
        )
    if smallest < wanted:
        _log.info("set size %d instead of %d: class %r has %d elements", smallest, wanted, name, smallest)
    return min(wanted, smallest)
