"""Prometheus metrics of a service."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
OTHER = "other"  # the route of requests to unknown paths


class Metrics:
    """Counts of requests by route, method and status, their durations, and the sizes of batches.

    Labels are routes such as /sets/{id}, never the contents of a request, so that their number is bounded.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ("route", "method", "status")
        self._requests = Counter("bruno_requests", "Requests.", labels, registry=self._registry)
        self._seconds = Histogram(
            "bruno_request_seconds",
            "Duration of requests.",
            ("route",),
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._batches = Histogram(
            "bruno_batch_elements",
            "Number of elements in a batch.",
            ("model",),
            registry=self._registry,
            buckets=_SIZES,
        )
        self._active = Gauge("bruno_requests_in_progress", "Requests in progress.", registry=self._registry)
        self._children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}
        self._waiting = Gauge(
            "bruno_requests_waiting", "Requests that wait for a model.", ("model",), registry=self._registry
        )

    def request(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request."""
        known = self._children.get((route, method, status))
        if known is None:  # the cache is bounded, as the number of labels is
            known = self._requests.labels(route, method, str(status)), self._seconds.labels(route)
            self._children[route, method, status] = known
        counter, histogram = known
        counter.inc()
        histogram.observe(seconds)

    def watch_active(self, count: Callable[[], int]) -> None:
        """Report the number of requests in progress, as this function returns it."""
        self._active.set_function(count)

    def watch_waiting(self, model: str, count: Callable[[], int]) -> None:
        """Report the number of requests that wait for a model, as this function returns it."""
        self._waiting.labels(model).set_function(count)

    def batches(self, model: str) -> Callable[[int], None]:
        """A function to call with the size of each batch of a model."""
        observe: Callable[[int], None] = self._batches.labels(model).observe
        return observe

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
