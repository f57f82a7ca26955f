"""Faults are still found if cells are missing: one repetition of the benchmark."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "missing_cells.py"


@pytest.mark.long
def test_missing_cells_hide_few_faults_whose_cells_are_there(tmp_path):
    spec = importlib.util.spec_from_file_location("missing_cells", SCRIPT)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    rows = benchmark.with_holes(benchmark.simulated(60, 60, 0.0, seed=1).x, 0.1, seed=0)
    model = benchmark.trained(rows, tmp_path, steps=1000)
    faults = benchmark.simulated(200, 60, 0.08, seed=2)
    complete, holed = (benchmark.areas(model, faults, rate, seed=0)["present"] for rate in (0.0, 0.1))
    assert complete > 0.95
    assert holed > complete - 0.03
