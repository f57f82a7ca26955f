"""Few-shot classification: accuracy at choosing the support set that a query belongs to, and a baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from bruno.checks import check_at_least, check_count
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.model import Bruno
from bruno.tasks.progress import Progress
from bruno.tasks.scorers import Matching, ModelScorer, PixelScorer, Scorer, scores_in_parts

# --- protocol and results --------------------------------------------------------------------------------


@dataclass(frozen=True)
class FewShotProtocol:
    """Settings of n-shot k-way classification; every way is measured with every shot.

    Attributes:
        ways: numbers k of classes to choose from.
        shots: numbers n of support images of each class.
        trials: number of trials, each with one query of every class; at least 2, for a standard error.
        rotations: every class counts four times, rotated by multiples of 90 degrees.
        rotated_decoys: with rotations, draw the other classes of an episode from all rotated classes but the
            query's own, as Prototypical Networks does; they may be rotations of the queried character or of
            each other. Otherwise they are different characters.
        noise: dequantise with fresh noise in each trial; otherwise with ½, as in `classify`.
        threshold: use only latent dimensions whose correlation exceeds this.
        batch_size: images to encode at a time.
    """

    ways: tuple[int, ...] = (5, 20)
    shots: tuple[int, ...] = (1, 5)
    trials: int = 20
    rotations: bool = False
    rotated_decoys: bool = False
    noise: bool = True
    threshold: float | None = None
    batch_size: int = 1024

    def __post_init__(self) -> None:
        for name, least in (("ways", 2), ("shots", 1)):
            numbers = tuple(getattr(self, name))
            if not numbers:
                raise ValueError(f"`{name}` must have at least one number; got none.")
            check_at_least(name, min(numbers), least)
            object.__setattr__(self, name, numbers)
        if self.rotated_decoys and not self.rotations:
            raise ValueError("`rotated_decoys` needs `rotations`; got rotations=False.")
        check_count("trials", self.trials, 2)
        check_count("batch_size", self.batch_size)

    @property
    def settings(self) -> tuple[tuple[int, int], ...]:
        """Every (way, shot), in the order of the results."""
        return tuple(product(self.ways, self.shots))

    def limited_to(self, examples: Examples) -> FewShotProtocol:
        """The protocol with ways and shots reduced to the classes and images that the examples have."""
        classes = len(examples.names) * (4 if self.rotated_decoys else 1)
        most_ways, most_shots = max(2, classes), max(1, int(examples.counts.min()) - 1)
        return replace(
            self,
            ways=tuple(dict.fromkeys(min(way, most_ways) for way in self.ways)),
            shots=tuple(dict.fromkeys(min(shot, most_shots) for shot in self.shots)),
        )


@dataclass(frozen=True)
class FewShotResult:
    """Accuracy at n-shot k-way classification.

    Attributes:
        way: k, the number of classes to choose from.
        shot: n, the number of support images of each class.
        accuracy: fraction of queries assigned to their own class, averaged over trials.
        spread: standard deviation of the accuracy between trials.
        trials: number of trials; every class is queried once in each.
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
class FewShotComparison:
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

    In each trial every class (with rotations, every rotated class) is queried once in every setting, with
    decoys drawn by `draw_episodes`. With noise, each image is encoded once per trial, otherwise once. A tie
    counts as wrong. The same seed gives the same episodes on every device, for every model and for
    `measure_pixels`.

    Args:
        model: a model, on the device to compute on.
        examples: classes of images or rows, preferably unseen in training.
        protocol: ways, shots, trials and other settings.
        generator: source of the trials' seeds; on any device.
        progress: called as progress(done, total), in images encoded plus queries scored.
    """
    plan = _Plan.of(examples, protocol, generator)
    return plan.results(_model_scorer(model, protocol), progress)


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

    With `matching` "nearest" the class of the nearest support image wins, by cosine similarity of pixels.
    "attention" is closest to the baseline of the paper, from Vinyals et al. (2016): pixels are binarised at
    half brightness, and the class with the largest Σ exp(cosine) over its supports wins. "nearest" is the
    stronger baseline. Accuracy on the 1,692 test classes of Omniglot, 20 trials, in per cent::

                               5-way 1   5-way 5   20-way 1   20-way 5
        nearest                  50.6      75.1       32.2       56.9
        attention                45.9      64.2       27.1       42.2
        "Pixels" in the paper    41.7      63.2       26.7       42.6

    The protocol's noise and threshold do not apply.
    """
    plan = _Plan.of(examples, protocol, generator)
    return plan.results(PixelScorer(matching, examples.levels, torch.device(device)), progress)


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
    plan = _Plan.of(examples, protocol, generator)
    scorer = _model_scorer(model, protocol)
    nearest = PixelScorer("nearest", examples.levels, scorer.device)
    first, both = plan.work(scorer), plan.work(scorer) + plan.work(nearest)
    report = progress or (lambda done, total: None)
    ours = plan.results(scorer, lambda done, total: report(done, both))
    if not model.kind.is_images:
        standardised = replace(examples, elements=model.normalised(examples.elements))
        plan = replace(plan, sampler=SetSampler(standardised, rotations=protocol.rotations))
    baseline = plan.results(nearest, lambda done, total: report(first + done, both))
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
    plan = _Plan.of(examples, protocol, generator)
    trials = plan.scores(_model_scorer(model, protocol), progress)
    return torch.cat([scores for (scores,) in trials])


