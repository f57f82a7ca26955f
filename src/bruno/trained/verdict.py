"""A quick comparison of a trained model with simple baselines, at the end of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from bruno.checks import check_count
from bruno.data import Examples, SetSampler
from bruno.data.sampling import seeded_generator
from bruno.recipe_data import is_path
from bruno.tasks.calibration import fixed_cutoffs
from bruno.tasks.contamination import Contamination, measure_contamination
from bruno.tasks.episodes import FewShotProtocol
from bruno.tasks.evaluation import BitsPerDim, measure_bits_per_dim
from bruno.tasks.few_shot import FewShotComparison, FewShotResult, compare_few_shot
from bruno.tasks.groups import Groups
from bruno.tasks.planted_faults import PlantedFaults, measure_planted_faults
from bruno.tasks.planted_outliers import PlantedOutliers, measure_planted_outliers
from bruno.trained.data import TrainedData
from bruno.training import Run

MeasuredOn = Literal["unseen classes", "unseen elements of the training classes", "the training classes"]

_FRACTION = 0.2  # of the elements seen in training; encoding one takes a third as long as training on it
_MIN_ELEMENTS, _MAX_ELEMENTS = 600, 20_000
_WITHOUT_LOG = 4000  # elements, for a model without a training log
_DENSITY_FRACTION = 0.3  # of the elements: for training sets, and again for held-out sets
_SET_SIZE = 20
_WAY, _SHOTS = 5, (1, 5)
_TRIALS, _EPISODES = 20, 300  # at least; a trial has an episode for each class
_IMAGES = 20  # of a class, to measure few-shot accuracy on
_CUTOFF_CLASSES = 10  # training classes of images that set the cutoffs
_CUTOFF_SETS = 60  # training sets of rows that set the cutoffs
_MIN_OF_CLASS = 4  # images, to plant outliers among
_CLEAR = 2  # a difference of more standard errors than this is clear
_CLEAR_OF_KINDS = 3  # the same for each kind of fault, as there are several
_FAIR = 2  # a method that flags more clean rows than this multiple of the requested rate finds more by that


class HeldOut(NamedTuple):
    """Elements to measure on, and in which way they are new to the model."""

    examples: Examples
    measured_on: MeasuredOn


@dataclass(frozen=True)
class Verdict:
    """A quick comparison of a trained model with simple baselines.

    All but `training` is measured on held-out elements if there are any.

    Attributes:
        data: name of the data.
        measured_on: in which way the measured elements are new to the model.
        classes: number of classes of the measured elements.
        unit: unit of the densities that `density` returns: "bits/dim", or "nats/row" of −log p.
        dim: dimensions of an element.
        training: bits/dim of training sets; None if they are not on this machine.
        held_out: bits/dim of sets of held-out classes or elements; None if there are none.
        few_shot: for images, few-shot accuracy, compared with nearest neighbours of pixels; None if not
            measured.
        faults: for rows, detection of planted faults, compared with a robust distance; None if not measured.
        outliers: for images, detection of planted outliers, compared with distances between patches of
            pixels; None if not measured.
        unmeasured: why neither `few_shot` nor `faults` was measured; empty if one of them was.
        contamination: for rows, signs of faults in the measured sets themselves; None if not measured.
        advice: the command that calibrates the model on clean data.
        uniform: for images, bits/dim if all values of a pixel were equally likely; None for rows.
    """

    data: str
    measured_on: MeasuredOn
    classes: int
    unit: str
    dim: int
    training: BitsPerDim | None
    held_out: BitsPerDim | None
    few_shot: FewShotComparison | None
    faults: PlantedFaults | None
    outliers: PlantedOutliers | None = None
    unmeasured: str = ""
    contamination: Contamination | None = None
    advice: str = ""
    uniform: float | None = None

    def density(self, bits_per_dim: float) -> float:
        """Bits/dim converted to `unit`: nats/row are bits/dim · dim · log 2."""
        return bits_per_dim if self.unit == "bits/dim" else bits_per_dim * self.dim * math.log(2)

    @property
    def gain(self) -> float | None:
        """Gain from conditioning: −log p of the first element of a set minus that of its last."""
        bits = self.held_out or self.training
        if bits is None or len(bits.by_position) < 2:
            return None
        return self.density(bits.by_position[0] - bits.by_position[-1])

    @property
    def beats_baseline(self) -> bool | None:
        """False if the model is clearly worse than the baseline in any respect, True if better, else None."""
        if self.faults is not None:
            margins = [self.area_margin, *self.detection_margins.values()]
        elif self.few_shot is not None:
            pairs = zip(self.few_shot.model, self.few_shot.baseline, strict=True)
            margins = [_clear(*_margin(ours, other)) for ours, other in pairs]
        else:
            return None
        if any(margin < 0 for margin in margins):
            return False
        return True if any(margins) else None

    @property
    def area_margin(self) -> int:
        """1 if the area under ROC for faults is clearly larger than the baseline's, −1 if smaller, else 0."""
        return 0 if self.faults is None else _clear(self.faults.area_gain, self.faults.area_error)

    @property
    def detection_margins(self) -> dict[str, int]:
        """By the kind of fault: 1 if the model clearly finds more than the baseline, −1 if fewer, else 0.

        Detection is compared at the thresholds for the requested false-alarm rate. A method that flags far
        more clean rows than requested does not win by that.
        """
        if (found := self.faults) is None:
            return {}
        margins = {}
        for kind, error in found.detection_errors.items():
            margin = _clear(
                found.model.detections[kind] - found.baseline.detections[kind], error, _CLEAR_OF_KINDS
            )
            winner = found.model if margin > 0 else found.baseline
            margins[kind] = margin if winner.false_alarms <= _FAIR * found.rate else 0
        return margins

    @property
    def finds_outliers(self) -> bool | None:
        """True if the model finds planted outliers clearly better than patches, False if clearly worse."""
        margin = 0 if self.outliers is None else _clear(self.outliers.area_gain, self.outliers.area_error)
        return margin > 0 if margin else None

    @property
    def outlier_margins(self) -> dict[str, int]:
        """By the kind of outlier: 1 if the model finds it clearly better than patches, −1 if worse, or 0."""
        if (found := self.outliers) is None:
            return {}
        return {
            kind: _clear(found.model[kind] - found.baseline[kind], error, _CLEAR_OF_KINDS)
            for kind, error in found.kind_errors.items()
        }

    @property
    def overfits(self) -> bool:
        """Whether held-out images are less likely than if all values of a pixel were equally likely."""
        if self.uniform is None or self.held_out is None:
            return False
        return self.held_out.mean > self.uniform


