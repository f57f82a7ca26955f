"""A trained model with its recipe, and the user files and arrays that it reads."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from bruno.arrays import (
    ArrayLike,
    as_tensor,
    check_element_type,
    fields_to_numpy,
    image_as_tensor,
    is_frame,
    is_pil_image,
    named_image_to_array,
)
from bruno.config import Recipe
from bruno.data import Element, ElementReader
from bruno.data.columns import check_not_all_missing
from bruno.data.images import normalise_drawings
from bruno.data.reader import collected
from bruno.kinds import Images, Kind, kind_of, rescale_levels
from bruno.model import Bruno
from bruno.recipe_data import RecipeData, has_consecutive_sets, unseen_split
from bruno.tasks.familiarity import Familiarity, UnfamiliarDataWarning
from bruno.text import numbered

Source = str | Path | Sequence[str | Path] | ArrayLike  # paths of files and folders, a frame, or elements


class Elements(NamedTuple):
    """Elements (n, *shape) on the CPU, and their names: paths, lines of a table, or positions.

    `groups` are the values of the group column, empty where there is none.
    """

    x: Tensor
    names: tuple[str, ...]
    groups: tuple[str, ...]

    def numpy(self) -> dict[str, Any]:
        """The fields by name, the elements as a numpy array."""
        return fields_to_numpy(self._asdict())


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model with its recipe, and the elements that it reads.

    Attributes:
        model: the frozen model, on the device that it was opened on.
        recipe: its training recipe; None for a model file without one.
        folder: the folder for its results.
        pretrained: the name of a model that comes with the package; "" for other models.
        data_dir: the folder of published datasets; $BRUNO_DATA if None.
        drawings: whether to normalise line drawings in user files; as in training if None.
        data: the data of the recipe, if they were read in training; read when needed if None.
        about: the metadata of its file: recipe, provenance and notes; those of this process if None.
    """

    model: Bruno
    recipe: Recipe | None
    folder: Path
    pretrained: str = ""
    data_dir: str | Path | None = None
    drawings: bool | None = None
    data: RecipeData | None = None
    about: dict[str, Any] | None = None

    def __repr__(self) -> str:
        data = self.recipe.data.name if self.recipe else "unknown data"
        return f"{type(self).__name__}({str(self.folder)!r}, {self.kind}, trained on {data})"

    def __sklearn_clone__(self) -> TrainedModel:
        """The object itself: clones of an estimator share the model."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainedModel:
        return self  # immutable; clones of an estimator of river are deep copies

    # --- the model ---------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    @property
    def is_pretrained(self) -> bool:
        """Whether the model comes with the package."""
        return bool(self.pretrained)

    @property
    def rotations(self) -> bool:
        """Whether training treated each rotation of a class as a separate class."""
        return self.recipe is not None and self.recipe.data.rotations

    @property
    def normalises(self) -> bool:
        """Whether images in user files are normalised as line drawings; see `normalise_drawing`."""
        kind = self.model.kind
        if not isinstance(kind, Images) or not kind.is_grey:
            return False
        if self.drawings is not None:
            return self.drawings
        return self.recipe is not None and self.recipe.data.drawings

    @property
    def backdrop(self) -> str:
        """The colour behind transparent pixels of files and PIL images; "" if each image gets its own."""
        return self.recipe.data.backdrop if self.recipe else ""

    @property
    def columns(self) -> tuple[str, ...]:
        """Column names of the rows in training, if they had names."""
        return self.recipe.data.columns if self.recipe else ()

    @property
    def kind(self) -> Kind:
        """The kind of elements, with the names of their columns if they are known."""
        return kind_of(self.model.shape, self.model.levels, self.columns)

    @property
    def group(self) -> str:
        """The column that named the set of a row in training, if there was one."""
        return self.recipe.data.group if self.recipe else ""

    @property
    def has_consecutive_sets(self) -> bool:
        """Whether the training sets were consecutive rows of a table without a group column."""
        return self.recipe is not None and not self.kind.is_images and has_consecutive_sets(self.recipe)

    @property
    def unseen(self) -> str:
        """The split of unseen classes."""
        return unseen_split(self.recipe) if self.recipe else "validation"

    # --- elements ----------------------------------------------------------------------------------------

    def reader(
        self,
        *,
        invert: bool | None = None,
        skip_bad: bool = False,
        group: str | None = None,
        offset: str = "",
    ) -> ElementReader:
        """A reader of image files or table rows in the shape and levels of the model.

        `group` is the group column, if it has another name than in training; `offset` is the column of
        offsets.
        """
        return ElementReader(
            self.model.shape,
            self.model.levels,
            invert=self._polarity(invert) if self.normalises else self._inverts(invert),
            drawings=self.normalises,
            backdrop=self.backdrop,
            skip_bad=skip_bad,
            group=self.group if group is None else group,
            columns=self.columns,
            table_format=self._table_format,
            missing=self.model.imputer is not None,
            offset=offset,
        )

    def read(
        self,
        source: Source | Iterable[Element],
        *,
        invert: bool | None = None,
        skip_bad: bool = False,
        impute: bool = True,
        name: str = "source",
    ) -> Elements:
        """Elements from files and folders, from a reader, or from frames, arrays, tensors and PIL images.

        Warns about files that were skipped, and about images unlike the training images. By default, files
        and PIL images are normalised or inverted as in training; arrays, tensors and elements that were read
        before are not changed.
        Missing numbers of rows are imputed from the rows of the same group, or of the whole source if it has
        no groups; without `impute` they stay NaN. Errors call the argument `name`.
        """
        elements = self._read(source, invert, skip_bad, name)
        self.warn_if_unfamiliar(elements.x)
        if not impute or elements.x.ndim != 2:
            return elements
        _, labels = np.unique(elements.groups, return_inverse=True)
        return elements._replace(x=self.model.impute(elements.x, labels))

    def read_set(
        self, source: Source, *, name: str, invert: bool | None = None, skip_bad: bool = False
    ) -> Tensor:
        """The elements of one set, read by `read`; raises ValueError if their rows name several groups."""
        x, _, groups = self.read(source, invert=invert, skip_bad=skip_bad, name=name)
        found = list(dict.fromkeys(groups))
        if len(found) > 1:
            raise ValueError(
                f"`{name}` must be one set; got {len(found)} groups in {self.group!r}, such as {found[0]!r} "
                f"and {found[1]!r}. Give the rows of one group, or omit this column to take all rows as one "
                "set."
            )
        return x

    def _read(
        self, source: Source | Iterable[Element], invert: bool | None, skip_bad: bool, name: str = "source"
    ) -> Elements:
        """`read` without the comparison with the training images."""
        if isinstance(source, Elements):  # read before
            return source
        source = list(source) if isinstance(source, Iterator) else source
        if are_paths(source) or is_frame(source):
            reader = self.reader(invert=invert, skip_bad=skip_bad)
            read = collected(self._opened(source, reader))
            if not read:
                raise ValueError(f"`{name}` must have at least one readable element; got {source}.")
            warn_of_unreadable(reader)
        elif isinstance(source, list) and source and isinstance(source[0], Element):
            read = source
        else:
            x = self.convert(cast(ArrayLike, source), invert=invert, name=name)
            return Elements(x, numbered(len(x)), ("",) * len(x))
        names, xs, groups = zip(*read, strict=True)
        return Elements(torch.stack(xs).cpu(), names, groups)

    @staticmethod
    def _opened(source: Any, reader: ElementReader) -> Iterator[Element]:
        """The elements of paths or of a frame."""
        if is_frame(source):
            return reader.read_frame(source)
        return reader.read([source] if isinstance(source, str | Path) else source)

    def convert(self, source: ArrayLike, *, invert: bool | None = None, name: str = "source") -> Tensor:
        """Elements (n, *shape) on the CPU from an array of one or several, or from PIL images.

        Like `read`, but without the comparison with the training images. Errors call the argument `name`.
        """
        shape, kind = self.model.shape, self.model.kind
        if isinstance(source, list | tuple) and any(map(is_pil_image, source)):
            return torch.cat([self.convert(part, invert=invert, name=name) for part in source])
        if is_pil_image(source) and self.normalises:
            return self._normalised(source, invert, name)
        x = as_tensor(self._on_backdrop(source, name), name, kind=kind).cpu()
        if kind.is_images and shape[0] == 1 and x.ndim in (2, 3) and x.shape[-2:] == shape[1:]:
            x = x if tuple(x.shape) == shape else x.unsqueeze(-3)  # grey images without a channel axis
        x = x.unsqueeze(0) if tuple(x.shape) == shape else x
        if x.shape[1:] == shape and not len(x):
            raise ValueError(f"`{name}` must have at least one element; got none.")
        if x.shape[1:] != shape:
            wanted = ", ".join(map(str, shape))
            hint = " Files and PIL images are converted to this shape." * kind.is_images
            raise ValueError(f"`{name}` must have shape (n, {wanted}); got {tuple(x.shape)}.{hint}")
        check_element_type(x, kind, source, name)
        if self.model.imputer is None:
            kind.check(x, name)
        else:
            check_not_all_missing(x.isnan().numpy(), name)
            kind.check(x.masked_fill(x.isnan(), 0.0), name)
        inverted = invert or (is_pil_image(source) and self._inverts(invert))
        return kind.levels - 1 - x if inverted and kind.is_images else x

    def _on_backdrop(self, source: ArrayLike, name: str) -> ArrayLike:
        """The source; a PIL image as a tensor if transparent pixels have one colour in all images."""
        kind = self.model.kind
        if not (self.backdrop and isinstance(kind, Images) and is_pil_image(source)):
            return source
        return image_as_tensor(source, kind.size, kind.is_grey, kind.levels, name, self.backdrop)

    def _normalised(self, image: Any, invert: bool | None, name: str) -> Tensor:
        """A PIL image as a drawing (1, *shape)."""
        kind = cast(Images, self.model.kind)
        pixels = named_image_to_array(image, None, True, name)
        drawing = normalise_drawings(pixels[None], kind.size, invert=self._polarity(invert))
        return rescale_levels(torch.from_numpy(drawing), 256, kind.levels)

    @cached_property
    def familiarity(self) -> Familiarity:
        """A check of whether images look like the training images."""
        return Familiarity(self.model, (self.about or {}).get("familiarity"))

    def warn_if_unfamiliar(
        self, *images: Tensor, what: str = "these images are", remedy: str = "`invert`"
    ) -> None:
        """Warn if images are unlike the training images, as predictions for them are still confident."""
        for some in images:
            if reason := self.familiarity.check(some):
                advice = "Check their contrast and their scale; other images need a model of their own."
                if self.normalises:  # polarity, contrast and scale are normalised, too
                    advice = "The model takes single line drawings; other images need a model of their own."
                elif self.familiarity.may_be_inverted(some):
                    advice = (
                        f"Check whether the images must be inverted ({remedy}), their contrast and their "
                        "scale."
                    )
                warnings.warn(
                    f"{what} unlike the training images: {reason}. Predictions for them are confident, "
                    f"but often wrong. {advice}",
                    UnfamiliarDataWarning,
                    stacklevel=3,
                )
                return

    @property
    def _table_format(self) -> str:
        return self.recipe.data.format if self.recipe else ""

    def _polarity(self, invert: bool | None) -> bool | None:
        """Whether the ink of drawings is dark; None to detect it in each image."""
        return self._inverts(None) or None if invert is None else invert

    def _inverts(self, invert: bool | None) -> bool:
        return (self.recipe is not None and self.recipe.data.invert) if invert is None else invert


def are_paths(source: object) -> bool:
    """Whether a source is a path, or a list of paths."""
    if isinstance(source, str | Path):
        return True
    return isinstance(source, list | tuple) and all(isinstance(part, str | Path) for part in source)


def warn_of_unreadable(reader: ElementReader) -> None:
    """Warn about what a reader skipped."""
    if reader.skipped:
        warnings.warn(
            f"skipped {len(reader.skipped)} unreadable element{'s' * (len(reader.skipped) > 1)}, first "
            f"{reader.skipped[0]}.",
            stacklevel=3,
        )
