"""Requests that wait at the same time are computed together, and none changes the answer of another."""

import asyncio
import threading

import numpy as np
import pytest
import torch
from serving.service import rows
from streams.keyed import trained

from bruno.serving.batching import Batcher
from bruno.serving.jobs import ServedModel
from bruno.serving.settings import RequestError
from bruno.serving.steps import Encode, Outcome, run_together


@pytest.fixture
def served():
    model = ServedModel(trained(), ":memory:", batch=64)
    yield model
    model.sets.close()


def x(count: int, seed: int) -> torch.Tensor:
    return torch.tensor(rows(count, seed), dtype=torch.double)


def test_answers_are_the_same_alone_and_in_a_batch_bit_for_bit(served):
    served.run([served.add("a", x(5, 1), "key", b"")])

    def jobs():
        return [served.score(x(n, n), given) for n in range(1, 9) for given in ("a", None, x(3, 2))]

    together = served.run(jobs())
    alone = [served.run([job])[0] for job in jobs()]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one.answer.scores, other.answer.scores)
        np.testing.assert_array_equal(one.answer.log_probs, other.answer.log_probs)


def test_a_batch_is_one_encoding_and_one_density(served, monkeypatch):
    calls = []
    compute = served._computer.compute
    monkeypatch.setattr(served._computer, "compute", lambda steps: calls.append(len(steps)) or compute(steps))
    served.run([served.score(x(2, i), None) for i in range(10)])
    assert calls == [10, 10, 0]


def test_an_error_of_one_job_leaves_the_others(served):
    def wrong():
        yield Encode(torch.zeros(1, 3))  # rows of another width

    outcomes = served.run([served.score(x(2, 1), None), wrong(), served.score(x(2, 1), "nothing")])
    assert outcomes[0].error is None
    assert isinstance(outcomes[1].error, Exception)
    assert isinstance(outcomes[2].error, RequestError)
    assert outcomes[2].error.status == 404


def test_each_change_of_a_batch_counts_exactly_once(served):
    outcomes = served.run([served.add("a", x(1, i), f"key {i // 2}", b"%d" % (i // 2)) for i in range(20)])
    counts = [outcome.answer["count"] for outcome in outcomes]
    assert counts == [i // 2 + 1 for i in range(20)]


def test_jobs_run_to_their_ends_in_any_number_of_steps():
    def job(steps):
        total = 0
        for _ in range(steps):
            total += yield Encode(torch.zeros(steps, 1))
        return total

    assert run_together([job(n) for n in (3, 0, 5)], lambda steps: [2 * len(one.x) for one in steps]) == [
        Outcome(18),
        Outcome(0),
        Outcome(50),
    ]


# --- the queue -------------------------------------------------------------------------------------------


class Held:
    """A function that runs jobs once it may, and notes the batches."""

    def __init__(self) -> None:
        self.batches, self.may_run, self.is_running = [], threading.Event(), threading.Event()

    def __call__(self, jobs):
        self.is_running.set()
        self.may_run.wait(60)
        self.batches.append(len(jobs))
        return run_together(jobs, lambda steps: [])


def job_of(answer):
    return answer
    yield


async def all_of(batcher, held, answers, elements=1):
    """Give the first job to the batcher, and all others while it runs."""
    first = asyncio.ensure_future(batcher(job_of(answers[0]), elements))
    await asyncio.to_thread(held.is_running.wait, 60)
    others = [asyncio.ensure_future(batcher(job_of(answer), elements)) for answer in answers[1:]]
    await asyncio.sleep(0)
    held.may_run.set()
    return await asyncio.gather(first, *others)


@pytest.mark.parametrize(("batch", "expected"), [(64, [1, 9]), (4, [1, 4, 4, 1]), (1, [1] * 10)])
def test_jobs_that_wait_are_one_batch_of_limited_size(batch, expected):
    held = Held()
    batcher = Batcher(held, batch=batch, seconds=60)
    assert asyncio.run(all_of(batcher, held, list(range(10)))) == list(range(10))
    batcher.close()
    assert held.batches == expected


def test_a_job_that_is_larger_than_a_batch_runs_alone():
    held = Held()
    batcher = Batcher(held, batch=4, seconds=60)
    assert asyncio.run(all_of(batcher, held, [1, 2], elements=100)) == [1, 2]
    batcher.close()
    assert held.batches == [1, 1]


def test_a_job_that_waits_too_long_is_given_up_and_never_runs(monkeypatch):
    held = Held()
    batcher = Batcher(held, batch=1, seconds=3600)

    async def ask():
        timers, loop = [], asyncio.get_running_loop()
        monkeypatch.setattr(
            loop, "call_later", lambda _, *call: timers.append(call) or loop.call_soon(lambda: 0)
        )
        jobs = [asyncio.ensure_future(batcher(job_of(answer))) for answer in (1, 2)]
        await asyncio.to_thread(held.is_running.wait, 60)
        for function, request in timers:  # an hour later
            function(request)
        return await asyncio.gather(*jobs, return_exceptions=True)

    found = asyncio.run(ask())
    assert [(one.status, one.retry_after) for one in found] == [(503, 1)] * 2
    held.may_run.set()
    batcher.close()
    assert held.batches == [1]  # that of the first, which had begun


def test_closing_finishes_the_jobs_that_wait():
    held = Held()
    batcher = Batcher(held, batch=1, seconds=60)

    async def ask():
        answers = [asyncio.ensure_future(batcher(job_of(i))) for i in range(5)]
        await asyncio.to_thread(held.is_running.wait, 60)
        held.may_run.set()
        await asyncio.to_thread(batcher.close)
        with pytest.raises(RequestError, match="stopping"):
            await batcher(job_of(6))
        return await asyncio.gather(*answers)

    assert asyncio.run(ask()) == list(range(5))
