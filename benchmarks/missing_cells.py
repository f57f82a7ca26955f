"""Area under ROC for faults of machines, with and without missing cells. Run with `make bench`.

Machines have eight sensors with shared correlations and means of their own. Faults are the row of another
machine, a spike in one sensor, and a broken correlation. Rows are scored online, each given the rows before
it, outliers excluded. A fault is "present" if no faulty cell is missing.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import bruno
from bruno.model import Bruno, Posterior
from bruno.process import Evidence
from bruno.provenance import provenance
from bruno.tasks.metrics import roc_auc

RESULTS = Path(__file__).parents[1] / "results"
_FAULTS = ("another machine", "spike", "broken correlation")
_WARM_UP = 5  # rows of a machine that are not counted
_CUTOFF = -4.0  # rows with a lower score are excluded from the evidence
_SENSORS, _FACTORS, _NOISE, _BETWEEN = 8, 2, 0.25, 2.0


class Machines(NamedTuple):
    """Rows of machines, and their faults."""

    x: NDArray[Any]  # (machines, rows, sensors)
    fault: NDArray[Any]  # (machines, rows): 0 for none, otherwise 1 + the position in _FAULTS
    faulty: NDArray[Any]  # (machines, rows, sensors): the cells of the fault


def simulated(machines: int, rows: int, fault_rate: float, seed: int) -> Machines:
    random = np.random.default_rng(seed)
    loadings = np.random.default_rng(0).normal(size=(_FACTORS, _SENSORS))
    spread = np.sqrt((loadings**2).sum(0) + _NOISE**2)
    shape = (machines, rows)
    noise = random.normal(0, _NOISE, (*shape, _SENSORS))
    deviation = (random.normal(size=(*shape, _FACTORS)) @ loadings + noise) / spread
    mean = random.normal(0, _BETWEEN, (machines, 1, _SENSORS))
    fault = np.where(random.random(shape) < fault_rate, random.integers(1, 4, shape), 0)
    sensor = np.eye(_SENSORS, dtype=bool)[random.integers(_SENSORS, size=shape)]
    sign = random.choice([-1, 1], (*shape, 1))
    spiked = deviation + sign * random.uniform(4, 8, (*shape, 1))
    broken = -np.sign(deviation) * random.uniform(1, 2.5, (*shape, 1))
    another, spike, correlation = (fault[..., None] == kind for kind in (1, 2, 3))
    deviation = np.where(spike & sensor, spiked, deviation)
    deviation = np.where(correlation & sensor, broken, deviation)
    other = (np.arange(machines)[:, None] + random.integers(1, machines, shape)) % machines
    x = np.where(another, mean[other, 0], mean) + deviation
    return Machines(x, fault, another | ((spike | correlation) & sensor))


def with_holes(x: NDArray[Any], rate: float, seed: int) -> NDArray[Any]:
    return np.where(np.random.default_rng(seed).random(x.shape) < rate, np.nan, x)


def trained(x: NDArray[Any], folder: Path, steps: int) -> Bruno:
    machines, rows, _ = x.shape
    path = folder / "train.npz"
    np.savez(path, rows=x.reshape(-1, _SENSORS), labels=np.repeat(np.arange(machines), rows))
    run = bruno.train(
        "table", folder / "run", data={"name": str(path)}, steps=steps, validation_sets=0, device="cpu"
    )
    return run.model


@torch.no_grad()
def online_scores(model: Bruno, x: NDArray[Any]) -> NDArray[Any]:
    """The score of each row given the rows of its machine before it, without the outliers among them."""
    rows = torch.from_numpy(x)
    evidence, scores = Evidence.empty(model.dim, (len(rows),)), []
    for i in range(rows.shape[1]):
        z = model.encode(Posterior(model, evidence).impute(rows[:, i])).z
        score = model.process.log_prob(z, evidence) - model.process.log_prob(z)
        scores.append(score)
        keep = (score > _CUTOFF) | (i < _WARM_UP)
        added = evidence.add(z)
        evidence = Evidence(
            torch.where(keep, added.count, evidence.count),
            torch.where(keep[:, None], added.mean, evidence.mean),
            torch.where(keep[:, None], added.scatter, evidence.scatter),
        )
    return torch.stack(scores, 1).numpy()


def areas(model: Bruno, machines: Machines, rate: float, seed: int) -> dict[str, float]:
    x = with_holes(machines.x, rate, seed)
    score = online_scores(model, x)[:, _WARM_UP:]
    fault, lost = machines.fault[:, _WARM_UP:], (np.isnan(x) & machines.faulty).any(-1)[:, _WARM_UP:]
    chosen = {"present": (fault > 0) & ~lost, "all": fault > 0}
    chosen |= {name: (fault == kind) & ~lost for kind, name in enumerate(_FAULTS, start=1)}
    result = {}
    for name, faults in chosen.items():
        use = faults | (fault == 0)
        result[name] = roc_auc(torch.from_numpy(faults[use]), torch.from_numpy(-score[use]))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=5, help="repetitions with new machines and models")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(arguments.seeds):
        clean = simulated(60, 60, 0.0, 3 * seed + 1).x
        test = simulated(200, 60, 0.08, 3 * seed + 2)
        for training in (0.0, 0.1):
            with tempfile.TemporaryDirectory() as folder:
                model = trained(with_holes(clean, training, seed), Path(folder), arguments.steps)
            for testing in (0.0, 0.1, 0.3):
                key = f"{training:.0%} missing in training, {testing:.0%} in the test"
                found.setdefault(key, []).append(areas(model, test, testing, 3 * seed))
    table = Table("case", *found[next(iter(found))][0], title="area under ROC, mean over repetitions")
    summary: dict[str, Any] = {}
    for case, results in found.items():
        values = {name: [one[name] for one in results] for name in results[0]}
        summary[case] = {
            name: {"mean": float(np.mean(some)), "stderr": float(np.std(some, ddof=1) / len(some) ** 0.5)}
            for name, some in values.items()
        }
        table.add_row(case, *(f"{one['mean']:.3f} ± {one['stderr']:.3f}" for one in summary[case].values()))
    Console(width=160).print(table)
    content = {"results": summary, "seeds": arguments.seeds, "steps": arguments.steps}
    (RESULTS / "missing-cells.json").write_text(
        json.dumps(content | {"provenance": provenance(0)}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
