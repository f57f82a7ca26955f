"""2,000 requests of 32 clients, malformed ones among them: no failure, and no growth of memory."""

import random
import signal
import socket
import threading
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
from serving.process import SECONDS, Client, saved_model, served_by
from serving.service import rows

CLIENTS, WARM_UP = 32, 300
GROWTH = 16  # MiB


def valid(number: int, choose: random.Random) -> tuple[str, str, object, dict[str, str]]:
    x = rows(choose.randint(1, 4), seed=number)
    key = {"Idempotency_Key": f"key {number}"}
    return choose.choice(
        [
            ("POST", "/score", {"elements": x, "set": f"s{number % 5}"}, {}),
            ("POST", "/score", {"elements": x, "given": x}, {}),
            ("POST", "/rank", {"elements": x, "given": x}, {}),
            ("POST", "/sample", {"given": x, "samples": 2}, {}),
            ("POST", "/classify", {"elements": x, "support": {"a": x, "b": "s1"}}, {}),
            ("PUT", f"/sets/s{number % 5}/elements", {"elements": x}, key),
            ("GET", f"/sets/s{number % 5}", None, {}),
            ("GET", "/health", None, {}),
        ]
    )


def malformed(number: int, choose: random.Random) -> tuple[str, str, object, dict[str, str]]:
    noise = np.random.default_rng(number).bytes(choose.randint(0, 2000))
    return choose.choice(
        [
            ("POST", "/score", noise, {}),
            ("POST", "/score", b"[" * 2000, {}),
            ("POST", "/score", {"elements": [[1e400, 1, 2, 3]]}, {}),
            ("POST", "/score", {"elements": rows(300)}, {}),
            ("POST", "/score", noise, {"Content_Type": "image/png"}),
            ("POST", "/score", noise, {"Content_Type": "text/plain"}),
            ("POST", "/score", b" " * 200_000, {}),
            ("POST", "/sample", {"samples": 10**9}, {}),
            ("PUT", "/sets/s1/elements", {"elements": rows(1)}, {}),
            ("PUT", "/sets/%00/elements", {"elements": rows(1)}, {"Idempotency_Key": f"bad {number}"}),
            ("DELETE", "/sets/nothing", None, {"Idempotency_Key": f"bad {number}"}),
            ("GET", "/../../etc/passwd", None, {}),
            ("GET", "/health", None, {"Host": "evil.example"}),
            ("BREW", "/score", None, {}),
        ]
    )


def torn(port: int, number: int) -> None:
    """Half of a request, or bytes that are not a request."""
    content = [
        b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
        b"\0\1\2",
        b"GET / HT",
    ]
    with closing(socket.create_connection(("127.0.0.1", port), timeout=SECONDS)) as connection:
        connection.sendall(content[number % len(content)])


class Load:
    """Requests by 32 clients, and the statuses of the answers."""

    def __init__(self, port: int) -> None:
        self._port, self._lock = port, threading.Lock()
        self._next = 0
        self.statuses: Counter[tuple[bool, int]] = Counter()
        self.failures: list[object] = []

    def run(self, until: int) -> None:
        """Send requests up to this number."""
        threads = [threading.Thread(target=self._client, args=(until,)) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, until: int) -> None:
        client = Client(self._port)
        while (number := self._take(until)) is not None:
            try:
                self._send(client, number)
            except Exception as error:
                self.failures.append((number, repr(error)))
        client.close()

    def _take(self, until: int) -> int | None:
        with self._lock:
            if self._next >= until:
                return None
            self._next += 1
            return self._next

    def _send(self, client: Client, number: int) -> None:
        choose = random.Random(number)
        if number % 20 == 0:
            torn(self._port, number)
            return
        is_valid = number <= CLIENTS or choose.random() < 0.7
        method, path, body, headers = (valid if is_valid else malformed)(number, choose)
        try:
            status, _, text = client(method, path, body, **headers)
        except ConnectionError:
            if is_valid:
                raise
            return  # refused while the body was still sent
        with self._lock:
            self.statuses[is_valid, status] += 1
        if status >= 500:
            self.failures.append((number, method, path, status, text[:200]))


@pytest.mark.slow
@pytest.mark.parametrize("requests", [300, pytest.param(2000, marks=pytest.mark.long)])
def test_requests_of_32_clients_do_not_fail_and_need_no_more_memory(tmp_path, requests):
    with served_by(saved_model(tmp_path), "--store", tmp_path / "sets", "--max-body", 100_000) as service:
        load, first = Load(service.port), Client(service.port)
        for i in range(5):
            first("PUT", f"/sets/s{i}/elements", {"elements": rows(2)}, Idempotency_Key=f"first {i}")
        first.close()
        load.run(WARM_UP)
        before = service.memory
        load.run(requests)
        growth = service.memory - before
        assert load.failures == []
        assert {status for is_valid, status in load.statuses if is_valid} == {200}
        refused = {status for is_valid, status in load.statuses if not is_valid}
        assert refused <= {400, 404, 405, 413, 415, 421, 422}
        assert growth < GROWTH
        assert service.stop(signal.SIGTERM) == 128 + signal.SIGTERM
