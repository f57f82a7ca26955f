"""Which columns or patches make an element an outlier: Shapley values of its score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from bruno.arrays import ArrayLike, NumpyResult
from bruno.checks import check_count
from bruno.data.sampling import seeded_generator
from bruno.flow.preprocessing import dequantise
from bruno.kinds import Images, Kind
from bruno.model import Posterior
from bruno.process import Evidence
from bruno.tasks.progress import Progress
from bruno.tasks.set_scores import Criterion, SetScorer
from bruno.text import numbered

_WALKS = 128  # permutations, half of them the reverse of the others
_PATCHES = 7  # along each side of an image
_NUMBERS_AT_A_TIME = 2**21


@dataclass(frozen=True, eq=False)
class Explanation(NumpyResult):
    """Contributions of columns or patches to the scores of elements, in nats.

    The contributions of an element add up to its score minus the mean score of the baseline.

    Attributes:
        contributions: contribution of each feature; negative ones make the element an outlier.
        errors: their standard errors, over permutations and draws.
        scores: scores of the elements.
        baseline: mean score of the draws that replace absent features.
        features: names of the columns, or "row 1, column 3" of a patch.
        x: the elements.
        kind: kind of the elements.
        grid: number of patches down and across; empty for rows.
        names: names of the elements.
        outliers: number of outliers that these are the most unusual of; 0 if they are not from a stream or
            batch.
    """

    contributions: Float[Tensor, "n features"]
    errors: Float[Tensor, "n features"]
    scores: Float[Tensor, " n"]
    baseline: Float[Tensor, " n"]
    features: tuple[str, ...]
    x: Tensor
    kind: Kind
    grid: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    outliers: int = 0

    def lowest(self, k: int = 3) -> list[list[tuple[str, float]]]:
        """For each element, the k features with the lowest contributions, lowest first."""
        return _lowest(self.contributions, self.features, k)

    @property
    def by_feature(self) -> list[dict[str, float]]:
        """For each element, the contribution of each feature by its name."""
        return [dict(zip(self.features, row, strict=True)) for row in self.contributions.tolist()]

    @property
    def maps(self) -> Float[Tensor, "n down across"]:
        """The contributions of patches as maps of the images."""
        if not self.grid:
            raise ValueError("`maps` needs images; these are rows. Use `contributions`.")
        return self.contributions.view(-1, *self.grid)


@dataclass(frozen=True, eq=False)
class PatchExplanation(NumpyResult):
    """The scores of the patches of images that were judged by patches; see `patch_maps`.

    The score of an image is that of its most unusual patch, the lowest of its map.

    Attributes:
        maps: scores of the patches, which overlap (`PatchGrid`).
        x: the images.
        kind: kind of the images.
        names: names of the images.
        outliers: number of outliers that these are the most unusual of.
    """

    maps: Float[Tensor, "n down across"]
    x: Tensor
    kind: Images
    names: tuple[str, ...]
    outliers: int

    @property
    def scores(self) -> Float[Tensor, " n"]:
        """Scores of the images."""
        return self.maps.flatten(1).amin(1)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the patches: "row 1, column 3"."""
        return _places(*self.maps.shape[1:])

    def lowest(self, k: int = 3) -> list[list[tuple[str, float]]]:
        """For each image, the k patches with the lowest scores, lowest first."""
        return _lowest(self.maps.flatten(1), self.features, k)

    @property
    def by_feature(self) -> list[dict[str, float]]:
        """For each image, the score of each patch by its name."""
        return [dict(zip(self.features, row, strict=True)) for row in self.maps.flatten(1).tolist()]


