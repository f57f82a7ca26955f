"""False-alarm rates of p-values, and detection of faults against other methods. Writes results/decisions/.

Coverage: in every redraw, the held-out groups are divided at random into calibration and test groups. Each
test group is one stream in random order. The false-alarm rate is the mean over groups of the share of clean
elements with p at most the asked rate. Standard errors are clustered by group: over the means of groups.

Detection: 200 machines that were not trained on, with 8 % faults. All methods judge the same rows. Each has
its own threshold at a rate of 1 %, the same quantile of its scores on the same clean machines.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bruno
from bruno import Bruno
from bruno.data import Examples, is_available, load_examples
from bruno.data.synthetic import simulate_machines
from bruno.provenance import provenance
from bruno.tasks import Cutoffs, GroupCalibration, Groups, fixed_cutoffs
from bruno.tasks.conformal import GroupScores
from bruno.tasks.keep_out import batch_scores, stream_scores
from bruno.tasks.metrics import average_precision, roc_auc

RESULTS = Path(__file__).parents[1] / "results" / "decisions"
RATES = (0.01, 0.05, 0.1)
_ROWS, _TRAINED, _TESTED, _FAULTS = 60, 100, 200, 0.08
_BOOTSTRAPS = 200
_NEIGHBOURS = 10  # of LocalOutlierFactor; its default of 20 is as many as a small set has


@dataclass(frozen=True)
class Case:
    """Held-out groups of a model: which are calibrated on is drawn anew."""

    name: str
    model: Bruno
    train: Examples
    held_out: Examples
    calibrated: int
    set_size: int


def train_machines(folder: Path, steps: int) -> Bruno:
    """A model of machines that are neither calibrated nor tested on."""
    return _train_table(folder / "machines", simulate_machines(_TRAINED, _ROWS, seed=0).examples, steps)


def _train_table(out: Path, examples: Examples, steps: int) -> Bruno:
    names = [examples.names[label] for label in examples.labels.tolist()]
    columns = examples.columns or [f"c{i}" for i in range(examples.shape[0])]
    rows = zip(names, examples.elements.tolist(), strict=True)
    lines = [",".join([name, *(repr(value) for value in row)]) for name, row in rows]
    table = out.parent / f"{out.name}.csv"
    table.write_text("\n".join([",".join(["group", *columns]), *lines]))
    return bruno.train(
        "table", out, data={"name": str(table), "group": "group"}, steps=steps, device="cpu"
    ).model


def wine_groups(size: int = 10) -> Examples:
    """scikit-learn's wine table, sorted by alcohol within each cultivar and cut into groups of this size."""
    from sklearn.datasets import load_wine

    wine = load_wine()
    order = np.lexsort((wine.data[:, 0], wine.target))
    rows = wine.data[order][:, 1:]  # the sorted column itself would reveal the order
    groups = len(rows) // size
    return Examples(
        rows[: groups * size], np.repeat(np.arange(groups), size), [f"g{i:02d}" for i in range(groups)]
    )


def cases(folder: Path, steps: int, data_dir: Path | None) -> Iterator[Case]:
    """The cases that can be run here, each trained when it is needed; Omniglot needs its data."""
    machines = train_machines(folder, steps)
    clean = simulate_machines(_TRAINED, _ROWS, seed=0).examples
    new = simulate_machines(360, _ROWS, seed=1).examples
    for calibrated in (40, 250):
        yield Case(f"machines, {calibrated}", machines, clean, new, calibrated, 12)
    wine = wine_groups()
    some, rest = wine.of_classes(range(0, len(wine.names), 2)), wine.of_classes(range(1, len(wine.names), 2))
    yield Case("wine", _train_table(folder / "wine", some, steps), some, rest, 7, 10)
    digits = bruno.train("digits", folder / "digits", data={"rotations": False}, steps=steps, device="cpu")
    seen, unseen = load_examples("digits"), load_examples("digits", "test")
    yield Case("digits", digits.model, seen, unseen, 2, 12)
    pretrained, drawn = bruno.open("omniglot", device="cpu").model, load_examples("drawn", "all")
    yield Case("drawn", pretrained, drawn.of_classes(range(10)), drawn.of_classes(range(10, 40)), 25, 12)
    if is_available("omniglot", data_dir):
        seen, unseen = (load_examples("omniglot", split, data_dir=data_dir) for split in ("train", "test"))
        some = unseen.of_classes(range(0, 423, 3))
        yield Case("omniglot", pretrained, seen.of_classes(range(0, 900, 40)), some, 110, 12)


