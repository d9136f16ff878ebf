"""A request that something breaks for fails alone, and the log says which it was."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from disagg.errors import DisaggError, RequestError
from disagg.protos.v1 import router_pb2 as pb
from disagg.router.actions import FailRequest, Reserve, TokenOutput
from disagg.router.contract import Submission
from disagg.router.requests import RequestTable
from disagg.router.router import Router, WorkerConnection
from disagg.transfer.messages import Role, TokenEvent, WorkerInfo
from tests.router.fakes import FakeWorker, answer_of, door_at, serving
from tests.router.test_requests import house, job, only
from tests.transfer.peer import until
from tests.worker.pairs import collect

PROMPT = (3, 1, 4)
NO_PAIR = ("p",)  # names of workers that no caller may give: placing it breaks
TWENTY = {"max_tokens": 20}


def failed(actions: list[Any]) -> list[tuple[str, type]]:
    return [(x.rid, type(x.error)) for x in only(FailRequest, actions)]


def errors_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


# -- the table


def test_a_request_that_breaks_placing_fails_alone(caplog):
    table = house("p", "d")
    actions = table.submit(job("bad"), 0.0, at=NO_PAIR)

    actions += table.submit(job("good"), 0.0)

    assert failed(actions) == [("bad", DisaggError)]
    assert [x.rid for x in only(Reserve, actions)] == ["good"]
    (record,) = errors_in(caplog)
    assert "bad" in record.message
    assert record.exc_info


def test_it_fails_once_however_often_others_are_placed(caplog):
    table = house("p", "d")
    table.submit(job("bad"), 0.0, at=NO_PAIR)

    for number in range(5):
        table.tick(float(number))

    assert len(errors_in(caplog)) == 1
    assert not table.requests


def test_a_broken_request_beside_placed_ones_fails_alone():
    """Placing counts the requests that workers have already."""
    table = house("p", "d")
    table.submit(job("bad"), 0.0)
    table.requests["bad"].cached_tokens = None

    actions = table.submit(job("good"), 0.0)

    assert failed(actions) == [("bad", DisaggError)]
    assert [x.rid for x in only(Reserve, actions)] == ["good"]


def test_a_broken_start_leaves_nothing_at_its_workers():
    table = house("p", "d")
    bad = job("bad")
    table.submit(replace(bad, codec=7), 0.0)

    table.submit(job("good"), 0.0)

    assert list(table.requests) == ["good"]
    assert table.num_queued == 0


def test_a_broken_deadline_keeps_no_other():
    table = house("p", "d")
    table.submit(job("bad"), 0.0)
    table.submit(job("late"), 0.0)
    table.requests["bad"].deadline = None

    actions = table.tick(1000.0)

    assert {rid for rid, _ in failed(actions)} == {"bad", "late"}


def test_a_dead_worker_frees_all_requests_but_a_broken_one():
    table = house("p", "d", "d2")
    for rid in ("bad", "good"):
        table.submit(job(rid), 0.0)
    table.requests["bad"].deaths = None

    actions = table.worker_down("p", 0.0)

    assert failed(actions) == [("bad", DisaggError)]
    assert table.num_queued == 1


@pytest.mark.parametrize(
    "bad",
    [
        replace(job(), prompt=()),
        replace(job(), sampling={"max_tokens": "four"}),
        replace(job(), waited_s=math.nan),
    ],
    ids=["no prompt", "no number of tokens", "no time"],
)
def test_what_placing_needs_is_checked_on_arrival(bad):
    table = RequestTable()

    with pytest.raises(RequestError):
        table.submit(bad, 0.0)

    assert not table.requests
    assert table.num_queued == 0


# -- the router


@asynccontextmanager
async def routing() -> AsyncIterator[tuple[Router, FakeWorker]]:
    """A router with one worker."""
    router, worker = Router(), FakeWorker()
    info = WorkerInfo("both-0", Role.BOTH, "here:1", 1, step_tokens=1 << 20)
    router.add(WorkerConnection(info, worker))
    try:
        async with asyncio.timeout(30):
            yield router, worker
    finally:
        await router.close()


class BrokenEvents(FakeWorker):
    """Reports figures that are no figures for one request.

    bad: tokens of its prompt
    """

    bad = (9, 9)

    def _token(self, job: Any) -> TokenEvent:
        event = super()._token(job)
        if tuple(job.prompt) == self.bad:
            return replace(event, stats={"tokens": "many"})
        return event


async def test_an_event_that_breaks_fails_its_request(monkeypatch):
    monkeypatch.setattr("tests.router.test_alone.FakeWorker", BrokenEvents)
    async with routing() as (router, _):
        good = asyncio.create_task(collect(router.generate(PROMPT, TWENTY, "raw")))

        with pytest.raises(DisaggError, match="TypeError"):
            await collect(router.generate(BrokenEvents.bad, TWENTY, "raw"))

        tokens, _ = await good
    assert tokens == answer_of(PROMPT, 20)


def breaking_at(token: bool, errors: list[DisaggError]) -> Callable[[Any], None]:
    """Takes no token, or no end; keeps the error that it gets then."""

    def deliver(output: Any) -> None:
        if isinstance(output, DisaggError):
            errors.append(output)
        elif (output.token is not None) == token:
            raise ValueError("it cannot be written")

    return deliver


@pytest.mark.parametrize("token", [True, False], ids=["a token", "the end"])
async def test_an_undeliverable_output_fails_its_request(token):
    errors: list[DisaggError] = []
    async with routing() as (router, worker):
        good = asyncio.create_task(collect(router.generate(PROMPT, TWENTY, "raw")))
        deliver = breaking_at(token, errors)

        rid = router.submit(Submission((1, 2), {"max_tokens": 2}, "raw"), deliver)
        await until(lambda: bool(errors))

        tokens, _ = await good
        await until(lambda: not worker.jobs)
        router.cancel(rid)
    assert tokens == answer_of(PROMPT, 20)
    assert "cannot be written" in str(errors[0])
    assert len(errors) == 1


async def test_a_client_that_takes_nothing_stops_no_other(caplog):
    def refuse(output: Any) -> None:
        raise ValueError("it takes nothing")

    async with routing() as (router, _):
        rid = router.submit(Submission((1, 2), TWENTY, "raw"), refuse)

        tokens, _ = await collect(router.generate(PROMPT, TWENTY, "raw"))

        assert rid not in router.table.requests
        router.cancel(rid)
    assert tokens == answer_of(PROMPT, 20)
    assert len(errors_in(caplog)) == 2  # why it failed, and that it could not be told


async def test_actions_behind_one_that_breaks_are_performed():
    outputs: list[TokenOutput] = []
    errors: list[DisaggError] = []
    router = Router()
    bad, good = (
        router.submit(Submission(PROMPT, TWENTY, "raw"), deliver)
        for deliver in (breaking_at(token=True, errors=errors), outputs.append)
    )

    router._perform([TokenOutput(bad, 7), TokenOutput(good, 8)])

    assert [output.token for output in outputs] == [8]
    assert len(errors) == 1
    assert list(router.table.requests) == [good]
    await router.close()


async def test_requests_end_in_time_though_checks_break(monkeypatch):
    router = Router()
    monkeypatch.setattr(router, "_check_peers", lambda now: 1 / 0)
    rid = router.submit(Submission(PROMPT, TWENTY, "raw"), lambda output: None)
    router.table.requests[rid].deadline = 0.0

    await until(lambda: rid not in router.table.requests)

    await router.close()


# -- doors


@pytest.fixture
def path(tmp_path):
    return tmp_path / "router"


async def test_a_begin_that_breaks_keeps_the_door_attached(path, monkeypatch):
    """Else all its requests would break with it, and again when they are resubmitted."""
    async with serving(path) as process, door_at(path) as client:
        good = asyncio.create_task(collect(client.generate(PROMPT, TWENTY, "raw")))
        await until(lambda: bool(process.worker.jobs))
        monkeypatch.setattr(process.router, "submit", lambda *_: 1 / 0)

        with pytest.raises(DisaggError, match="ZeroDivisionError"):
            await collect(client.generate((1, 2), TWENTY, "raw"))

        tokens, _ = await good
    assert tokens == answer_of(PROMPT, 20)
    assert len(process.worker.submitted) == 1


async def test_an_output_that_cannot_be_read_fails_its_request(path):
    async with serving(path) as process, door_at(path) as client:
        process.worker.go.clear()
        begun = [
            asyncio.create_task(collect(client.generate((1, n), TWENTY, "raw")))
            for n in (1, 2, 3)
        ]
        await until(lambda: process.router.running == 3)
        first, second, third = client._prompts

        response = pb.GenerateResponse(handles=[first, third], tokens=[7, 8])
        response.scores.add(position=0, logprobs="{")
        response.figures.add(handle=second, kv="[")
        client._on_response(response)

        for task, name in zip(begun[:2], ("logprobs", "kv"), strict=True):
            with pytest.raises(RequestError, match=name):
                await task
        await until(lambda: process.router.running == 1)
        begun[2].cancel()
