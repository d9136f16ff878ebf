"""The router, with workers that it cannot always reach: every token once, whatever happens."""

import asyncio
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from disagg.config import RouterConfig
from disagg.errors import PeerLostError, QueueFullError
from disagg.router.actions import TokenOutput
from disagg.router.router import TICK_S, Router, WorkerConnection
from disagg.transfer.control import WorkerClient
from disagg.transfer.messages import Role, StepEvents
from tests.transfer.peer import until
from tests.worker.pairs import GREEDY, KIVI, House, collect, house, leave, paired


class Line:
    """What a router has of a worker: its calls and its events, when they get through.

    broken: calls fail as if nobody were there · cut: and so does the stream of events
    deaf:   the stream stays open and says nothing
    gate:   a request gets through once this is set
    begun, done: the names of calls, in order
    """

    def __init__(self, client: WorkerClient):
        self._client = client
        self.broken = self.cut = self.deaf = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun: list[str] = []
        self.done: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            self.begun.append(name)
            if self.broken:
                raise PeerLostError("nobody answers")
            if name == "submit":
                await self.gate.wait()
            answer = await getattr(self._client, name)(*arguments)
            self.done.append(name)
            return answer

        return call

    async def events(self, *arguments: Any) -> AsyncGenerator[StepEvents]:
        async with aclosing(self._client.events(*arguments)) as steps:
            async for step in steps:
                while self.deaf:
                    await asyncio.sleep(0.01)
                if self.cut:
                    raise PeerLostError("the stream broke")
                yield step


def lines(home: House) -> list[Line]:
    """To its prefill and to its decode worker; before anything was said to them."""
    for peer in home.router.peers.values():
        peer.client = Line(peer.client)
    return [peer.client for peer in home.router.peers.values()]


def ask(router: Router) -> AsyncGenerator[TokenOutput]:
    return router.generate((1, 2, 3), GREEDY, KIVI)


async def test_a_request_waits_for_workers_that_come_later_and_says_for_how_long(
    runners,
):
    async with house() as home:
        began = time.monotonic()
        asking = asyncio.create_task(anext(outputs := ask(home.router)))
        await until(lambda: home.router.waiting == 1)
        assert not home.router.ready
        assert re.fullmatch(
            r"decode 0 of 1, 1 queued; for \d+ s", home.router.lacks({"decode": 1})
        )
        now = time.monotonic()
        await until(lambda: time.monotonic() > now)
        waited_s = time.monotonic() - now
        home.pair(runners)
        assert waited_s <= (await asking).waited_s <= time.monotonic() - began
        assert home.router.ready
        await outputs.aclose()


async def test_an_abort_does_not_overtake_its_request(home, story):
    prefill, decode = lines(home)
    prefill.gate.clear()
    asking = asyncio.create_task(home.complete(story, KIVI))
    await until(lambda: "submit" in prefill.begun)
    await leave(asking)
    await until(lambda: "abort" in decode.done)
    assert "abort" not in prefill.begun
    prefill.gate.set()
    await until(lambda: "abort" in prefill.done)
    assert prefill.done.index("submit") < prefill.done.index("abort")


async def test_a_broken_event_stream_costs_no_token_and_repeats_none(runners, story):
    async with paired(runners, silence_s=30.0) as home:
        _, decode = lines(home)
        expected, _ = await home.complete(story, KIVI, max_tokens=100)
        asking = await home.begin(story, KIVI, heard=5, max_tokens=100)
        decode.cut = True
        await until(lambda: not home.workers["d"].service.decode.attempts)
        decode.cut = False
        assert (await asking)[0] == expected
        assert home.router.table.retries == home.router.table.unequal_tokens == 0


async def test_a_silent_worker_is_fenced_before_it_works_again(runners, story):
    async with paired(runners, silence_s=1.5) as home:
        _, decode = lines(home)
        expected, _ = await home.complete(story, KIVI, max_tokens=100)
        asking = await home.begin(story, KIVI, heard=5, max_tokens=100)
        decode.deaf = True
        await until(lambda: not home.router.ready)
        lacks = home.router.lacks({"prefill": 1, "decode": 2})
        assert lacks.startswith("prefill 1 of 1, decode 0 of 2")
        decode.deaf = False
        assert (await asking)[0] == expected
        assert decode.done.count("fence") == 1
        assert home.router.peers["d"].info.epoch == home.workers["d"].service.epoch


