"""Leaving, dying, draining, breaking, damage: however it ends, both sides are free."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest

from disagg.config import ClusterConfig, Config, TransferConfig
from disagg.errors import (
    CorruptFrameError,
    DisaggError,
)
from disagg.model.runner import Runner
from disagg.transfer import outbox
from disagg.transfer.convert import frame_parts
from disagg.wire import Buffer, Item
from disagg.workers.members import Role
from disagg.workers.offering import Offering
from tests.workers.fakes import until
from tests.workers.pairs import GREEDY, House, Prompt, house

KIVI = "kivi:bits=2,group=64,residual=64"


def test_leaving_an_answer_frees_both_sides(runners: list[Runner], story: Prompt) -> None:
    async def scene() -> None:
        async with house() as home:
            home.pair(runners)
            many = GREEDY | {"max_tokens": 2000}
            async with aclosing(home.router.generate(story, many, KIVI)) as outputs:
                async for output in outputs:
                    if output.token is not None and home.workers["d"].decode.seats:
                        break
            await home.empty()

    asyncio.run(scene())


def test_leaving_while_the_prompt_is_computed_frees_both_sides(
    runners: list[Runner], story: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go = threading.Event(), threading.Event()
    offer = Offering.offer

    def offered(self: Offering, items: Sequence[Item]) -> None:
        offer(self, items)
        reached.set()
        go.wait(30)

    monkeypatch.setattr(Offering, "offer", offered)

    async def scene() -> None:
        async with house() as home:
            home.pair(runners)
            asking = asyncio.create_task(home.complete(story, KIVI))
            await until(reached.is_set)
            asking.cancel()
            await asyncio.wait([asking])
            go.set()
            await home.empty()

    asyncio.run(scene())


@pytest.mark.parametrize("victim", ["p", "d"])
def test_a_worker_that_dies_costs_no_token(
    victim: str, runners: list[Runner], story: Prompt
) -> None:
    """The prefill worker dies with pages on their way, the decode worker in mid-answer."""

    async def scene() -> None:
        async with house() as home:
            home.pair(runners)
            expected, _ = await home.complete(story, KIVI, max_tokens=40)
            heard = asyncio.Event()
            asking = asyncio.create_task(listen(home, story, heard))
            await heard.wait()
            home.add(f"{victim}2", home.workers[victim].role, runners[2])
            await asyncio.to_thread(home.workers[victim].stop, 0.0)
            await until(lambda: home.workers[victim].wait(0.0))
            home.router.died(victim)
            del home.workers[victim]
            assert await asking == expected
            assert home.router.dispatch.unequal_tokens == 0
            await home.empty()

    async def listen(home: House, prompt: Prompt, heard: asyncio.Event) -> list[int]:
        tokens: list[int] = []
        params = GREEDY | {"max_tokens": 40}
        async with aclosing(home.router.generate(prompt, params, KIVI)) as outputs:
            async for output in outputs:
                if output.token is not None:
                    tokens.append(output.token)
                if victim == "p" or len(tokens) == 5:
                    heard.set()
        return tokens

    asyncio.run(scene())


def test_a_fenced_worker_drops_what_it_decodes(runners: list[Runner], story: Prompt) -> None:
    async def scene() -> None:
        async with house() as home:
            home.pair(runners)
            decode = home.workers["d"]
            many = GREEDY | {"max_tokens": 2000}
            async with aclosing(home.router.generate(story, many, KIVI)) as outputs:
                async for output in outputs:
                    if output.token is not None and decode.decode.seats:
                        break
                on_io = decode.fence(decode.epoch + 1)
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(on_io, decode._loop))
                assert not decode.decode.seats
            await home.empty()

    asyncio.run(scene())


def test_a_draining_worker_finishes_what_it_has(runners: list[Runner], story: Prompt) -> None:
    async def scene() -> None:
        async with house() as home:
            home.pair(runners)
            tokens = []
            params = GREEDY | {"max_tokens": 30}
            async with aclosing(home.router.generate(story, params, KIVI)) as outputs:
                async for output in outputs:
                    tokens.append(output.token)
                    if len(tokens) == 3:
                        home.workers["d"].stop(30.0)
            assert len(tokens) == 31
            await until(lambda: home.workers["d"].wait(0.0))

    asyncio.run(scene())


def test_a_worker_without_a_router_leaves(runners: list[Runner]) -> None:
    async def scene() -> None:
        config = Config(cluster=replace(ClusterConfig(), orphan_s=0.05))
        async with house(config) as home:
            worker = home.add("d", Role.DECODE, runners[1])
            await until(lambda: bool(worker._events._subscribers))
            await home.router.close()
            await until(lambda: worker.wait(0.0))

    asyncio.run(scene())


def test_a_worker_whose_router_is_silent_for_a_lease_frees_everything(
    runners: list[Runner], story: Prompt
) -> None:
    async def scene() -> None:
        config = Config(transfer=replace(TransferConfig(), lease_s=0.05))
        async with house(config) as home:
            home.pair(runners)
            many = GREEDY | {"max_tokens": 2000}
            outputs = home.router.generate(story, many, KIVI)
            async for output in outputs:
                if output.token is not None and home.workers["d"].decode.seats:
                    break
            for listener in home.router._listeners.values():
                listener.cancel()
            decode = home.workers["d"]
            await until(lambda: not decode.decode.seats)
            await until(lambda: not decode.engine.pool.referenced_pages)
            await outputs.aclose()

    asyncio.run(scene())


def test_an_engine_that_breaks_ends_its_worker_by_name(
    runners: list[Runner], story: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = RuntimeError("the model broke")

    def forward(self: Runner, batch: object) -> None:
        raise broken

    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    async def scene() -> None:
        async with house(deadline_s=0.5) as home:
            home.pair(runners)
            monkeypatch.setattr(Runner, "forward", forward)
            with pytest.raises(DisaggError):
                await home.complete(story, KIVI)
            worker = home.workers.pop("p")
            with pytest.raises(RuntimeError, match="the model broke"):
                await until(lambda: worker.wait(0.0))

    asyncio.run(scene())


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_frame_is_refused_by_name(
    damage: str, runners: list[Runner], story: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(parts: Sequence[Buffer]) -> list[Buffer]:
        frame = bytearray(b"".join(parts))
        frame[-1] ^= 1
        return frame_parts([bytes(frame[:-3] if damage == "cut" else frame)])

    monkeypatch.setattr(outbox, "frame_parts", damaged)

    async def scene() -> None:
        async with house() as home:
            home.pair(runners)
            with pytest.raises(CorruptFrameError) as caught:
                await home.complete(story, KIVI)
            assert caught.value.exit_code == 6
            await home.empty()

    asyncio.run(scene())