def _margin(ours: FewShotResult, other: FewShotResult) -> tuple[float, float]:
    """Difference of two accuracies on the same episodes, and its standard error."""
    difference = torch.tensor(ours.by_trial) - torch.tensor(other.by_trial)
    return difference.mean().item(), difference.std().item() / math.sqrt(len(difference))


def _clear(difference: float, error: float | None, errors: float = _CLEAR) -> int:
    """The sign of a difference, 0 if it may be due to chance: at most this many standard errors."""
    if error is None or abs(difference) <= errors * error:
        return 0
    return 1 if difference > 0 else -1


class VerdictJobs(TrainedData):
    """The verdict on a trained model."""

    def verdict(self, *, split: str | None = None, elements: int | None = None, seed: int = 0) -> Verdict:
        """Measure densities and the gain from conditioning, and compare the model with baselines.

        Images are classified given one and five examples of each class, and the accuracy is compared with
        nearest neighbours of pixels. Outliers are planted in sets of images, and their detection is compared
        with distances between patches of pixels. In rows, faults are planted, and their detection is compared
        with a robust Mahalanobis distance.

        Args:
            split: the held-out split, validation or test. By default, all classes of user data that were not
                trained on, and the unseen split of a known dataset.
            elements: number of elements to encode; by default a fifth of the elements seen in training, but
                at least 600 and at most 20,000. This takes less than a tenth of the time of the training,
                unless that was very short.
            seed: seed of the sets, episodes and faults.
        """
        if self.recipe is None:
            raise ValueError(f"`model` must have a recipe, which names its data; {self.folder} has none.")
        elements = self._affordable_elements() if elements is None else elements
        check_count("elements", elements)
        train = None if self.lacks_its_data else self._select(self.recipe.data.split).examples
        held = self._held_out(train, split)
        new = held.measured_on != "the training classes"
        density_sets = max(2, int(_DENSITY_FRACTION * elements / _SET_SIZE))
        task_elements = int((1 - 2 * _DENSITY_FRACTION) * elements)
        few_shot, faults, outliers, contamination, unmeasured = None, None, None, None, ""
        try:
            if self.model.kind.is_images:
                few_shot = self._few_shot_check(held.examples, task_elements // 2, seed)
                outliers = self._outlier_check(train, held.examples, task_elements // 2, seed)
            elif train is not None:
                contamination = self._contamination(train, held.examples, seed)
                faults = measure_planted_faults(
                    self.model, train, held.examples, rows=task_elements, generator=self._generator(seed)
                )
        except ValueError as error:  # for example, too few classes, or too few elements of a class
            unmeasured = str(error)
        return Verdict(
            data=self.recipe.data.name,
            measured_on=held.measured_on,
            classes=len(held.examples.names),
            unit="bits/dim" if self.model.kind.is_images else "nats/row",
            dim=self.model.dim,
            training=None if train is None else self._density(train, density_sets, seed),
            held_out=self._density(held.examples, density_sets, seed) if new else None,
            few_shot=few_shot,
            faults=faults,
            outliers=outliers,
            unmeasured=unmeasured,
            contamination=contamination,
            advice=self.calibration_command,
            uniform=math.log2(self.model.levels) if self.model.kind.is_images else None,
        )

    def _contamination(self, train: Examples, held: Examples, seed: int) -> Contamination:
        generator = self._generator(seed)
        some = train.of_classes(range(min(_CUTOFF_SETS, len(train.names))))
        cutoffs = fixed_cutoffs(self.model, Groups.of(self.model, some, generator=generator))
        return measure_contamination(self.model, cutoffs, train, held, generator=generator)

    def _affordable_elements(self) -> int:
        """The default number of elements: a fifth of those seen in training, if there is a training log."""
        log = Run(self.folder).read_log()
        if not log or self.recipe is None:
            return _WITHOUT_LOG
        seen = log[-1]["index"] * self.recipe.train.elements
        return min(_MAX_ELEMENTS, max(_MIN_ELEMENTS, int(_FRACTION * seen)))

    def _held_out(self, train: Examples | None, split: str | None) -> HeldOut:
        """Elements to measure on: of unseen classes, else unseen elements, else training data."""
        assert self.recipe is not None
        own, trained_on = is_path(self.recipe.data.name), self.recipe.data.split
        if split not in (None, "test") and not (split == "validation" and trained_on == "train"):
            raise ValueError(f"`split` must be held out from {trained_on}, such as test; got {split!r}.")
        found = self._select(split or ("all" if own else self.unseen)).examples
        if train is None:  # characters that take the place of the data
            return HeldOut(found, "unseen classes")
        unseen = found.without(train.names)
        if unseen is not None and (own or len(unseen.names) > 1 or unseen.names == found.names):
            return HeldOut(unseen, "unseen classes")
        if own:
            return HeldOut(train, "the training classes")
        return HeldOut(found, "unseen elements of the training classes")

    def _density(self, examples: Examples, sets: int, seed: int) -> BitsPerDim:
        sampler = SetSampler(examples, device=self.device)
        per_class = sets // sampler.classes
        return measure_bits_per_dim(
            self.model,
            sampler,
            sets=None if per_class else sets,
            sets_per_class=max(1, per_class),
            set_size=min(_SET_SIZE, sampler.min_count),
            generator=self._generator(seed),
        )

    def _outlier_check(
        self, train: Examples | None, examples: Examples, images: int, seed: int
    ) -> PlantedOutliers | None:
        """Detection of planted outliers; None if there are too few images, or none to set the cutoffs."""
        if train is None or len(examples.names) < 2 or int(examples.counts.median()) < _MIN_OF_CLASS:
            return None
        generator = self._generator(seed)
        few = train.of_classes(range(min(_CUTOFF_CLASSES, len(train.names))))
        some = SetSampler(few, device=self.device)
        every, size = torch.arange(some.classes, device=self.device), min(_SET_SIZE, some.min_count)
        fixed = Examples(
            some.sets_of(every, size, generator).flatten(0, 1).cpu(),
            torch.arange(some.classes).repeat_interleave(size),
            train.names[: some.classes],
            levels=train.levels,
        )
        cutoffs = fixed_cutoffs(self.model, Groups.of(self.model, fixed, generator=generator))
        return measure_planted_outliers(self.model, cutoffs, examples, images=images, generator=generator)

    def _few_shot_check(self, examples: Examples, images: int, seed: int) -> FewShotComparison:
        """Few-shot accuracy on at most this many images; without noise, each image is encoded only once."""
        if len(examples.names) < 2:
            raise ValueError(
                f"`data` must have at least two classes to tell apart; got one, {examples.names[0]!r}."
            )
        generator = seeded_generator(seed)
        sampler = SetSampler(examples)
        each = min(_IMAGES, sampler.min_count)
        number = min(sampler.classes, max(_WAY, images // each))
        classes = torch.randperm(sampler.classes, generator=generator)[:number].sort().values
        some = Examples(
            sampler.sets_of(classes, each, generator).flatten(0, 1),
            torch.arange(number).repeat_interleave(each),
            tuple(examples.names[i] for i in classes.tolist()),
            levels=examples.levels,
        )
        trials = max(_TRIALS, math.ceil(_EPISODES / number))
        protocol = FewShotProtocol(ways=(_WAY,), shots=_SHOTS, trials=trials, noise=False, batch_size=256)
        return compare_few_shot(self.model, some, protocol.limited_to(some), generator=generator)
