"""Few-shot classification: accuracy at choosing the support set that a query belongs to, and a baseline."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from bruno.arrays import NumpyResult
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.model import Bruno
from bruno.tasks.episodes import EpisodePlan, FewShotProtocol
from bruno.tasks.progress import Progress
from bruno.tasks.scorers import Matching, ModelScorer, PixelScorer, Scorer, ViewScorer

# --- results ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewShotResult(NumpyResult):
    """Accuracy at n-shot k-way classification.

    Attributes:
        way: k, the number of classes to choose from.
        shot: n, the number of support images of each class.
        accuracy: fraction of queries assigned to their own class, averaged over trials.
        spread: standard deviation of the accuracy between trials.
        trials: number of trials; each of them queries every class once.
        episodes: number of queries in all trials.
        by_trial: accuracy of each trial.
    """

    way: int
    shot: int
    accuracy: float
    spread: float
    trials: int
    episodes: int
    by_trial: tuple[float, ...]

    @property
    def error(self) -> float:
        """Standard error of the accuracy."""
        return self.spread / math.sqrt(self.trials)


@dataclass(frozen=True)
class FewShotComparison(NumpyResult):
    """A model and the nearest-neighbour baseline on the same episodes.

    Attributes:
        protocol: settings of the measurement.
        model: results of the model, one for each of `protocol.settings`.
        baseline: results of the nearest neighbour, in the same order.
        features: features that the baseline compares: "pixels", or the standardised "columns" of rows.
    """

    protocol: FewShotProtocol
    model: tuple[FewShotResult, ...]
    baseline: tuple[FewShotResult, ...]
    features: str


# --- measurements ----------------------------------------------------------------------------------------


@torch.no_grad()
def measure_few_shot(
    model: Bruno,
    examples: Examples,
    protocol: FewShotProtocol,
    *,
    generator: Generator,
    progress: Progress | None = None,
) -> tuple[FewShotResult, ...]:
    """Accuracy at every n-shot k-way setting: the class with the highest p(query | support) wins.

    In each trial, every class (with rotations, every rotated class) is queried once in every setting, with
    decoys drawn by `draw_episodes`. With noise, each image is encoded once per trial; otherwise, only once. A
    tie counts as wrong. The same seed gives the same episodes on every device, for every model and for
    `measure_pixels`.

    Args:
        model: a model, on the device to compute on.
        examples: classes of images or rows, preferably unseen in training.
        protocol: ways, shots, trials and other settings.
        generator: source of the trials' seeds; on any device.
        progress: called as progress(done, total), in images encoded plus queries scored.
    """
    plan = EpisodePlan.of(examples, protocol, generator)
    return _results(plan, _model_scorer(model, protocol), progress)


@torch.no_grad()
def measure_pixels(
    examples: Examples,
    protocol: FewShotProtocol,
    *,
    generator: Generator,
    matching: Matching = "nearest",
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> tuple[FewShotResult, ...]:
    """Accuracy of raw pixels on the same episodes as `measure_few_shot` with the same seed.

    With `matching` "nearest", the class of the nearest support image wins, by cosine similarity of pixels.
    "attention" is closest to the baseline of the paper, which is from Vinyals et al. (2016): pixels are
    binarised at half brightness, and the class with the largest Σ exp(cosine) over its supports wins.
    "nearest" is the stronger baseline. Accuracy on the 1,692 test classes of Omniglot, 20 trials, in per
    cent::

                               5-way 1   5-way 5   20-way 1   20-way 5
        nearest                  50.6      75.1       32.2       56.9
        attention                45.9      64.2       27.1       42.2
        "Pixels" in the paper    41.7      63.2       26.7       42.6

    The protocol's noise, views and threshold do not apply.
    """
    plan = EpisodePlan.of(examples, protocol, generator)
    return _results(plan, PixelScorer(matching, examples.levels, torch.device(device)), progress)


@torch.no_grad()
def compare_few_shot(
    model: Bruno,
    examples: Examples,
    protocol: FewShotProtocol,
    *,
    generator: Generator,
    progress: Progress | None = None,
) -> FewShotComparison:
    """Accuracy of a model and of the nearest neighbour on the same episodes.

    The nearest neighbour compares pixels, or columns standardised by the model's preprocessing. The arguments
    are those of `measure_few_shot`.
    """
    plan = EpisodePlan.of(examples, protocol, generator)
    scorer = _model_scorer(model, protocol)
    nearest = PixelScorer("nearest", examples.levels, scorer.device)
    first, both = plan.work(scorer), plan.work(scorer) + plan.work(nearest)
    report = progress or (lambda done, total: None)
    ours = _results(plan, scorer, lambda done, total: report(done, both))
    if not model.kind.is_images:
        standardised = replace(examples, elements=model.normalised(examples.elements))
        plan = replace(plan, sampler=SetSampler(standardised, rotations=protocol.rotations))
    baseline = _results(plan, nearest, lambda done, total: report(first + done, both))
    return FewShotComparison(protocol, ours, baseline, model.kind.features)


@torch.no_grad()
def episode_scores(
    model: Bruno,
    examples: Examples,
    protocol: FewShotProtocol,
    *,
    generator: Generator,
    progress: Progress | None = None,
) -> Float[Tensor, "episodes way"]:
    """log p(query | support) in all episodes of `measure_few_shot`; the first class is the true one.

    The arguments are those of `measure_few_shot`; the protocol must have one way and one shot.
    """
    if len(protocol.settings) != 1:
        raise ValueError(
            f"`protocol` must have one way and one shot; got ways={protocol.ways}, shots={protocol.shots}."
        )
    plan = EpisodePlan.of(examples, protocol, generator)
    trials = plan.scores(_model_scorer(model, protocol), progress)
    return torch.cat([scores for (scores,) in trials])


def _model_scorer(model: Bruno, protocol: FewShotProtocol) -> ModelScorer:
    scorer = ViewScorer if protocol.views else ModelScorer
    return scorer(model, protocol.threshold, noise=protocol.noise)


def _results(plan: EpisodePlan, scorer: Scorer, progress: Progress | None) -> tuple[FewShotResult, ...]:
    """Fraction of episodes in which the true class scores above all others; NaN counts as wrong."""
    won = [
        [(scores[:, 0] > scores[:, 1:].amax(1)).double().mean().item() for scores in trial]
        for trial in plan.scores(scorer, progress)
    ]
    shares = torch.tensor(won, dtype=torch.double).T
    trials, episodes = len(won), len(won) * plan.sampler.classes
    return tuple(
        FewShotResult(
            way, shot, share.mean().item(), share.std().item(), trials, episodes, tuple(share.tolist())
        )
        for (way, shot), share in zip(plan.protocol.settings, shares, strict=True)
    )
