"""The store of sets in SQLite: states, positions in the input, excluded elements, and answers to requests.

Everything changes in one transaction. If a process is killed or loses power, the store has the state of the
last commit. Only one process at a time can have a store open.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bruno.files import check_regular

SCHEMA = 3  # the version of the tables
IN_MEMORY = ":memory:"  # path of a store without a file

_APPLICATION = 0x4252554E  # "BRUN" in the header of the file
_HEADER_SIZE = 100
_MAX_EXCLUDED = 100_000  # older elements can no longer be accepted
_MAX_ANSWERS = 100_000  # older requests can no longer be repeated safely
_AT_A_TIME = 500  # keys in a query

_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sets (name BLOB PRIMARY KEY, state BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE elements (name BLOB, number INTEGER, z BLOB NOT NULL, PRIMARY KEY (name, number)) WITHOUT ROWID;
CREATE TABLE excluded (number INTEGER PRIMARY KEY, id BLOB NOT NULL, name BLOB NOT NULL, z BLOB NOT NULL);
CREATE INDEX excluded_by_id ON excluded (id);
CREATE INDEX excluded_by_name ON excluded (name);
CREATE TABLE sources (name BLOB PRIMARY KEY, offset INTEGER NOT NULL, mark INTEGER NOT NULL) WITHOUT ROWID;
"""
_ANSWERS = """
CREATE TABLE answers (
    number INTEGER PRIMARY KEY, request BLOB NOT NULL UNIQUE, digest BLOB NOT NULL, answer TEXT NOT NULL
);
"""
# Statements that turn a store of each earlier version into the next one.
MIGRATIONS: dict[int, str] = {1: _ANSWERS, 2: "ALTER TABLE kept_out RENAME TO excluded"}


class Mark(NamedTuple):
    """How far a source has been read: the offset of the last row, and a checksum that identifies it."""

    offset: int
    check: int = 0


class Excluded(NamedTuple):
    """An element that was excluded from its set: its id, the name of the set, and its latents as bytes."""

    id: str
    name: str
    z: bytes


class Answer(NamedTuple):
    """The answer to a request that changed a set, and a digest that identifies the request."""

    digest: bytes
    text: str


