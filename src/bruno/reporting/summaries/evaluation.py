"""Summaries of evaluations: bits/dim, few-shot accuracy, fine-tuning."""

from __future__ import annotations

import re
from dataclasses import asdict

from bruno.finetuning import FineTuningComparison
from bruno.reporting.figure import minus
from bruno.reporting.plots import (
    Measured,
    accuracy_bars,
    line_plot,
)
from bruno.reporting.results import Result
from bruno.reporting.summaries.base import on_contamination, summarise
from bruno.tasks.evaluation import BitsPerDim
from bruno.tasks.few_shot import FewShotResult
from bruno.trained.evaluation import Evaluation, FewShotEvaluation
from bruno.trained.verdict import Verdict

_FAR_MORE = 5  # multiple of the requested false-alarm rate that is reported
_PLURALS = {
    "row of another set": "rows of another set",
    "one column of another set": "columns of another set",
    "spike in one column": "spikes in one column",
}
_OUTLIERS = {
    "image of another class": "images of another class",
    "patch of another class": "patches of another class",
}


@summarise.register
def _(outcome: Evaluation) -> Result:
    bits = outcome.bits
    rows = [(str(i), minus(f"{value:.4f}")) for i, value in enumerate(bits.by_position, start=1)]
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
    if protocol.views:
        variants["views"] = "mean of 8 views"
    return Result(
        "-".join(["few-shot", data, *variants]),
        ", ".join([f"Few-shot classification on {data}", *variants.values()]),
        {
            "split": data,
            "rotations": protocol.rotations,
            "rotated_decoys": protocol.rotated_decoys,
            "threshold": protocol.threshold,
            "noise": protocol.noise,
            "views": protocol.views,
            "bruno": [asdict(result) for result in found.model],
            found.features: [asdict(result) for result in found.baseline],
        },
        ("", "accuracy %", f"{baseline} %", "chance %", "episodes"),
        tuple(
            (_setting(a), _accuracy(a), _accuracy(b), f"{100 / a.way:.1f}", f"{a.episodes:,}")
            for a, b in zip(found.model, found.baseline, strict=True)
        ),
        f"Mean of {protocol.trials} trials ± standard error.",
        few_shot_bars({"BRUNO": found.model, baseline: found.baseline}),
    )


