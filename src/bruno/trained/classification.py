"""Classification of user elements into user classes by a trained model."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bruno.arrays import is_frame
from bruno.checks import check_omitted, check_rate
from bruno.data import Examples
from bruno.data.archives import is_hidden
from bruno.data.sampling import seeded_generator
from bruno.recipe_data import imputed
from bruno.tasks.calibration import GroupCalibration
from bruno.tasks.classification import Classification, classify, with_p_values
from bruno.tasks.episodes import FewShotProtocol
from bruno.tasks.temperature import FittedTemperature, fit_temperature, fit_temperature_to_groups
from bruno.text import numbered
from bruno.trained.base import Source
from bruno.trained.calibration import CalibrationJobs
from bruno.trained.data import Data, is_own

_log = logging.getLogger(__name__)

_NONE_RATE = 0.01
_CALIBRATION_EPISODES = 600  # a temperature is fitted to at least this many


class ClassificationJobs(CalibrationJobs):
    """The classification job of a trained model."""

    def classify(
        self,
        queries: Source,
        support: Source | Mapping[str, Source] | Sequence[Source],
        *,
        prior: Sequence[float] | None = None,
        temperature: float | None = None,
        calibrate: bool = False,
        views: bool = False,
        data: Data | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
        none_rate: float | None = None,
        seed: int = 0,
    ) -> Classification:
        """Probabilities of your own classes for your own elements, given a few examples of each class.

        Args:
            queries: elements to classify: files, folders, arrays.
            support: examples of each class by its name, or in a list, which numbers the classes from 1;
                or a folder of class folders; or a table with the group column: a CSV, Parquet or a frame.
            prior: probability of each class, in any unit; uniform by default.
            temperature: divides the log-probabilities. By default, it is fitted to the groups of the model's
                calibration; it is 1 if there is no calibration, or if the calibration keeps only scores.
            calibrate: fit the temperature on the unseen classes of the model's own data instead.
            views: average the scores over the eight rotations and reflections of square images, for a model
                trained on rotated and mirrored classes.
            data: with `calibrate`, the dataset or path to fit the temperature on.
            invert: turn dark ink into bright ink; as in training by default.
            skip_bad: skip files that cannot be read.
            none_rate: a query is rejected, as it belongs to none of the classes, if its p-value is at most
                this for every class. A query of one of the classes is rejected with at most this probability.
                By default, the rate is 1 % if the model has a calibration, from `Trained.calibrate` or with a
                pretrained model; without a calibration, nothing is rejected. If a rate is given and there is
                no calibration, the model is calibrated on its own unseen classes.
            seed: seed of the episodes that the temperature is fitted to.
        """
        check_rate("none_rate", _NONE_RATE if none_rate is None else none_rate)
        if calibrate:
            check_omitted("`calibrate` fits the temperature;", temperature=temperature)
        elif data is not None:
            raise ValueError("`data` is for calibration; omit it, or add `calibrate`.")
        reading: dict[str, Any] = {"invert": invert, "skip_bad": skip_bad}
        sets = self._support(support, reading)
        if len(sets) < 2:
            raise ValueError(f"`support` must have at least two classes; got {len(sets)}.")
        x, names, _ = self._read(queries, name="queries", **reading)
        self.warn_if_unfamiliar(torch.cat(list(sets.values())), x)
        calibration = self.ready_calibration() if none_rate is None else self.calibration(seed=seed)
        if calibrate:
            temperature = self._fitted_temperature(sets, data, invert, views, seed)
        elif temperature is None:
            temperature = 1.0 if calibration is None else self._kept_temperature(calibration, sets, seed)
        found = classify(self.model, sets, x, names=names, prior=prior, temperature=temperature, views=views)
        return found if calibration is None else with_p_values(found, calibration, none_rate or _NONE_RATE)

    def _support(
        self, support: Source | Mapping[str, Source] | Sequence[Source], reading: dict[str, Any]
    ) -> dict[str, Tensor]:
        keyed = dict(enumerate(support)) if isinstance(support, list | tuple) else support
        if isinstance(keyed, Mapping):
            sets = [self._read(some, name=f"support[{key}]", **reading).x for key, some in keyed.items()]
            names = numbered(len(sets)) if isinstance(support, list | tuple) else tuple(map(str, keyed))
            return dict(zip(names, map(self.model.impute, sets), strict=True))
        if is_frame(support):
            examples = self._frame_examples(support, reading["skip_bad"], "support")
            return _by_class(imputed(examples, self.model))
        if not isinstance(support, str | Path):
            raise TypeError(
                "`support` must be examples by class name, a list with the examples of each class, the path "
                f"of class folders or of a table, or a frame; got {type(support).__name__}."
            )
        path = Path(support)
        if path.is_file():
            skip_bad = reading["skip_bad"] or None  # or as in training
            selected = self._select(data=str(path), invert=reading["invert"], skip_bad=skip_bad)
            return _by_class(selected.examples)
        inside = sorted(path.iterdir()) if path.is_dir() else []
        folders = [folder for folder in inside if folder.is_dir() and not is_hidden(folder.name)]
        if len(folders) < 2:
            found = f"has {len(folders)}" if path.exists() else "does not exist"
            raise ValueError(f"`support` must be a folder of at least two class folders; {path} {found}.")
        return {folder.name: self.model.impute(self._read(folder, **reading).x) for folder in folders}

    def _kept_temperature(self, calibration: GroupCalibration, sets: dict[str, Tensor], seed: int) -> float:
        """The temperature for the ways and shots of the support, fitted to groups of the calibration."""
        found = fit_temperature_to_groups(
            self.model,
            calibration.groups,
            way=len(sets),
            shot=min(map(len, sets.values())),
            generator=seeded_generator(seed),
        )
        if found is None:
            return 1.0
        _log_temperature(found)
        return found.temperature

    def _fitted_temperature(
        self, sets: dict[str, Tensor], data: Data | None, invert: bool | None, views: bool, seed: int
    ) -> float:
        """The temperature for the ways and shots of the support, fitted to episodes of unseen classes."""
        split, invert = (None, invert) if is_own(data) else (self.unseen, None)
        examples = self._select(split, data, invert=invert, min_classes=2).examples
        rotated = len(examples.names) * (4 if self.rotations else 1)
        protocol = FewShotProtocol(
            ways=(len(sets),),
            shots=(min(map(len, sets.values())),),
            trials=max(2, _CALIBRATION_EPISODES // rotated),
            rotations=self.rotations,
            views=views,
        ).limited_to(examples)
        found = fit_temperature(self.model, examples, protocol, generator=seeded_generator(seed))
        if not found.mistakes:
            warnings.warn(
                f"no mistakes in {found.episodes} episodes: no temperature is fitted, and probabilities may "
                f"be overconfident. Mistakes are rarer than about {300 / found.episodes:.2g} %. Calibrate on "
                "data that are harder to tell apart (`data`).",
                stacklevel=4,
            )
        _log_temperature(found)
        return found.temperature


def _by_class(examples: Examples) -> dict[str, Tensor]:
    """The elements of each class by its name."""
    return {
        name: examples.elements[members]
        for name, members in zip(examples.names, examples.by_class(), strict=True)
    }


def _log_temperature(found: FittedTemperature) -> None:
    _log.info(
        "temperature %.2f, from %d episodes with %d mistakes",
        found.temperature,
        found.episodes,
        found.mistakes,
    )
