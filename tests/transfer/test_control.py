"""A worker that is told what to do over a real server, and a router that hears what came of it."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest

from disagg.errors import CapacityError, PeerLostError, RequestError
from disagg.protos.v1 import worker_pb2 as pb
from disagg.transfer.channel import connect, start_server
from disagg.transfer.control import WorkerClient, worker_handler
from disagg.transfer.work import Submit, TokenEvent, Work, WorkerStatus

SUBMIT = Submit(
    rid="r",
    attempt=2,
    work=Work.REPLAY,
    epoch=9,
    prompt=(1, 2, 300_000),
    emitted=(4,),
    codec="kivi:bits=2",
    sampling={"temperature": 0.5, "stop": [1]},
    decode_address="127.0.0.1:1",
    decode_epoch=7,
    deadline_s=3.5,
)
EVENTS = [
    [TokenEvent("r", 2, 0, 17), TokenEvent("s", 0, 5, 0)],
    [TokenEvent("r", 2, 1, 18, "length", stats={"wire_bytes": 3})],
    [TokenEvent("s", 0, 6, error=CapacityError("no room"))],
]
STATUS = WorkerStatus(9, "m", "p", {"running": 2.0}, {"role": "decode"})


class Worker:
    """Writes down what it was told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.left = asyncio.Event()

    async def submit(self, submit: Submit) -> None:
        if submit.epoch != 9:
            raise CapacityError("draining")
        self.told.append(submit)

    async def events(self, have: Mapping[str, int]) -> AsyncIterator[Sequence[TokenEvent]]:
        self.told.append(dict(have))
        try:
            for step in EVENTS:
                yield step
            await asyncio.Event().wait()
        finally:
            self.left.set()

    async def acknowledge(self, have: Mapping[str, int]) -> None:
        self.told.append(("ack", dict(have)))

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        self.told.append((rid, attempt, reason))

    async def fence(self, epoch: int) -> None:
        self.told.append(epoch)

    async def status(self) -> WorkerStatus:
        return STATUS


@asynccontextmanager
async def open_worker() -> AsyncIterator[tuple[Worker, WorkerClient]]:
    worker = Worker()
    server, address = await start_server([worker_handler(worker)], "127.0.0.1")
    link = connect(address)
    try:
        yield worker, WorkerClient(link)
    finally:
        await link.close()
        await server.stop(None)


def test_calls_arrive_as_they_were_made():
    async def scene():
        async with open_worker() as (worker, client):
            await client.submit(SUBMIT)
            await client.acknowledge({"r": 3})
            await client.abort("r", 2, "client gone")
            await client.fence(10)
            assert worker.told == [SUBMIT, ("ack", {"r": 3}), ("r", 2, "client gone"), 10]
            assert await client.status() == STATUS

    asyncio.run(scene())


def test_events_arrive_step_by_step_and_the_worker_learns_when_the_router_leaves():
    async def scene():
        async with open_worker() as (worker, client):
            seen = []
            stream = client.events({"r": 4})
            async for step in stream:
                seen.append(step)
                if len(seen) == len(EVENTS):
                    break
            await stream.aclose()
            assert worker.told == [{"r": 4}]
            assert seen[:2] == EVENTS[:2]
            (failed,) = seen[2]
            assert isinstance(failed.error, CapacityError)
            assert (failed.token, str(failed.error)) == (None, "no room")
            async with asyncio.timeout(30.0):
                await worker.left.wait()

    asyncio.run(scene())


def test_a_refusal_keeps_its_type():
    async def scene():
        async with open_worker() as (_, client):
            with pytest.raises(CapacityError, match="draining"):
                await client.submit(Submit("r", 0, Work.LOCAL, 1, (1,)))

    asyncio.run(scene())


def test_a_worker_that_goes_away_ends_the_events_with_a_lost_peer():
    async def scene():
        server, address = await start_server([worker_handler(Worker())], "127.0.0.1")
        link = connect(address)
        events = WorkerClient(link).events({})
        await anext(events)
        await server.stop(None)
        with pytest.raises(PeerLostError):
            await _last(events)
        with pytest.raises(PeerLostError):
            await WorkerClient(link).status()
        await link.close()

    asyncio.run(scene())


async def _last(events: AsyncIterator) -> object:
    return [step async for step in events][-1]


@pytest.mark.parametrize(
    "message",
    [
        pb.SubmitRequest(rid="r"),
        pb.SubmitRequest(rid="r", work=pb.WORK_LOCAL, sampling="{"),
        pb.SubmitRequest(rid="r", work=pb.WORK_LOCAL, sampling="[1]"),
    ],
    ids=["unknown work", "broken JSON", "JSON that is no object"],
)
def test_work_that_makes_no_sense_is_refused(message):
    with pytest.raises(RequestError):
        Submit.from_message(message)
