"""Speed and memory of streams with keys, on 8 columns, beside river and pyod. Run with `make bench`.

BRUNO judges every row by the rows of its own key, with p-values, and commits to a store on disk. The others
have one model for all rows: HalfSpaceTrees of river scores and learns one row at a time; the detectors of
pyod are fitted to all rows once. Threads are limited to two. Rows a second of processor time depend less on
other processes than those of the wall clock.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import bruno
from bruno.provenance import provenance
from bruno.trained import KeyedDetector, Trained

RESULTS = Path(__file__).parents[1] / "results"
COLUMNS = 8
_THREADS = 2
PYOD_COMMAND = "pip install --target DIR --no-deps pyod numba llvmlite, then PYTHONPATH=DIR"
PYOD = ("HBOS", "ECOD", "COPOD", "IForest")
JOBS = ("one_at_a_time", "without_groups", "micro_batches", "window", "river", "pyod", "memory")


def rows_of(keys: NDArray[Any], random: np.random.Generator) -> NDArray[Any]:
    """Rows of machines: each key has a mean of its own, and one row in 100 is an outlier."""
    means = np.random.default_rng(1).normal(size=(int(keys.max()) + 1, COLUMNS))
    x = means[keys] + 0.3 * random.normal(size=(len(keys), COLUMNS))
    faulty = random.random(len(keys)) < 0.01
    x[faulty] += 3.0 * random.normal(size=(int(faulty.sum()), COLUMNS))
    return x


def trained_in(folder: Path) -> Trained:
    """A model of 100 machines, trained briefly, as the speed does not depend on that, and calibrated."""
    keys = np.repeat(np.arange(100), 40)
    table = np.column_stack([keys, rows_of(keys, np.random.default_rng(0))])
    path = folder / "machines.csv"
    header = ",".join(["machine", *(f"x{i}" for i in range(COLUMNS))])
    np.savetxt(path, table, delimiter=",", header=header, comments="", fmt=["%d", *["%.4f"] * COLUMNS])
    data = {"name": str(path), "group": "machine"}
    trained = bruno.train("table", folder / "run", data=data, steps=200, validation_sets=0, device="cpu")
    trained.calibrate()
    return trained


@contextmanager
def measured(rows: int, into: dict[str, Any]) -> Iterator[None]:
    """Add rows a second of the body to a result."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    into["rows"] = rows
    into["rows_per_second"] = rows / (time.perf_counter() - wall)
    into["rows_per_cpu_second"] = rows / (time.process_time() - cpu)


