"""False-alarm rates are the requested ones: the benchmark of decisions, reduced and in full."""

import importlib.util
import sys
from pathlib import Path

import pytest
from tasks.machines import machine_model, machines

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "decisions.py"


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("decisions", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["decisions"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["decisions"]


def failures(tables: list[dict]) -> list[str]:
    return [
        f"{table['case']}, {table['procedure']}: {rate['measured']:.3f} at {rate['asked']}, {rate['basis']}"
        for table in tables
        for rate in table["rates"]
        if not rate["holds"]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("calibrated", [3, 25])
def test_rates_of_a_model_that_does_not_fit_hold_on_new_machines(benchmark, calibrated):
    fold = benchmark.Fold(machine_model(), machines(20, 12, seed=1), machines(40, 12, seed=2))
    tables = benchmark.coverage(benchmark.Case("machines", [fold], calibrated), redraws=10, seed=0)
    assert [table["procedure"] for table in tables] == ["stream", "batch"]
    assert {rate["basis"] for rate in tables[0]["rates"]} == {"estimated", "exact"} - (
        {"exact"} if calibrated == 3 else set()
    )
    assert not failures(tables)


@pytest.mark.long
@pytest.mark.parametrize("case", ["machines", "breast cancer", "digits", "drawn"])
def test_rates_hold_on_held_out_groups(benchmark, case, tmp_path):
    tables = [
        table
        for one in benchmark.cases(tmp_path, 1000, None, [case])
        for table in benchmark.coverage(one, redraws=200, seed=0)
    ]
    assert tables
    assert not failures(tables)
