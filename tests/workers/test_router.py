"""The router with plain fakes: every token once, whatever happens to workers and clients."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from disagg.config import RouterConfig
from disagg.errors import (
    DeadlineError,
    DisaggError,
    ModelError,
    PeerLostError,
    QueueFullError,
    RequestError,
)
from disagg.transfer.messages import Job, Load, Role
from disagg.workers.router import TICK_S, Output, Router
from tests.transfer.peer import until
from tests.workers import fakes
from tests.workers.fakes import STATS, FakeWorker, Network, answer, collect, leave

PROMPT = (1, 2, 3)


def ask(router: Router, count: int = 5) -> AsyncGenerator[Output]:
    return router.generate(PROMPT, {"max_tokens": count}, "raw")


@asynccontextmanager
async def routing(**config: float) -> AsyncIterator[Router]:
    """A router without workers; closed at the end."""
    router = Router(RouterConfig(**config))
    try:
        async with asyncio.timeout(60):
            yield router
    finally:
        await router.close()


def join(router: Router, *workers: FakeWorker) -> None:
    for worker in workers:
        router.add(worker.peer)


@asynccontextmanager
async def service(**config: float) -> AsyncIterator[tuple[Router, FakeWorker, FakeWorker]]:
    """A router, a prefill and a decode worker."""
    async with routing(**config) as router:
        workers = Network().pair()
        join(router, *workers)
        yield router, *workers


async def test_an_answer_arrives_in_order_with_its_figures_and_leaves_nothing():
    async with service() as (router, prefill, decode):
        tokens, last = await collect(ask(router))
        assert tokens == [answer(i) for i in range(5)]
        assert (last.finish_reason, last.kv) == ("length", STATS)
        await until(lambda: not prefill.events_kept.kept and not decode.events_kept.kept)
        assert router.running == 0


async def test_a_request_waits_for_workers_that_come_later_and_says_for_how_long():
    async with routing() as router:
        asked = time.monotonic()
        asking = asyncio.create_task(anext(ask(router)))
        await until(lambda: router.waiting == 1)
        assert not router.ready
        assert re.fullmatch(r"decode 0 of 1, 1 queued; for \d+ s", router.lacks({"decode": 1}))
        seen = time.monotonic()
        await until(lambda: time.monotonic() > seen)
        waited_s = time.monotonic() - seen
        join(router, *Network().pair())
        assert waited_s <= (await asking).waited_s <= time.monotonic() - asked
        assert router.ready


async def test_an_abort_does_not_overtake_its_request():
    async with service() as (router, prefill, decode):
        prefill.gate = asyncio.Event()
        asking = asyncio.create_task(collect(ask(router)))
        await until(lambda: router.running == 1)
        await leave(asking)
        assert not prefill.aborted
        prefill.gate.set()
        await until(lambda: bool(prefill.aborted and decode.aborted))
        assert prefill.submitted
        assert not decode.jobs


@pytest.mark.parametrize("known_by", ["supervisor", "silence"])
async def test_a_decode_worker_dies_and_another_one_goes_on(known_by):
    async with service(silence_s=1.5) as (router, prefill, decode):
        decode.pause_at = 3
        asking = asyncio.create_task(collect(ask(router, 9)))
        await until(lambda: 3 in router.dispatch.known("d").values())
        join(router, decode.network.add("d2", Role.DECODE))
        decode.die()
        if known_by == "supervisor":
            router.died("d")
        tokens, last = await asking
        assert tokens == [answer(i) for i in range(9)]
        assert last.finish_reason == "length"
        assert prefill.submitted[-1].job.emitted == tuple(answer(i) for i in range(3))


async def test_a_broken_event_stream_costs_no_token_and_repeats_none():
    async with service(silence_s=30.0) as (router, prefill, decode):
        decode.pause_at = 3
        asking = asyncio.create_task(collect(ask(router, 9)))
        await decode.paused.wait()
        decode.broken = True  # the next event breaks the stream
        decode.go.set()
        await until(lambda: not decode.jobs)
        decode.broken = False
        tokens, _ = await asking
        assert tokens == [answer(i) for i in range(9)]
        assert len(prefill.submitted) == 1


async def test_a_silent_worker_is_fenced_before_it_works_again():
    async with service(silence_s=1.5) as (router, prefill, decode):
        decode.pause_at = 2
        asking = asyncio.create_task(collect(ask(router)))
        await decode.paused.wait()
        decode.deaf = True
        await until(lambda: not router.ready)
        assert router.lacks({"prefill": 1, "decode": 2}).startswith("prefill 1 of 1, decode 0 of 2")
        decode.deaf = False
        decode.go.set()
        tokens, _ = await asking
        assert len(tokens) == 5
        assert decode.fenced == [2]
        assert prefill.submitted[-1].decode_epoch == 2


async def test_a_worker_that_leaves_and_falls_silent_is_not_waited_for():
    """It drops what it hands over, before it is back under its name."""
    async with service(silence_s=1.5) as (router, prefill, decode):
        decode.pause_at = 0
        asking = asyncio.create_task(collect(ask(router)))
        await decode.paused.wait()
        prefill.events_kept._load = lambda: Load(role=Role.NONE)
        prefill.events_kept.say([])
        await until(lambda: router.peers["p"].started.role is Role.NONE)
        prefill.deaf = True
        await until(lambda: prefill.fenced == [2])
        prefill.deaf = False
        join(router, other := prefill.network.add("p2", Role.PREFILL))
        await until(lambda: bool(other.submitted))
        decode.go.set()
        assert (await asking)[0] == [answer(i) for i in range(5)]


async def test_a_loop_that_was_late_is_not_a_silence_of_workers():
    """The clock jumps by more than a silence at once, as if a long prompt had blocked the loop."""
    jumped = 0.0
    async with service(silence_s=5.0) as (router, prefill, decode):
        router._clock = lambda: time.monotonic() + jumped
        decode.pause_at = 2
        asking = asyncio.create_task(collect(ask(router)))
        await decode.paused.wait()
        for _ in range(5):
            jumped += 8.0
            await asyncio.sleep(2 * TICK_S)
        assert router.ready
        await until(lambda: router.lacks({}).endswith("for 0 s"))
        decode.go.set()
        tokens, _ = await asking
        assert len(tokens) == 5
        assert not decode.fenced
        assert len(prefill.submitted) == 1


async def test_an_abort_that_was_lost_is_repeated_when_the_worker_speaks_again():
    async with service(silence_s=30.0) as (router, prefill, decode):
        decode.pause_at = 2
        async with aclosing(ask(router)) as outputs:
            async for output in outputs:
                if output.token == answer(1):
                    break
            decode.broken = True  # from here on; its event stream is open
        assert router.running == 0
        await until(lambda: bool(prefill.aborted))
        await until(lambda: bool(router.peers["d"].unheard))
        decode.broken = False
        await until(lambda: bool(decode.aborted))
        assert not decode.jobs


async def test_a_worker_that_decodes_what_nobody_wants_is_told():
    async with service() as (router, _, decode):
        await until(lambda: router.ready)
        decode.pause_at = 3
        decode.admit(Job("lost", 7, (1,), sampling={"max_tokens": 10**6}))
        await until(lambda: ("lost", 7) in decode.aborted)
        assert not decode.jobs


async def test_a_worker_follows_one_router_and_the_next_when_that_is_gone():
    async with service() as (router, *workers), routing(silence_s=0.3) as second:
        await until(lambda: router.ready)
        join(second, *workers)
        await until(lambda: all("follows" in x.trouble for x in second.peers.values()))
        assert not second.ready
        assert not workers[0].fenced
        tokens, _ = await collect(ask(router))
        assert len(tokens) == 5
        await router.close()
        await until(lambda: second.ready)
        tokens, _ = await collect(ask(second))
        assert len(tokens) == 5


async def test_prompts_wait_in_the_router_for_a_worker_that_is_full():
    async with service() as (router, prefill, decode):
        decode.slots = 2
        answers = await asyncio.gather(*(collect(ask(router)) for _ in range(20)))
        assert all(len(tokens) == 5 for tokens, _ in answers)
        assert len(prefill.submitted) == 20  # nobody was sent away
        assert not decode.reserved


REFUSED = [(ModelError("no"), ModelError, "no"), (RequestError("no"), RequestError, "no")]
REFUSED += [(UnicodeError("half a character"), DisaggError, "UnicodeError: half a character")]


@pytest.mark.parametrize(("error", "told", "words"), REFUSED, ids=["model", "request", "a bug"])
async def test_what_a_worker_refuses_for_good_or_nobody_foresaw_ends_the_request_at_once(
    error, told, words
):
    async with service(deadline_s=1e6) as (router, prefill, _):
        prefill.refuses = error
        with pytest.raises(told, match=words):
            await collect(ask(router))
        assert router.running == 0


async def test_a_request_without_workers_ends_at_its_deadline():
    async with routing(deadline_s=0.1) as router:
        with pytest.raises(DeadlineError, match="no token in"):
            await collect(ask(router))


async def test_closing_ends_every_answer_by_name():
    async with routing() as router:
        asking = asyncio.create_task(collect(ask(router)))
        await until(lambda: router.running == 1)
        await router.close()
        with pytest.raises(PeerLostError, match="shutting down"):
            await asking


async def test_a_closing_router_lets_answers_end_and_takes_no_new_ones():
    async with service() as (router, _, decode):
        decode.pause_at = 3
        asking = asyncio.create_task(collect(ask(router)))
        await decode.paused.wait()
        closing = asyncio.create_task(router.close(grace_s=30.0))
        await asyncio.sleep(0)
        with pytest.raises(PeerLostError, match="shutting down"):
            await collect(ask(router))
        decode.go.set()
        tokens, last = await asking
        assert (len(tokens), last.finish_reason) == (5, "length")
        await closing


async def test_an_answer_that_waits_for_its_figures_alone_ends_as_it_ended(monkeypatch):
    monkeypatch.setattr(fakes, "STATS", None)
    async with service() as (router, _, _):
        heard: list[Output] = []

        async def listen() -> None:
            async for output in ask(router):
                heard.append(output)

        listening = asyncio.create_task(listen())
        await until(lambda: len(heard) == 5)
        await router.close()
        await listening
        assert heard[-1].finish_reason == "length"


async def test_status_tells_who_answers_and_who_does_not():
    async with service(silence_s=30.0) as (router, _, decode):
        decode.broken = True
        status = await router.status()
        assert isinstance(status["d"], PeerLostError)
        assert not isinstance(status["p"], DisaggError)
        assert status["p"].gauges == {"jobs": 0}


async def test_no_more_requests_wait_than_may():
    async with routing(max_queue=2) as router:
        waiting = [asyncio.ensure_future(anext(ask(router))) for _ in range(2)]  # for workers
        await until(lambda: router.waiting == 2)
        with pytest.raises(QueueFullError, match="2 requests wait, 2 may"):
            await anext(ask(router))
        waiting[0].cancel()
        await until(lambda: router.waiting == 1)
        waiting.append(asyncio.ensure_future(anext(ask(router))))
        await until(lambda: router.waiting == 2)
        for task in waiting:
            task.cancel()
