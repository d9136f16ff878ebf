"""A worker that is told what to do over a real server, and a router that hears what came of it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from unittest.mock import call, create_autospec

import pytest

from disagg.errors import CapacityError, PeerLostError, RequestError
from disagg.protos.v1 import worker_pb2 as pb
from disagg.transfer.control import WorkerClient, WorkerHandler, worker_handler
from disagg.transfer.messages import (
    Grant,
    Job,
    Load,
    Role,
    StepEvents,
    Submit,
    TokenEvent,
    Work,
    WorkerStatus,
)
from disagg.transfer.rpc import connect, start_server

SAMPLING = {"temperature": 0.5, "stop": [1]}
JOB = Job(
    "r", 2, (1, 2, 300_000), (4,), SAMPLING, "kivi:bits=2", deadline_s=3.5, moved=9
)
SUBMIT = Submit(JOB, Work.PREFILL, 9, "127.0.0.1:1", 7, 2**64 - 1, "me")
GRANT = Grant(2**64 - 1, 7)
STEPS = [
    StepEvents(
        (TokenEvent("r", 2, 0, 17), TokenEvent("s", 0, 5, 0)),
        Load(1 << 40, 3, 1, Role.NONE),
    ),
    StepEvents((TokenEvent("r", 2, 1, 18, "length", stats={"wire_bytes": 3}),)),
    StepEvents((TokenEvent("s", 0, 6, error=CapacityError("no room")),)),
]
STATUS = WorkerStatus(9, {"running": 2.0}, {"role": "decode"})


class Worker:
    """A worker that is told what a mock notes; `steps` are its events."""

    def __init__(self) -> None:
        self.told = create_autospec(WorkerHandler, instance=True)
        self.told.reserve.return_value = GRANT
        self.told.status.return_value = STATUS
        self.told.submit.return_value = None
        self.told.abort.return_value = self.told.fence.return_value = None
        self.told.events.side_effect = self.events
        self.steps = STEPS
        self.left = asyncio.Event()

    async def events(
        self, have: Mapping[str, int], router: str
    ) -> AsyncIterator[StepEvents]:
        try:
            for step in self.steps:
                yield step
            await asyncio.Event().wait()
        finally:
            self.left.set()


@asynccontextmanager
async def open_worker() -> AsyncIterator[tuple[Worker, WorkerClient]]:
    worker = Worker()
    server, address = await start_server([worker_handler(worker.told)], "127.0.0.1")
    link = connect(address)
    try:
        yield worker, WorkerClient(link)
    finally:
        await link.close()
        await server.stop(None)


async def test_calls_arrive_as_they_were_made():
    async with open_worker() as (worker, client):
        assert await client.reserve(JOB, 9, "me") == GRANT
        await client.submit(SUBMIT)
        await client.abort("r", 2, "client gone")
        await client.fence(10, "me")
        assert await client.status() == STATUS
        assert worker.told.mock_calls == [
            call.reserve(job=JOB, epoch=9, router="me"),
            call.submit(submit=SUBMIT),
            call.abort(rid="r", attempt=2, reason="client gone"),
            call.fence(epoch=10, router="me"),
            call.status(),
        ]


async def test_events_arrive_step_by_step_until_the_router_leaves():
    async with open_worker() as (worker, client):
        async with aclosing(client.events({"r": 4}, "me")) as events:
            steps = [await anext(events) for _ in STEPS]
        worker.told.events.assert_called_once_with({"r": 4}, "me")
        assert steps[:2] == STEPS[:2]
        (failed,) = steps[2].events
        assert isinstance(failed.error, CapacityError)
        assert (failed.token, str(failed.error)) == (None, "no room")
        async with asyncio.timeout(30.0):
            await worker.left.wait()


async def test_a_router_that_has_much_to_catch_up_with_hears_all_of_it():
    backlog = StepEvents(
        tuple(TokenEvent(x, 0, 0, 1, logprobs=[0.5] * 500_000) for x in "abcd"), Load(7)
    )
    assert len(backlog.to_proto().SerializeToString()) > 8 << 20
    async with (
        open_worker() as (worker, client),
        aclosing(client.events({}, "me")) as events,
    ):
        worker.steps = [backlog]
        heard = [await anext(events) for _ in range(4)]
        assert [event.rid for step in heard for event in step.events] == [*"abcd"]
        assert {step.load for step in heard} == {backlog.load}


async def test_a_worker_that_goes_away_ends_the_events_with_a_lost_peer():
    server, address = await start_server([worker_handler(Worker().told)], "127.0.0.1")
    link = connect(address)
    client = WorkerClient(link)
    events = client.events({}, "me")
    await anext(events)
    await server.stop(None)
    with pytest.raises(PeerLostError):
        _ = [step async for step in events]
    with pytest.raises(PeerLostError):
        await client.status()
    await link.close()


@pytest.mark.parametrize(
    "message",
    [
        pb.SubmitRequest(job=pb.Job(rid="r")),
        pb.SubmitRequest(job=pb.Job(rid="r", sampling="{"), work=pb.WORK_LOCAL),
        pb.SubmitRequest(job=pb.Job(rid="r", sampling="[1]"), work=pb.WORK_LOCAL),
    ],
    ids=["unknown work", "broken JSON", "JSON that is no object"],
)
def test_work_that_makes_no_sense_is_refused(message):
    with pytest.raises(RequestError):
        Submit.from_proto(message)