def coverage(case: Case, redraws: int, seed: int) -> dict[str, Any]:
    """False-alarm rates of streams at each asked rate, over redraws of calibration and test groups."""
    generator = torch.Generator().manual_seed(seed)
    cutoffs = fixed_cutoffs(case.model, Groups.of(case.model, case.train, generator=generator))
    groups = Groups.of(case.model, case.held_out, generator=generator)
    every = groups.orders(torch.arange(len(groups.names)), case.set_size, 8, generator)
    scores = groups.scores(
        lambda z, usable: stream_scores(case.model, z, cutoffs, usable), every, case.model.device
    )[:, :, 1:]
    table = GroupCalibration(case.model, groups, cutoffs, -math.inf, case.name, True, seed).stream()
    positions = slice(case.set_size - 1)  # estimates are smoothed over all positions that are kept
    alarms: dict[float, list[torch.Tensor]] = {rate: [] for rate in RATES}
    bases: dict[float, str] = {}
    for _ in range(redraws):
        order = torch.randperm(len(groups.names), generator=generator)
        used, tested = order[: case.calibrated], order[case.calibrated :]
        elements = int(groups.counts[used].sum())
        known = GroupScores(table.positions[positions], table.scores[positions][:, used], elements)
        which = torch.randint(8, (len(tested),), generator=generator)
        new = scores[tested, which]
        for rate in RATES:
            bases[rate] = known.basis(1, rate)
            limits = torch.tensor([known.threshold(n, rate) for n in range(1, case.set_size)])
            share = torch.full((len(groups.names),), math.nan)
            share[tested] = (new < limits).double().mean(1).float()
            alarms[rate].append(share)
    rates = [_rate(rate, bases[rate], torch.stack(alarms[rate])) for rate in RATES]
    exact = known.smallest_exact(1)
    return {
        "case": case.name,
        "groups": case.calibrated,
        "redraws": redraws,
        "smallest exact rate": exact,
        "rates": rates,
    }


def _rate(rate: float, basis: str, shares: torch.Tensor) -> dict[str, Any]:
    by_group = shares.nanmean(0)
    by_group = by_group[~by_group.isnan()]
    mean, error = by_group.mean().item(), by_group.std().item() / math.sqrt(len(by_group))
    most, least = (rate + 3 * error, rate / 2) if basis == "exact" else (2 * rate, 0.0)
    return {
        "asked": rate,
        "basis": basis,
        "measured": mean,
        "standard error": error,
        "holds": least <= mean <= most,
    }


def detection(model: Bruno, machines: int, rows: int, seed: int) -> dict[str, Any]:
    """Area under ROC, average precision, false alarms and recall of all methods on the same machines."""
    train = simulate_machines(_TRAINED, _ROWS, seed=0).examples
    clean = simulate_machines(100, rows, seed=seed + 2).examples
    faulty, fault = simulate_machines(machines, rows, fault_rate=_FAULTS, seed=seed + 3)
    generator = torch.Generator().manual_seed(seed)
    cutoffs = fixed_cutoffs(model, Groups.of(model, train, generator=generator))
    outlier = fault.view(machines, rows) > 0
    methods = _methods(model, cutoffs)
    picks = torch.randint(machines, (_BOOTSTRAPS, machines), generator=generator)
    found, areas = {}, {}
    for name, method in methods.items():
        score = method(faulty.elements.view(machines, rows, -1))
        limit = np.quantile(method(clean.elements.view(100, rows, -1))[:, 1:].numpy(), 0.01)
        found[name], areas[name] = _quality(score[:, 1:].double(), outlier[:, 1:], limit, picks)
    margins = {
        f"{own} − {other}": {
            measure: {
                "margin": found[own][measure] - found[other][measure],
                "standard error": (areas[own][i] - areas[other][i]).std().item(),
            }
            for i, measure in enumerate(("area under ROC", "average precision"))
        }
        for own in list(methods)[:2]
        for other in list(methods)[4:]
    }
    return {"machines": machines, "rows": rows, "faults": _FAULTS, "methods": found, "margins": margins}


