"""Classification by small support sets, with calibrated probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from bruno.arrays import ArrayLike, NumpyResult, as_tensor
from bruno.checks import check_at_least
from bruno.kinds import Kind
from bruno.model import Bruno, Posterior
from bruno.process import Evidence
from bruno.tasks.calibration import GroupCalibration
from bruno.tasks.robust_evidence import shortfall
from bruno.tasks.scorers import check_views, dimensions_above, part_size, square_views
from bruno.text import numbered

MAX_EXAMPLES = 9  # support elements of a class that are kept with a classification


@dataclass(frozen=True, eq=False)
class Classification(NumpyResult):
    """Class probabilities of queries.

    Attributes:
        probabilities: probability of each class for each query; every row sums to 1.
        log_scores: log p(query | support of the class) of the latents. The Jacobian of a query is the same
            for every class and is omitted, except for rows with missing numbers, imputed for each class.
            With `views`, the mean over them; all attributes below are of the original queries.
        scores: log p(query | support of the class) − log p(query).
        log_prob: log p(query) on the scales of the columns, with missing numbers imputed for each class.
        labels: index of the most probable class of each query.
        classes: names of the classes.
        names: names of the queries.
        support: number of support elements of each class.
        temperature: divisor of the log scores.
        queries: the elements that were classified.
        kind: kind of the elements.
        p: p-value of each query as an element of each class; None if not calibrated, see `with_p_values`.
        none_of_these: whether each query belongs to none of the classes; None if not calibrated.
        examples: the first support elements of each class, at most `MAX_EXAMPLES`, to show.
    """

    probabilities: Float[Tensor, "queries classes"]
    log_scores: Float[Tensor, "queries classes"]
    scores: Float[Tensor, "queries classes"]
    log_prob: Float[Tensor, "queries classes"]
    labels: Int[Tensor, " queries"]
    classes: tuple[str, ...]
    names: tuple[str, ...]
    support: tuple[int, ...]
    temperature: float
    queries: Tensor
    kind: Kind
    p: Float[Tensor, "queries classes"] | None = None
    none_of_these: Bool[Tensor, " queries"] | None = None
    examples: tuple[Tensor, ...] = ()

    def most_probable(self, k: int) -> list[list[tuple[str, float]]]:
        """For each query, the k most probable classes (or all, if fewer) with their probabilities."""
        top = self.probabilities.topk(min(k, len(self.classes)))
        rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return [[(self.classes[i], p) for i, p in zip(*row, strict=True)] for row in rows]


@torch.no_grad()
def classify(
    model: Bruno,
    support: Mapping[str, ArrayLike] | Sequence[ArrayLike],
    queries: ArrayLike,
    *,
    names: Sequence[str] | None = None,
    prior: Sequence[float] | None = None,
    temperature: float = 1.0,
    threshold: float | None = None,
    views: bool = False,
    generator: Generator | None = None,
    batch_size: int = 256,
) -> Classification:
    """Probability of each class for each query, softmax_c of log p(query | support_c)/T + log prior_c.

    Args:
        model: any model.
        support: the elements (n_c, *shape) of each class, by its name or in a sequence; n_c may differ.
        queries: elements to classify, (queries, *shape). Missing numbers of rows, NaN, are imputed given each
            class: log p(query | support) is that of the completed row, an approximation of log p(observed
            numbers | support) that prefers classes in which the missing columns vary less.
        names: names of the queries; their numbers from 1 by default, as those of the classes of a sequence.
        prior: probability of each class before the query is seen, in any unit; uniform by default.
        temperature: T, see `fit_temperature`; at 1 a model of many pixels is overconfident.
        threshold: use only latent dimensions whose correlation exceeds this.
        views: average log p(query | support) over the eight rotations and reflections of square images: more
            accurate if the model was trained on rotated and mirrored classes, for eight times the work.
        generator: source of the dequantisation noise; without one ½ is added and the result is deterministic.
        batch_size: elements to encode at a time.
    """
    kind, keyed = model.kind, support if isinstance(support, Mapping) else dict(enumerate(support))
    given = {f"support[{key}]": as_tensor(x, f"support[{key}]", kind=kind) for key, x in keyed.items()}
    queries = as_tensor(queries, "queries", kind=kind)
    _check_arguments(model, given, queries, temperature)
    names, log_prior = _names(names, len(queries)), log_prior_of(prior, len(given))
    scored = partial(_scores, model, dimensions_above(model, threshold), generator, batch_size)
    log_scores, before, log_prob = scored(queries, *given.values())
    scores = log_scores - before
    if views:
        check_views(model)
        _, *turned = zip(*map(square_views, (queries, *given.values())), strict=True)
        log_scores = torch.stack([log_scores, *(scored(*view)[0] for view in turned)]).mean(0)
    probabilities = class_probabilities(log_scores, log_prior, temperature)
    return Classification(
        probabilities,
        log_scores,
        scores,
        log_prob,
        probabilities.argmax(1),
        classes=tuple(map(str, support)) if isinstance(support, Mapping) else numbered(len(given)),
        names=names,
        support=tuple(map(len, given.values())),
        temperature=temperature,
        queries=queries,
        kind=kind,
        examples=tuple(x[:MAX_EXAMPLES].cpu() for x in given.values()),
    )


def class_probabilities(
    log_scores: Float[Tensor, "queries classes"], log_prior: Float[Tensor, " classes"], temperature: float
) -> Float[Tensor, "queries classes"]:
    """softmax_c of log p(query | support_c)/T + log prior_c, for each query."""
    powers = log_scores.double() / temperature + log_prior.to(log_scores.device)
    return powers.softmax(1).to(log_scores.dtype)


def _scores(
    model: Bruno,
    dimensions: Bool[Tensor, " dim"] | None,
    generator: Generator | None,
    batch_size: int,
    queries: Tensor,
    *support: Tensor,
) -> list[Tensor]:
    """log p(z | class) and log p(z) of the latents of queries (q, *shape), and log p(x), all (q, classes)."""
    known = [model.latents(x, generator, batch_size=batch_size) for x in support]
    classes = Posterior(model, Evidence.stack([Evidence.of(z) for z in known]))
    size = max(1, min(batch_size, part_size(len(support) * model.dim, model.device)))
    parts = queries.to(model.device).split(size)
    scored = [_scores_of_part(classes, x, dimensions, generator, len(support)) for x in parts]
    return [torch.cat(some) for some in zip(*scored, strict=True)]


def _scores_of_part(
    classes: Posterior,
    x: Tensor,
    dimensions: Bool[Tensor, " dim"] | None,
    generator: Generator | None,
    ways: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_scores` of queries that fit into memory.

    Rows with missing numbers have latents for each class: their log p(z | class) includes the Jacobian.
    """
    model = classes.model
    missing = x.isnan().flatten(1).any(1, keepdim=True)
    if bool(missing.any()):
        complete = classes.impute(x.unsqueeze(1)).expand(-1, ways, *model.shape)
        z, log_det = model.encode(complete, generator, on_scales=True)
    else:
        z, log_det = (one.unsqueeze(1) for one in model.encode(x, generator, on_scales=True))
    omitted = log_det.masked_fill(missing, 0.0)
    prior = model.process.log_prob(z) + log_det
    given = model.process.log_prob(z, classes.evidence, dimensions=dimensions) + log_det
    return given - omitted, (prior - omitted).expand_as(given), prior.expand_as(given)


