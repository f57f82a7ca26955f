"""Calibration of a trained model on held-out groups, kept beside the model."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator

from bruno.checks import check_rate
from bruno.data import Examples, SetSampler
from bruno.data.archives import file_stamp
from bruno.files import inside
from bruno.recipe_data import imputed, is_path
from bruno.tasks.anomaly import density_floor, reference_density
from bruno.tasks.batch_criteria import BatchCriterion
from bruno.tasks.calibration import GroupCalibration, fixed_cutoffs
from bruno.tasks.conformal import GroupScores
from bruno.tasks.contamination import Contamination, measure_contamination
from bruno.tasks.groups import Groups
from bruno.tasks.planted_outliers import measure_planted_outliers
from bruno.tasks.progress import Progress
from bruno.tasks.robust_evidence import Cutoffs
from bruno.trained.data import Data, TrainedData, data_label, is_own
from bruno.weights import pretrained_calibration_path

_log = logging.getLogger(__name__)

CALIBRATION_FILE = "calibration.safetensors"  # in the folder of the results of a model
_FEW_GROUPS = 100  # with fewer test classes of user data, the validation classes are used, too
_TOO_FEW_GROUPS = 5  # with fewer, warn: they hardly show how groups differ
_MAX_GROUPS = 200  # of images, which take long to encode
_OTHER_IMAGES, _OTHER_ROWS = (50, 20), (100, 60)  # at most: groups that set the cutoffs, elements of each
_PLANTED_IN = 400  # images; outliers are planted among them to choose the criterion for batches
_SET_ASIDE = 4  # without training classes, every fourth group sets the cutoffs instead


class CleanGroups(NamedTuple):
    """Groups to calibrate on, and whether all of them are new to the model."""

    examples: Examples
    unseen: bool


class CalibrationSets(NamedTuple):
    """Groups to calibrate on, other groups that set the cutoffs, and whether p-values can be exact."""

    clean: Examples
    other: Examples
    unseen: bool


@dataclass(frozen=True, eq=False)
class CalibrationReport:
    """A calibration, and its file.

    Attributes:
        calibration: the calibration.
        path: where it is kept.
        contamination: for rows, signs of faults in the groups; None for images.
        advice: the command that calibrates on clean data.
    """

    calibration: GroupCalibration
    path: Path
    contamination: Contamination | None = None
    advice: str = ""


class CalibrationJobs(TrainedData):
    """The calibration of a trained model."""

    @property
    def calibration_path(self) -> Path:
        """The file of the calibration: in the run folder, or in the folder of the results of a model.

        Raises ValueError if it is a link that leads out of the folder.
        """
        return inside(self.folder, CALIBRATION_FILE)

    def calibrate(
        self,
        data: Data | None = None,
        *,
        group: str | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> CalibrationReport:
        """Calibrate on clean groups, and keep the calibration with the model.

        Afterwards, the p-value of an element compares its score with the scores of these groups, which are
        judged in the same way as a new set. The groups must have no outliers, must resemble the sets that
        will be judged, and must not be training data.

        Args:
            data: groups that the model was not trained on: a dataset, class folders, or a CSV or a frame with
                the group column. By default, the unseen classes of the model's own data.
            group: the group column of `data`, if it has another name than in training; not for the table that
                the model was trained on.
            invert: turn dark ink into bright ink in `data`; as in training by default.
            skip_bad: skip files and rows of `data` that cannot be read.
            seed: seed of the random orders of the groups.
            progress: called as progress(done, total), in elements.
        """
        path = self.calibration_path  # checked before the calibration, which may take a long time
        generator, contamination = self._generator(seed), None
        sets = self._calibration_sets(data, invert, skip_bad, generator, group)
        calibration = self._calibrated_with(sets, data, generator, seed, progress)
        _warn_if_few(calibration)
        if not self.model.kind.is_images:
            contamination = measure_contamination(
                self.model, calibration.cutoffs, sets.other, sets.clean, generator=generator
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        calibration.save(path)
        self._known_calibrations.clear()
        return CalibrationReport(calibration, path, contamination, self.calibration_command)

    def calibration(
        self,
        data: Data | None = None,
        *,
        invert: bool | None = None,
        skip_bad: bool = False,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> GroupCalibration:
        """A calibration on `data` or, by default, the one that is kept with the model.

        A pretrained model comes with a calibration on characters that it was not trained on. A model that has
        no calibration is calibrated on the unseen classes of its own data.
        """
        if data is None and (ready := self.ready_calibration()) is not None:
            return ready
        if data is None:
            try:
                found = self._known(
                    f"seed {seed}", lambda: self._calibrated_on(None, None, False, seed, progress)
                )
            except ValueError as error:
                raise ValueError(
                    "the model must have a calibration, as its own data cannot be used to calibrate: "
                    f"{error} Calibrate it: {self.calibration_command}"
                ) from error
        else:
            found = self._calibrated_on(data, invert, skip_bad, seed, progress)
        _warn_if_few(found)
        return found

    def ready_calibration(self) -> GroupCalibration | None:
        """The calibration that is kept with the model or comes with it; None if there is neither."""
        return self.kept_calibration() or self._pretrained_calibration()

    def kept_calibration(self) -> GroupCalibration | None:
        """The calibration that `calibrate` kept with the model; None if there is none."""
        path = self.calibration_path
        if not path.is_file():
            return None
        try:
            return self._known(file_stamp(path), lambda: GroupCalibration.load(path, self.model))
        except ValueError as error:
            warnings.warn(f"the calibration is ignored: {error}", stacklevel=3)
            return None

    def _pretrained_calibration(self) -> GroupCalibration | None:
        """The calibration that comes with a pretrained model; None for other models."""
        if not self.is_pretrained:
            return None
        path = pretrained_calibration_path(self.pretrained)
        if not path.is_file():
            return None
        found = self._known(path.name, lambda: GroupCalibration.load(path, self.model))
        _log.info("calibrated on %s. For your own data: bruno calibrate", found.data)
        return found

    @cached_property
    def _known_calibrations(self) -> dict[str, GroupCalibration]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        """The state without calibrations, which hold data: other processes get the model without them."""
        return {name: value for name, value in vars(self).items() if name != "_known_calibrations"}

    def _known(self, name: str, make: Callable[[], GroupCalibration]) -> GroupCalibration:
        """A calibration that is made or read once: either takes longer than judging a set."""
        if name not in self._known_calibrations:
            self._known_calibrations[name] = make()
        return self._known_calibrations[name]

    def _calibrated_on(
        self,
        data: Data | None,
        invert: bool | None,
        skip_bad: bool,
        seed: int,
        progress: Progress | None,
    ) -> GroupCalibration:
        generator = self._generator(seed)
        sets = self._calibration_sets(data, invert, skip_bad, generator)
        return self._calibrated_with(sets, data, generator, seed, progress)

    def _calibration_sets(
        self,
        data: Data | None,
        invert: bool | None,
        skip_bad: bool,
        generator: Generator,
        group: str | None = None,
    ) -> CalibrationSets:
        clean, unseen = self._clean_groups(data, invert, skip_bad, group)
        clean = _with_two_elements(clean)
        if self.model.kind.is_images:
            clean = _subsample(clean, (_MAX_GROUPS, None), generator)
        other = self._other_groups()
        if other is None and len(clean.names) >= 2 * _SET_ASIDE:
            every = range(len(clean.names))
            other = clean.of_classes(i for i in every if i % _SET_ASIDE == 0)
            clean = clean.of_classes(i for i in every if i % _SET_ASIDE)
            _log.info(
                "%d groups: %d for p-values, %d for the cutoffs of the evidence",
                len(every),
                len(clean.names),
                len(other.names),
            )
        return CalibrationSets(clean, clean if other is None else other, unseen and other is not None)

    def _calibrated_with(
        self,
        sets: CalibrationSets,
        data: Data | None,
        generator: Generator,
        seed: int,
        progress: Progress | None,
    ) -> GroupCalibration:
        clean, other, unseen = sets
        floor, reference = self._densities(clean, other, generator)
        encode = partial(
            Groups.of, self.model, floor=floor, generator=generator, ordered=self.has_consecutive_sets
        )
        cutoffs = fixed_cutoffs(self.model, encode(other, reference=reference))
        criterion = self._batch_criterion(cutoffs, other, generator)
        groups = encode(clean, reference=reference, keep_images=criterion == "patches", progress=progress)
        own_name = self.recipe.data.name if self.recipe else "unknown data"
        name = own_name if data is None else data_label(data)
        return GroupCalibration(
            self.model,
            groups,
            cutoffs,
            floor,
            data=name,
            unseen=unseen,
            seed=seed,
            reference=reference,
            criterion=criterion,
        )

    def _batch_criterion(self, cutoffs: Cutoffs, other: Examples, generator: Generator) -> BatchCriterion:
        """The criterion for batches: the better one at finding outliers that are planted in `other`."""
        if not self.model.kind.is_images:
            return "score"
        try:
            found = measure_planted_outliers(
                self.model, cutoffs, other, images=_PLANTED_IN, generator=generator
            )
        except ValueError:  # too few classes, or too few images of a class
            return "score"
        return found.criterion

    def _clean_groups(
        self,
        data: Data | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
        group: str | None = None,
    ) -> CleanGroups:
        """The groups to calibrate on.

        From the model's own data, these are the classes of the unseen split or, if user data has few of
        them, all classes that were not trained on. Training classes are used only if there are no others:
        the model fits them better than new classes, so thresholds from them flag too many new elements.
        """
        own = is_own(data)
        if group and (not own or self.kind.is_images):
            raise ValueError(f"`group` is for tables of your own, named by `data`; got {group!r}. Omit it.")
        if data is not None and not (self.recipe and _is_same_path(data, self.recipe.data.name)):
            split, invert = (None, invert) if own else (self.unseen, None)
            selected = self._select(
                split, data, invert=invert, impute=False, group=group, skip_bad=skip_bad or None
            )
            return CleanGroups(selected.examples, True)
        if group and group != self.group:
            raise ValueError(
                f"`group` must be omitted for {data}, which the model was trained on; got {group!r}."
            )
        clean = self._select(self.unseen, impute=False).examples
        if self.lacks_its_data:  # the built-in characters take its place, which the model has not seen
            return CleanGroups(clean, True)
        assert self.recipe is not None
        trained_on = set(self._select(self.recipe.data.split, impute=False).examples.names)
        few = len(clean.names) < _FEW_GROUPS and is_path(self.recipe.data.name)
        if data is not None or few:
            new = self._select("all", impute=False).examples.without(trained_on)
            clean = clean if new is None else new
        return CleanGroups(clean, trained_on.isdisjoint(clean.names))

    def _other_groups(self) -> Examples | None:
        """Training classes, which set the cutoffs; None if they cannot be read."""
        if self.recipe is None or self.lacks_its_data:
            return None
        try:
            examples = self._select(self.recipe.data.split, impute=False).examples
        except (ValueError, OSError):
            return None
        most = _OTHER_IMAGES if self.model.kind.is_images else _OTHER_ROWS
        return _subsample(_with_two_elements(examples), most, self._generator(0))

    def _densities(self, clean: Examples, other: Examples, generator: Generator) -> tuple[float, float]:
        """The log p(x) below which a row is out-of-distribution, and the log p(x) of a typical row.

        Both are −∞ for images, as log p(x) of an image mostly measures how complex it is.
        """
        if self.model.kind.is_images:
            return -math.inf, -math.inf
        known, new = (
            SetSampler(imputed(examples, self.model), device=self.device) for examples in (other, clean)
        )
        return (
            density_floor(self.model, known, generator=generator, clean=new),
            reference_density(self.model, known, generator=generator),
        )


def _warn_if_few(found: GroupCalibration) -> None:
    """Warn if a calibration rests on a few classes."""
    classes, elements = len(found.groups.names), len(found.groups.labels)
    if classes < _TOO_FEW_GROUPS:
        warnings.warn(
            f"calibrated on {classes} class{'es' * (classes > 1)} with {elements} elements, too few: rates "
            "are estimated, and depend on which classes these are. The fraction of clean elements that is "
            "flagged may be several times higher or lower than requested. Rank elements by score, calibrate "
            "on more classes (`bruno calibrate`), or set a threshold.",
            stacklevel=4,
        )


def report_basis(
    scores: GroupScores, rate: float, groups: int, position: int, false_discovery_rate: float | None = None
) -> None:
    """Log the lowest rate that is exact up to a position, and whether the requested rate is one of these.

    With a false-discovery rate, the lowest p-value of a batch is compared with that rate divided by the
    number of elements, which is position + 1.
    """
    check_rate("rate", rate)
    basis = scores.basis(position, rate)
    asked = f"{100 * rate:g} % is {basis}{' there' * (basis == 'exact')}"
    if false_discovery_rate is not None:
        basis = scores.basis(position, false_discovery_rate / (position + 1))
        asked = f"p-values for a false-discovery rate of {100 * false_discovery_rate:g} % are {basis}"
    smallest = scores.smallest_exact(position)
    if smallest < 1:
        found = (
            f"{scores.groups_at(position)} groups: rates of at least {100 * smallest:.1f} % are exact in "
            f"sets of up to {position + 1} elements"
        )
    else:
        smaller = f", smaller than a set of {position + 1}" * (position > int(scores.positions[-1]))
        found = f"{groups} group{'s' * (groups > 1)}{smaller}: no rate is exact"
    _log.info("%s; %s", found, asked)


def _is_same_path(first: Data, second: str) -> bool:
    return isinstance(first, str | Path) and os.path.realpath(first) == os.path.realpath(second)


def _with_two_elements(examples: Examples) -> Examples:
    """The classes with at least two elements; raises ValueError if there are none."""
    if int(examples.counts.max()) < 2:
        raise ValueError(
            f"`data` must have a class of at least 2 elements; got {len(examples.names)} of one element. "
            "Name the group column, or add elements."
        )
    return examples.with_at_least(2)


def _subsample(examples: Examples, most: tuple[int, int | None], generator: Generator) -> Examples:
    """A random subset of classes and of their elements; `most` limits the classes, and elements of each."""
    groups, elements = most
    if len(examples.names) > groups:
        chosen = torch.randperm(len(examples.names), generator=generator, device=generator.device)[:groups]
        examples = examples.of_classes(sorted(chosen.tolist()))
    if elements is None or int(examples.counts.max()) <= elements:
        return examples
    keep = torch.zeros(len(examples), dtype=torch.bool)
    for members in examples.by_class():
        order = torch.randperm(len(members), generator=generator, device=generator.device).cpu()
        keep[members[order[:elements]]] = True
    return examples.at(keep)
