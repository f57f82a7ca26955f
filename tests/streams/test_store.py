"""The store: transactions, one process at a time, versions, and damaged files."""

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from bruno.streams import store as module
from bruno.streams.store import Answer, Excluded, Mark, Store

MODEL = "0123456789abcdef"


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "state.db"


def opened(path: Path, **settings: object) -> Store:
    return Store(path, MODEL, settings, wait=0.0)


def filled(path: Path) -> Store:
    store = opened(path)
    store.put([("a", b"1"), ("b", b"2"), ("\udcff", b"3")])
    store.put_elements([("a", 0, b"x"), ("a", 1, b"y"), ("a", 2, b"z")])
    store.put_excluded([Excluded("line 1", "a", b"old"), Excluded("line 1", "b", b"new")])
    store.put_sources({"file": Mark(3, 4)})
    store.commit()
    return store


def test_what_is_committed_is_read_again(path):
    filled(path).close()
    store = opened(path)
    assert len(store) == 3
    assert list(store.names()) == ["a", "b", "\udcff"]
    assert store.states(["a", "c", "\udcff"]) == {"a": b"1", "\udcff": b"3"}
    assert (store.element("a", 1), store.elements("a", 0)) == (b"y", [b"y", b"z"])
    assert store.source("file") == Mark(3, 4)
    assert store.source("other") is None
    assert store.excluded("line 1") == (2, Excluded("line 1", "b", b"new"))
    assert store.latest_excluded(1) == ["line 1"]


def test_what_is_not_committed_is_not_kept(path):
    filled(path).close()
    store = opened(path)
    store.put([("a", b"9"), ("d", b"4")])
    store.drop_elements([("a", 5)])
    store.drop_excluded(2)
    store.put_sources({"file": Mark(5)})
    store.close()
    store = opened(path)
    assert store.states(["a", "d"]) == {"a": b"1"}
    assert store.elements("a", -1) == [b"x", b"y", b"z"]
    assert store.source("file") == Mark(3, 4)
    assert store.excluded("line 1")[0] == 2


def test_elements_that_count_again_are_no_longer_excluded(path):
    store = filled(path)
    store.drop_put_back([Excluded("line 1", "b", b"new")])
    assert store.excluded("line 1") == (1, Excluded("line 1", "a", b"old"))


def test_of_equal_elements_the_one_that_counts_again_is_no_longer_excluded(path):
    store = opened(path)
    store.put_excluded([Excluded(id, "a", b"same") for id in ("line 1", "line 2", "line 3")])
    store.drop_put_back([Excluded("line 2", "a", b"same")])
    assert store.latest_excluded(3) == ["line 1", "line 3"]
    store.drop_put_back([Excluded("a/1", "a", b"same")])  # in an older store, whose states have no ids
    assert len(store.latest_excluded(3)) == 1


def test_only_the_latest_elements_that_did_not_count_stay(path, monkeypatch):
    monkeypatch.setattr(module, "_MAX_EXCLUDED", 3)
    store = opened(path)
    store.put_excluded([Excluded(str(i), "a", b"") for i in range(10)])
    assert store.latest_excluded(10) == ["7", "8", "9"]


def test_a_store_in_memory_has_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    filled(Path(":memory:")).close()
    assert list(tmp_path.iterdir()) == []


def test_a_second_process_is_refused(path):
    store = filled(path)
    read = (
        f"import sqlite3; sqlite3.connect({str(path)!r}, timeout=0).execute('SELECT * FROM sets').fetchall()"
    )
    refused = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True)
    assert "database is locked" in refused.stderr
    with pytest.raises(ValueError, match="another process"):
        opened(path)
    store.close()
    subprocess.run([sys.executable, "-c", read], check=True)
    opened(path).close()


def test_a_store_of_another_model_is_refused(path):
    filled(path).close()
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"feedfeedfeedfeed; got .*{MODEL}"):
        Store(path, "feedfeedfeedfeed")
    assert path.read_bytes() == before


def test_other_settings_are_refused(path):
    store = opened(path, window=100)
    store.put([("a", b"")])
    store.commit()
    store.close()
    with pytest.raises(ValueError, match=r"`window` must be 100, .*got 200"):
        opened(path, window=200)
    with pytest.raises(ValueError, match=r"`half_life` must be omitted, as in the store .*got 5.0"):
        opened(path, window=100, half_life=5.0)
    opened(path, window=100).close()


