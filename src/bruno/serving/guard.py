"""Checks of every request before the service handles it: host, origin, token, size and number."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bruno.serving.metrics import OTHER, Metrics
from bruno.serving.settings import MIB, Limits, RequestError, busy

LOCAL = ("127.0.0.1", "localhost", "[::1]")
BODY = "bruno.body"  # the key of the whole body in the scope of a request
_DISCARDED, _DISCARDED_SECONDS = 64 * MIB, 5.0  # limits of a body that is received only to be discarded
_METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"}
_BODIES = {"application/json", "image/png"}
_ALWAYS = {"/health", "/metrics"}  # answered even by a busy service
_SAFE_HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class _Headers(NamedTuple):
    """The headers that are checked, each at most once in a request."""

    host: str = ""
    authorization: str = ""
    origin: str = ""
    sec_fetch_site: str = ""
    content_type: str = ""
    content_length: str = ""


_CHECKED_HEADERS = {name.replace("_", "-").encode(): name for name in _Headers._fields}


def check_hosts(hosts: Iterable[str]) -> None:
    """Raise ValueError unless all of these can be the name of a host."""
    for host in hosts:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]+\]", host):
            raise ValueError(f"`hosts` must be names or addresses, without a port; got {host!r}.")


class Guard:
    """An ASGI application that refuses requests, or passes them on with their whole body, `scope[BODY]`.

    Args:
        app: the application behind it.
        limits: limits on bodies, requests in progress and time.
        metrics: counts all requests.
        hosts: names that the Host header may have, besides those of this machine.
        token: the bearer token that requests must have; None for none.
        public: paths that need no token.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        metrics: Metrics,
        *,
        hosts: Iterable[str] = (),
        token: str | None = None,
        public: Iterable[str] = (),
    ) -> None:
        self._app, self._limits, self._metrics = app, limits, metrics
        self._hosts = {name.lower() for name in (*LOCAL, *hosts)}
        self._token = None if token is None else f"Bearer {token}".encode()
        self._public = {"/health", *public}
        self._active, self._bytes = 0, 0
        metrics.watch_active(lambda: self._active)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._measured(scope, receive, send)
        else:  # WebSockets are not supported
            await send({"type": "websocket.close", "code": 1008})

    async def _measured(self, scope: Scope, receive: Receive, send: Send) -> None:
        start, status = time.perf_counter(), 500
        body = _Body(receive)

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] += _SAFE_HEADERS
            await send(message)

        try:
            await self._checked(scope, body.receive, noted)
        except RequestError as error:
            await _refuse(error, noted, body)
        finally:
            route = getattr(scope.get("route"), "path", OTHER)
            method = scope["method"] if scope["method"] in _METHODS else OTHER
            self._metrics.request(route, method, status, time.perf_counter() - start)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = _headers_of(scope)
        self._check_host(headers.host)
        self._check_origin(scope["method"], headers)
        self._check_token(scope["path"], headers.authorization)
        length = self._check_body(scope["method"], headers)
        if scope["path"] in _ALWAYS:
            await self._app(scope, receive, send)
            return
        if self._active >= self._limits.waiting:
            raise busy(f"the service is busy with {self._active} requests.")
        self._active += 1
        taken = _Taken(self)
        try:
            taken.add(length or 0)
            scope[BODY] = await self._body(receive, taken, length)
            await self._app(scope, receive, send)
        finally:
            self._active -= 1
            taken.give_back()

    # --- who and from where ------------------------------------------------------------------------------

    def _check_host(self, host: str) -> None:
        """Raise unless the Host header names this service, as a web page could point its own name to it."""
        name = host.rsplit(":", 1)[0] if host.rpartition(":")[2].isdigit() else host
        if name.lower() not in self._hosts:
            raise RequestError(
                421,
                f"`Host` must be one of {', '.join(sorted(self._hosts))}; got {host[:100]!r}. Start the "
                "service with this name (--allow-host).",
            )

    def _check_origin(self, method: str, headers: _Headers) -> None:
        """Raise if a web page of another origin sends the request; following a link is allowed."""
        is_foreign = headers.sec_fetch_site in ("cross-site", "same-site") and method not in ("GET", "HEAD")
        own = (f"{scheme}://{headers.host}".lower() for scheme in ("http", "https"))
        if is_foreign or (headers.origin and headers.origin.lower() not in own):
            raise RequestError(403, "requests from web pages of other origins are refused.")

    def _check_token(self, path: str, authorization: str) -> None:
        if self._token is None or path in self._public:
            return
        if not hmac.compare_digest(authorization.encode(errors="surrogateescape"), self._token):
            raise RequestError(401, "`Authorization` must be the bearer token of this service.")

    # --- how much ----------------------------------------------------------------------------------------

    def _check_body(self, method: str, headers: _Headers) -> int | None:
        """The declared length of the body; raises if it is too large or of another type."""
        if (method in ("POST", "PUT") or headers.content_type) and headers.content_type.split(";")[
            0
        ].strip().lower() not in _BODIES:
            raise RequestError(
                415, f"`Content-Type` must be {' or '.join(sorted(_BODIES))}; got {headers.content_type!r}."
            )
        if not headers.content_length:
            return None
        if not headers.content_length.isascii() or not headers.content_length.isdigit():
            raise RequestError(400, f"`Content-Length` must be a number; got {headers.content_length!r}.")
        length = int(headers.content_length[:20])
        if length > self._limits.body:
            raise self._too_large(length)
        return length

    def _too_large(self, length: int) -> RequestError:
        return RequestError(
            413, f"the body must be at most {self._limits.body} bytes; got {length}. Send it in parts."
        )

    async def _body(self, receive: Receive, taken: _Taken, length: int | None) -> bytes:
        """The whole body; raises 413 if it is too long. The server limits the time that it takes."""
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError(400, "the body must be complete; the connection was closed.")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._limits.body:
                raise self._too_large(size)
            if length is None:  # a declared length is counted already
                taken.add(len(parts[-1]))
            if not message.get("more_body", False):
                return b"".join(parts)

    def take(self, amount: int) -> None:
        """Use memory for a body, or raise 503."""
        if self._bytes + amount > self._limits.memory:
            raise busy(f"requests in progress have {self._bytes} bytes.")
        self._bytes += amount

    def give_back(self, amount: int) -> None:
        """Release memory that `take` counted."""
        self._bytes -= amount


