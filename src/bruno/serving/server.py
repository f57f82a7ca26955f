"""The server: its address, the limits of a connection, and a graceful stop."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bruno.files import read_regular
from bruno.serving.app import create_app
from bruno.serving.service import Models
from bruno.serving.settings import Limits

_HEADERS = 2**16  # bytes of the headers of a request
_TOO_LARGE = ("431 Request Header Fields Too Large", f"headers must have at most {_HEADERS} bytes.")
_BACKLOG = 128  # connections that wait to be accepted


def serve(
    models: Models,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    ready: Callable[[str], None] | None = None,
    **settings: Any,
) -> None:
    """Serve models over HTTP until SIGINT or SIGTERM; requests in progress are finished first.

    Args:
        models: as `create_app` takes them.
        host: the address to listen on; without a token, it must be local to this machine.
        port: the port; 0 for any free one.
        ready: called with the address, once connections are accepted.
        settings: other arguments of `create_app`, such as `store` and `token`.
    """
    with _prepared(models, host=host, port=port, ready=ready, **settings) as server:
        server.run()


@contextmanager
def running(models: Models, *, host: str = "127.0.0.1", port: int = 0, **settings: Any) -> Iterator[str]:
    """Serve models in a thread while the body runs; yields the address.

    Args:
        models: as `create_app` takes them.
        host: the address to listen on.
        port: the port; 0 for any free one.
        settings: other arguments of `create_app`.
    """
    started = threading.Event()
    with _prepared(models, host=host, port=port, ready=lambda _: started.set(), **settings) as server:
        thread = threading.Thread(target=server.run, name="bruno-server", daemon=True)
        thread.start()
        while not started.wait(0.1):
            if not thread.is_alive():
                raise RuntimeError("the service could not be started.")
        try:
            yield server.address
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def _prepared(
    models: Models,
    *,
    host: str,
    port: int,
    token: str | None = None,
    hosts: Iterable[str] = (),
    limits: Limits | None = None,
    ready: Callable[[str], None] | None,
    **settings: Any,
) -> Iterator[_Server]:
    """A server that is ready to run."""
    if token is None and not _is_local(host):
        raise ValueError(
            f"`host` must be an address of this machine, such as 127.0.0.1, without a token; got {host!r}. "
            "Set a token (`token`)."
        )
    with _listening(host, port) as listener:
        allowed = (*hosts, _in_url(host))
        app = create_app(models, token=token, hosts=allowed, limits=limits, **settings)
        address = f"http://{_in_url(host)}:{listener.getsockname()[1]}/"
        yield _Server(app, limits or Limits(), listener, address, ready)


def read_token(path: str | Path) -> str:
    """The token in the first line of a file."""
    if not Path(path).exists():
        raise ValueError(f"`token` must be in a file; {path} does not exist.")
    lines = read_regular(Path(path)).decode(errors="replace").splitlines()
    if not lines:
        raise ValueError(f"`token` must be in the first line of {path}; the file is empty.")
    return lines[0].strip()


class _Server(uvicorn.Server):
    """A server on a socket that reports when it accepts connections."""

    def __init__(
        self,
        app: FastAPI,
        limits: Limits,
        listener: socket.socket,
        address: str,
        ready: Callable[[str], None] | None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=type("Protocol", (_Protocol,), {"limits": limits}),
            ws="none",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # headers of a request are not trusted to name its sender
            timeout_keep_alive=round(max(1.0, limits.read_seconds)),
            timeout_graceful_shutdown=round(max(1.0, limits.seconds)),
            backlog=_BACKLOG,
        )
        super().__init__(config)
        self.address, self._listener, self._ready = address, listener, ready

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal, or until `should_exit` is set."""
        super().run(sockets or [self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept connections."""
        await super().startup(sockets)
        if self.started and self._ready:
            self._ready(self.address)


def _listening(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address; raises ValueError if it cannot be."""
    if not 0 <= port < 2**16:
        raise ValueError(f"`port` must be from 0 to 65535; got {port}.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"`host` must be an address of this machine; got {host!r}: {error}.") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ValueError(
            f"`port` must be free, and `host` an address of this machine; {host} port {port}: "
            f"{error.strerror}. Choose another one."
        ) from error
    return listener


def _is_local(host: str) -> bool:
    """Whether only this machine can connect to an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits on connections, and on the size and time of headers."""

    limits: Limits
    _timer: asyncio.TimerHandle | None = None
    _header_bytes = 0
    _in_headers = True

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._end("503 Service Unavailable", "too many connections. Try again later.", retry=True)
        else:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        is_open = not self.transport.is_closing()
        if is_open and self._in_headers and self._header_bytes > _HEADERS:
            self._end(*_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._in_headers = True
        self._start_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_headers, self._header_bytes = False, 0
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > _HEADERS:  # they arrived in one piece
            self._end(*_TOO_LARGE)
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_headers = True
        self._stop_timer()
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.limits.read_seconds, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._end(
            "408 Request Timeout", f"a request must arrive within {self.limits.read_seconds:g} seconds."
        )

    def _end(self, status: str, reason: str, retry: bool = False) -> None:
        """Answer without the application, and close the connection."""
        body = f'{{"error": "{reason}"}}'
        again = "retry-after: 1\r\n" * retry
        self.transport.write(
            f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n{again}connection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )
        self.transport.close()
