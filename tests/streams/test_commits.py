"""Commits of a keyed detector: after any interruption, the store is that of the rows that were reported."""

import os
import random
import signal
import time
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from streams.keyed import assert_same, assert_same_states, in_steps, keyed, stream

from bruno.streams.store import Mark
from bruno.trained import KeyedDetector

KEYS, X = stream(5, 40)


def test_a_stream_is_continued_where_it_was(tmp_path):
    whole = keyed()
    expected = in_steps(whole, KEYS, X, 50)
    parts = []
    for some in (slice(0, 63), slice(63, 64), slice(64, None)):
        with keyed(tmp_path / "s.db") as judge:
            parts.append(in_steps(judge, KEYS[some], X[some], 20))
    scores = np.concatenate([part.score for part in parts])
    np.testing.assert_array_equal(scores, expected.score)
    with keyed(tmp_path / "s.db") as judge:
        assert_same_states(judge, whole)


@pytest.mark.parametrize("settings", [{}, {"window": 20}, {"cache": 2}], ids=str)
def test_the_last_step_is_undone_if_its_report_fails(tmp_path, settings):
    """The rows of the step before were reported, as the next step began."""
    with pytest.raises(OSError, match="full"), keyed(tmp_path / "s.db", **settings) as judge:  # noqa: PT012
        in_steps(judge, KEYS[:150], X[:150], 10)
        judge.step(KEYS[150:180], X[150:180], sources={"file": Mark(180)})
        raise OSError("the disk is full")
    expected = keyed(**settings)
    in_steps(expected, KEYS[:150], X[:150], 10)
    with keyed(tmp_path / "s.db", **settings) as judge:
        assert judge.source("file") is None
        assert judge.store.latest_excluded(99) == expected_ids(expected)
        assert_same_states(judge, expected)
        rest = judge.step(KEYS[150:], X[150:])
        assert_same(rest, expected.step(KEYS[150:], X[150:]))


def expected_ids(judge: KeyedDetector) -> list[str]:
    judge.commit()
    return judge.store.latest_excluded(10**6)


def test_a_set_that_left_memory_is_not_written_again_in_its_old_state(tmp_path):
    """A large batch takes more sets than the cache has room for, and leaves empty slots."""
    judge, expected = keyed(tmp_path / "s.db", cache=2, commit_rows=1000), keyed()
    for keys in ("abcde", "f", *"abcdeedcba"):
        judge.step(list(keys), X[: len(keys)])
        expected.step(list(keys), X[: len(keys)])
    assert_same_states(judge, expected)


def test_an_undone_step_leaves_no_set_behind(tmp_path):
    judge = keyed(tmp_path / "s.db")
    judge.step(["a"], X[:1])
    judge.step(["b"], X[:1])
    judge.undo()
    judge.undo()
    assert list(judge) == ["a"]


def test_nothing_is_committed_before_it_is_due(tmp_path):
    judge = keyed(tmp_path / "s.db", commit_rows=30, commit_seconds=1e9)
    for start in range(0, 50, 10):
        judge.step(KEYS[start : start + 10], X[start : start + 10])
    assert judge.uncommitted == 20  # 30 were, when the fourth step began
    judge.commit()
    assert judge.uncommitted == 0


