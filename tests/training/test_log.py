import json
import math
import tempfile
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from bruno.training.log import Log, LogEntry, drop_repeated


def entry(index: int, note: str = "", **values) -> LogEntry:
    zeros = dict.fromkeys(("loss", "bits_per_dim", "accuracy", "rate", "gradient_norm"), 0.0)
    times = dict.fromkeys(("seconds", "seconds_left", "step_seconds", "elements_per_second"), 1.0)
    return LogEntry(**{**zeros, **times, "index": index, "skipped": 0, "memory": 1, "note": note, **values})


def without_tensorboard():
    return mock.patch("bruno.training.log.find_spec", return_value=None)


@given(st.lists(st.integers(1, 20)))
def test_an_entry_counts_unless_a_later_entry_has_the_same_or_an_earlier_step(indices):
    entries = [{"index": index, "place": place} for place, index in enumerate(indices)]
    expected = [
        e for i, e in enumerate(entries) if all(later["index"] > e["index"] for later in entries[i + 1 :])
    ]
    assert drop_repeated(entries) == expected


@given(st.lists(st.text(), min_size=1, max_size=4), st.data())
def test_a_log_truncated_at_any_byte_keeps_its_whole_lines_and_takes_new_ones(notes, data):
    with tempfile.TemporaryDirectory() as folder, without_tensorboard():
        log, path = Log(Path(folder)), Path(folder) / "log.jsonl"
        for index, note in enumerate(notes, start=1):
            log.append(entry(index, note))
        content = path.read_bytes()
        size = data.draw(st.integers(0, len(content)))
        path.write_bytes(content[:size])
        lines = content[:size].split(b"\n")
        whole = len(lines) - 1 + (lines[-1] in content.split(b"\n") and lines[-1] != b"")
        log.append(entry(100, "new"))
        assert [(e["index"], e["note"]) for e in log.read()] == [
            *list(enumerate(notes, start=1))[:whole],
            (100, "new"),
        ]


def test_entries_are_lines_of_json_with_null_for_numbers_that_are_not_finite(tmp_path):
    log = Log(tmp_path)
    with without_tensorboard():
        log.append(entry(1, accuracy=math.nan, gradient_norm=math.inf))
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    values = json.loads(line, parse_constant=pytest.fail)
    assert values == {**asdict(entry(1)), "accuracy": None, "gradient_norm": None, "validation": None}
    assert log.read() == [values]


def test_a_run_without_a_log_has_no_entries(tmp_path):
    assert Log(tmp_path).read() == []


def test_tensorboard_gets_the_numbers_of_the_log(tmp_path):
    log = Log(tmp_path)
    for index in (1, 2, 3):
        log.append(entry(index, bits_per_dim=2.0 / index, accuracy=math.nan))
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    scalars = events.Scalars("bits_per_dim")
    assert [event.step for event in scalars] == [1, 2, 3]
    assert [event.value for event in scalars] == pytest.approx([2.0, 1.0, 2 / 3])
    assert "accuracy" not in events.Tags()["scalars"]


def test_a_long_line_is_not_an_entry_and_hides_no_other(tmp_path):
    log = Log(tmp_path)
    with without_tensorboard():
        log.append(entry(1))
        with (tmp_path / "log.jsonl").open("ab") as file:
            file.write(b'{"index": 9, "seconds": 1, "note": "' + b"x" * 100_000 + b'"}\n')
        log.append(entry(2))
    assert [one["index"] for one in log.read()] == [1, 2]


def test_a_log_larger_than_memory_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "log.jsonl").write_bytes(b"\n" * 1000)
    monkeypatch.setenv("BRUNO_MAX_MEMORY", "2000")
    with pytest.raises(ValueError, match=r"log\.jsonl.*BRUNO_MAX_MEMORY"):
        Log(tmp_path).read()