@summarise.register
def _(outcome: FineTuningComparison) -> Result:
    columns = [
        {"bits/dim": with_error(bits)}
        | {f"{_setting(r)}, %": _accuracy(r) for r in outcome.few_shot.get(name, ())}
        for name, bits in outcome.bits.items()
    ]
    note = (
        f"Mean ± standard error: of bits/dim between sets or classes, of accuracy between {outcome.trials} "
        "trials."
    )
    if outcome.few_shot and all(result.accuracy == 1 for result in outcome.few_shot["before"]):
        note += (
            " All queries were classified correctly before fine-tuning: the accuracy on these classes cannot "
            "increase."
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


@summarise.register
def _(outcome: Verdict) -> Result:
    rows = [
        (f"−log p, {name}, {outcome.unit}", _density(outcome, bits), "")
        for name, bits in (("training sets", outcome.training), ("held-out sets", outcome.held_out))
        if bits is not None
    ]
    if outcome.gain is not None:
        rows.append((f"gain from conditioning, {outcome.unit}", minus(f"{outcome.gain:.3f}"), ""))
    values = {
        **asdict(outcome),
        "gain": outcome.gain,
        "beats_baseline": outcome.beats_baseline,
        "detection_margins": outcome.detection_margins,
        "seems_contaminated": _seems_contaminated(outcome),
        "finds_outliers": outcome.finds_outliers,
        "outlier_margins": outcome.outlier_margins,
        "overfits": outcome.overfits,
    }
    return Result(
        "verdict",
        "Verdict",
        values,
        ("", "model", "baseline"),
        (*rows, *_few_shot_rows(outcome), *_outlier_rows(outcome), *_fault_rows(outcome)),
        " ".join(_conclusions(outcome)),
    )


def _few_shot_rows(outcome: Verdict) -> list[tuple[str, str, str]]:
    if outcome.few_shot is None:
        return []
    pairs = zip(outcome.few_shot.model, outcome.few_shot.baseline, strict=True)
    return [(f"{_setting(ours)}, %", _accuracy(ours), _accuracy(other)) for ours, other in pairs]


def _accuracy(result: FewShotResult) -> str:
    return f"{100 * result.accuracy:.1f} ± {100 * result.error:.1f}"


def _outlier_rows(outcome: Verdict) -> list[tuple[str, str, str]]:
    if (found := outcome.outliers) is None:
        return []
    return [
        (f"area under ROC, {kind}", f"{found.model[kind]:.3f}", f"{found.baseline[kind]:.3f}")
        for kind in found.model
    ]


def _fault_rows(outcome: Verdict) -> list[tuple[str, str, str]]:
    if (found := outcome.faults) is None:
        return []
    ours, other = found.model, found.baseline
    shares = {f"false alarms, requested {100 * found.rate:g} %": (ours.false_alarms, other.false_alarms)}
    for kind in ours.detections:
        shares[f"found: {kind}"] = (ours.detections[kind], other.detections[kind])
    rows = [(f"{name}, %", f"{100 * a:.1f}", f"{100 * b:.1f}") for name, (a, b) in shares.items()]
    return [*rows, ("area under ROC", f"{ours.area:.3f}", f"{other.area:.3f}")]


def _conclusions(outcome: Verdict) -> list[str]:
    """What the numbers mean, in sentences."""
    sentences = [f"Measured on {_measured_on(outcome)}."]
    if outcome.measured_on == "the training classes":
        sentences.append("No class was held out, so nothing is known about new ones.")
    if outcome.overfits:
        sentences.append(
            "The model overfits: held-out images are less likely than random pixels, which have "
            f"{outcome.uniform:.3g} bits/dim. Train on more images, for fewer steps, or with a smaller "
            "network."
        )
    if outcome.gain is not None and outcome.gain <= 0:
        sentences.append(
            "Conditioning does not help: the model did not learn what the elements of a set share."
        )
    if (found := outcome.faults) and found.model.false_alarms > _FAR_MORE * found.rate:
        sentences.append(
            f"{100 * found.model.false_alarms:.0f} % of clean rows are flagged, but {100 * found.rate:g} % "
            "was requested: thresholds from some sets do not hold for others. Train and calibrate on more "
            "sets."
        )
    if outcome.contamination is not None and outcome.contamination.suspected:
        sentences.append(on_contamination(outcome.contamination, outcome.advice))
    if outcome.unmeasured:
        return [*sentences, f"Not compared with a baseline: {outcome.unmeasured}"]
    if outcome.few_shot is None and outcome.faults is None:
        return sentences
    return [*sentences, *_on_outliers(outcome), *_comparison(outcome)]


def _measured_on(outcome: Verdict) -> str:
    """The number of classes and in which way they are new to the model, in words."""
    classes = "classes" if outcome.classes > 1 else "class"
    words = outcome.measured_on.replace("classes", classes)
    return re.sub(rf"(unseen|training) (?={classes})", rf"{outcome.classes} \1 ", words)


def _comparison(outcome: Verdict) -> list[str]:
    """Sentences on whether the model or the baseline is better, and at which kinds of fault."""
    measure, baseline = "Faults", "a robust Mahalanobis distance, calibrated in the same way"
    if outcome.few_shot:
        measure, baseline = "Few-shot accuracy", f"nearest neighbours in {outcome.few_shot.features}"
    ours, other = _found_more(outcome)
    if outcome.beats_baseline is None:
        return [f"{measure}: no clear difference from the baseline, {baseline}."]
    if outcome.beats_baseline:
        named = [f"The model finds {ours}."] * bool(ours and outcome.area_margin == 0)
        return [f"{measure}: the model is better than the baseline, {baseline}.", *named]
    if outcome.few_shot or outcome.area_margin < 0:
        named = [f"It finds {other}."] * bool(other) + [f"But the model finds {ours}."] * bool(ours)
        remedies = "Train on more classes or for longer, or use the baseline."
        advice = [] if _seems_contaminated(outcome) else [remedies]
        return [f"{measure}: the baseline is better, {baseline}.", *named, *advice]
    area = "larger than that of the baseline" if outcome.area_margin else "about that of the baseline"
    but = f". The model finds {ours}, but" if ours else ", but"
    return [
        f"{measure}: the area under ROC is {area}, {baseline}{but} the baseline finds {other}.",
        "For these faults, use the baseline.",
    ]


def _seems_contaminated(outcome: Verdict) -> bool:
    """Whether the sets that the verdict was measured on seem to contain faults."""
    return outcome.contamination is not None and outcome.contamination.suspected


def _found_more(outcome: Verdict) -> tuple[str, str]:
    """In words, the faults that the model finds more often, and those that the baseline finds more often."""
    if (found := outcome.faults) is None:
        return "", ""
    words: dict[int, list[str]] = {1: [], -1: []}
    for kind, margin in outcome.detection_margins.items():
        if margin:
            better, worse = (found.model, found.baseline)[::margin]
            name = "the baseline" if margin > 0 else "the model"
            words[margin].append(
                f"{100 * better.detections[kind]:.0f} % of the {_PLURALS[kind]}, "
                f"{name} {100 * worse.detections[kind]:.0f} %"
            )
    return "; ".join(words[1]), "; ".join(words[-1])


def _on_outliers(outcome: Verdict) -> list[str]:
    """Sentences on whether the model or the baseline finds outliers among images better."""
    if outcome.outliers is None:
        return []
    baseline = "distances between patches of pixels"
    if outcome.finds_outliers is None:
        found = f"Outliers: no clear difference from the baseline, {baseline}."
    elif outcome.finds_outliers:
        found = f"Outliers: the model is better than the baseline, {baseline}."
    else:
        found = (
            f"Outliers: the baseline is better, {baseline}. Batches of images are judged by them, streams by "
            "the model."
        )
    overall = {True: 1, False: -1, None: 0}[outcome.finds_outliers]  # a kind that agrees needs no sentence
    kinds = {kind: margin for kind, margin in outcome.outlier_margins.items() if margin not in (0, overall)}
    named = (f"{_OUTLIERS[kind]}, {'the model' if kinds[kind] > 0 else 'the baseline'} is" for kind in kinds)
    return [found] + [f"For {'; for '.join(named)} better."] * bool(kinds)


def _density(outcome: Verdict, bits: BitsPerDim) -> str:
    """The mean in the unit of the model, with the standard error if there is one."""
    mean = minus(f"{outcome.density(bits.mean):.3f}")
    return mean if bits.error is None else f"{mean} ± {outcome.density(bits.error):.3f}"


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
    return minus(f"{bits.mean:.4f}") + ("" if bits.error is None else f" ± {bits.error:.4f}")


def _setting(result: FewShotResult) -> str:
    return f"{result.way}-way {result.shot}-shot"