def test_commits_are_due_after_some_time(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    judge = keyed(tmp_path / "s.db", commit_seconds=5.0)
    judge.step(KEYS[:1], X[:1])
    now[0] = 4.0
    judge.step(KEYS[:1], X[:1])
    assert judge.uncommitted == 2
    now[0] = 6.0
    judge.step(KEYS[:1], X[:1])
    assert judge.uncommitted == 1


def test_rows_are_counted_once_by_their_offsets(tmp_path):
    offsets = np.arange(1000, 1000 + len(KEYS))
    expected = keyed()
    once = expected.step(KEYS, X, offsets=offsets)
    assert not once.skipped.any()
    with keyed(tmp_path / "s.db") as judge:
        judge.step(KEYS[:120], X[:120], offsets=offsets[:120])
    with keyed(tmp_path / "s.db") as judge:
        again = judge.step(KEYS[70:], X[70:], offsets=offsets[70:])
        assert again.skipped[:50].all()
        assert not again.skipped[50:].any()
        assert not again.outlier[:50].any()
        np.testing.assert_array_equal(again.score[50:], once.score[120:])
        twice = judge.step(KEYS[190:] * 2, np.concatenate([X[190:]] * 2), offsets=np.tile(offsets[190:], 2))
        assert twice.skipped.all()
        assert_same_states(judge, expected)


def test_a_source_is_committed_with_its_rows(tmp_path):
    judge = keyed(tmp_path / "s.db")
    judge.step(KEYS[:5], X[:5], sources={"file": Mark(5, 77)})
    assert judge.source("file") == Mark(5, 77)
    judge.store.close()  # as if killed
    with keyed(tmp_path / "s.db") as judge:
        assert judge.source("file") is None
        judge.step(KEYS[:5], X[:5], sources={"file": Mark(5, 77)})
    with keyed(tmp_path / "s.db") as judge:
        assert judge.source("file") == Mark(5, 77)


# --- kill -9 ---------------------------------------------------------------------------------------------


def judge_to_the_end(store: Path, report: Path, keys: list[str], x: np.ndarray, settings: dict) -> None:
    """Continue with the first row that is not committed; one line of the report for each row."""
    with report.open("ab", buffering=0) as out, keyed(store, commit_rows=25, **settings) as judge:
        done = judge.source("rows")
        size = 1 + os.getpid() % 13  # other batches in every process
        for start in range(done.offset if done else 0, len(keys), size):
            end = min(start + size, len(keys))
            found = judge.step(keys[start:end], x[start:end], sources={"rows": Mark(end)})
            lines = (
                f"\n{i} {score.hex()} {p.hex()};"
                for i, score, p in zip(range(start, end), found.score.tolist(), found.p.tolist(), strict=True)
            )
            out.write("".join(lines).encode())


def killed_often(tmp_path: Path, kills: int, settings: dict) -> None:
    keys, x = stream(5, 20 * kills, seed=8)
    store, report, moments = tmp_path / "s.db", tmp_path / "report", random.Random(0)
    killed = 0
    while True:
        child = os.fork()
        if not child:
            status = 1
            try:
                torch.set_num_threads(1)  # the threads of the parent do not exist here
                judge_to_the_end(store, report, keys, x, settings)
                status = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(status)
        if killed < kills:
            time.sleep(moments.uniform(0.0, 0.2))
            os.kill(child, signal.SIGKILL)
        ended = os.waitpid(child, 0)[1]
        if ended == 0:
            break
        assert os.WTERMSIG(ended) == signal.SIGKILL
        killed += 1
    expected = keyed(**settings)
    found = in_steps(expected, keys, x, len(keys))
    lines = [line for line in report.read_text().split("\n") if line.endswith(";")]
    reported: dict[int, set[str]] = {}
    for line in lines:
        reported.setdefault(int(line.split()[0]), set()).add(line)
    wanted = {
        i: {f"{i} {s.hex()} {p.hex()};"}
        for i, (s, p) in enumerate(zip(found.score.tolist(), found.p.tolist(), strict=True))
    }
    assert reported == wanted
    with keyed(store, **settings) as judge:
        assert_same_states(judge, expected)
        assert sorted(judge.store.latest_excluded(10**6)) == sorted(expected_ids(expected))
        if "window" in settings:
            for name in judge:
                assert judge.store.elements(name, -1) == expected.store.elements(name, -1)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"window": 20, "cache": 3}], ids=str)
def test_a_killed_stream_has_the_scores_and_states_of_an_uninterrupted_one(tmp_path, settings):
    killed_often(tmp_path, 4, settings)


@pytest.mark.long
@pytest.mark.parametrize("settings", [{}, {"window": 20, "cache": 3}], ids=str)
def test_a_stream_killed_50_times_has_the_scores_and_states_of_an_uninterrupted_one(tmp_path, settings):
    killed_often(tmp_path, 50, settings)