@torch.no_grad()
def with_p_values(found: Classification, calibration: GroupCalibration, rate: float) -> Classification:
    """The classification with a p-value of each query for each class, and whether it belongs to none.

    The p-value for a class is that of the query as the next element of its support, all of which counts.
    A query belongs to no class if all its p-values are at most `rate`. A query of one of the classes
    is then rejected with a probability of at most `rate`, as its own class must reject it.
    """
    scores = calibration.support()
    gains = (found.scores - shortfall(found.log_prob, calibration.reference)).double().cpu().numpy()
    columns = [
        scores.p_values(gains[:, i], shots, scores.basis(shots, rate))
        for i, shots in enumerate(found.support)
    ]
    p = torch.from_numpy(np.stack(columns, 1)).to(found.probabilities)
    return replace(found, p=p, none_of_these=(p <= rate).all(1))


def log_prior_of(prior: Sequence[float] | None, classes: int) -> Float[Tensor, " classes"]:
    """The log of a prior of classes, uniform by default; raises ValueError if it is not positive."""
    try:
        weights = torch.as_tensor([1.0] * classes if prior is None else prior, dtype=torch.double)
    except (TypeError, ValueError):
        raise TypeError(f"`prior` must be a list of {classes} numbers; got {prior!r}.") from None
    if weights.shape != (classes,) or not (weights > 0).all() or not weights.isfinite().all():
        raise ValueError(
            f"`prior` must be a positive number for each of the {classes} classes; got {weights.tolist()}."
        )
    return weights.log()


def _names(names: Sequence[str] | None, queries: int) -> tuple[str, ...]:
    """The names of the queries; their numbers by default."""
    if names is not None and len(names) != queries:
        raise ValueError(f"`names` must have one for each of {queries} queries; got {len(names)}.")
    return numbered(queries) if names is None else tuple(names)


def _check_arguments(
    model: Bruno, support: Mapping[str, Tensor], queries: Tensor, temperature: float
) -> None:
    check_at_least("temperature", temperature, 0)
    if not temperature > 0:
        raise ValueError(f"`temperature` must be above 0; got {temperature}.")
    if len(support) < 2:
        raise ValueError(
            f"`support` must have at least two classes to choose from; got {len(support)}. "
            "To score elements against a single set, use Posterior.score."
        )
    for name, x in [*support.items(), ("queries", queries)]:
        if tuple(x.shape[1:]) != model.shape:
            raise ValueError(
                f"`{name}` must be elements of the model's shape, (n, {', '.join(map(str, model.shape))}); "
                f"got {tuple(x.shape)}. Resize them."
            )
        if not len(x):
            raise ValueError(f"`{name}` must hold at least one element; got none. Omit it or add some.")
