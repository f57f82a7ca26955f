"""False-alarm rates of p-values, and detection of faults against other methods. Writes results/decisions/.

Coverage: in every redraw, the held-out groups are divided at random into calibration and test groups. Each
test group is one stream and one batch, in random order. The false-alarm rate is the mean over groups of the
share of clean elements with p at most the requested rate. Standard errors are clustered by group: over the
means of groups. Data with ten classes have five models, each trained without three of them: two are
calibrated on. The rates of each model are reported, too: those of a single choice of classes vary.

Detection: 200 machines that were not trained on, with 8 % faults. All methods judge the same rows. Each has
its own threshold at a rate of 1 %, the same quantile of its scores on the same clean machines.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bruno
from bruno import Bruno
from bruno.config import load_recipe
from bruno.data import Examples, SetSampler, is_available, load_examples
from bruno.data.synthetic import simulate_machines
from bruno.provenance import provenance
from bruno.tasks import Cutoffs, GroupCalibration, Groups, fixed_cutoffs, reference_density
from bruno.tasks.batch_criteria import SetScale
from bruno.tasks.conformal import GroupScores
from bruno.tasks.metrics import average_precision, roc_auc
from bruno.tasks.robust_evidence import batch_scores, shortfall
from bruno.tasks.stream_evidence import EncodedSets, stream_scores
from bruno.training import Run, Trainer

RESULTS = Path(__file__).parents[1] / "results" / "decisions"
RATES = (0.01, 0.05, 0.1)
CASES = ("machines", "breast cancer", "digits", "mnist", "fashion-mnist", "drawn", "omniglot")
_ROWS, _TRAINED, _TESTED, _FAULTS = 60, 100, 200, 0.08
_BOOTSTRAPS = 200
_NEIGHBOURS = 10  # of LocalOutlierFactor; its default of 20 is as many as a small set has


@dataclass(frozen=True)
class Fold:
    """A model, the groups it was trained on, and held-out groups."""

    model: Bruno
    train: Examples
    held_out: Examples


@dataclass(frozen=True)
class Case:
    """Held-out groups of models: which are calibrated on is drawn anew."""

    name: str
    folds: list[Fold]
    calibrated: int
    set_size: int = 12


@dataclass(frozen=True)
class Scores:
    """Scores of the held-out groups of a fold: those to calibrate on, and those of new sets.

    Attributes:
        names: names of the groups.
        known: of all groups.
        new: (groups, orders, elements).
        counts: number of elements of each group.
    """

    names: tuple[str, ...]
    known: GroupScores
    new: torch.Tensor
    counts: torch.Tensor


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


def table_groups(size: int = 10) -> Examples:
    """scikit-learn's breast-cancer table, sorted by radius within each diagnosis and cut into groups.

    The columns of the radius, the perimeter and the area are left out: they would reveal the order.
    """
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    order = np.lexsort((table.data[:, 0], table.target))
    columns = [1, *range(4, 10)]
    rows = table.data[order][:, columns]
    groups = len(rows) // size
    return Examples(
        rows[: groups * size],
        np.repeat(np.arange(groups), size),
        [f"g{i:02d}" for i in range(groups)],
        columns=tuple(str(table.feature_names[i]).replace(" ", "_") for i in columns),
    )


def _train_images(out: Path, name: str, examples: Examples, steps: int) -> Bruno:
    """A small model of images, trained on these classes."""
    settings = [f"train.steps={steps}", f"data.name={name}", "data.rotations=false"]
    recipe = load_recipe("digits", settings)
    torch.manual_seed(recipe.train.seed)
    model = Bruno.from_config(recipe.model(examples.shape, examples.levels))
    run = Run(out)
    for _ in run.fit(Trainer(model, SetSampler(examples), recipe.train), recipe):
        pass
    return run.model()


def ten_classes(folder: Path, name: str, steps: int, data_dir: Path | None) -> Case:
    """Five models of images of ten classes, each trained on seven of them."""
    examples = load_examples(name, "all" if name == "digits" else "train", data_dir=data_dir)
    folds = []
    for first in range(0, 10, 2):
        held_out = [(first + i) % 10 for i in (0, 3, 6)]
        train = examples.of_classes(i for i in range(10) if i not in held_out)
        model = _train_images(folder / f"{name}-{first}", name, train, steps)
        folds.append(Fold(model, train, examples.of_classes(held_out)))
    return Case(name, folds, 2)


def cases(folder: Path, steps: int, data_dir: Path | None, wanted: Sequence[str]) -> Iterator[Case]:
    """The wanted cases that can be run here, each trained when it is needed; some need published data."""
    if "machines" in wanted:
        machines = train_machines(folder, steps)
        clean = simulate_machines(_TRAINED, _ROWS, seed=0).examples
        new = simulate_machines(360, _ROWS, seed=1).examples
        for calibrated in (5, 40, 250):
            yield Case(f"machines, {calibrated}", [Fold(machines, clean, new)], calibrated)
    if "breast cancer" in wanted:
        table = table_groups()
        some = table.of_classes(range(0, len(table.names), 2))
        rest = table.of_classes(range(1, len(table.names), 2))
        yield Case("breast cancer", [Fold(_train_table(folder / "table", some, steps), some, rest)], 21, 10)
    if "digits" in wanted:
        yield ten_classes(folder, "digits", steps, data_dir)
    for name in ("mnist", "fashion-mnist"):
        if name in wanted and is_available(name, data_dir):
            yield ten_classes(folder, name, steps // 3, data_dir)
    pretrained = bruno.open("omniglot-small", device="cpu").model
    if "drawn" in wanted:
        drawn = load_examples("drawn", "all")
        fold = Fold(pretrained, drawn.of_classes(range(10)), drawn.of_classes(range(10, 40)))
        yield Case("drawn", [fold], 21)
    if "omniglot" in wanted and is_available("omniglot", data_dir):
        seen, unseen = (load_examples("omniglot", split, data_dir=data_dir) for split in ("train", "test"))
        fold = Fold(pretrained, seen.of_classes(range(0, 900, 40)), unseen)
        yield Case("omniglot", [fold], 300)  # at 1 %, 200 groups give half of it, the least that holds


def fold_scores(fold: Fold, set_size: int, seed: int) -> dict[str, Scores]:
    """Scores of the held-out groups of a fold as streams and as batches."""
    model, generator = fold.model, torch.Generator().manual_seed(seed)
    reference = _reference(model, fold.train, generator)
    cutoffs = fixed_cutoffs(model, Groups.of(model, fold.train, reference=reference, generator=generator))
    groups = Groups.of(model, fold.held_out, reference=reference, generator=generator)
    orders = max(2 if model.kind.is_images else 8, 200 // len(groups.names))
    every = groups.orders(torch.arange(len(groups.names)), set_size, orders, generator)
    calibration = GroupCalibration(model, groups, cutoffs, -math.inf, "", True, seed, reference)
    stream, batch = calibration.stream(), calibration.batch(set_size)
    positions = slice(set_size - 1)  # estimates are smoothed over all positions that are kept
    stream = GroupScores(stream.positions[positions], stream.scores[positions], stream.elements)

    def in_stream(sets: EncodedSets) -> torch.Tensor:
        scores = stream_scores(model, sets.z, cutoffs, sets.usable, sets.shortfall)
        return scores.masked_fill(~sets.usable, -math.inf)

    def in_batch(sets: EncodedSets) -> torch.Tensor:
        scores = batch_scores(model, sets.z, cutoffs, sets.usable, sets.shortfall)[0]
        return scores.masked_fill(~sets.usable, -math.inf)

    new, whole = (groups.scores(of, every, model.device) for of in (in_stream, in_batch))
    if model.kind.is_images:
        whole = SetScale.of(whole).standardised(whole)
    names = fold.held_out.names
    return {
        "stream": Scores(names, stream, new[:, :, 1:], groups.counts),
        "batch": Scores(names, batch, whole, groups.counts),
    }


def _reference(model: Bruno, train: Examples, generator: torch.Generator) -> float:
    """The reference density of rows, as `Trained.calibrate` has it; images have none."""
    return (
        -math.inf
        if model.kind.is_images
        else reference_density(model, SetSampler(train), generator=generator)
    )


def coverage(case: Case, redraws: int, seed: int) -> list[dict[str, Any]]:
    """False-alarm rates of streams and batches at each requested rate, over redraws of the groups."""
    folds = [fold_scores(fold, case.set_size, seed) for fold in case.folds]
    tables = []
    for procedure in ("stream", "batch"):
        scores = [fold[procedure] for fold in folds]
        known, shares = _redraw(scores, case.calibrated, redraws, seed)
        position = int(known.positions[0])
        rates = [_rate(rate, known.basis(position, rate), shares[rate]) for rate in RATES]
        tables.append(
            {
                "case": case.name,
                "procedure": procedure,
                "groups": case.calibrated,
                "test groups": len({name for _, name in shares[RATES[0]]}),
                "redraws": redraws,
                "smallest exact rate": known.smallest_exact(position),
                "rates": rates,
                "by model": [_of_fold(one, number, shares) for number, one in enumerate(scores)]
                if len(scores) > 1
                else [],
            }
        )
    return tables


Shares = dict[float, dict[tuple[int, str], list[float]]]  # by requested rate, and by fold and group


def _redraw(folds: list[Scores], calibrated: int, redraws: int, seed: int) -> tuple[GroupScores, Shares]:
    """The last calibration, and the shares of flagged elements."""
    generator = torch.Generator().manual_seed(seed)
    shares: Shares = {rate: {} for rate in RATES}
    for redraw in range(redraws):
        number = redraw % len(folds)
        one = folds[number]
        order = torch.randperm(len(one.names), generator=generator)
        used, tested = order[:calibrated], order[calibrated:]
        elements = int(one.counts[used].sum())
        known = GroupScores(one.known.positions, one.known.scores[:, used], elements)
        which = torch.randint(one.new.shape[1], (len(tested),), generator=generator)
        new = one.new[tested, which]
        for rate in RATES:
            limits = torch.tensor([known.threshold(n, rate) for n in known.positions.tolist()])
            flagged = (new < limits).double().mean(1).tolist()
            for place, share in zip(tested.tolist(), flagged, strict=True):
                shares[rate].setdefault((number, one.names[place]), []).append(share)
    return known, shares


def _of_fold(fold: Scores, number: int, shares: Shares) -> dict[str, Any]:
    """The measured rates of one model, each the mean over its held-out groups."""
    own = [
        {name: float(np.mean(some)) for (place, name), some in shares[rate].items() if place == number}
        for rate in RATES
    ]
    return {
        "held out": list(fold.names),
        "measured": [float(np.mean(list(by_group.values()))) for by_group in own],
        "by group": own,
    }


def _rate(rate: float, basis: str, shares: dict[tuple[int, str], list[float]]) -> dict[str, Any]:
    by_name: dict[str, list[float]] = {}
    for (_, name), some in shares.items():
        by_name.setdefault(name, []).extend(some)
    by_group = np.array([np.mean(some) for some in by_name.values()])
    mean, error = float(by_group.mean()), float(by_group.std(ddof=1)) / math.sqrt(len(by_group))
    most, least = (rate + 3 * error, rate / 2) if basis == "exact" else (2 * rate, 0.0)
    return {
        "asked": rate,
        "basis": basis,
        "measured": mean,
        "standard error": error,
        "holds": bool(least <= mean <= most),
    }


def detection(model: Bruno, machines: int, rows: int, seed: int) -> dict[str, Any]:
    """Area under ROC, average precision, false alarms and recall of all methods on the same machines."""
    train = simulate_machines(_TRAINED, _ROWS, seed=0).examples
    clean = simulate_machines(100, rows, seed=seed + 2).examples
    faulty, fault = simulate_machines(machines, rows, fault_rate=_FAULTS, seed=seed + 3)
    generator = torch.Generator().manual_seed(seed)
    reference = _reference(model, train, generator)
    cutoffs = fixed_cutoffs(model, Groups.of(model, train, reference=reference, generator=generator))
    outlier = fault.view(machines, rows) > 0
    methods = _methods(model, cutoffs, reference)
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


def _methods(
    model: Bruno, cutoffs: Cutoffs, reference: float
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Scores of sets (sets, n, columns), lower for outliers; the first four are ours."""
    from sklearn.covariance import MinCovDet
    from sklearn.ensemble import IsolationForest
    from sklearn.neighbors import LocalOutlierFactor

    def each(fit: Callable[[np.ndarray], np.ndarray]) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.from_numpy(np.stack([fit(some) for some in x.numpy()]))

    def scaled(x: np.ndarray) -> np.ndarray:
        return (x - x.mean(0)) / x.std(0)

    def encoded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z, log_det = model.encode(x, on_scales=True)
        return z, shortfall(model.process.log_prob(z) + log_det, reference)

    def stream(x: torch.Tensor, cutoffs: Cutoffs | None) -> torch.Tensor:
        z, less = encoded(x)
        return stream_scores(model, z, cutoffs, less=less)

    def batch(x: torch.Tensor, cutoffs: Cutoffs | None) -> torch.Tensor:
        z, less = encoded(x)
        return batch_scores(model, z, cutoffs, less=less)[0]

    return {
        "BRUNO, stream": partial(stream, cutoffs=cutoffs),
        "BRUNO, batch": partial(batch, cutoffs=cutoffs),
        "BRUNO, stream, everything counts": partial(stream, cutoffs=None),
        "BRUNO, batch, everything counts": partial(batch, cutoffs=None),
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
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES, help="of the coverage")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    source = provenance(arguments.seed)  # of the code that is loaded, not of that at the end of the run

    def write(name: str, values: Any) -> None:
        record = {name: values, "provenance": source}
        (arguments.out / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        if arguments.only != "detection":
            tables: list[dict[str, Any]] = []
            for case in cases(Path(folder), arguments.steps, arguments.data_dir, arguments.cases):
                tables += coverage(case, arguments.redraws, arguments.seed)
                print(*map(json.dumps, tables[-2:]), sep="\n", flush=True)
                write("coverage", tables)
        if arguments.only != "coverage":
            model = train_machines(Path(tempfile.mkdtemp(dir=folder)), arguments.steps)
            tables = [detection(model, arguments.machines, rows, arguments.seed) for rows in (20, 60)]
            print(json.dumps(tables), flush=True)
            write("detection", tables)


if __name__ == "__main__":
    main()
