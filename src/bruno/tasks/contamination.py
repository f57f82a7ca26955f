"""Signs of faults in tables that should be clean: rows far beyond the bulk of the rows of their sets."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from bruno.data import Examples
from bruno.model import Bruno
from bruno.tasks.planted_faults import RobustDistance
from bruno.tasks.robust_evidence import Cutoffs, scores_within, typical_elements

_BULK = 0.8  # the excess of a row is in units of this quantile above the median
_FAR, _BETWEEN = 8, 4  # excess of rows that are far beyond the bulk, and of rows between these and the bulk
_FEWEST, _FRACTION = 5, 0.01  # far rows, at least
_SPREAD = 0.5  # far rows are in at least this fraction of the sets that they would be in at random
_NEAR = 0.75  # fraction of the training rows that the robust covariance uses
_ROUNDS = 5  # of choosing these rows
_MAX_SETS, _MAX_ROWS = 300, 200  # rows of each set


@dataclass(frozen=True)
class Contamination:
    """Rows of sets that are far beyond the bulk of all rows, relative to the other rows of their sets.

    Attributes:
        rows: number of rows.
        far: number of rows far beyond the bulk.
        between: number of rows between the bulk and these.
        sets: number of sets with such rows.
        expected_sets: the expected number of sets with such rows, if they were spread at random.
    """

    rows: int
    far: int
    between: int
    sets: int
    expected_sets: float

    @property
    def fraction(self) -> float:
        """The fraction of the rows that are far beyond the bulk."""
        return self.far / max(1, self.rows)

    @property
    def suspected(self) -> bool:
        """Whether these rows seem to be faults.

        In a heavy tail, more rows have a moderate excess than a large one. If the model does not fit some
        sets, the far rows are in few sets.
        """
        return (
            self.far >= max(_FEWEST, _FRACTION * self.rows, self.between)
            and self.sets >= _SPREAD * self.expected_sets
        )


@torch.no_grad()
def measure_contamination(
    model: Bruno, cutoffs: Cutoffs, train: Examples, test: Examples, *, generator: Generator
) -> Contamination:
    """Count rows of `test` that are far beyond the bulk, both by the model and by a robust distance.

    The two measures are −log p(x | the other typical rows of the set), and the squared Mahalanobis distance
    from the median of the set, with a robust covariance. With m the median of a measure over all rows and q
    its 80 % quantile, the excess of a row is (value − m)/(q − m). Its smaller excess counts: a row that only
    the model finds unlikely may be one that the model fits badly, and a row that is only distant may be in
    another state of the machine, which the model has learnt. Missing numbers are imputed from their sets.

    Args:
        model: a model of rows.
        cutoffs: cutoffs of the evidence.
        train: sets that determine the covariance.
        test: sets to look for faults in.
        generator: chooses rows if there are many.
    """
    sets = [members for members in test.by_class() if len(members) > 2]
    if len(sets) > _MAX_SETS:
        order = torch.randperm(len(sets), generator=generator, device=generator.device)
        sets = [sets[i] for i in order[:_MAX_SETS].tolist()]
    train = replace(train, elements=model.impute(train.elements, train.labels))
    distance = _robust(model, train)
    surprises, distances, counts = [], [], []
    for members in sets:
        order = torch.randperm(len(members), generator=generator, device=generator.device).cpu()
        x = model.impute(test.elements[members])[order[:_MAX_ROWS]].to(model.device)
        z, log_det = model.encode(x, on_scales=True)
        inside = typical_elements(model, z, cutoffs)
        given = scores_within(model, z, inside, torch.zeros_like(log_det))
        surprises.append(-(given + log_det).double().cpu())
        distances.append(distance.scores(x.unsqueeze(0))[0])
        counts.append(len(x))
    if not counts:
        return Contamination(0, 0, 0, 0, 0.0)
    excess = _excess(torch.cat(surprises)).minimum(_excess(torch.cat(distances)))
    return _counted(excess > _FAR, excess > _BETWEEN, counts)


def _counted(far: Bool[Tensor, " n"], beyond: Bool[Tensor, " n"], counts: list[int]) -> Contamination:
    number, rows = int(far.sum()), len(far)
    found = sum(bool(some.any()) for some in far.split(counts))
    expected = sum(1 - (1 - number / rows) ** count for count in counts)
    return Contamination(rows, number, int(beyond.sum()) - number, found, expected)


def _excess(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Values in units of their upper quantile above their median; 0 if most are equal."""
    median, upper = values.quantile(torch.tensor([0.5, _BULK], dtype=values.dtype))
    return (values - median) / (upper - median) if upper > median else torch.zeros_like(values)


def _robust(model: Bruno, train: Examples) -> RobustDistance:
    """The distance with the covariance of the nearest rows alone, up to its scale."""
    found = RobustDistance.of(model, train)
    y = model.normalised(train.elements).double().cpu()
    rows = torch.cat([y[members] - y[members].median(0).values for members in train.by_class()])
    # Of all rows, as most may equal the median of their set.
    ridge = 1e-6 * found.covariance.diagonal().mean() * torch.eye(y.shape[1], dtype=torch.double)
    for _ in range(_ROUNDS):
        far = (rows @ torch.linalg.inv(found.covariance) * rows).sum(1)
        near = rows[far <= far.sort().values[int(_NEAR * (len(far) - 1))]]
        found = RobustDistance(model, near.T @ near / len(near) + ridge)
    return found
