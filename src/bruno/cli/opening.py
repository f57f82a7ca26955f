"""A trained model as the commands open it, with the data it is of, or those that take their place."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from bruno.checkpoint import load, read_about
from bruno.cli.options import choose_device, console, keep
from bruno.config import Recipe, from_dict, to_dict
from bruno.data import DATASETS, ElementReader, Examples, is_available, load_examples, load_path
from bruno.data.augmentation import downsample
from bruno.flow.preprocessing import Gaussianise
from bruno.model import Bruno
from bruno.reporting.results import Result
from bruno.training.run import Run
from bruno.weights import pretrained_names, pretrained_path

_UNLIKE = 3  # times as bright or as dark as what a model learnt
_SOME = 64  # images to tell by whether they surprise a model


def examples_of(recipe: Recipe, split: str, data_dir: Path | None, *, original: bool = False) -> Examples:
    """A split of a recipe's data; images in the size of its model, or in their original one."""
    data = recipe.data
    examples = load_examples(
        data.name,
        split,
        data_dir=data_dir,
        size=data.size or None,
        original=original,
        grey=not data.colour,
        group=data.group,
        columns=data.columns,
        skip_bad=data.skip_bad,
        min_count=recipe.train.min_count,
    )
    if examples.skipped:
        _say_skipped(examples.skipped)
    examples = examples.inverted() if data.invert else examples
    return examples.named(data.classes) if data.classes else examples


@cache  # once, however many splits of the same data are asked for
def _say_skipped(names: tuple[str, ...]) -> None:
    small = [name for name in names if re.search(r" \(only \d+\)$", name)]
    bad = [name for name in names if name not in small]
    said = [f"{len(bad)} that could not be used, first {bad[0]}"] if bad else []
    whole = f"{len(small)} whole class{'es' * (len(small) > 1)}"
    said += [f"{whole}, too small, first {small[0]}"] if small else []
    console.print(f"left out {', and '.join(said)}", soft_wrap=True)


@lru_cache(maxsize=1)  # of the one model that a command opens
def _most_bits_of_samples(model: Bruno) -> float:
    """Bits/dim of the least likely of some samples of a model."""
    noise = torch.Generator(model.process.mean.device).manual_seed(0)
    images = model.prior().sample(_SOME, generator=noise).images
    return model.bits_per_dim(model.prior().log_prob(images, noise)).max().item()


def say_unlike(what: str, unlike: str, invert: str = "--invert, --no-invert") -> None:
    """That images are unlike those of training, how, and what to see to."""
    console.print(
        f"{what} unlike those the model learnt: {unlike}. It will be sure of itself all the same. See "
        f"whether ink is dark ({invert}), contrast low, the pen thin or thick.",
        soft_wrap=True,
    )


@cache
def _say_drawn(name: str) -> None:
    console.print(
        f"{name} is not on this machine: all built-in characters take its place (`--data drawn`); "
        f"`--data {name}` downloads it, `--data-dir DIR` says where it is.",
        soft_wrap=True,
    )


def held_out_examples(recipe: Recipe, split: str, data_dir: Path | None) -> Examples:
    """A split to measure on: classes that a run was limited to are what it learnt from, in test all count."""
    limited = recipe.data.classes if split.startswith("train") else ()
    return examples_of(replace(recipe, data=replace(recipe.data, classes=limited)), split, data_dir)


def unseen_by(*recipes: Recipe) -> str:
    """The split whose classes none of these learns from."""
    return "test" if any(recipe.data.split == "trainval" for recipe in recipes) else "validation"


def chosen_split(split: str | None, data: str | None, *, unused: bool = False) -> str:
    """The one that is asked for, or test; none can be where all of one's own data are taken, or none is."""
    if split and (unused or is_own(data)):
        raise ValueError(
            f"`--split` is a part of a known data set, and none is split here; leave out {split}."
        )
    return split or "test"


def measured_on(split: str, data: str | None) -> str:
    """What results on a split, or on other data, are called."""
    if data is None:
        return split
    return Path(data).stem if is_own(data) or data == "drawn" else f"{data}-{split}"


def is_own(data: str | None) -> bool:
    """Whether --data names files of the user, not a set that the project knows."""
    return data is not None and data not in DATASETS