async def test_a_worker_that_leaves_and_falls_silent_is_not_waited_for(
    runners, story, monkeypatch
):
    """It drops what it hands over, before it is back under its name."""
    async with paired(runners, silence_s=1.5) as home:
        prefill, _ = lines(home)
        expected, _ = await home.complete(story, KIVI)
        engine, go = home.workers["d"].engine, threading.Event()
        step = engine.step
        monkeypatch.setattr(engine, "step", lambda: go.wait(30) and step())
        asking = await home.begin(story, KIVI, heard=1, max_tokens=12)
        home.workers["p"].assume(Role.NONE)
        await until(lambda: home.router.peers["p"].info.role is Role.NONE)
        prefill.deaf = True
        await until(lambda: "fence" in prefill.done)
        prefill.deaf = False
        home.add("p2", Role.PREFILL, runners[2])
        await until(lambda: home.router.table.retries == 1)
        go.set()
        assert (await asking)[0] == expected


async def test_a_loop_that_was_late_is_not_a_silence_of_workers(home, story):
    """The clock jumps by more than a silence at once, as if a long prompt had blocked the loop."""
    jumped = 0.0
    home.router._clock = lambda: time.monotonic() + jumped
    prefill, decode = lines(home)
    asking = await home.begin(story, KIVI)
    for _ in range(5):
        jumped += 8.0
        await asyncio.sleep(2 * TICK_S)
    assert home.router.ready
    await until(lambda: home.router.lacks({}).endswith("for 0 s"))
    assert "fence" not in prefill.begun + decode.begun
    assert home.router.table.retries == 0
    await leave(asking)


async def test_an_abort_that_was_lost_is_repeated_when_the_worker_speaks_again(
    home, story
):
    """Else the worker would keep what it said of the answer for ever."""
    _, decode = lines(home)
    asking = await home.begin(story, KIVI, max_tokens=60)
    decode.broken = True
    await asking
    await until(lambda: bool(home.router.peers["d"].unaborted))
    assert home.workers["d"].service.event_log.num_requests
    decode.broken = False
    await until(lambda: "abort" in decode.done)


async def test_a_worker_follows_one_router_and_the_next_when_that_is_gone(home, story):
    await until(lambda: home.router.ready)
    second = Router(RouterConfig(silence_s=0.3))
    for peer in home.router.peers.values():
        second.add(WorkerConnection(peer.info, peer.client))
    await until(lambda: all("follows" in x.trouble for x in second.peers.values()))
    assert not second.ready
    expected, _ = await home.complete(story, KIVI)
    await home.router.close()
    await until(lambda: second.ready)
    assert (await collect(second.generate(story, GREEDY, KIVI)))[0] == expected
    await second.close()


async def test_a_closing_router_lets_answers_end_and_takes_no_new_ones(home, story):
    asking = await home.begin(story, KIVI, max_tokens=60)
    closing = asyncio.create_task(home.router.close(grace_s=30.0))
    await asyncio.sleep(0)
    with pytest.raises(PeerLostError, match="shutting down"):
        await home.complete(story, KIVI)
    tokens, last = await asking
    assert (len(tokens), last.finish_reason) == (60, "length")
    await closing


@pytest.mark.parametrize("closes", [False, True])
async def test_an_end_waits_for_figures_unless_the_router_closes(
    closes, home, story, monkeypatch
):
    monkeypatch.setattr("disagg.router.router.RECEIPT_S", 1.0 if closes else 30.0)
    prefill, _ = lines(home)
    await until(lambda: home.router.ready)
    prefill.deaf = True
    asking = await home.begin(story, KIVI, heard=12, max_tokens=12)
    if closes:
        await home.router.close()
    prefill.deaf = False
    _, last = await asking
    assert (last.finish_reason, "wire_bytes" in last.kv) == ("length", not closes)


async def test_status_tells_who_answers_and_who_does_not(home):
    _, decode = lines(home)
    decode.broken = True
    status = await home.router.status()
    assert isinstance(status["d"], PeerLostError)
    assert status["p"].epoch == home.workers["p"].service.epoch


async def test_no_more_requests_wait_than_may():
    async with house(max_queue=2) as home:
        waiting = [
            asyncio.ensure_future(anext(ask(home.router))) for _ in range(2)
        ]  # for workers
        await until(lambda: home.router.waiting == 2)
        with pytest.raises(QueueFullError, match="2 requests wait, 2 may"):
            await anext(ask(home.router))
        await leave(waiting.pop())
        waiting.append(asyncio.ensure_future(anext(ask(home.router))))
        await until(lambda: home.router.waiting == 2)
        for asking in waiting:
            await leave(asking)
