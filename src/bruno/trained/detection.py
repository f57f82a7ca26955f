"""Outlier detection in streams by a trained model: calibrated detectors, watched streams, and evaluation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bruno.arrays import NumpyResult
from bruno.checks import check_omitted
from bruno.data import Element, SetSampler
from bruno.tasks.anomaly_benchmark import DetectionComparison, measure_anomaly
from bruno.tasks.detector import Detector
from bruno.tasks.progress import Progress
from bruno.trained.base import Source
from bruno.trained.batch import BatchJobs, checked_rate
from bruno.trained.calibration import report_basis
from bruno.trained.data import Data, available_set_size
from bruno.trained.states import WatchState
from bruno.trained.watch import Watch

_log = logging.getLogger(__name__)

_SETS = 500  # contaminated sets for each rate of an evaluation
_SET_SIZE = 20
_BETTER_AS_A_BATCH = (
    "distances between patches of pixels find outliers better than this model's scores, but need complete "
    "sets; if the sets are complete, judge them as a batch (bruno anomaly batch)"
)
_SYNTHETIC_LENGTH, _SYNTHETIC_OUTLIERS = 80, 0.1  # elements of a synthetic stream; fraction of outliers


@dataclass(frozen=True)
class AnomalyEvaluation(NumpyResult):
    """How well outliers are found, and the name of the data it was measured on."""

    data: str
    comparisons: tuple[DetectionComparison, ...]


class DetectionJobs(BatchJobs):
    """The outlier-detection jobs of a trained model."""

    def detector(
        self,
        *,
        rate: float | None = None,
        threshold: float | None = None,
        count_all: bool = False,
        within: bool = False,
        data: Data | None = None,
        invert: bool | None = None,
        skip_bad: bool = False,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> Detector:
        """A detector of outliers in a stream, calibrated on held-out groups.

        Args:
            rate: false-alarm rate, the fraction of clean elements that are flagged; 0.01 by default.
            threshold: flag scores below this instead of calibrating.
            count_all: keep outliers in the evidence; by default, they are excluded.
            within: prepare for `watch` with `within`, which needs `count_all` but no calibration.
            data: calibrate on this instead of the calibration that is kept with the model.
            invert: turn dark ink into bright ink in `data`, if it is user data; as in training by default.
            skip_bad: skip files and rows of `data` that cannot be read.
            seed: seed of the random orders of the groups.
            progress: called as progress(done, total).
        """
        if within:
            check_omitted("`within` needs no calibration;", threshold=threshold, data=data)
        rate = checked_rate(rate, threshold, data)
        if within and not count_all:
            raise ValueError("`within` needs `count_all`: ranks are exact only if no element is excluded.")
        if threshold is not None or within:
            limit = -math.inf if threshold is None else threshold
            return Detector(self.model, limit, rate=rate, count_all=count_all, within=within)
        found = self.calibration(data, invert=invert, skip_bad=skip_bad, seed=seed, progress=progress)
        scores = found.stream(count_all=count_all)
        position = min(_SET_SIZE - 1, int(scores.positions[-1]))
        report_basis(scores, rate, len(found.groups.names), position)
        if found.criterion == "patches":
            _log.info(_BETTER_AS_A_BATCH)
        return Detector.calibrated(found, rate=rate, count_all=count_all)

    def watch(
        self,
        stream: Source | Iterable[Element],
        detector: Detector | Callable[[], Detector] | None = None,
        *,
        typical: Source | None = None,
        state: str | Path | None = None,
        one_set: bool = False,
        group: str | None = None,
        within: bool = False,
        explain: bool = False,
        invert: bool | None = None,
        skip_bad: bool = False,
    ) -> Watch:
        """Watch a stream: iterate over its judged elements.

        Rows that name a group belong to the set of that group; other elements are one set. If training had no
        group column, a row is judged given the 19 before it.

        Args:
            stream: files, folders, arrays or elements, or an iterator of arrays or elements, read one by one.
            detector: a detector from `Trained.detector`, or a function that returns one and is called once
                all other arguments are valid; by default one calibrated at a false-alarm rate of 1 %.
            typical: elements to condition on before the stream begins.
            state: a file to resume from, if it exists, and to save the states of all sets to.
            one_set: judge all elements as one set, even if the model was trained on several.
            group: the group column, if it has another name than in training.
            within: judge by the rank of an element within its set, as with a detector that was made `within`.
                It needs a detector with `count_all`, and a set that was not trained on.
            explain: give the contributions of columns or patches to the scores of outliers.
            invert: turn dark ink into bright ink; as in training by default.
            skip_bad: skip files that cannot be read.
        """
        detector = self.detector if detector is None else detector
        return Watch(
            self,
            stream,
            detector,
            typical=typical,
            state=state,
            one_set=one_set,
            group=group,
            within=within,
            explain=explain,
            invert=invert,
            skip_bad=skip_bad,
        )

    def accept(self, names: str | Sequence[str], state: str | Path) -> WatchState:
        """Add elements that were excluded by mistake to their sets in a state file.

        Args:
            names: the name or names of the elements, as a stream or the table of its outliers reports them:
                the folders at the beginning of a name may be omitted if the rest names only one element.
            state: the file of the state, which is replaced.
        """
        path = Path(state)
        accepted = WatchState.load(path, self.model).accepting([names] if isinstance(names, str) else names)
        accepted.save(path, self.model)
        return accepted

    def synthetic_stream(
        self,
        *,
        split: str | None = None,
        data: Data | None = None,
        classes: Sequence[str] | None = None,
        set_class: str | None = None,
        invert: bool | None = None,
        seed: int = 0,
    ) -> list[Element]:
        """A set of one class in which a tenth of the elements are of other classes.

        Args:
            split: split of the data; test by default.
            data: a dataset or the path of user data, instead of the model's own data.
            classes: use only these classes, for the set and its outliers.
            set_class: the class of the set; a random one by default.
            invert: turn dark ink into bright ink in user images; as in training by default.
            seed: seed of the stream.
        """
        selected = self._select(split, data, classes, invert, min_classes=2)
        names = selected.examples.names
        if set_class is not None and set_class not in names:
            raise ValueError(f"`set_class` must be one of {', '.join(names[:20])}; got {set_class!r}.")
        sampler = SetSampler(selected.examples, device=self.device)
        size = min(_SYNTHETIC_LENGTH, sampler.min_count)
        of = None if set_class is None else names.index(set_class)
        sets = sampler.contaminated(1, size, _SYNTHETIC_OUTLIERS, self._generator(seed), of=of)
        return [
            Element(f"{i}, of another class" if outlier else str(i), x)
            for i, (x, outlier) in enumerate(zip(sets.x[0], sets.outlier[0].tolist(), strict=True), start=1)
        ]

    def measure_anomaly(
        self,
        *,
        sets: int = _SETS,
        set_size: int = _SET_SIZE,
        rotations: bool | None = None,
        split: str | None = None,
        data: Data | None = None,
        classes: Sequence[str] | None = None,
        invert: bool | None = None,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> AnomalyEvaluation:
        """Area under ROC and average precision on contaminated sets, compared with other methods.

        Args:
            sets: number of contaminated sets for each rate.
            set_size: elements in a set; fewer if the smallest class has fewer.
            rotations: treat each rotation of a class as a separate class; as in training by default.
            split: split of the data; test by default.
            data: a dataset or the path of user data, instead of the model's own data.
            classes: use only these classes, for sets and outliers.
            invert: turn dark ink into bright ink in user images; as in training by default.
            seed: seed of the sets.
            progress: called as progress(done, total), in sets.
        """
        selected = self._select(split, data, classes, invert, min_classes=2)
        found = measure_anomaly(
            self.model,
            selected.examples,
            set_size=available_set_size(selected.examples, set_size, least=2),
            sets=sets,
            rotations=self.rotations if rotations is None else rotations,
            generator=self._generator(seed),
            progress=progress,
        )
        return AnomalyEvaluation(selected.name, found)
