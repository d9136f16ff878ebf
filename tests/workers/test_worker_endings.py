"""Leaving, dying, draining, breaking, damage: however it ends, both sides are free."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from disagg.config import ClusterConfig, Config, TransferConfig
from disagg.engine.engine import Engine
from disagg.errors import ConfigError, CorruptFrameError, DisaggError, RequestError
from disagg.model.runner import Runner
from disagg.transfer import sender
from disagg.transfer.messages import Job, Role
from disagg.transfer.receiver import Receiver
from disagg.wire import Buffer, Frame, Item
from disagg.workers.offering import Offering
from disagg.workers.worker import Worker
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
                    if output.token is not None and home.workers["d"].decode.attempts:
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
                    if output.token is not None and decode.decode.attempts:
                        break
                assert await outcome(decode, decode.fence(decode.epoch + 2, home.router.id)) == (
                    "reservation"
                )
                assert await outcome(decode, decode.fence(decode.epoch + 1, "other")) == "config"
                assert decode.decode.attempts
                await outcome(decode, decode.fence(decode.epoch + 1, home.router.id))
                assert not decode.decode.attempts
                assert decode.started.epoch == decode.epoch
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
            await until(lambda: worker._events.followed)
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
                if output.token is not None and home.workers["d"].decode.attempts:
                    break
            for peer in home.router.peers.values():
                peer.task.cancel()
            decode = home.workers["d"]
            await until(lambda: not decode.decode.attempts)
            await until(lambda: not decode.engine.pool.referenced_pages)
            await outputs.aclose()

    asyncio.run(scene())


def test_an_engine_that_breaks_ends_its_worker_by_name(
    runners: list[Runner], story: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = RuntimeError("the engine broke")

    def step(self: Engine) -> None:
        raise broken

    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    async def scene() -> None:
        async with house(deadline_s=0.5) as home:
            home.pair(runners)
            monkeypatch.setattr(home.workers["p"].engine, "step", partial(step, None))
            with pytest.raises(DisaggError):
                await home.complete(story, KIVI)
            worker = home.workers.pop("p")
            with pytest.raises(RuntimeError, match="the engine broke"):
                await until(lambda: worker.wait(0.0))

    asyncio.run(scene())


@pytest.mark.parametrize("error", [RuntimeError("a clock stood still"), None], ids=["error", "end"])
def test_a_supervised_task_that_ends_ends_its_worker(
    error: Exception | None, runners: list[Runner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing that ends leases or frees what is orphaned may stop unnoticed."""
    go = threading.Event()

    async def keep_time(self: Receiver) -> None:
        while not go.is_set():
            await asyncio.sleep(0.01)
        if error is not None:
            raise error

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(Receiver, "run", keep_time)

    async def scene() -> None:
        async with house() as home:
            worker = home.add("d", Role.DECODE, runners[0])
            await until(lambda: worker._events.followed)
            go.set()
            del home.workers["d"]
            with pytest.raises(RuntimeError, match="a clock stood still" if error else "has ended"):
                await until(lambda: worker.wait(0.0))

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("side", "error"),
    [("send", OverflowError("Integer value out of range")), ("admit", KeyError("codec"))],
)
def test_what_nobody_foresaw_ends_one_request_and_leaves_nothing(
    side: str,
    error: Exception,
    runners: list[Runner],
    story: Prompt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever type an error has, the sequence that the engine holds for the hand-off is freed."""

    def broken(*args: object) -> None:
        raise error

    async def scene() -> None:
        async with house() as home:
            home.pair(runners)
            rules = home.workers["d"].receiver.reservations
            target, name = (sender, "pack") if side == "send" else (rules, "_on_admit")
            whole = getattr(target, name)
            monkeypatch.setattr(target, name, broken)
            asked = [home.complete(story, KIVI) for _ in range(4)]
            failures = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(failure, DisaggError) for failure in failures)
            await home.empty()
            monkeypatch.setattr(target, name, whole)
            tokens, _ = await home.complete(story, KIVI)
            assert len(tokens) == 12
            await home.empty()

    asyncio.run(scene())


def test_an_integer_beyond_64_bits_is_refused_and_wedges_nothing(
    runners: list[Runner], story: Prompt
) -> None:
    async def scene() -> None:
        async with house() as home:
            home.pair(runners)
            for name in ("top_k", "max_tokens", "seed"):
                with pytest.raises(RequestError, match=name):
                    await home.complete(story, KIVI, **{name: 2**64})
            await home.empty()

    asyncio.run(scene())


def test_the_next_router_finds_nothing_of_the_one_before(
    runners: list[Runner], story: Prompt
) -> None:
    async def scene() -> None:
        async with house() as home:
            home.pair(runners)
            many = GREEDY | {"max_tokens": 2000}
            outputs = home.router.generate(story, many, KIVI)
            async for output in outputs:
                if output.token is not None and home.workers["d"].decode.attempts:
                    break
            decode = home.workers["d"]
            job = Job("r", 1, story, sampling={"max_tokens": 4})
            with pytest.raises(ConfigError, match="follows router"):
                await anext(decode.events({}, "other"))
            for peer in home.router.peers.values():
                peer.task.cancel()  # as if it had been killed
            await until(lambda: not decode._events.followed)
            steps = decode.events({}, "other")
            on_io = asyncio.run_coroutine_threadsafe(anext(steps), decode._loop)
            step = await asyncio.wrap_future(on_io)
            assert step.events == ()
            assert not decode.decode.attempts
            assert decode.receiver.gauges()["running"] == 0
            assert await outcome(decode, decode.reserve(job, decode.epoch, "me")) == "config"
            assert await outcome(decode, decode.reserve(job, decode.epoch, "other")) == ""
            assert await outcome(decode, decode.abort("r", 1, "")) == ""
            await outcome(decode, steps.aclose())  # type: ignore[attr-defined]
            await outputs.aclose()

    asyncio.run(scene())


async def outcome(worker: Worker, call: Coroutine[Any, Any, object]) -> str:
    """The reason of the error of a call on the worker's loop; none."""
    try:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, worker._loop))
    except DisaggError as error:
        return error.reason
    return ""


def test_damaged_frames_are_refused_by_name(
    runners: list[Runner], story: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(frame: Frame) -> list[Buffer]:
        data = bytearray(b"".join(pack(frame)))
        data[-1] ^= 1
        return [bytes(data)]

    pack = sender.pack
    monkeypatch.setattr(sender, "pack", damaged)

    async def scene() -> None:
        async with house() as home:
            home.pair(runners)
            with pytest.raises(CorruptFrameError) as caught:
                await home.complete(story, KIVI)
            assert caught.value.exit_code == 6
            assert (await home.workers["p"].status()).info["failures"] == {"corrupt_frame": 3}
            await home.empty()

    asyncio.run(scene())
