"""The router with plain fakes: every token once, whatever happens to workers and clients."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

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
from disagg.transfer.messages import Job, Role, Work
from disagg.workers.router import TICK_S, Output, Router
from tests.workers.fakes import STATS, FakeWorker, Network, answer, until

PROMPT = (1, 2, 3)


def ask(router: Router, count: int = 5) -> AsyncGenerator[Output]:
    return router.generate(PROMPT, {"max_tokens": count}, "raw")


async def collect(outputs: AsyncGenerator[Output]) -> tuple[list[int], Output]:
    tokens = []
    async with aclosing(outputs):
        async for output in outputs:
            if output.token is not None:
                tokens.append(output.token)
    return tokens, output


def play(scene: Callable[[Router, Network], Awaitable[None]], **config: float) -> None:
    """Run a scene with a router that is closed afterwards."""

    async def run() -> None:
        router = Router(RouterConfig(**config))  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(60):
                await scene(router, Network())
        finally:
            await router.close()

    asyncio.run(run())


def join(router: Router, *workers: FakeWorker) -> None:
    for worker in workers:
        router.add(worker.peer)


def test_an_answer_arrives_in_order_with_its_figures_and_leaves_nothing() -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        join(router, prefill, decode)
        tokens, last = await collect(ask(router))
        assert tokens == [answer(i) for i in range(5)]
        assert (last.finish_reason, last.kv) == ("length", STATS)
        await until(lambda: not prefill.events_kept.kept and not decode.events_kept.kept)
        assert router.running == 0

    play(scene)


def test_a_request_waits_for_workers_that_come_later() -> None:
    async def scene(router: Router, network: Network) -> None:
        asking = asyncio.create_task(collect(ask(router)))
        await until(lambda: router.running == 1)
        assert not router.ready
        join(router, *network.pair())
        tokens, _ = await asking
        assert len(tokens) == 5
        assert router.ready

    play(scene)


def test_a_token_says_how_long_its_request_was_in_the_queue() -> None:
    async def scene(router: Router, network: Network) -> None:
        asked = time.monotonic()
        asking = asyncio.create_task(anext(ask(router)))
        await until(lambda: router.waiting == 1)
        seen = time.monotonic()
        await until(lambda: time.monotonic() > seen)
        waited_s = time.monotonic() - seen
        join(router, *network.pair())
        assert waited_s <= (await asking).waited_s <= time.monotonic() - asked

    play(scene)


def test_leaving_an_answer_aborts_both_sides() -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        decode.pause_at = 2
        join(router, prefill, decode)
        async with aclosing(ask(router)) as outputs:
            async for output in outputs:
                if output.token == answer(1):
                    break
        await until(lambda: bool(prefill.aborted and decode.aborted))
        assert not decode.jobs
        assert router.running == 0

    play(scene)


def test_an_abort_does_not_overtake_its_request() -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        prefill.gate = asyncio.Event()
        join(router, prefill, decode)
        asking = asyncio.create_task(collect(ask(router)))
        await until(lambda: router.running == 1)
        asking.cancel()
        await asyncio.wait([asking])
        assert not prefill.aborted
        prefill.gate.set()
        await until(lambda: bool(prefill.aborted and decode.aborted))
        assert prefill.submitted
        assert not decode.jobs

    play(scene)


@pytest.mark.parametrize("known_by", ["supervisor", "silence"])
def test_a_decode_worker_dies_and_another_one_goes_on(known_by: str) -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        decode.pause_at = 3
        join(router, prefill, decode)
        asking = asyncio.create_task(collect(ask(router, 9)))
        await until(lambda: 3 in router.dispatch.known("d").values())
        second = network.add("d2", Role.DECODE)
        join(router, second)
        decode.die()
        if known_by == "supervisor":
            router.died("d")
        tokens, last = await asking
        assert tokens == [answer(i) for i in range(9)]
        assert last.finish_reason == "length"
        assert prefill.submitted[-1].job.emitted == tuple(answer(i) for i in range(3))

    play(scene, silence_s=1.5)


def test_a_broken_event_stream_costs_no_token_and_repeats_none() -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        decode.pause_at = 3
        join(router, prefill, decode)
        asking = asyncio.create_task(collect(ask(router, 9)))
        await decode.paused.wait()
        decode.broken = True  # the next event breaks the stream
        decode.go.set()
        await until(lambda: not decode.jobs)
        decode.broken = False
        tokens, _ = await asking
        assert tokens == [answer(i) for i in range(9)]
        assert len(prefill.submitted) == 1

    play(scene, silence_s=30.0)


def test_a_silent_worker_is_fenced_before_it_works_again() -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        decode.pause_at = 2
        join(router, prefill, decode)
        asking = asyncio.create_task(collect(ask(router)))
        await decode.paused.wait()
        decode.deaf = True
        await until(lambda: not router.ready)
        decode.deaf = False
        decode.go.set()
        tokens, _ = await asking
        assert len(tokens) == 5
        assert decode.fenced == [2]
        assert prefill.submitted[-1].decode_epoch == 2

    play(scene, silence_s=1.5)


def test_a_loop_that_was_late_is_not_a_silence_of_workers() -> None:
    """The clock jumps by more than a silence at once, as if a long prompt had blocked the loop."""

    async def scene() -> None:
        jumped = 0.0
        router = Router(RouterConfig(silence_s=5.0), lambda: time.monotonic() + jumped)
        prefill, decode = Network().pair()
        decode.pause_at = 2
        join(router, prefill, decode)
        asking = asyncio.create_task(collect(ask(router)))
        await decode.paused.wait()
        for _ in range(5):
            jumped += 8.0
            await asyncio.sleep(2 * TICK_S)
        assert router.ready
        decode.go.set()
        tokens, _ = await asking
        assert len(tokens) == 5
        assert not decode.fenced
        assert len(prefill.submitted) == 1
        await router.close()

    asyncio.run(scene())


def test_an_abort_that_was_lost_is_repeated_when_the_worker_speaks_again() -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        decode.pause_at = 2
        join(router, prefill, decode)
        async with aclosing(ask(router)) as outputs:
            async for output in outputs:
                if output.token == answer(1):
                    break
            decode.broken = True  # from here on; its event stream is open
        await until(lambda: bool(prefill.aborted))
        await until(lambda: bool(router.peers["d"].unheard))
        decode.broken = False
        await until(lambda: bool(decode.aborted))
        assert not decode.jobs

    play(scene, silence_s=30.0)


def test_a_worker_that_decodes_what_nobody_wants_is_told() -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        join(router, prefill, decode)
        await until(lambda: router.ready)
        decode.pause_at = 3
        decode.admit(Job("lost", 7, (1,), sampling={"max_tokens": 10**6}))
        await until(lambda: ("lost", 7) in decode.aborted)
        assert not decode.jobs

    play(scene)


def test_a_worker_follows_one_router_and_the_next_when_that_is_gone() -> None:
    async def scene(router: Router, network: Network) -> None:
        workers = network.pair()
        join(router, *workers)
        await until(lambda: router.ready)
        second = Router(RouterConfig(silence_s=0.3))
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
        await second.close()

    play(scene)


def test_a_single_token_is_asked_of_the_prefill_worker_alone() -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        join(router, prefill, decode)
        tokens, last = await collect(ask(router, 1))
        assert (tokens, last.finish_reason) == ([answer(0)], "length")
        assert [x.work for x in prefill.submitted] == [Work.LOCAL]
        assert decode.events_kept.kept == 0

    play(scene)


def test_prompts_wait_in_the_router_for_a_worker_that_is_full() -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        decode.slots = 2
        join(router, prefill, decode)
        answers = await asyncio.gather(*(collect(ask(router)) for _ in range(20)))
        assert all(len(tokens) == 5 for tokens, _ in answers)
        assert len(prefill.submitted) == 20  # nobody was sent away
        assert not decode.reserved

    play(scene)


def test_a_refused_hand_off_goes_to_another_pair() -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        prefill.refuses = PeerLostError("a broken card")
        join(router, prefill, decode, network.add("p2", Role.PREFILL))
        for _ in range(6):
            tokens, _ = await collect(ask(router))
            assert len(tokens) == 5
        assert not decode.reserved

    play(scene)


@pytest.mark.parametrize("error", [ModelError("no"), RequestError("no")], ids=lambda e: e.reason)
def test_what_a_worker_refuses_for_good_reaches_the_client(error: DisaggError) -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        prefill.refuses = error
        join(router, prefill, decode)
        with pytest.raises(type(error)):
            await collect(ask(router))
        assert router.running == 0

    play(scene)


def test_what_nobody_foresaw_ends_the_request_at_once() -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        prefill.refuses = UnicodeError("a codec of half a character")
        join(router, prefill, decode)
        with pytest.raises(DisaggError, match="UnicodeError: a codec of half a character"):
            await collect(ask(router))
        assert router.running == 0

    play(scene, deadline_s=1e6)


def test_a_request_without_workers_ends_at_its_deadline() -> None:
    async def scene(router: Router, network: Network) -> None:
        with pytest.raises(DeadlineError, match="no token in"):
            await collect(ask(router))

    play(scene, deadline_s=0.1)


def test_closing_ends_every_answer_by_name() -> None:
    async def scene(router: Router, network: Network) -> None:
        asking = asyncio.create_task(collect(ask(router)))
        await until(lambda: router.running == 1)
        await router.close()
        with pytest.raises(PeerLostError, match="shutting down"):
            await asking

    play(scene)


def test_a_closing_router_lets_answers_end_and_takes_no_new_ones() -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        decode.pause_at = 3
        join(router, prefill, decode)
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

    play(scene)


def test_status_tells_who_answers_and_who_does_not() -> None:
    async def scene(router: Router, network: Network) -> None:
        prefill, decode = network.pair()
        join(router, prefill, decode)
        decode.broken = True
        status = await router.status()
        assert isinstance(status["d"], PeerLostError)
        assert not isinstance(status["p"], DisaggError)
        assert status["p"].gauges == {"jobs": 0}

    play(scene, silence_s=30.0)


def test_no_more_requests_wait_than_may():
    async def scene(router: Router, network: Network) -> None:
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

    play(scene, max_queue=2)
