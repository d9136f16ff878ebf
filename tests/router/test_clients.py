"""Clients of one service: room in the queue for each, and turns when requests are placed."""

import asyncio

import pytest

from disagg.errors import CapacityError, QueueFullError
from disagg.protos.v1 import router_pb2 as pb
from disagg.router.actions import Reserve
from disagg.router.client import RouterClient
from disagg.router.contract import Submission
from disagg.router.door_service import ROUTER_SERVICE
from disagg.router.request_state import Phase
from disagg.router.router import Router
from disagg.transfer.messages import Load
from disagg.transfer.rpc import connect
from tests.router.fakes import SECRET, door_at, serving
from tests.router.rules import Rules
from tests.router.test_placement import TOKEN_BYTES, crowded
from tests.router.test_requests import ROOM, house, job, only, room
from tests.transfer.peer import until
from tests.worker.pairs import collect, leave

PROMPT = (3, 1, 4)
TWENTY = {"max_tokens": 20}
FULL = Load(100, slots=0)
NO_SLOT = Load(20_000 * TOKEN_BYTES, slots=0)
ONE_SLOT = Load(20_000 * TOKEN_BYTES, slots=1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "router"


# -- names of clients


async def test_the_name_of_a_client_reaches_the_router(path):
    async with serving(path) as process, door_at(path) as client:
        process.worker.go.clear()
        outputs = client.generate(PROMPT, TWENTY, "raw", client="a name")
        asking = asyncio.create_task(collect(outputs))
        await until(lambda: process.router.running == 1)

        (request,) = process.router.table.requests.values()

        assert request.client == "a name"
        asking.cancel()


async def test_a_door_that_names_no_client_is_served(path):
    async with serving(path) as process:
        link = connect(f"unix:{path}", SECRET)
        method = link.channel.stream_stream(f"/{ROUTER_SERVICE}/Generate")
        stream = method(metadata=link.metadata)
        process.worker.go.clear()
        begin = pb.Begin(handle=1, prompt=PROMPT, sampling='{"max_tokens": 2}')
        await stream.write(pb.GenerateRequest(begins=[begin]).SerializeToString())

        await until(lambda: process.router.running == 1)

        (request,) = process.router.table.requests.values()
        assert request.client == ""
        await link.close()


# -- room in the queue, and turns


def test_a_flood_of_one_client_leaves_places_to_others():
    """Eight requests with 128 answers each fill the queue; another client gets half of it."""
    router = Router()

    def begin(client: str) -> None:
        submission = Submission(PROMPT, TWENTY, "raw", client=client)
        router.submit(submission, lambda output: None)

    async def scene() -> tuple[int, int]:
        for _ in range(8 * 128):
            begin("a")
        with pytest.raises(QueueFullError, match="1024 requests wait, 1024 may"):
            begin("a")
        for _ in range(512):
            begin("b")
        with pytest.raises(QueueFullError, match="1536 requests wait"):
            begin("b")
        waiting = router.table.waiting
        await router.close()
        return waiting["a"], waiting["b"]

    assert asyncio.run(scene()) == (1024, 512)


def begin_one(table: Rules, now: float, worker: str = "d") -> str:
    """The decode worker has room for one: who asks first gets it, and ends."""
    asked = [x.rid for x in only(Reserve, table.tick(now))]
    room(table, asked[0])
    for rid in asked[1:]:
        attempt = table.requests[rid].job.attempt
        table.refused(worker, rid, attempt, CapacityError("full"), now)
    table.cancel(asked[0], now)
    return asked[0]


def test_room_for_one_goes_to_clients_in_turn():
    table = house("p", "d")
    table.update_load("d", FULL, 0.0)
    for number in range(4):
        table.submit(job(f"a{number}"), 0.0, client="a")
    table.submit(job("b0"), 1.0, client="b")
    table.submit(job("b1"), 1.0, client="b")
    table.table.update_load("d", ROOM)

    begun = [begin_one(table, float(second)) for second in range(2, 8)]

    assert begun == ["a0", "b0", "a1", "b1", "a2", "a3"]


@pytest.mark.parametrize("end", ["cancelled", "late"])
def test_who_asked_for_room_and_left_costs_no_turn(end):
    """The decode worker does not answer until all requests of a client are over."""
    table = house("p", "d")
    for number in range(9):
        table.submit(job(f"a{number}"), 0.0, client="a")
    assert {each.phase for each in table.requests.values()} == {Phase.RESERVE}
    for rid in list(table.requests) if end == "cancelled" else ():
        table.cancel(rid, 1.0)
    table.tick(101.0)
    assert not table.requests
    table.update_load("d", FULL, 101.0)
    table.submit(job("a"), 101.0, client="a")
    for number in range(9):
        table.submit(job(f"b{number}"), 101.0, client="b")
    table.table.update_load("d", ROOM)

    begun = [begin_one(table, 102.0 + second) for second in range(2)]

    assert "a" in begun


def test_prompts_without_room_do_not_delay_a_short_one_of_their_client():
    """While another client has a new short prompt whenever there is room for one."""
    table = crowded(1)
    table.update_load("d0", NO_SLOT, 0.0)
    for number in range(4):
        table.submit(job(f"long{number}", 30_000), 0.0, client="a")
    table.submit(job("short", 200), 90.0, client="a")
    begun = []

    for number in range(3):
        table.submit(job(f"b{number}", 200), 90.0, client="b")
        table.table.update_load("d0", ONE_SLOT)
        begun.append(begin_one(table, 90.0, "d0"))
        table.update_load("d0", NO_SLOT, 90.0)

    assert "short" in begun


def test_a_prompt_that_waited_has_its_room_at_any_turn():
    """Another client, whose turn it is, gets none of the room that a worker was kept for."""
    table = crowded(1, tokens_left=100)
    table.submit(job("large", 30_000), 0.0, client="a")
    table.submit(job("small", 200, length=4), 0.0, client="a")
    room(table, "small")
    table.tick(40.0)
    table.submit(job("other", 200, length=3000), 40.0, client="b")

    table.cancel("small", 41.0)
    table.finished("d0", "running0", 1, 2, "stop", 41.0)

    assert table.requests["large"].phase is Phase.RESERVE


async def test_without_a_router_each_client_has_its_share(path):
    """A door counts by itself while it has no router."""
    async with door_at(path, max_queue=4) as client:
        asking = [begin(client, "a") for _ in range(4)]
        await until(lambda: client.running == 4)
        asking += [begin(client, "b") for _ in range(2)]
        await until(lambda: client.running == 6)

        with pytest.raises(QueueFullError, match="6 requests wait for a router"):
            await begin(client, "b")
        with pytest.raises(QueueFullError):
            await begin(client, "a")

        for each in asking:
            await leave(each)


def begin(client: RouterClient, name: str) -> "asyncio.Task[object]":
    outputs = client.generate(PROMPT, TWENTY, "raw", client=name)
    return asyncio.create_task(collect(outputs))
