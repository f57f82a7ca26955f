"""Rows a second of `bruno.ray` on 1 and 2 cores of one machine, and where the shuffle begins to cost.

Each case runs in a process and a local cluster of its own. The first run starts the workers, and is not
counted. `alone` is the same work in one process without Ray: encode, reduce, remove and score.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bruno.provenance import provenance

RESULTS = Path(__file__).parents[1] / "results"
COLUMNS = 8
BLOCKS = 8


def table_of(rows: int, keys: int) -> pa.Table:
    random = np.random.default_rng(0)
    numbers = random.integers(0, keys, rows)
    x = random.normal(size=(rows, COLUMNS)) + random.normal(size=(keys, COLUMNS))[numbers]
    columns: dict[str, Any] = {"key": numbers} | {f"x{i}": x[:, i] for i in range(COLUMNS)}
    return pa.table(columns)


def model() -> Any:
    """A flow of the size of the preset `table`, with fresh weights: speed does not depend on them."""
    import torch

    from bruno import Bruno, FlowConfig, ModelConfig

    torch.manual_seed(0)
    flow = FlowConfig("dense", couplings=2, units=32)
    return Bruno.from_config(ModelConfig((COLUMNS,), levels=0, flow=flow)).requires_grad_(False)


def in_cluster(cpus: int, rows: int, keys: int) -> dict[str, Any]:
    """Seconds of each job on a local cluster."""
    import ray
    import ray.data

    import bruno.ray

    ray.init(
        num_cpus=cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config={"num_workers_soft_limit": 8},  # keep idle workers: to start one takes seconds
    )
    ray.data.DataContext.get_current().enable_progress_bars = False
    names = [f"x{i}" for i in range(COLUMNS)]
    found: dict[str, Any] = {"cpus": cpus, "rows": rows, "keys": keys}
    for attempt, some in (("first", min(rows, 10_000)), ("measured", rows)):
        table = table_of(some, keys)
        size = -(-some // BLOCKS)
        data = ray.data.from_arrow([table.slice(i, size) for i in range(0, some, size)])
        for job in (bruno.ray.score, bruno.ray.condition):
            began = time.perf_counter()
            job(data, model(), "key", columns=names).materialize()
            seconds = time.perf_counter() - began
            if attempt == "measured":
                found[job.__name__] = {"seconds": seconds, "rows_per_second": some / seconds}
    ray.shutdown()
    return found


def alone(rows: int, keys: int) -> dict[str, Any]:
    """Seconds of `score` in one process with one thread, and processor seconds of its parts."""
    import torch

    torch.set_num_threads(1)
    from bruno.ray.evidence import KeyedEvidence
    from bruno.streams.densities import RowDensities
    from bruno.streams.encoder import encoder_of

    table, bruno_model = table_of(rows, keys), model()
    x: NDArray[Any] = np.stack([table.column(f"x{i}").to_numpy() for i in range(COLUMNS)], 1)
    names, seconds = table.column("key").combine_chunks(), {}

    def timed(name: str, work: Any) -> Any:
        began = time.process_time()
        result = work()
        seconds[name] = time.process_time() - began
        return result

    encode, densities = encoder_of(bruno_model), RowDensities(bruno_model.process)
    start = time.perf_counter()
    parts = [x[i : i + 4096] for i in range(0, rows, 4096)]
    z = timed("encode", lambda: np.concatenate([encode(part).z for part in parts]))
    slices = [slice(i, i + rows // BLOCKS) for i in range(0, rows, rows // BLOCKS)]
    pieces = timed("reduce", lambda: [KeyedEvidence.of(names[s], z[s]) for s in slices])
    packed = timed("pack", lambda: [piece.packed("0" * 16) for piece in pieces])
    pieces = timed("unpack", lambda: [KeyedEvidence.unpacked(one, "0" * 16, COLUMNS) for one in packed])
    evidence = timed("merge", lambda: KeyedEvidence.merged(pieces))

    def score() -> Any:
        others = evidence.without_each(evidence.places(names), z)
        return densities(z, *others) - densities.prior(z)

    timed("score", score)
    wall, total = time.perf_counter() - start, sum(seconds.values())
    sizes = {"shuffled_bytes": sum(map(len, packed)), "shuffled_sets": sum(map(len, pieces))}
    return {
        "rows": rows,
        "keys": keys,
        "seconds": wall,
        "rows_per_second": rows / wall,
        "processor_seconds": seconds,
        "rows_per_processor_second": rows / total,
        **sizes,
    }


def case(cpus: int, rows: int, keys: int) -> dict[str, Any]:
    """The result of one case, measured in a process of its own, with the load of the machine."""
    numbers = [str(number) for number in (cpus, rows, keys)]
    text = subprocess.run([sys.executable, __file__, "--case", *numbers], check=True, stdout=subprocess.PIPE)
    return {**json.loads(text.stdout.splitlines()[-1]), "load": os.getloadavg(), "provenance": provenance()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, nargs="+", default=[100, 10_000, 500_000])
    parser.add_argument(
        "--cpus", type=int, nargs="+", default=[0, 1, 2], help="0: in one process, without Ray"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "ray.json", help="other cases in it are kept")
    parser.add_argument("--case", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        cpus, rows, keys = options.case
        print(json.dumps(in_cluster(cpus, rows, keys) if cpus else alone(rows, keys)))
        return
    found = json.loads(options.out.read_text()) if options.out.exists() else {}
    found |= {"columns": COLUMNS, "blocks": BLOCKS, "cores": os.cpu_count()}
    for cpus in options.cpus:
        for keys in options.keys:
            name = f"{cpus} cpus, {keys} keys" if cpus else f"alone, {keys} keys"
            found[name] = case(cpus, options.rows, keys)
            options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
