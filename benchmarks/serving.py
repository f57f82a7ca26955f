"""Throughput and latency of the service with requests batched together, and with every request alone.

32 clients send a request, wait for the answer and send the next. Both services run at the same time and are
measured in turn, a part each, so that both meet the same load of the machine. Run with `make bench`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import multiprocessing
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import uvloop
from PIL import Image
from rich.console import Console
from rich.table import Table
from streams import COLUMNS, rows_of, trained_in

from bruno.data.synthetic import draw_characters
from bruno.provenance import provenance
from bruno.serving import serve

RESULTS = Path(__file__).parents[1] / "results"
CLIENTS = 32
IMAGES = "omniglot-small"


# --- the services ----------------------------------------------------------------------------------------


def _serve(models: list[str], store: str, batching: bool, address: Any) -> None:
    warnings.simplefilter("ignore")
    serve(models, port=0, store=store, batching=batching, device="cpu", ready=address.send)


class Service(NamedTuple):
    """A service in a process of its own."""

    port: int
    process: int

    @property
    def cpu_seconds(self) -> float:
        """Processor time so far."""
        fields = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def service(models: list[str], folder: Path, batching: bool) -> Iterator[Service]:
    """A service that runs while the body does."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    folder.mkdir()
    process = context.Process(target=_serve, args=(models, str(folder), batching, theirs))
    process.start()
    try:
        yield Service(int(ours.recv().rstrip("/").rsplit(":", 1)[1]), process.pid or 0)
    finally:
        process.terminate()
        process.join()


# --- the clients -----------------------------------------------------------------------------------------


def request(
    method: str, path: str, body: bytes, kind: str = "application/json", key: str | None = None
) -> bytes:
    """A request as bytes."""
    once = f"Idempotency-Key: {key}\r\n" if key else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n{once}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Client(asyncio.Protocol):
    """Sends requests one after the other, and notes the time of each answer."""

    def __init__(self, requests: Iterator[bytes], seconds: list[float]) -> None:
        self._requests, self._seconds = requests, seconds
        self._received, self._start = b"", 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        """Send the first request."""
        self._transport = transport
        self._send()

    def _send(self) -> None:
        content = next(self._requests, None)
        if content is None:
            self._transport.close()
            self.ended.set_result(None)
            return
        self._start = time.perf_counter()
        self._transport.write(content)

    def data_received(self, data: bytes) -> None:
        """Send the next request once the answer is complete."""
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end or len(body) < int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0]):
            return
        self._seconds.append(time.perf_counter() - self._start)
        if not head.startswith(b"HTTP/1.1 200"):
            self.ended.set_exception(RuntimeError(body.decode()))
            return
        self._received = b""
        self._send()


async def load(port: int, requests: list[bytes], clients: int = CLIENTS) -> tuple[float, list[float]]:
    """Seconds that some clients take for all requests, and the time of each answer."""
    shared, seconds, loop = iter(requests), list[float](), asyncio.get_running_loop()
    start = time.perf_counter()
    made = [
        await loop.create_connection(lambda: Client(shared, seconds), "127.0.0.1", port)
        for _ in range(clients)
    ]
    await asyncio.gather(*(client.ended for _, client in made))
    return time.perf_counter() - start, seconds


# --- the work --------------------------------------------------------------------------------------------