def explain(
    posterior: Posterior,
    x: ArrayLike,
    *,
    criterion: Criterion = "score",
    reference: float = -math.inf,
    features: Sequence[str] = (),
    names: Sequence[str] = (),
    permutations: int = _WALKS,
    patch: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Explanation:
    """Shapley values of the scores of elements (n, *shape) given a set.

    The features of an element replace those of a draw from the predictive of the set, one by one in a random
    order; the draw does not depend on the element. The contribution of a feature is the mean change of the
    score when it is replaced, over draws and over random orders, each used forwards and in reverse. All
    elements have the same orders and draws.

    Args:
        posterior: posterior of one set, or of a set for each element.
        x: the elements.
        criterion: "score" for log p(x | set) − log p(x), "density" for log p(x | set).
        reference: log p(x) of a typical element; the shortfall of log p(x) below it is subtracted from the
            score, see `shortfall`.
        features: names of the columns; by default their numbers, from 1.
        names: names of the elements; by default their numbers, from 1.
        permutations: number of random orders, even.
        patch: height and width of a patch of an image; by default a seventh of the image, rounded up.
        seed: seed of the orders and draws.
        progress: called as progress(done, total), in elements.

    >>> from bruno import Bruno, FlowConfig, ModelConfig
    >>> model = Bruno.from_config(ModelConfig((2,), levels=0, flow=FlowConfig("dense", couplings=0)))
    >>> given = model.condition(torch.randn(50, 2, generator=torch.Generator().manual_seed(0)))
    >>> found = explain(given, torch.tensor([[0.1, 9.0]]), features=("heat", "load"), criterion="density")
    >>> found.lowest(1)[0][0][0]
    'load'
    """
    scorer = SetScorer(posterior.model, criterion, reference=reference)
    return explain_scores(
        scorer,
        posterior.evidence,
        posterior.impute(x),
        features=features,
        names=names,
        permutations=permutations,
        patch=patch,
        seed=seed,
        progress=progress,
    )


@torch.no_grad()
def explain_scores(
    scorer: SetScorer,
    evidence: Evidence,
    x: Tensor,
    *,
    features: Sequence[str] = (),
    names: Sequence[str] = (),
    permutations: int = _WALKS,
    patch: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Explanation:
    """Like `explain`, with the scores of a `SetScorer`; the other arguments are the same."""
    check_count("permutations", permutations, 4)
    if permutations % 2:
        raise ValueError(f"`permutations` must be even; got {permutations}.")
    model = scorer.model
    if x.ndim != len(model.shape) + 1:
        raise ValueError(f"`x` must be elements (n, *{model.shape}); got shape {tuple(x.shape)}.")
    names = tuple(names) or numbered(len(x))
    if len(names) != len(x):
        raise ValueError(f"`names` must have one for each of {len(x)} elements; got {len(names)}.")
    owner, known, grid = _features(model.kind, features, patch)
    owner = owner.to(model.device)
    pixels = x.to(model.device) if x.is_floating_point() else dequantise(x.to(model.device))
    generator = seeded_generator(seed, model.device)
    ranks = _random_ranks(len(known), permutations, generator)
    parts = []
    for i, element in enumerate(pixels):
        own = evidence[i] if evidence.batch_shape else evidence
        # The same generator state for every element: common random numbers.
        draws = Posterior(model, own).sample(permutations // 2, generator=generator.clone_state()).x
        parts.append(_walks(scorer, own, element, draws.repeat_interleave(2, 0), ranks, owner))
        if progress is not None:
            progress(i + 1, len(pixels))
    walks = torch.stack(parts).double()  # (n, permutations, features + 1)
    steps = walks.diff(dim=-1).gather(-1, ranks.expand(len(walks), -1, -1))
    pairs = steps.unflatten(1, (-1, 2)).mean(2)
    return Explanation(
        contributions=steps.mean(1),
        errors=pairs.std(1) / math.sqrt(pairs.shape[1]),
        scores=walks[:, 0, -1],
        baseline=walks[:, :, 0].mean(1),
        features=known,
        x=x,
        kind=model.kind,
        grid=grid,
        names=names,
    )


def _walks(
    scorer: SetScorer,
    evidence: Evidence,
    element: Tensor,
    draws: Float[Tensor, "walks *shape"],
    ranks: Int[Tensor, "walks features"],
    owner: Int[Tensor, "*shape"],
) -> Float[Tensor, "walks steps"]:
    """Scores of each draw with 0, 1, … of its features replaced by those of the element, in each order."""
    features, model = ranks.shape[1], scorer.model
    size = max(1, _NUMBERS_AT_A_TIME // ((features + 1) * model.dim))
    present = torch.arange(features + 1, device=ranks.device)
    parts = []
    for some, rank in zip(draws.split(size), ranks.split(size), strict=True):
        joined = rank[:, owner]  # the step at which each column or pixel is replaced
        joined = joined.unsqueeze(1) < present.view(1, -1, *[1] * len(model.shape))
        mixed = torch.where(joined, element.to(some), some.unsqueeze(1))
        # Not validated: a draw may have nearly whole numbers.
        encoded = model.encode(mixed.flatten(0, 1), on_scales=True, validate=False)
        parts.append(scorer.scores(encoded, evidence).view(len(some), features + 1))
    return torch.cat(parts)


def _random_ranks(features: int, permutations: int, generator: Generator) -> Int[Tensor, "walks features"]:
    """The step at which each feature is replaced: random orders, each followed by its reverse."""
    keys = torch.rand((permutations // 2, features), generator=generator, device=generator.device)
    ranks = keys.argsort(1).argsort(1)
    return torch.stack([ranks, features - 1 - ranks], 1).flatten(0, 1)


def _features(
    kind: Kind, names: Sequence[str], patch: int | None
) -> tuple[Int[Tensor, "*shape"], tuple[str, ...], tuple[int, ...]]:
    """The feature that each column or pixel belongs to, the names of features, and the grid of patches."""
    if not isinstance(kind, Images):
        count = kind.shape[0]
        if names and len(names) != count:
            raise ValueError(f"`features` must be names of {count} columns; got {len(names)}.")
        return torch.arange(count), tuple(names) or numbered(count), ()
    height, width = kind.size
    side = math.ceil(max(height, width) / _PATCHES) if patch is None else patch
    check_count("patch", side)
    down, across = math.ceil(height / side), math.ceil(width / side)
    owner = torch.arange(height).unsqueeze(1) // side * across + torch.arange(width) // side
    return owner.expand(kind.shape), _places(down, across), (down, across)


def _places(down: int, across: int) -> tuple[str, ...]:
    """Names of the patches of a grid."""
    return tuple(f"row {i + 1}, column {j + 1}" for i in range(down) for j in range(across))


def _lowest(
    values: Float[Tensor, "n features"], features: Sequence[str], k: int
) -> list[list[tuple[str, float]]]:
    """For each element, the k features with the lowest values, lowest first."""
    found = values.topk(min(k, len(features)), largest=False)
    rows = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return [[(features[i], value) for i, value in zip(*row, strict=True)] for row in rows]