def in_batches(
    trained: Trained, store: Path, keys: int, rows: int, batch: int, **settings: Any
) -> dict[str, Any]:
    """Rows of many keys in random order: the start, when every set is new, and afterwards."""
    random, found = np.random.default_rng(2), {"keys": keys, "batch": batch}
    batches = []
    for _ in range(max(2, rows // batch)):
        chosen = random.integers(0, keys, batch)
        batches.append(([f"machine {key}" for key in chosen.tolist()], rows_of(chosen, random)))
    with KeyedDetector(trained, store, **settings) as judge:
        started = min(len(batches) - 1, 30 * keys // batch)  # about 30 rows of every key
        for name, some in (("start", batches[:started]), ("later", batches[started:])):
            found[name] = {}
            with measured(batch * len(some), found[name]):
                for names, x in some:
                    judge.step(names, x)
                judge.commit()
    found["bytes_per_set"] = store.stat().st_size / keys
    return found


def one_at_a_time(trained: Trained, store: Path, rows: int) -> dict[str, Any]:
    x, found = rows_of(np.zeros(rows, int), np.random.default_rng(3)), {}
    with KeyedDetector(trained, store) as judge:
        for row in x[:200]:
            judge.step(["one"], row[None])
        with measured(rows, found):
            for row in x:
                judge.step(["one"], row[None])
    return found


def without_groups(folder: Path, rows: int) -> dict[str, Any]:
    """Rows of a table without a group column, each judged given the 19 before it (`Trained.watch`)."""
    random = np.random.default_rng(7)
    x = rows_of(np.zeros(rows + 2000, int), random) + 0.05 * random.normal(
        size=(rows + 2000, COLUMNS)
    ).cumsum(0)
    path, names = folder / "rows.csv", [f"x{i}" for i in range(COLUMNS)]
    np.savetxt(path, x[:2000], delimiter=",", header=",".join(names), comments="", fmt="%.4f")
    data = {"name": str(path)}
    trained = bruno.train("table", folder / "rows", data=data, steps=200, validation_sets=0, device="cpu")
    trained.calibrate()
    found: dict[str, Any] = {}
    judged = iter(trained.watch(x[2000:]))
    next(judged)
    with measured(rows - 1, found):
        found["outliers"] = sum(one.judgement.outlier for one in judged)
    return found


def memory(trained: Trained, store: Path, rows: int, keys: int, batch: int) -> dict[str, Any]:
    """Peak memory after a tenth of the rows and after all, with a cache of a tenth of the keys."""
    random = np.random.default_rng(4)
    peaks = []
    with KeyedDetector(trained, store, cache=keys // 10) as judge:
        for part in (rows // 10, rows - rows // 10):
            for _ in range(part // batch):
                chosen = random.zipf(1.3, batch) % keys  # some keys are hot
                judge.step([f"machine {key}" for key in chosen.tolist()], rows_of(chosen, random))
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return {"rows": rows, "keys": keys, "peak_mib_after_a_tenth": peaks[0], "peak_mib": peaks[1]}


def river_trees(rows: int) -> dict[str, Any]:
    """One model for all rows; a model for each of 10,000 keys would need 10,000 times the memory."""
    from river.anomaly import HalfSpaceTrees

    x, found = rows_of(np.zeros(rows, int), np.random.default_rng(5)), {}
    low, high = x.min(0), x.max(0)
    names = [f"x{i}" for i in range(COLUMNS)]
    trees = HalfSpaceTrees(seed=0, limits={n: (a, b) for n, a, b in zip(names, low, high, strict=True)})
    examples = [dict(zip(names, row, strict=True)) for row in x.tolist()]
    with measured(rows, found):
        for example in examples:
            trees.score_one(example)
            trees.learn_one(example)
    return found


def pyod_detectors(rows: int) -> dict[str, Any]:
    """The fastest of pyod's usual detectors: fitted to all rows at once; and scoring one row at a time."""
    from pyod.models.copod import COPOD
    from pyod.models.ecod import ECOD
    from pyod.models.hbos import HBOS
    from pyod.models.iforest import IForest

    x, results = rows_of(np.zeros(rows, int), np.random.default_rng(6)), {}
    for kind in (HBOS, ECOD, COPOD, IForest):
        kind().fit(x[:1000])  # compiles
        detector, fit, single = kind(), {}, {}
        with measured(rows, fit):
            detector.fit(x)
        with measured(200, single):
            for row in x[:200]:
                detector.decision_function(row[None])
        results[kind.__name__] = {"fit": fit, "one_at_a_time": single}
    return results


def report(found: dict[str, Any]) -> None:
    """Print a table of the rows a second."""
    table = Table("", "rows/s", "rows/s of processor time")
    for name, one in (
        ("BRUNO, micro-batches, 10,000 keys, new sets", found["micro_batches"]["start"]),
        ("BRUNO, micro-batches, 10,000 keys, afterwards", found["micro_batches"]["later"]),
        ("BRUNO, micro-batches, window of 100", found["window"]["later"]),
        ("BRUNO, one row at a time, one key", found["one_at_a_time"]),
        ("BRUNO, one row at a time, no group column", found["without_groups"]),
        ("river HalfSpaceTrees, one row at a time", found["river"]),
        *((f"pyod {name}, fitted to all rows", found["pyod"][name]["fit"]) for name in PYOD),
        *((f"pyod {name}, one row at a time", found["pyod"][name]["one_at_a_time"]) for name in PYOD),
    ):
        table.add_row(name, f"{one['rows_per_second']:,.0f}", f"{one['rows_per_cpu_second']:,.0f}")
    Console().print(table, found["memory"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--memory-rows", type=int, default=10_000_000)
    parser.add_argument("--batch", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=10_000)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS, help="measure only these again")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "streams.json", help="other jobs in it are kept"
    )
    options = parser.parse_args()
    wanted = [job for job in options.jobs if job != "pyod" or find_spec("pyod") is not None]
    if len(wanted) < len(options.jobs):
        print(f"the job `pyod` is left out, as pyod is not installed: {PYOD_COMMAND} installs it elsewhere.")
    import torch

    torch.set_num_threads(_THREADS)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trained = trained_in(folder)
        stores = (folder / f"{i}.db" for i in itertools.count())
        jobs: dict[str, Callable[[], dict[str, Any]]] = {
            "one_at_a_time": lambda: one_at_a_time(trained, next(stores), max(1000, options.rows // 100)),
            "without_groups": lambda: without_groups(folder, max(1000, options.rows // 500)),
            "micro_batches": lambda: in_batches(
                trained, next(stores), options.keys, options.rows, options.batch
            ),
            "window": lambda: in_batches(
                trained, next(stores), options.keys // 10, options.rows // 5, options.batch, window=100
            ),
            "river": lambda: river_trees(max(1000, options.rows // 100)),
            "pyod": lambda: pyod_detectors(options.rows // 10),
            "memory": lambda: memory(trained, next(stores), options.memory_rows, options.keys, options.batch),
        }
        before = json.loads(options.out.read_text()) if options.out.exists() else {}
        found: dict[str, Any] = {"threads": _THREADS, "cores": os.cpu_count(), "columns": COLUMNS}
        found |= {job: before[job] for job in JOBS if job in before}
        for job in wanted:
            # The load of this machine, over 1, 5 and 15 minutes: above the cores, others slow it down.
            about = {"load": os.getloadavg(), "provenance": provenance()}
            found[job] = jobs[job]() | about
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    if set(JOBS) <= found.keys():
        report(found)


if __name__ == "__main__":
    main()
