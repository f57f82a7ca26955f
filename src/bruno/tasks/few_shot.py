"""Few-shot classification: which of k small sets does an element belong to? The protocol and its baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from bruno.data import Examples
from bruno.data.sampling import SetSampler
from bruno.model import Bruno
from bruno.tasks import Progress
from bruno.tasks.scorers import Matching, ModelScorer, PixelScorer, Scorer, scores_in_parts


@dataclass(frozen=True)
class FewShotResult:
    """Accuracy at n-shot k-way classification.

    Attributes:
        way: k, the number of classes to choose from.
        shot: n, the number of support images of each class.
        accuracy: share of queries given to their own class, the mean over trials.
        spread: standard deviation of the accuracy from one trial to another.
        trials: how many there were; in each of them every class is asked once.
        episodes: queries in all trials together.
        by_trial: the accuracy of each trial.
    """

    way: int
    shot: int
    accuracy: float
    spread: float
    trials: int
    episodes: int
    by_trial: tuple[float, ...]


class EpisodeIndices(NamedTuple):
    """One n-shot k-way task for every class; the query belongs to the first of its k supports.

    Both are places as `SetSampler.at` takes them: of images, each with its rotation.
    """

    query: Int[Tensor, " episodes"]
    support: Int[Tensor, "episodes way shot"]


def draw_episodes(sampler: SetSampler, way: int, shot: int, generator: Generator) -> EpisodeIndices:
    """For each class, n supports and a query of it, none twice, and n supports of k − 1 other characters.

    With rotations a character is four classes. A decoy is never a rotation of the character that is asked
    for, nor of another decoy, and each decoy is rotated by a multiple of 90 degrees of its own.
    """
    characters, turns = len(sampler.counts), 4 if sampler.rotations else 1
    own_character = torch.arange(characters).repeat(turns)
    own_turn = torch.arange(turns).repeat_interleave(characters)
    keys = torch.rand((len(own_character), characters), generator=generator)
    keys.scatter_(1, own_character.unsqueeze(1), 2.0)  # the largest key of all, so the first to be chosen
    chosen = keys.topk(way, 1).indices
    turn = torch.randint(turns, chosen.shape, generator=generator)
    turn[:, 0] = own_turn
    images = sampler.distinct(chosen.flatten(), shot + 1, generator).view(*chosen.shape, shot + 1)
    index = images + (turn * len(sampler.elements)).unsqueeze(-1)
    return EpisodeIndices(index[:, 0, shot], index[:, :, :shot])


@torch.no_grad()
def measure_few_shot(
    model: Bruno,
    examples: Examples,
    *,
    ways: Sequence[int] = (5, 20),
    shots: Sequence[int] = (1, 5),
    trials: int = 20,
    rotations: bool = False,
    generator: Generator,
    threshold: float | None = None,
    noisy: bool = True,
    batch_size: int = 1024,
    progress: Progress | None = None,
) -> tuple[FewShotResult, ...]:
    """Accuracy at every n-shot k-way setting: the class with the highest p(query | support) wins.

    In each trial every class (with rotations, every rotated class) is asked once in every setting, against
    decoys as in `draw_episodes`; an image is dequantised with fresh noise and encoded once a trial, however
    many episodes it is in, and without noise once in all trials. A tie counts as wrong. The same seed gives
    the same episodes on every device and for every model, and to `measure_pixels`.

    Args:
        model: on the device where the work is to be done.
        examples: classes of images (or rows), best of a kind that the model has not been trained on.
        ways: numbers k of classes to choose from.
        shots: numbers n of support images.
        trials: at least 2, for the spread.
        rotations: every class counts four times, rotated by multiples of 90 degrees.
        generator: of seeds for the trials; on any device.
        threshold: use only latent dimensions whose correlation exceeds this.
        noisy: as the protocol has it; if not, images are dequantised with ½, as in `classify`.
        batch_size: images to encode at a time.
        progress: called as progress(done, total), in images encoded or asked, all through the work.
    """
    plan = _Plan.of(examples, ways, shots, trials, rotations, generator)
    return plan.results(ModelScorer(model, threshold, noisy=noisy), batch_size, progress)


@torch.no_grad()
def measure_pixels(
    examples: Examples,
    *,
    ways: Sequence[int] = (5, 20),
    shots: Sequence[int] = (1, 5),
    trials: int = 20,
    rotations: bool = False,
    generator: Generator,
    matching: Matching = "nearest",
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> tuple[FewShotResult, ...]:
    """What raw pixels give on the very episodes of `measure_few_shot` with the same seed.

    With `matching` "nearest" the class of the single nearest support image wins, by the cosine of pixels.
    "attention" comes closest to the paper's row, which is from Vinyals et al. (2016): pixels become 0
    or 1, cut at half, and the largest Σ exp(cosine) over a class's supports wins. The former is the stronger,
    so it is the one to beat. Accuracy on Omniglot's 1,692 test classes, 20 trials, in per cent::

                               5-way 1   5-way 5   20-way 1   20-way 5
        nearest                  50.6      75.1       32.2       56.9
        attention                45.9      64.2       27.1       42.2
        "Pixels" in the paper    41.7      63.2       26.7       42.6
    """
    plan = _Plan.of(examples, ways, shots, trials, rotations, generator)
    return plan.results(PixelScorer(matching, examples.levels, torch.device(device)), 1024, progress)


@torch.no_grad()
def episode_scores(
    model: Bruno,
    examples: Examples,
    *,
    way: int,
    shot: int,
    trials: int,
    rotations: bool = False,
    generator: Generator,
    threshold: float | None = None,
    noisy: bool = True,
    batch_size: int = 1024,
) -> Float[Tensor, "episodes way"]:
    """log p(query | support) in all episodes of `measure_few_shot` at one setting; the first is right.

    The arguments are those of `measure_few_shot`.
    """
    plan = _Plan.of(examples, [way], [shot], trials, rotations, generator)
    scorer = ModelScorer(model, threshold, noisy=noisy)
    return torch.cat([scores for (scores,) in plan.scores(scorer, batch_size)])


@dataclass(frozen=True, eq=False)
class _Plan:
    """Which episodes are drawn; two seeds a trial, so that the episodes do not depend on the noise."""

    sampler: SetSampler
    settings: list[tuple[int, int]]
    seeds: list[list[int]]

    @classmethod
    def of(
        cls,
        examples: Examples,
        ways: Sequence[int],
        shots: Sequence[int],
        trials: int,
        rotations: bool,
        generator: Generator,
    ) -> _Plan:
        """The plan of a seed, if the examples are enough for it."""
        if len(examples.names) < 2:
            raise ValueError(
                f"`examples` must have at least two classes to choose from; got {len(examples.names)}. "
                "Rotations of one class are never asked against each other."
            )
        sampler = SetSampler(examples, rotations=rotations)
        if trials < 2:
            raise ValueError(f"`trials` must be at least 2, for a spread to be told; got {trials}.")
        rules = (
            ("ways", ways, 2, len(sampler.counts), "the number of classes, rotations not counted"),
            (
                "shots",
                shots,
                1,
                sampler.min_count - 1,
                f"for {sampler.min_count} images a class and one query",
            ),
        )
        for name, numbers, low, high, why in rules:
            wrong = [number for number in numbers if not low <= number <= high]
            if wrong or not numbers:
                got = wrong[0] if wrong else "none"
                raise ValueError(f"`{name}` must be from {low} to {high}, {why}; got {got}.")
        seeds = torch.randint(2**62, (trials, 2), generator=generator, device=generator.device)
        return cls(sampler, list(product(ways, shots)), seeds.tolist())

    def results(
        self, scorer: Scorer, batch_size: int, progress: Progress | None
    ) -> tuple[FewShotResult, ...]:
        """The share of episodes in which the first class scores above all others; a NaN does not."""
        won = [
            [(scores[:, 0] > scores[:, 1:].amax(1)).double().mean().item() for scores in trial]
            for trial in self.scores(scorer, batch_size, progress)
        ]
        shares = torch.tensor(won, dtype=torch.double).T
        trials, episodes = len(won), len(won) * self.sampler.classes
        return tuple(
            FewShotResult(
                way, shot, share.mean().item(), share.std().item(), trials, episodes, tuple(share.tolist())
            )
            for (way, shot), share in zip(self.settings, shares, strict=True)
        )

    def scores(
        self, scorer: Scorer, batch_size: int, progress: Progress | None = None
    ) -> Iterator[list[Float[Tensor, "episodes way"]]]:
        """For each trial the scores at each setting.

        Features are computed once for each image: in a trial where there is noise, in all of them where not.
        """
        images = len(self.sampler.elements) * self.sampler.classes // len(self.sampler.counts)
        groups = [[seeds] for seeds in self.seeds] if scorer.noisy else [self.seeds]
        asked = self.sampler.classes * len(self.settings)
        report = progress or (lambda done, total: None)
        done, total = 0, len(groups) * images + len(self.seeds) * asked
        for group in groups:
            trials = [self._episodes(seed) for seed, _ in group]
            noise = Generator(scorer.device).manual_seed(group[0][1])
            flat = [index.flatten() for trial in trials for episodes in trial for index in episodes]
            used, place = torch.cat(flat).unique(return_inverse=True)
            parts = []
            for some in used.split(batch_size):
                parts.append(scorer.features(self.sampler.at(some).to(scorer.device), noise))
                done += len(some)
                report(done, total)
            done += images - len(used)
            features, places = torch.cat(parts), iter(place.split([len(index) for index in flat]))
            for trial in trials:
                found = []
                for episodes in trial:
                    query, support = (next(places).to(scorer.device) for _ in episodes)
                    support = support.view(episodes.support.shape)
                    found.append(scores_in_parts(scorer, features, support, query))
                yield found
                done += asked
                report(done, total)

    def _episodes(self, seed: int) -> list[EpisodeIndices]:
        """Those of a trial, for each setting."""
        generator = Generator().manual_seed(seed)
        return [draw_episodes(self.sampler, way, shot, generator) for way, shot in self.settings]
