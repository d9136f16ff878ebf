"""A worker that is told what to do over a real server, and a router that hears what came of it."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from unittest.mock import call, create_autospec

import pytest

from disagg.errors import CapacityError, PeerLostError, RequestError, VersionError
from disagg.protos.v1 import worker_pb2 as pb
from disagg.transfer.control import (
    WORKER_SERVICE,
    WorkerClient,
    WorkerHandler,
    worker_handler,
)
from disagg.transfer.messages import (
    CONTROL_VERSION,
    Grant,
    Job,
    Load,
    Role,
    StepEvents,
    Submit,
    TokenEvent,
    Work,
    WorkerInfo,
    WorkerStatus,
    spoken,
)
from disagg.transfer.rpc import Link, connect, failures_of, start_server

SAMPLING = {"temperature": 0.5, "stop": [1]}
JOB = Job(
    "r",
    2,
    (1, 2, 300_000),
    (4,),
    SAMPLING,
    "kivi:bits=2",
    deadline_s=3.5,
    moved=9,
    prediction=(7, 8),
    senders=4,
)
FOLLOWERS = ("127.0.0.1:2", "[::1]:3")
SUBMIT = Submit(JOB, Work.PREFILL, 9, "127.0.0.1:1", 7, 2**64 - 1, "me", FOLLOWERS)
GRANT = Grant(2**64 - 1, 7, FOLLOWERS)
STEPS = [
    StepEvents(
        (TokenEvent("r", 2, 0, 17), TokenEvent("s", 0, 5, 0)),
        Load(1 << 40, 3, 1, Role.NONE, step=9, stalled_s=0.5),
    ),
    StepEvents((TokenEvent("r", 2, 1, 18, "length", stats={"wire_bytes": 3}),)),
    StepEvents((TokenEvent("s", 0, 6, error=CapacityError("no room")),)),
]
SPEAKS = spoken("a model", [("kivi", "a plan")])
STATUS = WorkerStatus(9, {"running": 2.0}, {"role": "decode"}, SPEAKS)


class Worker:
    """A worker that is told what a mock notes; `steps` are its events."""

    def __init__(self) -> None:
        self.told = create_autospec(WorkerHandler, instance=True)
        self.told.reserve.return_value = GRANT
        self.told.status.return_value = STATUS
        self.told.submit.return_value = None
        self.told.acknowledge.return_value = None
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
        await client.acknowledge({"r": 3}, "me")
        await client.abort("r", 2, "client gone")
        await client.fence(10, "me")
        assert await client.status() == STATUS
        assert worker.told.mock_calls == [
            call.reserve(job=JOB, epoch=9, router="me"),
            call.submit(submit=SUBMIT),
            call.acknowledge(have={"r": 3}, router="me"),
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


async def test_events_of_a_worker_that_goes_away_end_with_a_lost_peer():
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


async def _call_as(version: int, method: str, link: Link) -> None:
    """What a router of another release would send."""
    kind = pb.EventsRequest if method == "Events" else pb.StatusRequest
    message = kind(version=version).SerializeToString()
    path = f"/{WORKER_SERVICE}/{method}"
    if method == "Status":
        await link.call(path, message, 30.0)
        return
    with failures_of(link.address):
        async for _ in link.channel.unary_stream(path)(message):
            pass


@pytest.mark.parametrize("method", ["Events", "Status"])
@pytest.mark.parametrize(
    "version", [0, CONTROL_VERSION + 1], ids=["older than versions", "newer"]
)
async def test_a_router_of_another_version_is_refused(method, version):
    server, address = await start_server([worker_handler(Worker().told)], "127.0.0.1")
    link = connect(address)
    try:
        with pytest.raises(VersionError, match=f"version {version} .* this side 1"):
            await _call_as(version, method, link)
    finally:
        await link.close()
        await server.stop(None)


@pytest.mark.parametrize(
    "speaks", [(), ("wire 4",), ("control 2",)], ids=["nothing", "no version", "newer"]
)
async def test_a_worker_of_another_version_is_refused(speaks):
    async with open_worker() as (worker, client):
        worker.told.status.return_value = replace(STATUS, speaks=speaks)

        with pytest.raises(VersionError, match=r"of disagg\.v1\.WorkerService"):
            await client.status()


def test_workers_of_one_release_and_model_speak_the_same():
    assert spoken("m", [("kivi", "1")]) == spoken("m", [("kivi", "1")])


@pytest.mark.parametrize(
    ("model", "plans"),
    [("n", [("kivi", "1")]), ("m", [("kivi", "2")]), ("m", [("int8", "1")])],
    ids=["model", "layout", "codec"],
)
def test_workers_that_differ_speak_differently(model, plans):
    assert spoken("m", [("kivi", "1")]) != spoken(model, plans)


def test_a_worker_older_than_versions_speaks_nothing():
    """Its WorkerInfo is a pickle without the field."""
    info = WorkerInfo("d", Role.DECODE, "d:1", 1, speaks=spoken("m", []))
    del info.__dict__["speaks"]

    assert pickle.loads(pickle.dumps(info)).speaks == ()