class Store:
    """The states of sets by name, with everything that changes together with them.

    Nothing is permanent until `commit`; `close` drops uncommitted changes. Names are any text.

    Args:
        path: the file, created if it does not exist; ":memory:" for none.
        fingerprint: fingerprint of the model whose states the store holds.
        settings: settings that the states depend on, such as the window; those of an existing store must be
            the same.
        wait: seconds to wait for another process that has the store open.
    """

    def __init__(
        self,
        path: str | Path,
        fingerprint: str,
        settings: Mapping[str, Any] | None = None,
        *,
        wait: float = 5.0,
    ) -> None:
        self.path, self._is_unused = str(path), False
        about = {"model": fingerprint, "settings": dict(settings or {})}
        if self.path != IN_MEMORY:
            _check_file(Path(path))
        with self._translated():
            self._db = sqlite3.connect(self.path, timeout=wait, isolation_level=None, check_same_thread=False)
            try:
                self._prepare(about)
            except BaseException:
                self._db.close()
                raise

    def _prepare(self, about: dict[str, Any]) -> None:
        execute = self._db.execute
        execute("PRAGMA locking_mode = EXCLUSIVE")  # until the connection or the process ends
        execute("PRAGMA synchronous = FULL")  # a commit survives a power cut
        execute("BEGIN EXCLUSIVE")
        try:
            if execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                self._migrate()
                self._check_about(about)
            else:
                self._create(about)
                self._is_unused = self.path != IN_MEMORY
        except BaseException:
            execute("ROLLBACK")
            raise
        execute("COMMIT")
        # After the first commit, so that the header is in the file and not in the log.
        execute("PRAGMA journal_mode = WAL")

    def _create(self, about: dict[str, Any]) -> None:
        self._run(
            f"{_TABLES} {_ANSWERS} PRAGMA application_id = {_APPLICATION}; PRAGMA user_version = {SCHEMA}"
        )
        rows = [(name, json.dumps(value)) for name, value in about.items()]
        self._db.executemany("INSERT INTO about VALUES (?, ?)", rows)

    def _migrate(self) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA or any(step not in MIGRATIONS for step in range(version, SCHEMA)):
            raise ValueError(
                f"{self.path}: must be a store of version {SCHEMA} at most; got {version}. Update bruno."
            )
        for step in range(version, SCHEMA):
            self._run(f"{MIGRATIONS[step]}; PRAGMA user_version = {step + 1}")

    def _run(self, statements: str) -> None:
        """Run statements in the current transaction, which `executescript` would commit."""
        for statement in filter(str.strip, statements.split(";")):
            self._db.execute(statement)

    def _check_about(self, wanted: dict[str, Any]) -> None:
        try:
            found = {name: json.loads(value) for name, value in self._db.execute("SELECT * FROM about")}
            model, settings = found["model"], dict(found["settings"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path}: is damaged: it does not name its model.") from error
        if model != wanted["model"]:
            raise ValueError(
                f"{self.path}: must be a store of this model, {wanted['model']}; got one of {model}. Name "
                "another file."
            )
        for name, value in wanted["settings"].items():
            if (kept := settings.get(name)) != value:
                rule = "omitted" if kept in (None, False) else repr(kept)
                raise ValueError(
                    f"`{name}` must be {rule}, as in the store {self.path}; got {value!r}. Name another file "
                    "to begin again."
                )

    @classmethod
    @contextmanager
    def opened(cls, path: str | Path, fingerprint: str) -> Iterator[Store]:
        """A context manager for an existing store, whatever its settings."""
        store = cls(path, fingerprint)
        try:
            yield store
        finally:
            store.close()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that the states depend on."""
        with self._translated():
            row = self._db.execute("SELECT value FROM about WHERE name = 'settings'").fetchone()
        return dict(json.loads(row[0]))

    # --- reading -----------------------------------------------------------------------------------------

    def __len__(self) -> int:
        with self._translated():
            return int(self._db.execute("SELECT count(*) FROM sets").fetchone()[0])

    def names(self, after: str = "", limit: int = -1) -> Iterator[str]:
        """Yield the names of all sets, or of some of those after a name, in order."""
        with self._translated():
            query = "SELECT name FROM sets WHERE name > ? ORDER BY name LIMIT ?"
            for (name,) in self._db.execute(query, (_blob(after), limit)):
                yield _text(name)

    def states(self, names: Sequence[str]) -> dict[str, bytes]:
        """The states of sets by name, without names that are not in the store."""
        found: dict[str, bytes] = {}
        with self._translated():
            for start in range(0, len(names), _AT_A_TIME):
                some = [_blob(name) for name in names[start : start + _AT_A_TIME]]
                query = f"SELECT name, state FROM sets WHERE name IN ({','.join('?' * len(some))})"
                found |= {_text(name): bytes(state) for name, state in self._db.execute(query, some)}
        return found

    def element(self, name: str, number: int) -> bytes:
        """The latents of one element of a window."""
        with self._translated():
            query = "SELECT z FROM elements WHERE name = ? AND number = ?"
            row = self._db.execute(query, (_blob(name), number)).fetchone()
        if row is None:
            raise ValueError(f"{self.path}: is damaged: element {number} of set {name!r} is missing.")
        return bytes(row[0])

    def elements(self, name: str, after: int) -> list[bytes]:
        """The latents of the elements of a window after a number, in order."""
        with self._translated():
            query = "SELECT z FROM elements WHERE name = ? AND number > ? ORDER BY number"
            return [bytes(z) for (z,) in self._db.execute(query, (_blob(name), after))]

    def source(self, name: str) -> Mark | None:
        """How far a source has been read; None if it is new."""
        with self._translated():
            row = self._db.execute(
                "SELECT offset, mark FROM sources WHERE name = ?", (_blob(name),)
            ).fetchone()
        return None if row is None else Mark(*row)

    def excluded(self, id: str, name: str | None = None) -> tuple[int, Excluded] | None:
        """The latest excluded element with this id, of any or one set, and its number; None without one."""
        with self._translated():
            query = "SELECT * FROM excluded WHERE id = ? AND ifnull(name = ?, 1) ORDER BY number DESC LIMIT 1"
            row = self._db.execute(query, (_blob(id), None if name is None else _blob(name))).fetchone()
        return None if row is None else (row[0], Excluded(_text(row[1]), _text(row[2]), bytes(row[3])))

    def sets_excluding(self, id: str, count: int) -> list[str]:
        """The names of the sets that have an excluded element with this id, the latest first."""
        with self._translated():
            query = "SELECT name FROM excluded WHERE id = ? GROUP BY name ORDER BY max(number) DESC LIMIT ?"
            rows = self._db.execute(query, (_blob(id), count)).fetchall()
        return [_text(name) for (name,) in rows]

    def excluded_ending(self, end: str, count: int) -> list[str]:
        """The different ids of excluded elements that end with this text, the latest first."""
        with self._translated():
            query = (
                "SELECT id, max(number) FROM excluded WHERE substr(id, -?) = ? GROUP BY id ORDER BY 2 DESC "
                "LIMIT ?"
            )
            rows = self._db.execute(query, (len(_blob(end)), _blob(end), count)).fetchall()
        return [_text(id) for id, _ in rows]

    def latest_excluded(self, count: int) -> list[str]:
        """The ids of the latest excluded elements, from old to new."""
        with self._translated():
            rows = self._db.execute(
                "SELECT id FROM excluded ORDER BY number DESC LIMIT ?", (count,)
            ).fetchall()
        return [_text(id) for (id,) in reversed(rows)]

    def count_excluded(self) -> int:
        """Number of elements that can be accepted."""
        with self._translated():
            return int(self._db.execute("SELECT count(*) FROM excluded").fetchone()[0])

    def answer(self, request: str) -> Answer | None:
        """The answer that was given to a request, by its key."""
        with self._translated():
            query = "SELECT digest, answer FROM answers WHERE request = ?"
            row = self._db.execute(query, (_blob(request),)).fetchone()
        return None if row is None else Answer(bytes(row[0]), row[1])

    # --- writing -----------------------------------------------------------------------------------------

    def put(self, states: Iterable[tuple[str, bytes]]) -> None:
        """Replace the states of sets."""
        rows = ((_blob(name), state) for name, state in states)
        self._write("INSERT OR REPLACE INTO sets VALUES (?, ?)", rows)

    def drop(self, name: str) -> None:
        """Remove a set, with its elements and the elements that were excluded from it."""
        for table in ("sets", "elements", "excluded"):
            self._write(f"DELETE FROM {table} WHERE name = ?", [(_blob(name),)])

    def put_answers(self, answers: Mapping[str, Answer]) -> None:
        """Add the answers to requests, by their keys; only the latest 100,000 stay."""
        rows = [(_blob(request), *answer) for request, answer in answers.items()]
        self._write("INSERT INTO answers (request, digest, answer) VALUES (?, ?, ?)", rows)
        limit = "SELECT max(number) - ? FROM answers"
        self._write(f"DELETE FROM answers WHERE number <= ({limit})", [(_MAX_ANSWERS,)])

    def put_elements(self, elements: Iterable[tuple[str, int, bytes]]) -> None:
        """Add elements to windows: set, number and latents."""
        rows = ((_blob(name), number, z) for name, number, z in elements)
        self._write("INSERT OR REPLACE INTO elements VALUES (?, ?, ?)", rows)

    def drop_elements(self, limits: Iterable[tuple[str, int]]) -> None:
        """Remove the elements of windows up to a number, for each set."""
        rows = ((_blob(name), number) for name, number in limits)
        self._write("DELETE FROM elements WHERE name = ? AND number <= ?", rows)

    def put_excluded(self, elements: Sequence[Excluded]) -> None:
        """Add excluded elements; only the latest 100,000 stay."""
        rows = ((_blob(id), _blob(name), z) for id, name, z in elements)
        self._write("INSERT INTO excluded (id, name, z) VALUES (?, ?, ?)", rows)
        limit = "SELECT max(number) - ? FROM excluded"
        self._write(f"DELETE FROM excluded WHERE number <= ({limit})", [(_MAX_EXCLUDED,)])

    def drop_excluded(self, number: int) -> None:
        """Remove an excluded element, by its number."""
        self._write("DELETE FROM excluded WHERE number = ?", [(number,)])

    def drop_put_back(self, elements: Iterable[Excluded]) -> None:
        """Remove excluded elements that count again: one for each, of another id if its own is not there."""
        rows = ((_blob(name), z, _blob(id)) for id, name, z in elements)
        query = "SELECT number FROM excluded WHERE name = ? AND z = ? ORDER BY id = ? DESC LIMIT 1"
        self._write(f"DELETE FROM excluded WHERE number = ({query})", rows)

    def put_sources(self, marks: Mapping[str, Mark]) -> None:
        """Set how far sources have been read."""
        self._write(
            "INSERT OR REPLACE INTO sources VALUES (?, ?, ?)",
            [(_blob(name), mark.offset, mark.check) for name, mark in marks.items()],
        )

    def commit(self) -> None:
        """Make everything that was written since the last commit permanent."""
        with self._translated():
            if self._db.in_transaction:
                self._db.execute("COMMIT")
                self._is_unused = False

    def rollback(self) -> None:
        """Drop everything that was written since the last commit."""
        with self._translated():
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def close(self) -> None:
        """Close the file and drop uncommitted changes; a new file without a commit is deleted."""
        if self._is_unused:  # while no other process can have begun to use it
            for name in (self.path, f"{self.path}-wal"):
                Path(name).unlink(missing_ok=True)
            self._is_unused = False
        with self._translated():
            self._db.close()

    def _write(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        with self._translated():
            if not self._db.in_transaction:
                self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(statement, rows)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate the errors of SQLite into ValueError and OSError with the path."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if "locked" in str(error):
                raise ValueError(
                    f"{self.path}: must not be in use; another process has it open. Stop it, or wait."
                ) from error
            if "unable to open" in str(error) or "readonly" in str(error):
                raise ValueError(
                    f"`store` must be a file that can be written; got {self.path}: {error}."
                ) from error
            if "malformed" in str(error) or "no such" in str(error):
                raise ValueError(f"{self.path}: is damaged: {error}.") from error
            raise OSError(f"{self.path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.path}: is damaged: {error}.") from error


def _check_file(path: Path) -> None:
    """Raise ValueError unless a file is a store or can become one."""
    if not path.parent.is_dir():
        raise ValueError(f"`store` must be a file in an existing folder; {path.parent} does not exist.")
    if path.is_symlink() and not path.exists():
        raise ValueError(f"`store` must be a file that can be written; got a broken link, {path}.")
    if not path.exists() or check_regular(path) == 0:
        return
    if path.with_name(f"{path.name}-journal").exists():  # creation was interrupted: SQLite rolls it back
        return
    with path.open("rb") as file:
        header = file.read(_HEADER_SIZE)
    is_sqlite = len(header) == _HEADER_SIZE and header.startswith(b"SQLite format 3\0")
    if not is_sqlite or struct.unpack(">I", header[68:72])[0] != _APPLICATION:
        raise ValueError(f"`store` must be a store of streams or a new file; {path} is another file.")


def _blob(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(blob: bytes) -> str:
    return bytes(blob).decode("utf-8", "surrogateescape")