def length_of_sets(examples: Examples, wanted: int, least: int = 1) -> int:
    """As long as that, or as the smallest class lets them be, and then it is named."""
    min_count = int(examples.counts.min())
    short = f"{examples.names[int(examples.counts.argmin())]!r} has {min_count}"
    if min_count < least:
        raise ValueError(f"every class must have at least {least} elements for this; {short}. Leave it out.")
    if min_count < wanted:
        only = f"{min_count} element{'s' * (min_count != 1)}"
        console.print(f"sets are of {only}, not of {wanted}: {short}", soft_wrap=True)
    return min(wanted, min_count)


class Opened(NamedTuple):
    """A trained model, what it was made from if that is known, and where its results go."""

    model: Bruno
    recipe: Recipe | None
    folder: Path
    shipped: bool = False  # with the package

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.process.mean.device

    @property
    def rotations(self) -> bool:
        """Whether rotated classes counted as classes in training."""
        return self.recipe is not None and self.recipe.data.rotations

    @property
    def group(self) -> str:
        """The column that named the set of a row in training, if there was one."""
        return self.recipe.data.group if self.recipe else ""

    @property
    def columns(self) -> tuple[str, ...]:
        """What the numbers of a row were called in training, if they had names."""
        return self.recipe.data.columns if self.recipe else ()

    def inverts(self, invert: bool | None) -> bool:
        """Whether to invert one's own images: what is asked for, or else as in training."""
        return (self.recipe is not None and self.recipe.data.invert) if invert is None else invert

    def reader(self, *, invert: bool | None = None, skip_bad: bool = False) -> ElementReader:
        """Of elements as this model takes them."""
        return ElementReader(
            self.model.shape,
            self.model.levels,
            invert=self.inverts(invert),
            skip_bad=skip_bad,
            group=self.group,
            columns=self.columns,
        )

    @property
    def unseen(self) -> str:
        """The split whose classes had no part in training."""
        return unseen_by(self.recipe) if self.recipe else "validation"

    def warn_if_unlike(
        self, *images: Tensor, what: str = "these images are", invert: str = "--invert, --no-invert"
    ) -> None:
        """Say so if images are far from what the model learnt: its answers would not show it.

        `invert` is what turns dark ink into bright, or not.
        """
        if not self.model.levels:
            return
        for some in images:
            some = some.flatten(0, -4) if some.ndim > 3 else some.unsqueeze(0)
            if unlike := self._other_brightness(some) or self._other_kind(some) or self.brighter(some):
                say_unlike(what, unlike, invert)
                return

    def brighter(self, images: Tensor) -> str:
        """How some, or one, are far brighter than any is in training: paper, most likely.

        By itself an image may well be far darker than the others are, or less likely.
        """
        if (learnt := self._learnt_brightness) is None:
            return ""
        images = images if images.ndim > 3 else images.unsqueeze(0)
        means = images.mean((1, 2, 3), dtype=torch.double) / self.model.levels
        places = (means > learnt * _UNLIKE).nonzero().flatten().tolist()
        if not places:
            return ""
        which = f"{len(places)} of {len(images)}, first number {places[0] + 1}, with " * (len(images) > 1)
        return f"{which}a brightness of {means[places[0]]:.0%}, there {learnt:.0%}"

    @property
    def _learnt_brightness(self) -> float | None:
        """The mean share of white in training, if the model knows: of images on a bell."""
        if not isinstance(self.model.preprocessing, Gaussianise):
            return None
        shares = self.model.preprocessing.shares
        return (shares * torch.arange(len(shares), device=shares.device)).sum().item() / len(shares)

    def _other_brightness(self, images: Tensor) -> str:
        """How images are far brighter or darker than in training, on average."""
        learnt, mean = self._learnt_brightness, images.mean(dtype=torch.double).item() / self.model.levels
        if learnt is None or learnt / _UNLIKE < mean < learnt * _UNLIKE:
            return ""
        return f"a brightness of {mean:.0%}, there {learnt:.0%}"

    @torch.no_grad()
    def _other_kind(self, images: Tensor) -> str:
        """How images surprise a model more, on average, than any of some samples of its own does."""
        model, noise = self.model, torch.Generator(self.device).manual_seed(0)
        some = images[:: math.ceil(len(images) / _SOME)].to(self.device)
        size = (model.shape[-2], model.shape[-1])
        some = some if some.shape[-2:] == size else downsample(some, size)
        mean = model.bits_per_dim(model.prior().log_prob(some, noise)).mean().item()
        most = _most_bits_of_samples(model)
        return f"{mean:.1f} bits/dim, samples of its own at most {most:.1f}" if mean > most else ""

    def at_hand(self, data: str | None, data_dir: Path | None) -> str | None:
        """The other data asked for, None for the run's own.

        Who tries a model of the package need not have its data: without them it is given our own characters.
        """
        if (
            data is None
            and self.shipped
            and self.recipe
            and not is_available(self.recipe.data.name, data_dir)
        ):
            _say_drawn(self.recipe.data.name)
            return "drawn"
        return data

    def examples(
        self,
        split: str,
        data_dir: Path | None,
        data: str | None = None,
        *,
        invert: bool | None = None,
        classes: int = 1,
    ) -> Examples:
        """A split of the data of the run or of a named set, or all of one's own, in the model's levels.

        At least so many classes must be in it.
        """
        if invert and not is_own(data):
            raise ValueError(
                "`--invert` is for images of your own; name them, as --data DIR, or leave it out."
            )
        data = self.at_hand(data, data_dir)
        if data is not None:
            examples = self._others(split, data_dir, data, invert)
        elif self.recipe is not None:
            examples = held_out_examples(self.recipe, split, data_dir)
        else:
            raise ValueError(f"`--data` must be given: {self.folder} does not say what it was trained on.")
        if len(examples.names) < classes:
            raise ValueError(
                f"there must be at least {classes} classes for this; {data or f'the {split} split'} has "
                f"{len(examples.names)}. Name other data, as --data DIR, or a larger split."
            )
        examples = examples.with_levels(self.model.levels)
        if is_own(data):
            self.warn_if_unlike(examples.elements)
        return examples

    def _others(self, split: str, data_dir: Path | None, data: str, invert: bool | None) -> Examples:
        """Other data than the run's, if they are of the model's shape."""
        if data == "drawn" and not (self.recipe and self.recipe.data.name == data):
            split = "all"  # none of them is known to it
        examples = (
            self._own(Path(data), invert) if is_own(data) else load_examples(data, split, data_dir=data_dir)
        )
        if examples.shape != self.model.shape:
            raise ValueError(
                f"`--data` must be elements of the model's shape {self.model.shape}; "
                f"{data} has {examples.shape}."
            )
        return examples

    def _own(self, path: Path, invert: bool | None) -> Examples:
        """All of one's own class folders, npz or CSV, read as this model takes them."""
        size = self.model.shape[1:]
        own = load_path(
            path,
            size=(size[0], size[1]) if self.model.levels else None,
            grey=self.model.shape[0] == 1,
            group=self.group,
            columns=self.columns,
            skip_bad=self.recipe is not None and self.recipe.data.skip_bad,
        )
        if own.skipped:
            _say_skipped(own.skipped)
        return own.inverted() if self.inverts(invert) else own

    def keep(self, result: Result, seed: int) -> None:
        """Show a result and write it beside the model."""
        result = replace(result, model=self.model.fingerprint())
        keep(result, self.folder, to_dict(self.recipe or self.model.config), seed)


