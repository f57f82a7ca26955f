"""A service in a process of its own, as the command starts it, and clients that speak HTTP to it."""

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from streams.keyed import small_model

import bruno

SECONDS = 120  # for an answer, on a machine that is however busy


def saved_model(folder: Path) -> Path:
    """A small model of rows in a file."""
    path = folder / "rows.safetensors"
    bruno.save(small_model(), path)
    return path


class ServiceProcess:
    """`bruno serve` of a model, on a free port."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "bruno", "serve", *map(str, arguments), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self.process.stderr.read())
        self.port = urlsplit(line.split()[0]).port

    @property
    def memory(self) -> float:
        """Resident memory in MiB."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * 4096 / 2**20

    def stop(self, number: int) -> int:
        """Send a signal, and wait for the end; returns the exit code."""
        self.process.send_signal(number)
        self.process.communicate(timeout=SECONDS)
        return self.process.returncode


@contextmanager
def served_by(*arguments: object) -> Iterator[ServiceProcess]:
    service = ServiceProcess(*arguments)
    try:
        yield service
    finally:
        if service.process.poll() is None:
            service.stop(signal.SIGKILL)


class Client:
    """A connection that is opened again if it was closed, as by a service that waited too long."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)

    def __call__(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer; `body` is JSON unless it is bytes."""
        content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        is_new = self._connection.sock is None
        try:
            self._connection.request(method, path, content, sent)
            answer = self._connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        except ConnectionError:
            self._connection.close()
            if is_new:
                raise
            return self(method, path, body, **headers)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()


def ask(port: int, *request: object, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own."""
    client = Client(port)
    try:
        return client(*request, **headers)
    finally:
        client.close()
