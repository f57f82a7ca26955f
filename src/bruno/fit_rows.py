"""Train a small model on rows in memory, without a run folder: seconds for thousands of rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import evolve
from jaxtyping import Float, Int
from torch import Tensor

from bruno.arrays import Arrays, as_tensor
from bruno.checks import check_count
from bruno.config import FlowConfig, ModelConfig, ProcessConfig, load_recipe
from bruno.data import Examples, SetSampler
from bruno.data.columns import check_not_all_missing
from bruno.data.examples import check_labels
from bruno.model import Bruno
from bruno.process import StudentTProcess
from bruno.process.checks import check_finite
from bruno.recipe_data import learn_columns
from bruno.training import Trainer

_UNITS, _COUPLINGS, _DOF = 32, 2, 100.0
_RATE, _AVERAGE = 2e-2, 0.9  # learning rate and moving average, for a run of few steps
_ROWS_PER_STEP = 5  # by default, there is a step for every five rows
_MIN_STEPS, _MAX_STEPS = 10, 1000  # limits of the default number of steps
_ELEMENTS = 160  # elements in a step
_LOWEST, _HIGHEST = 0.01, 0.98  # limits of the initial correlations


def default_steps(rows: int) -> int:
    """The default number of steps: a fifth of the number of rows, from 10 to 1000."""
    return min(_MAX_STEPS, max(_MIN_STEPS, rows // _ROWS_PER_STEP))


def fit_rows(
    rows: Float[Tensor, "n dim"] | Arrays,
    labels: Int[Tensor, " n"] | Arrays | None = None,
    *,
    steps: int | None = None,
    seed: int = 0,
    impute: bool = False,
    device: torch.device | str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> Bruno:
    """Train a small model on rows, and return it frozen, in float64.

    The scales of columns are chosen from the data, and missing numbers, NaN, are imputed. The process starts
    from the variances within and between sets.

    Args:
        rows: at least two rows of real numbers.
        labels: for each row an integer, the same for all rows of a set; by default all are one set.
        steps: optimiser steps; by default a fifth of the number of rows, from 10 to 1000.
        seed: seed of all random numbers.
        impute: learn to impute missing numbers, even if these rows have none.
        device: the device to train on.
        progress: called as progress(done, total), in steps.

    >>> model = fit_rows(torch.tensor([[0.0, 1.0], [0.5, 1.2], [0.1, 0.8], [0.4, 1.1]]), steps=2)
    >>> model.shape, model.kind.noun
    ((2,), 'row')
    """
    x = as_tensor(rows, "rows").double()
    if x.ndim != 2 or len(x) < 2 or not x.shape[1]:
        raise ValueError(f"`rows` must have at least 2 rows, (n, dim); got shape {tuple(x.shape)}.")
    check_finite(x.masked_fill(x.isnan(), 0.0), "rows")
    check_not_all_missing(x.isnan().cpu().numpy(), "rows")
    steps = default_steps(len(x)) if steps is None else steps
    check_count("steps", steps)
    examples = _sets(x.cpu(), None if labels is None else as_tensor(labels, "labels").cpu())
    config = ModelConfig(
        examples.shape,
        levels=0,
        flow=FlowConfig("dense", couplings=_COUPLINGS, units=_UNITS),
        process=ProcessConfig(dof=_DOF),
        missing="impute" if impute or bool(x.isnan().any()) else "reject",
        scales="auto",
    )
    model = Bruno.from_config(config, seed=seed).to(device)
    return _trained(model, learn_columns(model, examples, seed), steps, seed, progress)


def _trained(
    model: Bruno, examples: Examples, steps: int, seed: int, progress: Callable[[int, int], None] | None
) -> Bruno:
    sampler = SetSampler(examples, device=model.device)
    size = min(20, sampler.min_count)
    config = evolve(
        load_recipe("table").train,
        steps=steps,
        batch=max(2, _ELEMENTS // size),
        set_size=size,
        learning_rate=_RATE,
        ema=_AVERAGE,
        seed=seed,
        graph=False,
    )
    trainer = Trainer(model, sampler, config)
    trainer.begin()
    _start_process(model, examples)
    for done in range(steps):
        trainer.step()
        if progress is not None:
            progress(done + 1, steps)
    return trainer.trained().double().requires_grad_(False)


def _sets(rows: Float[Tensor, "n dim"], labels: Int[Tensor, " n"] | None) -> Examples:
    """The sets with at least two rows; if there are none, all rows as one set."""
    one_set = torch.zeros(len(rows), dtype=torch.long)
    labels = one_set if labels is None else labels
    check_labels(labels, len(rows))
    _, own, count = labels.unique(return_inverse=True, return_counts=True)
    large = count[own] > 1
    if not bool(large.any()):
        labels, large = one_set, torch.ones_like(large)
    known, labels = labels[large].unique(return_inverse=True)
    return Examples(rows[large], labels, tuple(map(str, known.tolist())), levels=0)


@torch.no_grad()
def _start_process(model: Bruno, examples: Examples) -> None:
    """Initialise the process with the variance of the latents, and the fraction of it between sets."""
    z = model.latents(examples.elements.to(model.device)).double()
    labels, count = examples.labels.to(z.device), examples.counts.to(z.device).double().unsqueeze(1)
    means = z.new_zeros((len(count), z.shape[1])).index_add(0, labels, z) / count
    within = (z - means[labels]).square().sum(0) / (len(z) - len(count))  # every set has two rows or more
    between = means.var(0) - within * (1 / count).mean() if len(count) > 1 else torch.zeros_like(within)
    variance = (within + between.clamp(min=0)).clamp(1e-6, 1e6)
    process = StudentTProcess(
        model.dim,
        dof=_DOF,
        variance=variance,
        correlation=(between / variance).clamp(_LOWEST, _HIGHEST),
        device=z.device,
    )
    model.process.load_state_dict(process.state_dict())
