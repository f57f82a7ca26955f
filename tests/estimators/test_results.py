"""The numbers of docs/estimators.md are those of the results."""

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "estimators.md").read_text("utf-8")


def test_the_tables_match_the_results():
    tables = runpy.run_path(str(ROOT / "benchmarks" / "estimators.py"))["tables"]()
    for table in tables.split("\n\n"):
        assert table in PAGE


def test_the_number_of_explained_rows_matches_the_results():
    kept = json.loads((ROOT / "results" / "estimators" / "outliers.json").read_text("utf-8"))["explanations"]
    flagged = sum(one["flagged"] for one in kept.values())
    first = round(sum(one["flagged"] * one["first"] for one in kept.values()))
    assert f"In {first} of {flagged} flagged rows" in PAGE
