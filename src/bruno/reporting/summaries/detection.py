"""Summaries of outliers in streams and batches, and of calibrations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

from bruno.kinds import Kind
from bruno.reporting.figure import minus
from bruno.reporting.images import to_uint8
from bruno.reporting.plots import Measured, dot_plot
from bruno.reporting.results import Result
from bruno.reporting.summaries.base import on_contamination, summarise
from bruno.reporting.timelines import MAX_SETS, STRIP, score_timeline
from bruno.tasks.anomaly import Judgement
from bruno.tasks.conformal import GroupScores
from bruno.tasks.detector import Detector
from bruno.tasks.stream_summary import StreamSummary, far_more_flagged
from bruno.trained.batch import BatchJudgement
from bruno.trained.calibration import CalibrationReport
from bruno.trained.detection import AnomalyEvaluation
from bruno.trained.keyed_watch import KeyedWatch
from bruno.trained.watch import Watch, WatchedStream

TITLES = {"anomaly": "Outliers in a stream", "anomaly-batch": "Outliers in a batch"}  # of results, by job
_LOWEST = 20  # sets in a table
_RATES = (0.01, 0.05, 0.1)  # thresholds are reported for these rates
_POSITIONS = (1, 5, 20, 50, 100)  # thresholds are reported at these positions
_PATCHES = (
    "Distances between patches of pixels find outliers better than this model. The score of an image is "
    "minus the distance of its most unusual patch to the second-nearest image, divided by the median."
)
_MOST = 0.5  # if a larger fraction is out-of-distribution, the data are probably of another kind


@summarise.register
def _(outcome: Watch) -> Result:
    result = _timeline(
        "anomaly", TITLES["anomaly"], outcome.summary, outcome.kind, "stream", "those before it"
    )
    found = {name: one.drift.changed_at for name, one in outcome.state.sets.items()}
    changed = {name: position for name, position in found.items() if position is not None}
    values = {**result.values, "changed_since": changed}
    result = replace(result, values=values, note=" ".join([result.note, *_on_drift(changed)]))
    return _with_groups(_with_misfit(result, outcome, _rate_of(outcome.detector)), outcome.summary)


@summarise.register
def _(outcome: KeyedWatch) -> Result:
    result = _timeline(
        "anomaly", TITLES["anomaly"], outcome.summary, outcome.kind, "stream", "those before it in its set"
    )
    return _with_groups(_with_misfit(result, outcome, _rate_of(outcome.detector)), outcome.summary)


@summarise.register
def _(outcome: BatchJudgement) -> Result:
    result = _timeline(
        "anomaly-batch",
        TITLES["anomaly-batch"],
        outcome.summary,
        outcome.kind,
        "batch",
        "all others",
        in_order=outcome.has_consecutive_sets,
    )
    if outcome.criterion == "patches":
        picture = _timeline_picture(outcome.summary, outcome.kind, "batch", "(typical: −1)")
        result = replace(result, note=f"{_found(outcome.summary)}. {_PATCHES}", picture=picture)
    return _with_groups(_with_misfit(result, outcome, outcome.rate), outcome.summary)


def verdict(judgement: Judgement) -> str:
    """A judgement in words; empty for an inlier."""
    return "outlier" * judgement.outlier + ", out-of-distribution" * judgement.out_of_distribution


def p_value(judgement: Judgement) -> str:
    """The p-value in words, with ≈ if it is estimated; empty without one."""
    if judgement.p is None:
        return ""
    return f"p {'≈' if judgement.basis == 'estimated' else '='} {judgement.p:.2g}"


def _on_drift(changed: Mapping[str, int]) -> list[str]:
    """A sentence on each set that has changed, with the element near which it changed."""
    return [
        f"The distribution of {f'set {name!r}' if name else 'the stream'} changed near element {since}."
        for name, since in changed.items()
    ]


def _rate_of(detector: Detector) -> float | None:
    """The false-alarm rate of a calibrated detector; None with a fixed threshold."""
    return detector.rate if isinstance(detector.threshold, GroupScores) else None


def _with_misfit(result: Result, outcome: WatchedStream | BatchJudgement, rate: float | None) -> Result:
    """The result with a note if far more elements are flagged than requested."""
    misfit = _misfit(outcome.summary, rate, outcome.advice, not outcome.kind.is_images)
    return replace(result, note=f"{result.note} {misfit}.") if misfit else result


def _misfit(summary: StreamSummary, rate: float | None, advice: str, rows: bool) -> str:
    """A sentence if far more elements are flagged than requested, otherwise ""."""
    found = "" if rate is None else far_more_flagged(summary.outliers, summary.count, rate)
    if not found:
        return ""
    strange = ", and most are out-of-distribution" * (summary.out_of_distribution > _MOST * summary.count)
    check = "Check units and columns. If they are" if rows else "If the data are"
    return (
        f"{found}{strange}: the model or its calibration does not fit these data, or they are faulty. "
        f"{check} right, calibrate on clean sets of this kind: {advice}"
    )


def _with_groups(result: Result, summary: StreamSummary) -> Result:
    """The result with a table of the sets, most outliers first, and of all sets together."""
    if len(summary.groups) < 2:
        return result
    order = sorted(summary.groups.items(), key=lambda one: (-one[1].outliers, one[1].lowest_p or 1.0))
    rows = [
        (name, str(one.elements), str(one.outliers), "" if one.lowest_p is None else f"{one.lowest_p:.2g}")
        for name, one in order[:_LOWEST]
    ]
    if len(order) > _LOWEST:
        rest = [one for _, one in order[_LOWEST:]]
        elements, outliers = sum(one.elements for one in rest), sum(one.outliers for one in rest)
        rows.append((f"{len(rest)} others", str(elements), str(outliers), ""))
    rows.append((f"all {len(order)} sets", str(summary.count), str(summary.outliers), ""))
    groups = {name: one._asdict() for name, one in summary.groups.items()}
    return replace(
        result,
        columns=("set", "elements", "outliers", "lowest p"),
        rows=tuple(rows),
        values={**result.values, "groups": groups},
    )


def _timeline(
    name: str,
    title: str,
    summary: StreamSummary,
    kind: Kind,
    what: str,
    given: str,
    *,
    in_order: bool = False,
) -> Result:
    judged, sets = [one.judgement for one in summary.latest], len(summary.groups)
    drawn = [f"the last {len(judged):,} elements"] * (len(judged) < summary.count)
    if sets > 1:
        some = f"{MAX_SETS} of {sets:,} sets, those with most outliers"
        order = "in order of time" if in_order else "most outliers first"
        drawn.append(f"{some if sets > MAX_SETS else f'the {sets} sets'}, {order}")
    shown = f" In the picture: {'; '.join(drawn)}." if drawn else ""
    calibrated_rows = not kind.is_images and any(one.p is not None for one in judged)
    prior = "max(log p(x), log p of a typical row)" if calibrated_rows else "log p(x)"  # see `shortfall`
    return Result(
        name,
        title,
        {
            "elements": summary.count,
            "outliers": summary.outliers,
            "out_of_distribution_count": summary.out_of_distribution,
            "names": [one.name for one in summary.latest],
            "sets": [one.group for one in summary.latest] if sets > 1 else None,
            "scores": [one.score for one in judged],
            "thresholds": [one.threshold for one in judged],
            "p": [one.p for one in judged],
            "basis": [one.basis for one in judged],
            "outlier": [one.outlier for one in judged],
            "out_of_distribution": [one.out_of_distribution for one in judged],
        },
        note=f"{_found(summary)}.{shown} The score is log p(x | {given}) − {prior}, in nats.",
        picture=_timeline_picture(summary, kind, what, in_order=in_order),
    )


def _found(summary: StreamSummary) -> str:
    """How many outliers there are."""
    found = f"{summary.outliers:,} of {summary.count:,} are outliers"
    if not summary.out_of_distribution:
        return found
    return f"{found}, {summary.out_of_distribution:,} of them out-of-distribution"


def _timeline_picture(
    summary: StreamSummary, kind: Kind, what: str, unit: str = "(nats)", *, in_order: bool = False
) -> bytes:
    judged, several = [one.judgement for one in summary.latest], len(summary.groups) > 1
    images = {
        group: {
            one.position: to_uint8(one.x, kind.levels)
            for one in sorted(some[:STRIP], key=lambda one: one.position)
        }
        for group, some in (("outliers", summary.most_unusual), ("inliers", summary.most_typical))
        if kind.is_images and not several
    }
    return score_timeline(
        [one.score for one in judged],
        [one.threshold for one in judged],
        [one.outlier for one in judged],
        [one.out_of_distribution for one in judged],
        groups=[one.group for one in summary.latest],
        positions=summary.latest_positions,
        xlabel="element of its set" if several else f"element of the {what}",
        unit=unit,
        in_order=in_order,
        **images,
    )


@summarise.register
def _(outcome: CalibrationReport) -> Result:
    calibration, scores = outcome.calibration, outcome.calibration.stream()
    last = int(scores.positions[-1])
    positions = [n for n in _POSITIONS if n < last] + [last]
    smallest = scores.smallest_exact(min(positions[-1], 19))
    counts, found = calibration.groups.counts, outcome.contamination
    suspected = found is not None and found.suspected
    warning = f" {on_contamination(found, outcome.advice)}" if found and suspected else ""
    return Result(
        "calibration",
        "Thresholds of the score in a stream",
        {
            "data": calibration.data,
            "groups": len(calibration.groups.names),
            "elements": int(counts.sum()),
            "unseen": calibration.unseen,
            "smallest_exact_rate": smallest if smallest < 1 else None,
            "cutoffs": calibration.cutoffs.by_count,
            "thresholds": {str(rate): [scores.threshold(n, rate) for n in positions] for rate in _RATES},
            "positions": positions,
            "contamination": None if found is None else asdict(found),
            "seems_contaminated": suspected,
        },
        ("false-alarm rate", "basis", *(f"after {n}" for n in positions)),
        tuple(
            (
                f"{100 * rate:g} %",
                scores.basis(positions[0], rate),
                *(minus(f"{scores.threshold(n, rate):+.1f}") for n in positions),
            )
            for rate in _RATES
        ),
        f"{len(calibration.groups.names)} groups of {calibration.data}, "
        f"{' to '.join(map(str, sorted({int(counts.min()), int(counts.max())})))} elements each: "
        + (f"rates of at least {100 * smallest:.1f} % are exact." if smallest < 1 else "no rate is exact.")
        + f" Kept in {outcome.path}.{warning}",
    )


@summarise.register
def _(outcome: AnomalyEvaluation) -> Result:
    found = outcome.comparisons
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
