"""Summaries of analyses: correlations, degrees of freedom, gain, stability."""

from __future__ import annotations

from dataclasses import asdict

from bruno.reporting.figure import minus
from bruno.reporting.plots import (
    line_plot,
    predictive_bands,
    scatter_plot,
    training_curves,
)
from bruno.reporting.results import Result
from bruno.reporting.summaries.base import summarise
from bruno.tasks.analysis import (
    CorrelationAndDof,
    DimensionsByCorrelation,
    Inspection,
    LogProbByPosition,
    ToyComparison,
)
from bruno.tasks.stability import StabilityStudy


@summarise.register
def _(outcome: Inspection) -> Result:
    raise TypeError(
        "`outcome` must be one result; summarise the parts of an inspection: its correlations, dof, toy "
        "and positions."
    )


@summarise.register
def _(outcome: DimensionsByCorrelation) -> Result:
    counts = dict(zip(outcome.thresholds, outcome.dimensions, strict=True))
    # The curve is flat below the smallest correlation, and ends where no dimension is left.
    rising = [t for t, n in counts.items() if n == outcome.total][-6:]
    shown = {t: n for t, n in counts.items() if n and (n < outcome.total or t in rising)}
    rows = []
    for limit in (0.01, 0.1, 0.5):
        nearest = min(counts, key=lambda t: abs(t - limit))
        rows.append((f"{nearest:.2g}", f"{counts[nearest]} of {outcome.total}"))
    return Result(
        "correlations",
        "Latent dimensions that distinguish sets",
        asdict(outcome),
        ("correlation above", "dimensions"),
        tuple(rows),
        picture=line_plot(
            {"dimensions": (list(shown), list(shown.values()))}, "correlation above", "dimensions", log="xy"
        ),
    )


@summarise.register
def _(outcome: CorrelationAndDof) -> Result:
    if outcome.dof is None:
        return Result("degrees-of-freedom", "Degrees of freedom", {}, note="A Gaussian process has none.")
    return Result(
        "degrees-of-freedom",
        "Correlation and degrees of freedom of every latent dimension",
        asdict(outcome),
        picture=scatter_plot(outcome.correlation, outcome.dof, "correlation", "degrees of freedom", log="xy"),
    )


@summarise.register
def _(outcome: ToyComparison) -> Result:
    processes = {"Gaussian": outcome.gaussian}
    processes |= {f"Student-t, {p.dof:g} degrees of freedom": p for p in outcome.student_t}
    return Result(
        "toy-comparison",
        "Student-t and Gaussian processes on data with a tenth of the variance they expect",
        asdict(outcome),
        note="Dots: the observations. Band: predictive mean ± 2 standard deviations. The Student-t process "
        "learns the spread from the observations, faster with fewer degrees of freedom; the Gaussian process "
        "cannot.",
        picture=predictive_bands(
            outcome.observations, {name: (p.mean, p.variance) for name, p in processes.items()}
        ),
    )


@summarise.register
def _(outcome: LogProbByPosition) -> Result:
    count = len(outcome.gain)
    return Result(
        "gain-by-position",
        "Gain from conditioning, by the number of elements seen",
        asdict(outcome),
        ("seen", "log p(x | seen) − log p(x), nats"),
        tuple(
            (str(n), f"{minus(f'{outcome.gain[n]:+.2f}')} ± {outcome.gain_error[n]:.2f}")
            for n in sorted({1, 2, 5, count - 1})
            if n < count
        ),
        f"{outcome.sets} sets; ± standard error.",
        line_plot(
            {"gain": (range(count), outcome.gain)},
            "elements seen before",
            "nats",
            errors={"gain": outcome.gain_error},
        ),
    )


@summarise.register
def _(outcome: StabilityStudy) -> Result:
    curves = outcome.curves
    return Result(
        f"study-{outcome.name}",
        f"Stability of training on {outcome.name}",
        {"curves": [asdict(curve) for curve in curves]},
        ("", "process", "final bits/dim", "skipped steps"),
        tuple((c.variant, c.process, minus(f"{c.final:.3f}"), str(c.skipped)) for c in curves),
        f"{outcome.steps} steps of RMSProp each. Faint: every step; bold: the running mean.",
        training_curves([(c.variant, c.process, c.bits_per_dim) for c in curves]),
    )