def _quality(
    score: torch.Tensor, outlier: torch.Tensor, limit: float, picks: torch.Tensor
) -> tuple[dict[str, float], torch.Tensor]:
    times = torch.stack([torch.bincount(pick, minlength=len(outlier)) for pick in picks])
    weight = torch.cat([torch.ones_like(times[:1]), times]).double().repeat_interleave(outlier.shape[1], 1)
    area = roc_auc(outlier.flatten(), -score.flatten(), weight)
    precision = average_precision(outlier.flatten(), -score.flatten(), weight)
    flagged = score < limit
    return {
        "area under ROC": area[0].item(),
        "area error": area[1:].std().item(),
        "average precision": precision[0].item(),
        "average precision error": precision[1:].std().item(),
        "false alarms at 1 %": flagged[~outlier].double().mean().item(),
        "recall at 1 %": flagged[outlier].double().mean().item(),
    }, torch.stack([area[1:], precision[1:]])


def _methods(model: Bruno, cutoffs: Cutoffs) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Scores of sets (sets, n, columns), lower for outliers; the first four are ours."""
    from sklearn.covariance import MinCovDet
    from sklearn.ensemble import IsolationForest
    from sklearn.neighbors import LocalOutlierFactor

    def each(fit: Callable[[np.ndarray], np.ndarray]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.from_numpy(np.stack([fit(some) for some in x.numpy()]))

    def scaled(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(0)) / x.std(0)

    return {
        "BRUNO, stream": lambda x: stream_scores(model, model.latents(x), cutoffs),
        "BRUNO, batch": lambda x: batch_scores(model, model.latents(x), cutoffs)[0],
        "BRUNO, stream, everything counts": lambda x: stream_scores(model, model.latents(x), None),
        "BRUNO, batch, everything counts": lambda x: batch_scores(model, model.latents(x), None)[0],
        "IsolationForest": each(lambda x: IsolationForest(random_state=0).fit(x).score_samples(x)),
        "LocalOutlierFactor": each(
            lambda x: LocalOutlierFactor(n_neighbors=_NEIGHBOURS).fit(scaled(x)).negative_outlier_factor_
        ),
        "robust Mahalanobis": each(
            lambda x: -MinCovDet(random_state=0).fit(scaled(x)).mahalanobis(scaled(x))
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--redraws", type=int, default=200)
    parser.add_argument("--machines", type=int, default=_TESTED)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--only", choices=("coverage", "detection"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    def write(name: str, values: Any) -> None:
        record = {name: values, "provenance": provenance(arguments.seed)}
        (arguments.out / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        if arguments.only != "detection":
            table = []
            for case in cases(Path(folder), arguments.steps, arguments.data_dir):
                table.append(coverage(case, arguments.redraws, arguments.seed))
                print(json.dumps(table[-1]), flush=True)
                write("coverage", table)
        if arguments.only != "coverage":
            model = train_machines(Path(tempfile.mkdtemp(dir=folder)), arguments.steps)
            tables = [detection(model, arguments.machines, rows, arguments.seed) for rows in (20, 60)]
            print(json.dumps(tables), flush=True)
            write("detection", tables)


if __name__ == "__main__":
    main()
