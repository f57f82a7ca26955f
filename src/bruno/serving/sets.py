"""The sets of one model, in the store of its streams, and the answers to requests that changed them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from bruno.model import Bruno
from bruno.process import Evidence
from bruno.serving.settings import RequestError
from bruno.streams.codec import SetRecord, decode, encode
from bruno.streams.sets import capacity_for
from bruno.streams.store import Answer, Store
from bruno.text import rename_arguments

# The default settings of `KeyedDetector`, so that it and the service can open each other's stores.
_SETTINGS = {"window": None, "half_life": None, "within": False}


class Sets:
    """Sets by their ids, each with the evidence of its elements. Nothing is permanent until `commit`.

    Recently used states are also cached in memory.

    Args:
        model: the model of the latents.
        path: the file of the store, created if it does not exist, or ":memory:".
    """

    def __init__(self, model: Bruno, path: str | Path) -> None:
        self._dim, self._fingerprint = model.dim, model.fingerprint()
        self._store = Store(path, self._fingerprint, _SETTINGS)
        self._states: OrderedDict[str, SetRecord] = OrderedDict()
        self._capacity = capacity_for(self._dim)
        self._changed: set[str] = set()
        self._answers: dict[str, Answer] = {}

    def ids(self, after: str, limit: int) -> list[str]:
        """The ids of sets after one of them, in order."""
        self._write()
        return list(self._store.names(after, limit))

    def __len__(self) -> int:
        self._write()
        return len(self._store)

    def get(self, id: str) -> SetRecord | None:
        """The state of a set; None if it does not exist."""
        record = self._states.get(id)
        if record is None:
            state = self._store.states([id]).get(id)
            if state is None:
                return None
            record = self._states[id] = decode(state, self._fingerprint, self._dim, id)
        self._states.move_to_end(id)
        return record

    def __getitem__(self, id: str) -> SetRecord:
        """The state of a set; raises 404 if it does not exist."""
        record = self.get(id)
        if record is None:
            raise RequestError(404, f"`set` must exist; {id!r} does not. PUT elements into it first.")
        return record

    def add(self, id: str, z: Float[np.ndarray, "n dim"], *, incomplete: bool = False) -> int:
        """Add latents to a set, which is created if it does not exist; returns its size.

        `incomplete` says that some of the elements had missing numbers; their set remembers it.
        """
        before, added = self.get(id), torch.from_numpy(z)
        evidence = Evidence.of(added) if before is None else _evidence(before).add(added)
        return self._put(id, evidence, before, len(z), incomplete=incomplete)

    def remove(self, id: str, z: Float[np.ndarray, "n dim"]) -> int:
        """Remove latents from a set; returns its size. Raises 409 for latents that were not added."""
        before = self[id]
        try:
            after = _evidence(before).remove(torch.from_numpy(z))
        except ValueError as error:
            raise RequestError(409, rename_arguments(error, {"z": "elements"})) from error
        return self._put(id, after, before, 0)

    def delete(self, id: str) -> None:
        """Delete a set; raises 404 if it does not exist."""
        self[id]
        del self._states[id]
        self._changed.discard(id)
        self._store.drop(id)

    def once(self, key: str, digest: bytes, change: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Make a change once per key, and return its answer; a repeated request gets the same answer.

        Raises 422 if the key was used for another request.
        """
        if (before := self.answered(key, digest)) is not None:
            return before
        answer = change()
        self._answers[key] = Answer(digest, json.dumps(answer))
        return answer

    def answered(self, key: str, digest: bytes) -> dict[str, Any] | None:
        """The answer to an earlier request with this key; raises 422 if that request was different."""
        before = self._answers.get(key) or self._store.answer(key)
        if before is None:
            return None
        if before.digest != digest:
            raise RequestError(
                422,
                f"`Idempotency-Key` must be new for a new request; {key!r} was used for another one. Repeat "
                "that request unchanged, or choose another key.",
            )
        return dict(json.loads(before.text))

    def commit(self) -> None:
        """Commit all changes in one transaction; if that fails, none of them is kept."""
        try:
            self._write()
            self._store.commit()
        except BaseException:
            self._states.clear()
            self._changed.clear()
            self._answers.clear()
            self._store.rollback()
            raise
        while len(self._states) > self._capacity:
            self._states.popitem(last=False)

    def close(self) -> None:
        """Close the store, and drop uncommitted changes."""
        self._store.close()

    def _put(
        self,
        id: str,
        evidence: Evidence,
        before: SetRecord | None,
        added: int,
        *,
        incomplete: bool = False,
    ) -> int:
        """Replace the state of a set by one with this evidence; returns its size."""
        record = self._states[id] = SetRecord.of(evidence)
        record.incomplete = incomplete
        if before is not None:
            record.position, record.counted = before.position + added, before.counted + added
            record.offset, record.incomplete = before.offset, before.incomplete or incomplete
        self._changed.add(id)
        return int(record.count)

    def _write(self) -> None:
        """Write the changes to the store."""
        if self._changed:
            self._store.put((id, encode(self._states[id], self._fingerprint, id)) for id in self._changed)
            self._changed.clear()
        if self._answers:
            self._store.put_answers(self._answers)
            self._answers.clear()


def _evidence(record: SetRecord) -> Evidence:
    """Like `SetRecord.evidence`, without the checks, which are made when a record is read."""
    if record.count != int(record.count):
        return record.evidence  # raises
    mean, scatter = torch.from_numpy(record.mean), torch.from_numpy(record.scatter)
    return Evidence(torch.tensor(int(record.count)), mean, scatter)