class _Taken:
    """The memory that one request has taken."""

    def __init__(self, guard: Guard) -> None:
        self._guard, self._amount = guard, 0

    def add(self, amount: int) -> None:
        self._guard.take(amount)
        self._amount += amount

    def give_back(self) -> None:
        self._guard.give_back(self._amount)
        self._amount = 0


def _headers_of(scope: Scope) -> _Headers:
    """The headers that are checked; raises 400 if one is repeated."""
    found: dict[str, Any] = {}
    for raw, value in scope["headers"]:
        name = _CHECKED_HEADERS.get(raw)
        if name is not None:
            if name in found:
                raise RequestError(400, f"`{raw.decode()}` must be given once; got it again.")
            found[name] = value.decode("latin-1")
    return _Headers(**found)


class _Body:
    """The body of a request, as it arrives."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._has_ended = receive, False

    async def receive(self) -> Message:
        """The next part."""
        message = await self._receive()
        self._has_ended = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Receive the rest, as much as the limits allow, and forget it."""
        size = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_DISCARDED_SECONDS):
                while not self._has_ended and size < _DISCARDED:
                    size += len((await self.receive()).get("body", b""))


async def _refuse(error: RequestError, send: Send, rest: _Body) -> None:
    """Answer with an error, and close the connection once the rest of the body has arrived.

    Many clients read no answer before they have sent the whole body, and lose it if the connection is closed.
    """
    body, headers = refusal(error)
    headers["connection"] = "close"
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    await rest.discard()
    await send({"type": "http.response.body", "body": b""})


def refusal(error: RequestError) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of an answer with an error."""
    body = json.dumps({"error": error.reason}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return body, headers