def _model_scorer(model: Bruno, protocol: FewShotProtocol) -> ModelScorer:
    return ModelScorer(model, protocol.threshold, noise=protocol.noise)


# --- episodes --------------------------------------------------------------------------------------------


class EpisodeIndices(NamedTuple):
    """One n-shot k-way task for every class; the query belongs to the first of its k supports.

    Both hold indices for `SetSampler.at`: of images, each with its rotation.
    """

    query: Int[Tensor, " episodes"]
    support: Int[Tensor, "episodes way shot"]


def draw_episodes(
    sampler: SetSampler, way: int, shot: int, generator: Generator, *, rotated_decoys: bool = False
) -> EpisodeIndices:
    """For each class, n supports and one query without repetition, and n supports of k − 1 decoy classes.

    With rotations a character is four classes. By default a decoy is never a rotation of the queried
    character, nor of another decoy, and each decoy has its own random rotation. With `rotated_decoys`, the
    decoys are any other classes.
    """
    own, characters = torch.arange(sampler.classes), len(sampler.counts)
    if rotated_decoys:
        classes = _choose(own, sampler.classes, way, generator)
    else:
        chosen = _choose(own % characters, characters, way, generator)
        turn = torch.randint(sampler.classes // characters, chosen.shape, generator=generator)
        turn[:, 0] = own // characters
        classes = turn * characters + chosen
    index = sampler.indices_of(classes.flatten(), shot + 1, generator).view(*classes.shape, shot + 1)
    return EpisodeIndices(index[:, 0, shot], index[:, :, :shot])


def _choose(
    first: Int[Tensor, " episodes"], count: int, way: int, generator: Generator
) -> Int[Tensor, "episodes way"]:
    """Different random numbers below `count` for each episode, the given one first."""
    keys = torch.rand((len(first), count), generator=generator)
    keys.scatter_(1, first.unsqueeze(1), 2.0)  # above all other keys
    return keys.topk(way, 1).indices


@dataclass(frozen=True, eq=False)
class _Plan:
    """The episodes to draw; two seeds per trial, so that the episodes do not depend on the noise."""

    sampler: SetSampler
    protocol: FewShotProtocol
    seeds: list[list[int]]

    @classmethod
    def of(cls, examples: Examples, protocol: FewShotProtocol, generator: Generator) -> _Plan:
        """The episodes of a seed; raises if the examples are too few for the protocol."""
        sampler = SetSampler(examples, rotations=protocol.rotations)
        classes, which = len(sampler.counts), "without rotations"
        if protocol.rotated_decoys:
            classes, which = sampler.classes, "with rotations"
        if classes < 2:
            raise ValueError(
                f"`examples` must have at least two classes to choose from; got {classes}. Rotations of one "
                "class are in the same episode only with `rotated_decoys`."
            )
        least = sampler.min_count
        for name, numbers, high, why in (
            ("ways", protocol.ways, classes, f"the number of classes {which}"),
            ("shots", protocol.shots, least - 1, f"as a class has {least} elements and one is the query"),
        ):
            if max(numbers) > high:
                raise ValueError(f"`{name}` must be at most {high}, {why}; got {max(numbers)}.")
        seeds = torch.randint(2**62, (protocol.trials, 2), generator=generator, device=generator.device)
        return cls(sampler, protocol, seeds.tolist())

    @property
    def _images(self) -> int:
        """Number of images of all classes, including rotations."""
        return len(self.sampler.elements) * self.sampler.classes // len(self.sampler.counts)

    @property
    def _queries(self) -> int:
        """Number of queries of one trial."""
        return self.sampler.classes * len(self.protocol.settings)

    def work(self, scorer: Scorer) -> int:
        """Maximum number of images to encode, plus queries to score."""
        trials = self.protocol.trials
        return (trials if scorer.noise else 1) * self._images + trials * self._queries

    def results(self, scorer: Scorer, progress: Progress | None) -> tuple[FewShotResult, ...]:
        """Fraction of episodes in which the true class scores above all others; NaN counts as wrong."""
        won = [
            [(scores[:, 0] > scores[:, 1:].amax(1)).double().mean().item() for scores in trial]
            for trial in self.scores(scorer, progress)
        ]
        shares = torch.tensor(won, dtype=torch.double).T
        trials, episodes = len(won), len(won) * self.sampler.classes
        return tuple(
            FewShotResult(
                way, shot, share.mean().item(), share.std().item(), trials, episodes, tuple(share.tolist())
            )
            for (way, shot), share in zip(self.protocol.settings, shares, strict=True)
        )

    def scores(
        self, scorer: Scorer, progress: Progress | None
    ) -> Iterator[list[Float[Tensor, "episodes way"]]]:
        """The scores at each setting, trial by trial; with noise, each trial encodes its images again."""
        groups = [[seeds] for seeds in self.seeds] if scorer.noise else [self.seeds]
        report = progress or (lambda done, total: None)
        done, total = 0, self.work(scorer)
        for group in groups:
            trials = [self._episodes(seed) for seed, _ in group]
            generator = Generator(scorer.device).manual_seed(group[0][1])
            flat = [index.flatten() for trial in trials for episodes in trial for index in episodes]
            used, place = torch.cat(flat).unique(return_inverse=True)
            parts = []
            for some in used.split(self.protocol.batch_size):
                parts.append(scorer.features(self.sampler.at(some).to(scorer.device), generator))
                done += len(some)
                report(done, total)
            done += self._images - len(used)
            features, places = torch.cat(parts), iter(place.split([len(index) for index in flat]))
            for trial in trials:
                found = []
                for episodes in trial:
                    query, support = (next(places).to(scorer.device) for _ in episodes)
                    support = support.view(episodes.support.shape)
                    found.append(scores_in_parts(scorer, features, support, query))
                yield found
                done += self._queries
                report(done, total)

    def _episodes(self, seed: int) -> list[EpisodeIndices]:
        """The episodes of one trial, for each setting."""
        generator = Generator().manual_seed(seed)
        rotated = self.protocol.rotated_decoys
        return [
            draw_episodes(self.sampler, way, shot, generator, rotated_decoys=rotated)
            for way, shot in self.protocol.settings
        ]
