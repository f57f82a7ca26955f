"""Episodes of few-shot classification: their protocol, how they are drawn, and their scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from bruno.checks import check_at_least, check_count, check_whole_numbers
from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.tasks.progress import Progress
from bruno.tasks.scorers import Scorer, scores_in_parts


@dataclass(frozen=True)
class FewShotProtocol:
    """Settings of n-shot k-way classification; every way is measured with every shot.

    Attributes:
        ways: numbers k of classes to choose from.
        shots: numbers n of support images of each class.
        trials: number of trials, each with one query of every class; at least 2, for a standard error.
        rotations: each class is four classes, rotated by multiples of 90 degrees.
        rotated_decoys: with rotations, draw the other classes of an episode from all rotated classes but the
            query's own, as in Prototypical Networks; they may be rotations of the queried character or of
            each other. Otherwise, they are different characters.
        noise: add fresh dequantisation noise in each trial; otherwise, add ½, as in `classify`.
        views: average the scores over the eight rotations and reflections of an episode's images, which must
            be square.
        threshold: use only latent dimensions whose correlation exceeds this.
        batch_size: images to encode at a time.
    """

    ways: tuple[int, ...] = (5, 20)
    shots: tuple[int, ...] = (1, 5)
    trials: int = 20
    rotations: bool = False
    rotated_decoys: bool = False
    noise: bool = True
    views: bool = False
    threshold: float | None = None
    batch_size: int = 1024

    def __post_init__(self) -> None:
        for name, least in (("ways", 2), ("shots", 1)):
            check_whole_numbers(name, getattr(self, name))
            numbers = tuple(getattr(self, name))
            if not numbers:
                raise ValueError(f"`{name}` must have at least one number; got none.")
            check_at_least(name, min(numbers), least)
            object.__setattr__(self, name, numbers)
        if self.rotated_decoys and not self.rotations:
            raise ValueError("`rotated_decoys` needs `rotations`; got `rotations=False`.")
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


class EpisodeIndices(NamedTuple):
    """One n-shot k-way episode for every class; the query belongs to the first of its k supports.

    `query` and `support` are indices for `SetSampler.at`, of images with a rotation each.
    """

    query: Int[Tensor, " episodes"]
    support: Int[Tensor, "episodes way shot"]


def draw_episodes(
    sampler: SetSampler, way: int, shot: int, generator: Generator, *, rotated_decoys: bool = False
) -> EpisodeIndices:
    """Draw for each class a query, n other elements as its support, and n elements of each of k − 1 decoys.

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
    """Distinct random numbers below `count` for each episode, starting with the number in `first`."""
    keys = torch.rand((len(first), count), generator=generator)
    keys.scatter_(1, first.unsqueeze(1), 2.0)  # above all other keys
    return keys.topk(way, 1).indices


@dataclass(frozen=True, eq=False)
class EpisodePlan:
    """The episodes to draw. Each trial has two seeds, so that its episodes do not depend on the noise."""

    sampler: SetSampler
    protocol: FewShotProtocol
    seeds: list[list[int]]

    @classmethod
    def of(cls, examples: Examples, protocol: FewShotProtocol, generator: Generator) -> EpisodePlan:
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
