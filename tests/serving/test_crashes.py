"""What was acknowledged is kept: after kill -9, and after SIGTERM, which lets requests in progress finish."""

import http.client
import json
import signal
import threading

import pytest
from serving.process import Client, saved_model, served_by
from serving.service import rows
from streams.keyed import small_model

from bruno.serving.sets import Sets

CLIENTS, PUTS, SETS = 4, 40, 3
LOST = (OSError, http.client.HTTPException)  # the connection, or the answer


class Writer(threading.Thread):
    """Adds rows one by one, and repeats a request that was not answered with the same key."""

    def __init__(self, number: int, state: "State") -> None:
        super().__init__(daemon=True)
        self.number, self.state = number, state

    def run(self) -> None:
        try:
            for i in range(PUTS):
                self._put(f"{self.number}-{i}", f"set {i % SETS}", rows(1, seed=100 * self.number + i))
        finally:
            self.state.finished()

    def _put(self, key: str, id: str, elements: object) -> None:
        path = f"/sets/{id.replace(' ', '%20')}/elements"
        while (port := self.state.port_to_try()) is not None:
            client = Client(port)
            try:
                status, _, body = client("PUT", path, {"elements": elements}, Idempotency_Key=key)
            except LOST:
                self.state.lost(port)
                continue
            finally:
                client.close()
            assert status == 200, body
            self.state.acknowledge(id, json.loads(body)["count"])
            return


class State:
    """Where the service is, and what it has acknowledged."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._port, self._writing = None, CLIENTS
        self.acknowledged: list[tuple[str, int]] = []

    def served_at(self, port: int) -> None:
        with self._changed:
            self._port = port
            self._changed.notify_all()

    def port_to_try(self) -> int:
        with self._changed:
            assert self._changed.wait_for(lambda: self._port is not None, 300)
            return self._port

    def lost(self, port: int) -> None:
        with self._changed:
            self._port = None if self._port == port else self._port

    def acknowledge(self, id: str, count: int) -> None:
        with self._changed:
            self.acknowledged.append((id, count))
            self._changed.notify_all()

    def finished(self) -> None:
        with self._changed:
            self._writing -= 1
            self._changed.notify_all()

    def wait_for(self, acknowledged: int) -> None:
        """Wait until this many changes are acknowledged, or no writer is left."""
        with self._changed:
            reached = self._changed.wait_for(
                lambda: len(self.acknowledged) >= acknowledged or not self._writing, 300
            )
            assert reached


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.long)])
def test_nothing_that_was_acknowledged_is_lost_and_nothing_counts_twice(tmp_path, kills):
    model, store, state = saved_model(tmp_path), tmp_path / "sets", State()
    writers = [Writer(number, state) for number in range(CLIENTS)]
    for writer in writers:
        writer.start()
    for kill in range(1, kills + 1):
        with served_by(model, "--store", store) as service:
            state.served_at(service.port)
            state.wait_for(CLIENTS * PUTS * kill // (kills + 1))
            service.stop(signal.SIGKILL)
    with served_by(model, "--store", store) as service:
        state.served_at(service.port)
        state.wait_for(CLIENTS * PUTS)
        assert service.stop(signal.SIGTERM) == 128 + signal.SIGTERM
    for writer in writers:
        writer.join(60)
    sets = Sets(small_model(), store / "rows.db")
    for id in (f"set {i}" for i in range(SETS)):
        counts = sorted(count for name, count in state.acknowledged if name == id)
        assert counts == list(range(1, len(counts) + 1))  # each change counted once, in some order
        assert sets[id].count == len(counts)
    assert len(state.acknowledged) == CLIENTS * PUTS
    sets.close()


@pytest.mark.slow
def test_sigterm_answers_the_requests_in_progress(tmp_path):
    model, store = saved_model(tmp_path), tmp_path / "sets"
    acknowledged, begun = [], threading.Barrier(CLIENTS + 1)

    def write(number: int, port: int) -> None:
        client, first = Client(port), True
        for i in range(10_000):
            try:
                status, _, _ = client(
                    "PUT", "/sets/a/elements", {"elements": rows(1)}, Idempotency_Key=f"{number}-{i}"
                )
            except LOST:
                return
            if status == 200:
                acknowledged.append(1)
            if first:
                begun.wait(300)
                first = False

    with served_by(model, "--store", store) as service:
        threads = [threading.Thread(target=write, args=(i, service.port)) for i in range(CLIENTS)]
        for thread in threads:
            thread.start()
        begun.wait(300)
        assert service.stop(signal.SIGTERM) == 128 + signal.SIGTERM
        for thread in threads:
            thread.join(300)
    sets = Sets(small_model(), store / "rows.db")
    assert CLIENTS <= len(acknowledged) <= sets["a"].count <= len(acknowledged) + CLIENTS
    sets.close()
