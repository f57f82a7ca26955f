"""What a connection may do: slow, large and many requests are refused, and a busy service says so."""

import json
import socket
import threading
from contextlib import closing
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from serving.process import SECONDS, ask
from serving.service import models, rows

from bruno.serving import Limits, running
from bruno.serving.jobs import ServedModel

HEAD = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def service(**limits):
    return running({"rows": models()["rows"]}, store=":memory:", limits=Limits(**limits))


def port_of(address: str) -> int:
    return urlsplit(address).port


def connected(address: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(address)), timeout=SECONDS)


def answer_to(address: str, content: bytes) -> bytes:
    """All that is received until the connection is closed."""
    with closing(connected(address)) as connection:
        received = b""
        try:
            connection.sendall(content)
            while some := connection.recv(65536):
                received += some
        except ConnectionError:  # closed while we still sent
            return received
        return received


@pytest.mark.parametrize(
    "content",
    [b"", b"GET /hea", HEAD, HEAD + b"Content-Length: 50\r\n\r\n{"],
    ids=["nothing", "part of a line", "part of the headers", "part of the body"],
)
def test_a_request_that_does_not_arrive_in_time_is_refused(content):
    with service(read_seconds=0.2) as address:
        assert answer_to(address, content).startswith(b"HTTP/1.1 408")


def test_a_second_request_of_a_connection_has_to_arrive_in_time_too():
    first = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with service(read_seconds=0.2) as address:  # sent in one piece, however busy the machine is
        received = answer_to(address, first + b"GET /health HT")
    assert received.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408" in received


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["incomplete", "complete"])
def test_headers_that_are_too_large_are_refused(end):
    with service() as address:
        received = answer_to(address, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000 + end)
        assert received[:12] in (b"HTTP/1.1 431", b"")  # the answer may be lost with what was not read
        assert ask(port_of(address), "GET", "/health")[0] == 200


@pytest.mark.parametrize("content", [b"\0" * 100, b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01"])
def test_what_is_not_http_is_refused(content):
    with service(read_seconds=1.0) as address:
        assert answer_to(address, content)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 408")


def test_too_many_connections_are_refused_and_the_others_go_on():
    with service(connections=2) as address, closing(connected(address)), closing(connected(address)):
        received = answer_to(address, b"")
        assert received.startswith(b"HTTP/1.1 503")
        assert b"retry-after: 1\r\n" in received


def test_a_busy_service_refuses_requests_and_stays_healthy(monkeypatch):
    may_run, run = threading.Event(), ServedModel.run
    monkeypatch.setattr(ServedModel, "run", lambda self, jobs: (may_run.wait(SECONDS), run(self, jobs))[1])
    statuses = []

    def score(port: int) -> None:
        statuses.append(ask(port, "POST", "/score", {"elements": rows(1)})[0])

    with service(waiting=2) as address:
        port = port_of(address)
        waiting = [threading.Thread(target=score, args=(port,)) for _ in range(2)]
        for thread in waiting:
            thread.start()
        while b"bruno_requests_in_progress 2.0" not in ask(port, "GET", "/metrics")[2]:
            pass
        status, headers, body = ask(port, "POST", "/score", {"elements": rows(1)})
        assert (status, headers["retry-after"]) == (503, "1")
        assert "busy" in json.loads(body)["error"]
        assert ask(port, "GET", "/health")[0] == 200
        may_run.set()
        for thread in waiting:
            thread.join(SECONDS)
        assert statuses == [200, 200]
        assert ask(port, "POST", "/score", {"elements": rows(1)})[0] == 200


def test_a_request_that_takes_too_long_is_answered_with_503(monkeypatch):
    may_run, run = threading.Event(), ServedModel.run
    monkeypatch.setattr(ServedModel, "run", lambda self, jobs: (may_run.wait(SECONDS), run(self, jobs))[1])
    with service(seconds=0.2) as address:
        status, headers, _ = ask(port_of(address), "POST", "/score", {"elements": rows(1)})
        may_run.set()
        assert (status, headers["retry-after"]) == (503, "1")


def test_a_port_in_use_is_an_error():
    with (
        service() as address,
        pytest.raises(ValueError, match="`port`"),
        running({"rows": models()["rows"]}, store=":memory:", port=port_of(address)),
    ):
        pass


def refused(address: str, path: str, size: int) -> int:
    """The status of a refused request with a body, for a client that reads nothing before it has sent all."""
    headers = {"Content-Type": "application/json", "Idempotency-Key": "1"}
    with pytest.raises(HTTPError) as error:
        urlopen(Request(address + path, b"0" * size, headers, method="PUT"), timeout=SECONDS)
    with error.value:
        assert "error" in json.load(error.value)
    return error.value.code


def test_a_client_that_first_sends_a_large_body_gets_the_reason_for_its_refusal():
    with service() as address:
        assert refused(address, "sets/a/elements", 16 * 2**20) == 413
    with running({"rows": models()["rows"]}, store=":memory:", token="x" * 16) as address:
        assert refused(address, "sets/a/elements", 16 * 2**20) == 401


@pytest.mark.parametrize("limit", ["_DISCARDED", "_DISCARDED_SECONDS"])
def test_no_connection_stays_open_for_a_body_without_end(monkeypatch, limit):
    monkeypatch.setattr(f"bruno.serving.guard.{limit}", 0.01)
    with service(read_seconds=SECONDS) as address:
        received = answer_to(address, HEAD + b"Content-Length: 9999999999\r\n\r\n{")
    assert received.startswith(b"HTTP/1.1 413")
