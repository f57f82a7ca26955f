"""Batching of requests to a model: one thread takes all waiting requests and computes them together."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bruno.serving.settings import busy
from bruno.serving.steps import Job, Outcome


@dataclass(eq=False)
class _Request:
    job: Job
    elements: int
    answer: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    is_given_up: bool = field(default=False)


class Batcher:
    """Runs jobs in one thread; jobs that wait at the same time form a batch.

    While a batch is computed, the next one collects. Requests that the event loop reads in one iteration are
    handed over together; a request never waits for others that may arrive later. With `batch` 1, every job
    runs alone.

    Args:
        run: runs jobs to completion; called in the thread.
        batch: number of elements of a batch; the first job of a batch may have more.
        seconds: time that a job may take, waiting included.
        observe: called with the number of elements of each batch.
    """

    def __init__(
        self,
        run: Callable[[list[Job]], list[Outcome]],
        *,
        batch: int,
        seconds: float,
        observe: Callable[[int], None] = lambda elements: None,
    ) -> None:
        self._run, self._batch, self._seconds, self._observe = run, batch, seconds, observe
        self._arrived: list[_Request] = []  # in this iteration of the event loop
        self._waiting: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="bruno-serving", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for their turn."""
        return len(self._arrived) + len(self._waiting)

    async def __call__(self, job: Job, elements: int = 1) -> Any:
        """The answer of a job with this number of elements; raises its error, or 503 if it takes too long."""
        loop = asyncio.get_running_loop()
        request = _Request(job, elements, loop.create_future(), loop)
        with self._changed:
            if self._is_closed:
                raise busy("the service is stopping.")
            self._arrived.append(request)
            if len(self._arrived) == 1:
                loop.call_soon(self._hand_over)
        timer = loop.call_later(self._seconds, self._give_up, request)
        try:
            return await request.answer
        finally:
            timer.cancel()

    def _hand_over(self) -> None:
        """Let the thread see the requests that have arrived."""
        with self._changed:
            self._waiting += self._arrived
            self._arrived = []
            self._changed.notify()

    def _give_up(self, request: _Request) -> None:
        request.is_given_up = True
        if not request.answer.done():
            request.answer.set_exception(busy(f"no answer within {self._seconds:g} seconds."))

    def close(self) -> None:
        """Run all jobs that wait, and end the thread."""
        with self._changed:
            self._is_closed = True
        self._hand_over()
        self._thread.join()

    def _work(self) -> None:
        while requests := self._next():
            outcomes = self._outcomes(requests)
            for loop in {request.loop for request in requests}:
                some = [(r, o) for r, o in zip(requests, outcomes, strict=True) if r.loop is loop]
                try:
                    loop.call_soon_threadsafe(_deliver, some)
                except RuntimeError:  # the loop is closed, so nobody waits for the answers
                    continue

    def _outcomes(self, requests: list[_Request]) -> list[Outcome]:
        self._observe(sum(request.elements for request in requests))
        try:
            return self._run([request.job for request in requests])
        except Exception as error:  # from the store; then no job of the batch has changed anything
            return [Outcome(error=error)] * len(requests)

    def _next(self) -> list[_Request]:
        """Wait for the requests of the next batch; empty if the batcher is closed."""
        with self._changed:
            while True:
                while not self._waiting and not self._is_closed:
                    self._changed.wait()
                taken: list[_Request] = []
                elements = 0
                while self._waiting and (not taken or elements + self._waiting[0].elements <= self._batch):
                    request = self._waiting.popleft()
                    if not request.is_given_up:
                        taken.append(request)
                        elements += request.elements
                if taken or self._is_closed:
                    return taken


def _deliver(some: list[tuple[_Request, Outcome]]) -> None:
    """Set the answers of requests that someone still waits for; runs in their event loop."""
    for request, outcome in some:
        if request.answer.done():
            continue
        if outcome.error is not None:
            request.answer.set_exception(outcome.error)
        else:
            request.answer.set_result(outcome.answer)