def pngs(count: int) -> list[bytes]:
    """Drawings of characters, dark on bright, as a user has them."""
    drawn = draw_characters(-(-count // 20), 20, size=56, seed=7).elements[:count, 0]
    return [_png(255 - image.numpy().astype(np.uint8)) for image in drawn]


def _png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def body_of(rows: Any) -> bytes:
    return json.dumps({"elements": rows.tolist()}).encode()


class Work:
    """Requests of one kind, different in each part."""

    def __init__(self, count: int) -> None:
        self.count, self._part = count, 0
        self._random = np.random.default_rng(0)
        self._pngs = pngs(64)

    def part(self, kind: str) -> list[bytes]:
        """The requests of a part."""
        self._part += 1
        rows = rows_of(self._random.integers(0, 100, self.count), self._random)
        if kind == "images: score":
            path = f"/score?model={IMAGES}&set=a"
            return [
                request("POST", path, self._pngs[i % len(self._pngs)], "image/png") for i in range(self.count)
            ]
        if kind == "rows: score":
            bodies = [
                json.dumps({"elements": [row], "set": f"m{i % 100}"}).encode()
                for i, row in enumerate(rows.tolist())
            ]
            return [request("POST", "/score?model=table", body) for body in bodies]
        return [
            request(
                "PUT",
                f"/sets/m{i % 100}/elements?model=table",
                body_of(row[None]),
                key=f"{self._part}-{i}",
            )
            for i, row in enumerate(rows)
        ]


def first_sets(port: int) -> None:
    """Sets to score by."""
    rows = rows_of(np.repeat(np.arange(100), 5), np.random.default_rng(1)).reshape(100, 5, COLUMNS)
    puts = [
        request("PUT", f"/sets/m{i}/elements?model=table", body_of(some), key=f"first-{i}")
        for i, some in enumerate(rows)
    ]
    puts += [
        request("PUT", f"/sets/a/elements?model={IMAGES}", png, "image/png", f"first-png-{i}")
        for i, png in enumerate(pngs(5))
    ]
    uvloop.run(load(port, puts, clients=1))


def measured(services: dict[str, Service], kind: str, count: int, parts: int) -> dict[str, Any]:
    """Both services in turn; the ratios are those of the parts."""
    work = Work(count)
    wall, cpu, times = ({name: [] for name in services} for _ in range(3))
    for _ in range(parts + 1):
        for name, one in services.items():
            before = one.cpu_seconds
            seconds, answers = uvloop.run(load(one.port, work.part(kind)))
            wall[name].append(seconds)
            cpu[name].append(one.cpu_seconds - before)
            times[name].append(answers)
    found: dict[str, Any] = {"requests": count * parts}
    for name in services:
        milliseconds = 1e3 * np.concatenate(times[name][1:])  # the first part is not measured
        found[name] = {
            "requests_per_second": count * parts / sum(wall[name][1:]),
            "requests_per_cpu_second": count * parts / sum(cpu[name][1:]),
            "milliseconds": {str(p): float(np.percentile(milliseconds, p)) for p in (50, 90, 99)},
        }
    ratios = [b / a for a, b in zip(wall["batched"][1:], wall["alone"][1:], strict=True)]
    of_cpu = sum(cpu["alone"][1:]) / sum(cpu["batched"][1:])
    return {**found, "ratio": statistics.median(ratios), "ratios": ratios, "ratio_of_cpu": of_cpu}


def report(found: dict[str, Any]) -> None:
    table = Table(
        "", "requests/s", "alone", "ratio", "of CPU time", "p50 ms", "p99 ms", "alone: p50 ms", "p99 ms"
    )
    for kind, one in found.items():
        batched, alone = one["batched"], one["alone"]
        table.add_row(
            kind,
            *(f"{some['requests_per_second']:,.0f}" for some in (batched, alone)),
            f"{one['ratio']:.1f}",
            f"{one['ratio_of_cpu']:.1f}",
            *(f"{some['milliseconds'][p]:.0f}" for some in (batched, alone) for p in ("50", "99")),
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=320, help="requests of a part")
    parser.add_argument("--rows", type=int, default=3200, help="requests of a part")
    parser.add_argument("--parts", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "serving-cpu.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        trained_in(folder)
        models = [IMAGES, f"table={folder / 'run'}"]
        services = {
            name: stack.enter_context(service(models, folder / name, batching))
            for name, batching in (("batched", True), ("alone", False))
        }
        for one in services.values():
            first_sets(one.port)
        counts = {"images: score": options.images, "rows: score": options.rows, "rows: put": options.rows}
        found = {kind: measured(services, kind, count, options.parts) for kind, count in counts.items()}
    report(found)
    settings = {"clients": CLIENTS, "cores": os.cpu_count(), "load": os.getloadavg(), "columns": COLUMNS}
    models_used = {"images": IMAGES, "rows": "preset table, 200 steps"}
    options.out.write_text(
        json.dumps({**settings, "models": models_used, **found, "provenance": provenance()}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
