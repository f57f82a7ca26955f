"""False alarms, detection and explanations of `SetOutlierDetector`. Writes results/estimators/.

False alarms: a small model is trained on a random half of clean rows, and judges the other half.
Detection: it is trained on half of the rows of one class, and separates the other half from the rows of all
other classes. Explanations: one column of a new row is moved by 6 to 9 deviations given all others.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer, load_iris, load_wine
from sklearn.ensemble import IsolationForest
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import LocalOutlierFactor

from bruno.provenance import provenance
from bruno.sklearn import SetOutlierDetector

RESULTS = Path(__file__).parents[1] / "results" / "estimators"
RATES = (0.01, 0.05)
SPLITS = 10
_COLUMNS, _FLAGGED = 6, 60


def clean_rows(seed: int) -> dict[str, np.ndarray]:
    """Rows without labelled outliers, by name."""
    random = np.random.default_rng(seed)
    return {
        "normal, 200 × 8": random.normal(size=(200, 8)),
        "normal, 1000 × 8": random.normal(size=(1000, 8)),
        "log-normal, 1000 × 4": np.exp(random.normal(size=(1000, 4))),
        "Student-t (3), 1000 × 4": random.standard_t(3, size=(1000, 4)),
        "iris, 150 × 4": load_iris().data,
        "wine, 178 × 13": load_wine().data,
        "breast cancer, 569 × 30": load_breast_cancer().data,
    }


def false_alarms() -> dict[str, Any]:
    """Share of new clean rows with p at most each rate, with its standard error over splits."""
    found: dict[str, list[list[float]]] = {}
    for split in range(SPLITS):
        for name, rows in clean_rows(split).items():
            order = np.random.default_rng(split).permutation(len(rows))
            half = len(rows) // 2
            detector = SetOutlierDetector(novelty=True, random_state=split).fit(rows[order[:half]])
            p = detector.p_values(rows[order[half:]])
            found.setdefault(name, []).append([float((p <= rate).mean()) for rate in RATES])
    return {name: measured(values) for name, values in found.items()}


def detection() -> dict[str, Any]:
    """Area under ROC of other classes against new rows of one class, for each method."""
    found: dict[str, dict[str, list[list[float]]]] = {}
    datasets = {"iris": load_iris(), "wine": load_wine(), "breast cancer": load_breast_cancer()}
    for name, data in datasets.items():
        for split in range(SPLITS):
            for label in np.unique(data.target):
                own = np.random.default_rng(split).permutation(np.flatnonzero(data.target == label))
                half = len(own) // 2
                test = np.concatenate([own[half:], np.flatnonzero(data.target != label)])
                for method, detector in methods(split).items():
                    scores = detector.fit(data.data[own[:half]]).score_samples(data.data[test])
                    area = roc_auc_score(data.target[test] == label, scores)
                    found.setdefault(name, {}).setdefault(method, []).append([float(area)])
    return {name: {method: measured(v) for method, v in by.items()} for name, by in found.items()}


def methods(seed: int) -> dict[str, Any]:
    return {
        "SetOutlierDetector": SetOutlierDetector(novelty=True, random_state=seed),
        "IsolationForest": IsolationForest(random_state=seed),
        "LocalOutlierFactor": LocalOutlierFactor(novelty=True),
    }


def explanations() -> dict[str, Any]:
    """How often the column that was moved has the lowest contribution."""
    found = {}
    for correlation in (0.0, 0.5, 0.8):
        covariance = (1 - correlation) * np.eye(_COLUMNS) + correlation
        deviation = 1 / np.sqrt(np.linalg.inv(covariance)[0, 0])
        random = np.random.default_rng(0)
        rows = random.multivariate_normal(np.zeros(_COLUMNS), covariance, size=1000 + _FLAGGED)
        detector = SetOutlierDetector(novelty=True, rate=0.01).fit(rows[:1000])
        columns, new = random.integers(_COLUMNS, size=_FLAGGED), rows[1000:]
        moved = random.choice([-1, 1], _FLAGGED) * random.uniform(6, 9, _FLAGGED) * deviation
        new[np.arange(_FLAGGED), columns] += moved
        flagged = detector.predict(new) == -1
        lowest = detector.explain(new[flagged]).contributions.argmin(1).numpy()
        first = float((lowest == columns[flagged]).mean())
        found[f"correlation {correlation}"] = {"flagged": int(flagged.sum()), "first": first}
    return found


def fitting_time() -> dict[str, float]:
    """Seconds to fit, by the number of rows of 8 columns."""
    seconds = {}
    for rows in (100, 1000, 10_000):
        x = np.random.default_rng(0).normal(size=(rows, 8))
        start = time.perf_counter()
        SetOutlierDetector().fit(x)
        seconds[str(rows)] = time.perf_counter() - start
    return seconds


def measured(values: list[list[float]]) -> dict[str, Any]:
    array = np.array(values)
    error = array.std(0, ddof=1) / np.sqrt(len(array))
    return {"mean": array.mean(0).round(4).tolist(), "error": error.round(4).tolist()}


def tables() -> str:
    """The tables of docs/estimators.md, from the results."""
    kept = json.loads((RESULTS / "outliers.json").read_text("utf-8"))
    lines = [f"| clean rows | at {RATES[0]:.0%} | at {RATES[1]:.0%} |", "|---|---|---|"]
    for name, found in kept["false_alarms"].items():
        lines.append(f"| {name} | " + " | ".join(percent(*pair) for pair in pairs(found)) + " |")
    names = list(next(iter(kept["detection"].values())))
    lines += ["", "| area under ROC | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for data, by_method in kept["detection"].items():
        cells = (f"{mean:.3f} ± {error:.3f}" for one in by_method.values() for mean, error in pairs(one))
        lines.append(f"| {data} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def pairs(found: dict[str, list[float]]) -> list[tuple[float, float]]:
    return list(zip(found["mean"], found["error"], strict=True))


def percent(mean: float, error: float) -> str:
    return f"{100 * mean:.1f} ± {100 * error:.1f} %"


def main() -> None:
    result = {
        "rates": RATES,
        "splits": SPLITS,
        "false_alarms": false_alarms(),
        "detection": detection(),
        "explanations": explanations(),
        "seconds": fitting_time(),
        "provenance": provenance(0),
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "outliers.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