def test_an_older_store_is_migrated(path, monkeypatch):
    filled(path).close()
    monkeypatch.setattr(module, "SCHEMA", module.SCHEMA + 2)
    steps = {
        module.SCHEMA - 2: "ALTER TABLE sets ADD COLUMN colour TEXT",
        module.SCHEMA - 1: "CREATE TABLE more (x); INSERT INTO more VALUES (7)",
    }
    monkeypatch.setattr(module, "MIGRATIONS", steps)
    store = opened(path)
    assert store._db.execute("PRAGMA user_version").fetchone() == (module.SCHEMA,)
    assert store._db.execute("SELECT x FROM more").fetchone() == (7,)
    assert store.states(["a"]) == {"a": b"1"}
    store.close()
    opened(path).close()


def test_a_store_of_version_1_is_migrated(path):
    store = filled(path)
    store._db.execute("DROP TABLE answers")
    store._db.execute("ALTER TABLE excluded RENAME TO kept_out")
    store._db.execute("PRAGMA user_version = 1")
    store.close()
    store = opened(path)
    assert store.excluded("line 1") == (2, Excluded("line 1", "b", b"new"))
    assert store.answer("key") is None
    store.put_answers({"key": Answer(b"digest", "{}")})
    store.commit()
    assert store.answer("key") == (b"digest", "{}")
    assert store.states(["a"]) == {"a": b"1"}


def test_only_the_latest_answers_stay(path, monkeypatch):
    monkeypatch.setattr(module, "_MAX_ANSWERS", 3)
    store = opened(path)
    for i in range(10):
        store.put_answers({str(i): Answer(b"", str(i))})
    assert [store.answer(str(i)) is not None for i in range(10)] == [False] * 7 + [True] * 3


def test_a_set_is_removed_with_all_that_belongs_to_it(path):
    store = filled(path)
    store.drop("a")
    assert list(store.names()) == ["b", "\udcff"]
    assert (store.elements("a", -1), store.count_excluded()) == ([], 1)


def test_names_are_listed_in_parts(path):
    store = filled(path)
    assert (list(store.names(limit=2)), list(store.names("b"))) == (["a", "b"], ["\udcff"])


def test_a_migration_that_fails_changes_nothing(path, monkeypatch):
    filled(path).close()
    monkeypatch.setattr(module, "SCHEMA", module.SCHEMA + 1)
    monkeypatch.setattr(module, "MIGRATIONS", {module.SCHEMA - 1: "DROP TABLE sources; DROP TABLE sources"})
    with pytest.raises(ValueError, match="no such table"):
        opened(path)
    monkeypatch.undo()
    assert opened(path).source("file") == Mark(3, 4)


def test_a_newer_store_is_refused(path, monkeypatch):
    monkeypatch.setattr(module, "SCHEMA", module.SCHEMA + 1)
    filled(path).close()
    monkeypatch.undo()
    with pytest.raises(ValueError, match=rf"version {module.SCHEMA} .*got {module.SCHEMA + 1}"):
        opened(path)


@pytest.mark.parametrize("content", [b"text", b"SQLite format 3\0", b"SQLite format 3\0" + bytes(200)])
def test_another_file_is_refused_and_not_changed(path, content):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"`store` .*another file"):
        opened(path)
    assert [one.name for one in path.parent.iterdir()] == ["state.db"]
    assert path.read_bytes() == content


def test_another_database_is_refused(path):
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE sets (x)")
    other.close()
    with pytest.raises(ValueError, match=r"`store` .*another file"):
        opened(path)


def test_a_folder_and_a_missing_folder_are_refused(tmp_path):
    with pytest.raises(ValueError, match="folder"):
        opened(tmp_path)
    with pytest.raises(ValueError, match=r"`store` .*nowhere"):
        opened(tmp_path / "nowhere" / "state.db")


@pytest.mark.parametrize("start", [100, 4096, 8192])
def test_a_damaged_store_is_a_value_error(path, start):
    filled(path).close()
    content = bytearray(path.read_bytes())
    content[start : start + 4096] = b"\xa5" * len(content[start : start + 4096])
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"state\.db"):  # noqa: PT012
        store = opened(path)
        store.states(["a"])
        store.element("a", 0)
        store.excluded("line 1")
        list(store.names())


def test_a_new_store_without_anything_is_deleted(path):
    opened(path).close()
    assert list(path.parent.iterdir()) == []


def test_an_interrupted_creation_begins_again(path):
    path.write_bytes(b"")
    filled(path).close()
    assert len(opened(path)) == 3
