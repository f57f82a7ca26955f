import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bruno.reporting.images import png
from bruno.reporting.results import Result, mark_outdated, read_results

PICTURE = png(np.zeros((2, 2, 1), np.uint8))
WHOLE = {"title": "t", "note": "", "columns": ["a"], "rows": [["1"]], "values": {}, "provenance": {}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


def result(name: str = "one", **changes) -> Result:
    values = {
        "title": "A <title>",
        "values": {"accuracy": 0.5},
        "columns": ("a", "b"),
        "rows": (("1", "2 & 3"),),
    }
    return Result(name, **{**values, **changes})


def test_written_results_are_read_back_oldest_first(tmp_path):
    first = result("zebra", picture=PICTURE, note="seen", model="abc")
    for i, each in enumerate((first, result("ant"))):
        path = each.write(tmp_path, config={"rate": 0.1}, seed=7)
        os.utime(path, (i, i))
    zebra, ant = read_results(tmp_path)
    assert (zebra.name, zebra.picture, zebra.rows, zebra.note) == ("zebra", first.picture, first.rows, "seen")
    assert zebra.model == "abc"
    assert ant.picture == b""
    record = json.loads(path.read_text())
    assert record["values"] == {"accuracy": 0.5}
    assert record["config"] == {"rate": 0.1}
    assert record["provenance"]["seed"] == 7
    assert {"command", "commit", "hardware", "packages"} <= record["provenance"].keys()


def test_nan_and_infinity_are_written_as_null(tmp_path):
    path = result(values={"curve": (1.0, float("nan"), float("inf"))}).write(tmp_path, config={}, seed=0)
    assert json.loads(path.read_text())["values"] == {"curve": [1.0, None, None]}


def test_a_result_without_a_picture_replaces_one_with_a_picture(tmp_path):
    result(picture=PICTURE).write(tmp_path, config={}, seed=0)
    result().write(tmp_path, config={}, seed=0)
    assert read_results(tmp_path)[0].picture == b""


@pytest.mark.parametrize(
    "content",
    [
        b'{"a": 1}',
        b'{"title": "Cu',
        b"",
        b"\xff\xfe",
        b"null",
        b"[1, 2]",
        b'"text"',
        b"[" * 100_000,
        b"1" * 5000,
        *(
            json.dumps({**WHOLE, **change}).encode()
            for change in (
                {"title": None},
                {"note": 3},
                {"model": []},
                {"values": [1]},
                {"provenance": "me"},
                {"columns": "ab"},
                {"columns": [1]},
                {"rows": {"a": 1}},
                {"rows": [1]},
                {"rows": ["ab"]},
                {"rows": [[None]]},
            )
        ),
    ],
)
def test_a_file_that_is_not_a_result_is_skipped_with_a_warning(tmp_path, content):
    result("kept").write(tmp_path, config={}, seed=0)
    (tmp_path / "results" / "other.json").write_bytes(content)
    with pytest.warns(UserWarning, match=r"other\.json") as warned:
        assert [result.name for result in read_results(tmp_path)] == ["kept"]
    assert len(warned) == 1


@pytest.mark.slow
@given(change=st.dictionaries(st.sampled_from([*WHOLE, "model"]), JSON, min_size=1))
def test_any_json_is_read_or_skipped(change):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "results" / "other.json"
        path.parent.mkdir()
        path.write_text(json.dumps({**WHOLE, **change}))
        try:
            (found,) = read_results(Path(folder))
        except UserWarning:  # an error in these tests
            return
    assert isinstance(found.title, str)
    assert all(isinstance(cell, str) for row in found.rows for cell in row)


def test_a_folder_or_dangling_link_named_as_a_result_is_skipped_with_a_warning(tmp_path):
    (tmp_path / "results" / "folder.json").mkdir(parents=True)
    (tmp_path / "results" / "link.json").symlink_to("nowhere")
    with pytest.warns(UserWarning, match=r"(folder|link)\.json") as warned:
        assert read_results(tmp_path) == []
    assert len(warned) == 2


def test_a_damaged_picture_is_skipped_with_a_warning(tmp_path):
    path = result().write(tmp_path, config={}, seed=0)
    path.with_suffix(".png").write_bytes(b"<html>")
    with pytest.warns(UserWarning, match=r"one\.png"):
        assert read_results(tmp_path)[0].picture == b""


def test_a_folder_without_results_has_none(tmp_path):
    assert read_results(tmp_path) == []


def test_results_of_earlier_checkpoints_are_marked():
    results = [result(model="old", note="How."), result(model="new"), result()]
    old, new, without = mark_outdated(results, {"new", "best"})
    assert old.note.startswith("From an earlier checkpoint")
    assert old.note.endswith(" How.")
    assert [new, without] == results[1:]
    assert mark_outdated(results, ()) == results
