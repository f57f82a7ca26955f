"""Outlier detection by a trained model: calibrated detectors, batches, streams, and how well it works."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import Generator

from bruno.data import Element, Examples, SetSampler
from bruno.kinds import Kind
from bruno.recipe_data import is_path
from bruno.tasks.anomaly import (
    Detector,
    StreamSummary,
    calibrate,
    calibrate_batch,
    density_floor,
    judge_batch,
)
from bruno.tasks.anomaly_benchmark import Contamination, measure_anomaly
from bruno.tasks.progress import Progress
from bruno.trained.data import Source, TrainedData, available_set_size
from bruno.trained.watch import Watch

_log = logging.getLogger(__name__)
T = TypeVar("T")

_RATE = 0.01  # false alarms
_SETS = 500  # to calibrate or measure on
_SET_SIZE = 20
_FEW_CLASSES = 10  # too few to calibrate on
_SYNTHETIC_LENGTH, _SYNTHETIC_OUTLIERS = 80, 0.1  # of a stream made from the data


@dataclass(frozen=True, eq=False)
class BatchJudgement:
    """The judgements of a batch, each element given all others, in the order of the batch."""

    summary: StreamSummary
    kind: Kind


@dataclass(frozen=True)
class AnomalyEvaluation:
    """How well outliers are found, and the name of the data it was measured on."""

    data: str
    contaminations: tuple[Contamination, ...]


class DetectionJobs(TrainedData):
    """The outlier-detection jobs of a trained model."""

    def detector(
        self,
        *,
        rate: float = _RATE,
        threshold: float | None = None,
        keep_out: bool = False,
        sets: int = _SETS,
        set_size: int = _SET_SIZE,
        data: str | None = None,
        invert: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Detector:
        """A detector of outliers in a stream, calibrated on sets of unseen classes.

        Args:
            rate: false-alarm rate, the fraction of clean elements that are flagged.
            threshold: flag scores below this instead of calibrating.
            keep_out: exclude outliers from the evidence.
            sets: number of clean sets to calibrate on.
            set_size: size of these sets; later elements of a stream use the last threshold.
            data: calibrate on this instead of the model's own data.
            invert: turn dark ink into bright ink in `data`, if it is user data; as in training by default.
            seed: seed of the sets.
            progress: called as progress(done, total).
        """
        if threshold is not None:
            return Detector(self.model, threshold, keep_out=keep_out)
        clean, generator = self._clean_examples(data, invert), self._generator(seed)
        thresholds = self._calibrated(calibrate, clean, rate, sets, set_size, generator, progress)
        _log.info(
            "thresholds: %+.1f after one element, %+.1f after %d",
            thresholds.by_count[0],
            thresholds.by_count[-1],
            len(thresholds.by_count),
        )
        return Detector(self.model, thresholds, keep_out=keep_out, floor=self._floor(clean, generator))

    def judge_batch(
        self,
        batch: Source | Iterable[Element],
        *,
        rate: float = _RATE,
        threshold: float | None = None,
        sets: int = _SETS,
        data: str | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> BatchJudgement:
        """Judge each element of a complete batch given all others, as one set.

        Args:
            batch: files, folders, arrays or elements; at least two elements.
            rate: false-alarm rate.
            threshold: flag scores below this instead of calibrating.
            sets: number of clean sets, as large as the batch, to calibrate on.
            data: calibrate on this instead of the model's own data.
            invert: turn dark ink into bright ink; as in training by default.
            skip_bad: skip files that cannot be read.
            seed: seed of the sets.
            progress: called as progress(done, total).
        """
        x, names, _ = self.read(batch, invert=invert, skip_bad=skip_bad)
        if len(x) < 2:
            raise ValueError(f"`batch` must have at least two elements; got {len(x)}.")
        floor = -math.inf
        if threshold is None:
            clean, generator = self._clean_examples(data, invert), self._generator(seed)
            threshold = self._calibrated(calibrate_batch, clean, rate, sets, len(x), generator, progress)
            floor = self._floor(clean, generator)
        summary = StreamSummary(latest=None)
        judged = judge_batch(self.model, x.to(self.device), threshold, floor)
        for name, element, judgement in zip(names, x, judged, strict=True):
            summary.add(name, element, judgement)
        return BatchJudgement(summary, self.model.kind)

    def watch(
        self,
        stream: Source | Iterable[Element],
        detector: Detector | Callable[[], Detector] | None = None,
        *,
        typical: Source | None = None,
        state: str | Path | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
    ) -> Watch:
        """Watch a stream: iterate over its judged elements.

        Args:
            stream: files, folders, arrays or elements.
            detector: as from `detector`, or a function that returns it, called once all arguments are valid;
                by default calibrated at a false-alarm rate of 1 %.
            typical: elements to condition on before the stream begins.
            state: a file to resume from, if it exists, and to save the posterior to.
            invert: turn dark ink into bright ink; as in training by default.
            skip_bad: skip files that cannot be read.
        """
        detector = self.detector if detector is None else detector
        return Watch(self, stream, detector, typical=typical, state=state, invert=invert, skip_bad=skip_bad)

    def synthetic_stream(
        self,
        *,
        split: str | None = None,
        data: str | None = None,
        invert: bool | None = None,
        seed: int = 0,
    ) -> list[Element]:
        """A set of one class in which a tenth of the elements are of other classes."""
        selected = self._select(split, data, invert, min_classes=2)
        sampler = SetSampler(selected.examples, device=self.device)
        size = min(_SYNTHETIC_LENGTH, sampler.min_count)
        sets = sampler.contaminated(1, size, _SYNTHETIC_OUTLIERS, self._generator(seed))
        return [
            Element(f"{i}, of another class" if outlier else str(i), x)
            for i, (x, outlier) in enumerate(zip(sets.x[0], sets.outlier[0].tolist(), strict=True), start=1)
        ]

    def measure_anomaly(
        self,
        *,
        sets: int = _SETS,
        set_size: int = _SET_SIZE,
        split: str | None = None,
        data: str | None = None,
        invert: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> AnomalyEvaluation:
        """Area under ROC and average precision on contaminated sets, compared with other methods."""
        selected = self._select(split, data, invert, min_classes=2)
        found = measure_anomaly(
            self.model,
            selected.examples,
            set_size=available_set_size(selected.examples, set_size, least=2),
            sets=sets,
            rotations=self.rotations,
            generator=self._generator(seed),
            progress=progress,
        )
        return AnomalyEvaluation(selected.name, found)

    def _clean_examples(self, data: str | None, invert: bool | None) -> Examples:
        """The examples for calibration: unseen classes.

        A table may have only a few of these, which say little about others. Then all sets are used: the small
        model of a table fits its training sets hardly better than others.
        """
        unseen = None if is_path(data) else self.unseen
        clean = self._select(unseen, data, invert if is_path(data) else None).examples
        if data is not None or self.model.kind.is_images or len(clean.names) >= _FEW_CLASSES:
            return clean
        every = self._select("all", None, None).examples
        if len(every.names) == len(clean.names):
            return clean
        _log.info(
            "%d of %d sets were held out, too few: calibrating on all", len(clean.names), len(every.names)
        )
        return every

    def _calibrated(
        self,
        fit: Callable[..., T],
        clean: Examples,
        rate: float,
        sets: int,
        set_size: int,
        generator: Generator,
        progress: Progress | None,
    ) -> T:
        """The result of `calibrate` or `calibrate_batch` on clean sets."""
        if len(clean.names) < _FEW_CLASSES:
            warnings.warn(
                f"calibrated on {len(clean.names)} class{'es' * (len(clean.names) > 1)} with {len(clean)} "
                "elements, too few: the false-alarm rate may be far off. Name other data to calibrate on, or "
                "set a threshold.",
                stacklevel=3,
            )
        return fit(
            self.model,
            SetSampler(clean, device=self.device),
            rate=rate,
            set_size=available_set_size(clean, set_size, least=2),
            sets=sets,
            generator=generator,
            progress=progress,
        )

    def _floor(self, clean: Examples, generator: Generator) -> float:
        """The log p(x) below which a row is out-of-distribution; images can be judged however unlikely."""
        if self.model.kind.is_images:
            return -math.inf
        return density_floor(self.model, SetSampler(clean, device=self.device), generator=generator)