def open_model(run: str, checkpoint: str, device: str) -> Opened:
    """The model of a training run, one in a file of its own, or one that comes with the package."""
    device, folder = choose_device(device), folder_of(run)
    if is_run(run):
        return Opened(Run(folder).model(checkpoint, device), Run(folder).recipe, folder)
    path = model_file(run, checkpoint)
    model = load(path, device=device)
    made_from = read_about(path).get("recipe")
    recipe = from_dict(Recipe, made_from) if made_from else None
    return Opened(model, recipe, folder, shipped=_is_shipped(run))


def model_file(run: str, checkpoint: str) -> Path:
    """The file of a model that is named by its path, or that comes with the package."""
    path = pretrained_path(run) if _is_shipped(run) else Path(run)
    if not path.is_file():
        known = ", ".join(pretrained_names()) or "none yet"
        raise ValueError(f"`run` must be a run's folder, a model's file, or of {known}; there is no {run}.")
    if checkpoint != "last":
        raise ValueError(f"`--checkpoint` is for a run's folder; {run} is one model. Leave it out.")
    return path


def folder_of(run: str) -> Path:
    """Where the results of a model go."""
    if _is_shipped(run):
        return Path("runs") / f"pretrained-{run}"
    path = Path(run) if Path(run).name else Path(run).resolve()  # a folder named "." has another name
    if not path.is_file():
        return path
    return path.with_suffix("") if path.suffix else path.with_name(f"{path.name}-results")


def is_run(run: str) -> bool:
    """Whether a name is that of a folder, and not of a model of the package."""
    return Path(run).is_dir() and not _is_shipped(run)


def _is_shipped(run: str) -> bool:
    """Whether a name is that of a model of the package; a run in a folder of that name comes first."""
    return run in pretrained_names() and not Run(Path(run)).checkpoints
