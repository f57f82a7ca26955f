"""What the jobs of a trained model found, as results with a table, a note and a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from bruno.fit import FineTuningComparison
from bruno.kinds import Kind
from bruno.model import Samples
from bruno.reporting.element_plots import STRIP, class_probabilities, score_timeline
from bruno.reporting.images import BACKGROUND, contact_sheet, grid, png, prefix_sheet, to_uint8
from bruno.reporting.plots import (
    Measured,
    accuracy_bars,
    dot_plot,
    line_plot,
    predictive_bands,
    scatter_plot,
    training_curves,
)
from bruno.reporting.results import Result
from bruno.tasks.analysis import (
    CorrelationAndDof,
    DimensionsByCorrelation,
    LogProbByPosition,
    ToyComparison,
)
from bruno.tasks.anomaly import Judgement, StreamSummary
from bruno.tasks.classification import Classification
from bruno.tasks.evaluation import BitsPerDim
from bruno.tasks.few_shot import FewShotResult
from bruno.tasks.generation import SetSamples, SpreadByRepeats
from bruno.tasks.retrieval import RetrievalQuality
from bruno.tasks.stability import StabilityStudy
from bruno.trained.detection import AnomalyEvaluation, BatchJudgement
from bruno.trained.jobs import (
    Evaluation,
    FewShotEvaluation,
    RetrievalEvaluation,
    Retrieved,
    SpeckEvaluation,
)
from bruno.trained.watch import Watch

_LOWEST = 20  # scores of a batch in its table
_ROWS = 10  # of a table of samples
_SHOWN = 40  # samples in a picture of specks
_QUERIES = 24  # in a picture of class probabilities
_CLASSES = 5  # shown of each query


@singledispatch
def summarise(outcome: Any) -> Result:
    """The result of a job, ready to be written and shown."""
    raise TypeError(f"`outcome` must be the result of a job; got {type(outcome).__name__}.")


# --- evaluation ------------------------------------------------------------------------------------------


@summarise.register
def _(outcome: Evaluation) -> Result:
    bits = outcome.bits
    rows = [(str(i), f"{value:.4f}") for i, value in enumerate(bits.by_position, start=1)]
    return Result(
        f"bits-{outcome.data}",
        f"Bits/dim on {outcome.data}, by position in the set",
        {"split": outcome.data, **asdict(bits)},
        ("position", "bits/dim"),
        (*rows, ("mean", with_error(bits))),
        f"{bits.sets} sets{'; ± standard error' * (bits.error is not None)}.",
        line_plot(
            {outcome.data: (range(1, len(bits.by_position) + 1), bits.by_position)},
            "position in the set",
            "bits/dim",
        ),
    )


@summarise.register
def _(outcome: FewShotEvaluation) -> Result:
    found, data = outcome.comparison, outcome.data
    protocol, baseline = found.protocol, f"nearest {found.features}"
    variants = {}  # suffix of the file name: words in the title
    if protocol.threshold is not None:
        variants[f"above-{protocol.threshold:g}"] = (
            f"dimensions with correlation above {protocol.threshold:g}"
        )
    if protocol.rotated_decoys:
        variants["rotated-decoys"] = "decoys may be rotations of the query's class"
    if not protocol.noise:
        variants["without-noise"] = "without noise"
    return Result(
        "-".join(["few-shot", data, *variants]),
        ", ".join([f"Few-shot classification on {data}", *variants.values()]),
        {
            "split": data,
            "rotations": protocol.rotations,
            "rotated_decoys": protocol.rotated_decoys,
            "threshold": protocol.threshold,
            "noise": protocol.noise,
            "bruno": [asdict(result) for result in found.model],
            found.features: [asdict(result) for result in found.baseline],
        },
        ("", "accuracy %", f"{baseline} %", "chance %", "episodes"),
        tuple(
            (_setting(a), _per_cent(a), _per_cent(b), f"{100 / a.way:.1f}", f"{a.episodes:,}")
            for a, b in zip(found.model, found.baseline, strict=True)
        ),
        f"Mean of {protocol.trials} trials ± standard deviation; in the picture ± standard error.",
        few_shot_bars({"BRUNO": found.model, baseline: found.baseline}),
    )


@summarise.register
def _(outcome: FineTuningComparison) -> Result:
    columns = [
        {"bits/dim": with_error(bits)}
        | {f"{_setting(r)}, %": _per_cent(r) for r in outcome.few_shot.get(name, ())}
        for name, bits in outcome.bits.items()
    ]
    note = (
        f"Bits/dim ± standard error. Accuracy: mean of {outcome.trials} trials ± standard deviation over "
        "trials; in the picture ± standard error."
    )
    return Result(
        f"finetuning-{outcome.split}",
        f"Before and after fine-tuning, on {outcome.split}",
        {
            name: {
                "bits_per_dim": asdict(bits),
                "few_shot": [asdict(result) for result in outcome.few_shot.get(name, ())],
            }
            for name, bits in outcome.bits.items()
        },
        ("", *outcome.bits),
        tuple((name, *(column[name] for column in columns)) for name in columns[0]),
        note if outcome.few_shot else "Too few held-out classes, or elements of each, to measure accuracy.",
        few_shot_bars(outcome.few_shot) if outcome.few_shot else b"",
    )


def few_shot_bars(results: dict[str, tuple[FewShotResult, ...]]) -> bytes:
    """Accuracies of several methods at the same settings, ± standard error, and chance."""
    first = next(iter(results.values()))
    return accuracy_bars(
        [_setting(result) for result in first],
        {name: [Measured(r.accuracy, r.error) for r in found] for name, found in results.items()},
        [1 / result.way for result in first],
    )


def with_error(bits: BitsPerDim) -> str:
    """Mean bits/dim, with the standard error if there is one."""
    return f"{bits.mean:.4f}" + ("" if bits.error is None else f" ± {bits.error:.4f}")


def _setting(result: FewShotResult) -> str:
    return f"{result.way}-way {result.shot}-shot"


def _per_cent(result: FewShotResult) -> str:
    return f"{100 * result.accuracy:.1f} ± {100 * result.spread:.1f}"


# --- generation ------------------------------------------------------------------------------------------


@summarise.register
def _(outcome: Samples) -> Result:
    values = {"seen": (0,), "clamped": outcome.clamped}
    picture = b""
    if outcome.levels:
        columns = math.ceil(math.sqrt(len(outcome.x)))
        images = to_uint8(outcome.images, outcome.levels)
        picture = png(grid(images, columns, padding=1, background=BACKGROUND))
    result = Result("samples-prior", "Samples from the prior", values, picture=picture)
    if outcome.levels:
        return result
    return _with_rows(result, outcome.x[None, None], (0,), outcome.columns)


@summarise.register
def _(outcome: SetSamples) -> Result:
    samples, seen = outcome.samples, outcome.lengths
    result = Result("samples", "More of the same", {"seen": seen, "clamped": samples.clamped})
    if not samples.levels:
        return _with_rows(result, samples.x, seen, samples.columns)
    inputs, drawn = (to_uint8(x, samples.levels) for x in (outcome.inputs, samples.images))
    shown = inputs[:, [n - 1 for n in seen if n]]  # the last element of each prefix
    return replace(
        result,
        note="Top: the elements of the set, one by one. Below each: samples given it and all before it.",
        picture=prefix_sheet(list(zip(shown, drawn, strict=True)), seen),
    )


@summarise.register
def _(outcome: SpreadByRepeats) -> Result:
    samples, repeats, count = outcome.samples, outcome.repeats, len(outcome.inputs)
    noun, scale = ("image", "pixel, from 0 to 1") if samples.levels else ("row", "column, standardised")
    picture = b""
    if samples.levels:
        first = to_uint8(outcome.inputs[:1], samples.levels).expand(len(repeats), -1, -1, -1)
        drawn = to_uint8(samples.images[0, :, :_ROWS], samples.levels)
        picture = prefix_sheet([(first, drawn)], repeats)
    return Result(
        "samples-repeats",
        f"Samples given the same {noun} repeatedly",
        {"seen": repeats, "variance": outcome.variance, "by_element": outcome.by_element},
        ("times seen", f"mean variance of a {scale}, over {count} {noun}{'s' * (count != 1)}"),
        tuple((str(n), f"{v:.4f}") for n, v in zip(repeats, outcome.variance, strict=True)),
        "Top: the first image. Below: samples after it was seen that many times." * bool(samples.levels),
        picture,
    )


@summarise.register
def _(outcome: SpeckEvaluation) -> Result:
    found, data = outcome.result, outcome.data
    first = found.with_speck.double().argsort(descending=True, stable=True)[:_SHOWN]
    images = to_uint8(found.images[first], found.levels)
    settings = f"given {found.given} image{'s' * (found.given != 1)} of a class"
    if found.temperature != 1:
        settings += f", at temperature {found.temperature:g}"
    return Result(
        f"specks-{data}",
        f"Specks in samples, on {data}",
        {
            "split": data,
            "share": found.share,
            "error": found.error,
            "samples": found.samples,
            "given": found.given,
            "temperature": found.temperature,
            "data_share": found.data_share,
            "data_images": found.data_images,
        },
        ("", "with specks %", "images"),
        (
            ("samples", f"{100 * found.share:.1f} ± {100 * found.error:.1f}", f"{found.samples:,}"),
            (data, f"{100 * found.data_share:.1f}", f"{found.data_images:,}"),
        ),
        f"A speck is an isolated dot of one or two bright pixels. Samples {settings}; ± standard error. "
        f"In the picture: {len(images)} samples, those with specks first.",
        png(grid(images, 10, padding=1, background=BACKGROUND)),
    )


def class_samples_picture(outcome: SetSamples) -> bytes:
    """A row for each class: what was given, a gap, and samples."""
    given = to_uint8(outcome.inputs, outcome.samples.levels)
    drawn = to_uint8(outcome.samples.images[:, 0], outcome.samples.levels)
    gap = torch.full_like(given[:, :1], BACKGROUND)
    rows = torch.cat([given, gap, drawn], 1)
    return png(grid(rows.flatten(0, 1), rows.shape[1], padding=1, background=BACKGROUND))


def _with_rows(result: Result, x: Tensor, seen: Sequence[int], names: Sequence[str]) -> Result:
    """A result on rows of a table: the last samples as text."""
    rows = [
        (str(number), str(n), *(f"{value:.6g}" for value in row))
        for number, prefixes in enumerate(x.tolist(), start=1)
        for n, some in zip(seen, prefixes, strict=True)
        for row in some
    ]
    columns = ("set", "seen", *(names or map(str, range(1, x.shape[-1] + 1))))
    note = f"The last {_ROWS} of {len(rows)} samples." * (len(rows) > _ROWS)
    return replace(result, columns=columns, rows=tuple(rows[-_ROWS:]), note=note)


# --- classification --------------------------------------------------------------------------------------


@summarise.register
def _(outcome: Classification) -> Result:
    names, likeliest = short_names(outcome.names), outcome.most_probable(_CLASSES)
    rows = []
    for name, ((first, probability), *others) in zip(names, likeliest, strict=True):
        rest = ", ".join(f"{other} {100 * p:.1f}" for other, p in others)
        rows.append((name, first, f"{100 * probability:.1f}", rest))
    shown = [f"the first {_QUERIES} of {len(rows)}"] * (len(rows) > _QUERIES)
    shown += [f"the {_CLASSES} most probable of {len(outcome.classes)} classes"] * (
        len(outcome.classes) > _CLASSES
    )
    images = to_uint8(outcome.queries[:_QUERIES], outcome.kind.levels) if outcome.kind.is_images else None
    return Result(
        "classification",
        "Class probabilities",
        {
            "classes": outcome.classes,
            "temperature": outcome.temperature,
            "support": outcome.support,
            "images": outcome.names,
            "probabilities": outcome.probabilities.tolist(),
        },
        (outcome.kind.noun, "class", "%", "or"),
        tuple(rows),
        f"In the picture: {', '.join(shown)}." if shown else "",
        class_probabilities(names[:_QUERIES], likeliest[:_QUERIES], images),
    )


def short_names(names: Sequence[str]) -> list[str]:
    """File names without their folders, if they stay different."""
    short = [name.rsplit("/", 1)[-1] for name in names]
    return short if len(set(short)) == len(set(names)) else list(names)


# --- outliers --------------------------------------------------------------------------------------------


@summarise.register
def _(outcome: Watch) -> Result:
    return _timeline(
        "anomaly", "Outliers in a stream", outcome.summary, outcome.kind, "stream", "those before it"
    )


@summarise.register
def _(outcome: BatchJudgement) -> Result:
    result = _timeline(
        "anomaly-batch", "Outliers in a batch", outcome.summary, outcome.kind, "batch", "all others"
    )
    lowest = sorted(outcome.summary.latest, key=lambda one: (not one[1].out_of_distribution, one[1].score))[
        :_LOWEST
    ]
    names = short_names([name for name, _ in lowest])
    rows = tuple(
        (f"{judgement.score:+.2f}", name, verdict(judgement))
        for name, (_, judgement) in zip(names, lowest, strict=True)
    )
    return replace(result, columns=("score", "lowest scores", ""), rows=rows)


def verdict(judgement: Judgement) -> str:
    """What a judgement says, in words; empty for an inlier."""
    return "outlier" * judgement.outlier + ", out of distribution" * judgement.out_of_distribution


def _timeline(name: str, title: str, summary: StreamSummary, kind: Kind, what: str, given: str) -> Result:
    found = f"{summary.outliers} of {summary.count} are outliers"
    if summary.out_of_distribution:
        found += f", {summary.out_of_distribution} of them out of distribution and excluded from the evidence"
    shown = f" The {STRIP} lowest are shown." * (summary.outliers > STRIP and kind.is_images)
    judged = [judgement for _, judgement in summary.latest]
    scores, thresholds = [one.score for one in judged], [one.threshold for one in judged]
    images = {
        group: {one.position: to_uint8(one.x, kind.levels) for one in some} if kind.is_images else {}
        for group, some in (("outliers", summary.lowest_outliers), ("inliers", summary.highest_inliers))
    }
    return Result(
        name,
        title,
        {
            "elements": summary.count,
            "outliers": summary.outliers,
            "out_of_distribution": summary.out_of_distribution,
            "names": [name for name, _ in summary.latest],
            "scores": scores,
            "thresholds": thresholds,
        },
        note=f"{found}.{shown} The score is log p(x | {given}) − log p(x), in nats.",
        picture=score_timeline(
            scores,
            thresholds,
            [one.outlier for one in judged],
            [one.out_of_distribution for one in judged],
            first=summary.first_position,
            xlabel=f"element of the {what}",
            **images,
        ),
    )


@summarise.register
def _(outcome: AnomalyEvaluation) -> Result:
    found = outcome.contaminations
    by_rate = {f"{100 * part.rate:.0f} % outliers": part.qualities for part in found}
    methods = list(found[0].qualities)
    panels = {
        "area under ROC": {
            rate: [Measured(q[m].area, q[m].area_error) for m in methods] for rate, q in by_rate.items()
        },
        "average precision": {
            rate: [Measured(q[m].average_precision, q[m].average_precision_error) for m in methods]
            for rate, q in by_rate.items()
        },
    }
    return Result(
        f"anomaly-quality-{outcome.data}",
        f"Finding outliers in sets, on {outcome.data}",
        {"contamination": [asdict(part) for part in found]},
        ("area under ROC / average precision", *by_rate),
        tuple(
            (m, *(f"{q[m].area:.3f} / {q[m].average_precision:.3f}" for q in by_rate.values()))
            for m in methods
        ),
        f"{found[0].sets} sets of {found[0].set_size} elements of {outcome.data}; "
        "in the picture ± standard error.",
        dot_plot(methods, panels),
    )


# --- retrieval -------------------------------------------------------------------------------------------


@summarise.register
def _(outcome: Retrieved) -> Result:
    picture = b""
    if outcome.found is not None:
        query, found = (to_uint8(x, outcome.kind.levels) for x in (outcome.query, outcome.found))
        picture = contact_sheet(query, found, outcome.scores)
    ranked = zip(outcome.names, outcome.scores, strict=True)
    return Result(
        "retrieval",
        "Best matches",
        {"collection": outcome.collection, "names": outcome.names, "scores": outcome.scores},
        ("rank", "score", "element"),
        tuple((str(i), f"{score:+.1f}", name) for i, (name, score) in enumerate(ranked, start=1)),
        "Top: the query. Below: the best matches, with rank and score in nats." * bool(picture),
        picture,
    )


@summarise.register
def _(outcome: RetrievalEvaluation) -> Result:
    found = outcome.results
    methods, at = list(found[0].qualities), list(next(iter(found[0].qualities.values())).precision)
    by_shots = {f"{part.shots} example{'s' * (part.shots != 1)}": part.qualities for part in found}
    panels = {
        "mean average precision": {
            name: [Measured(q[m].average_precision, q[m].average_precision_error) for m in methods]
            for name, q in by_shots.items()
        }
    }
    for k in at:
        panels[f"precision at {k}"] = {
            name: [Measured(q[m].precision[k], q[m].precision_error[k]) for m in methods]
            for name, q in by_shots.items()
        }
    rows = [(m, *(_precisions(q[m]) for q in by_shots.values())) for m in methods]
    return Result(
        f"retrieval-quality-{outcome.data}",
        f"Finding the rest of a class, on {outcome.data}",
        {"by_shots": [asdict(part) for part in found]},
        ("mean average precision (precision at 1, 5, 10)", *by_shots),
        (*rows, ("chance", *(f"{part.chance:.3f}" for part in found))),
        f"{found[0].queries} queries in a collection of {found[0].collection} elements of {outcome.data}; "
        "in the picture ± standard error.",
        dot_plot(methods, panels),
    )


def _precisions(quality: RetrievalQuality) -> str:
    at = ", ".join(f"{value:.2f}" for value in quality.precision.values())
    return f"{quality.average_precision:.3f} ({at})"


# --- analyses --------------------------------------------------------------------------------------------


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
            (str(n), f"{outcome.gain[n]:+.2f} ± {outcome.gain_error[n]:.2f}")
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
        tuple((c.variant, c.process, f"{c.final:.3f}", str(c.skipped)) for c in curves),
        f"{outcome.steps} steps of RMSProp each. Faint: every step; bold: the running mean.",
        training_curves([(c.variant, c.process, c.bits_per_dim) for c in curves]),
    )
