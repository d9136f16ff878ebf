"""Leaving, dying, draining, breaking, damage: however it ends, both sides are free."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from disagg.config import ClusterConfig, Config, TransferConfig
from disagg.errors import (
    ConfigError,
    CorruptFrameError,
    DisaggError,
    PeerLostError,
    RanksLostError,
)
from disagg.kv.page import Item
from disagg.transfer import sender
from disagg.transfer.messages import Job, Role, Submit, Work
from disagg.transfer.receiver import Receiver
from disagg.wire import Buffer, Frame
from disagg.worker.event_log import EventLog
from disagg.worker.handoff import OutgoingHandoff
from disagg.worker.prefill import PrefillSide
from disagg.worker.worker import Worker
from tests.transfer.peer import until
from tests.worker.pairs import GREEDY, KIVI, House, alone, house, leave, on_loop, paired


@pytest.fixture
def offering(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[threading.Event, threading.Event]:
    """The engine has offered pages and waits: set when it does, and what it waits for."""
    reached, go, offer = threading.Event(), threading.Event(), OutgoingHandoff.offer

    def offered(self: OutgoingHandoff, items: list[Item]) -> None:
        offer(self, items)
        reached.set()
        go.wait(30)

    monkeypatch.setattr(OutgoingHandoff, "offer", offered)
    return reached, go


async def test_leaving_while_the_prompt_is_computed_frees_both_sides(
    offering, home, story
):
    reached, go = offering
    asking = asyncio.create_task(home.complete(story, KIVI))
    await until(reached.is_set)
    await leave(asking)
    go.set()


async def test_a_hand_off_given_up_while_its_pages_came_is_no_failure(
    offering, home, story
):
    reached, go = offering
    asking = asyncio.create_task(home.complete(story, KIVI))
    await until(reached.is_set)
    decode, (rid,) = home.workers["d"], home.router.table.requests
    await on_loop(decode, decode.service.abort(rid, 1, "given up"))
    go.set()
    assert (await asking)[0] == alone(story, KIVI)
    assert home.router.table.retries == 1
    for worker in home.workers.values():
        assert (await worker.service.status()).info["failures"] == {}


@pytest.mark.parametrize(("victim", "heard"), [("p", 1), ("d", 5)])
async def test_a_worker_that_dies_costs_no_token(victim, heard, home, runners, story):
    """The prefill worker dies with pages on their way, the decode worker in mid-answer."""
    expected, _ = await home.complete(story, KIVI, max_tokens=40)
    asking = await home.begin(story, KIVI, heard, max_tokens=40)
    home.add(f"{victim}2", home.workers[victim].service.role, runners[2])
    await home.kill(victim)
    assert (await asking)[0] == expected
    assert home.router.table.unequal_tokens == 0


async def test_a_fenced_worker_drops_what_it_decodes(home, story):
    decode = home.workers["d"]
    service = decode.service
    asking = await home.begin(story, KIVI)
    assert (
        await outcome(decode, service.fence(service.epoch + 2, home.router.id))
        == "reservation"
    )
    assert await outcome(decode, service.fence(service.epoch + 1, "other")) == "config"
    assert service.decode.attempts
    await outcome(decode, service.fence(service.epoch + 1, home.router.id))
    assert not service.decode.attempts
    assert decode.info.epoch == service.epoch
    await leave(asking)


async def test_a_fence_drops_an_attempt_that_waited_for_the_one_before_it(home, story):
    worker = home.workers["p"]

    async def fence_between() -> set[tuple[str, int]]:
        first = Submit(
            Job("r", 1, story), Work.PREFILL, worker.service.epoch, "127.0.0.1:1"
        )
        await worker.service.submit(first)
        second = asyncio.create_task(
            worker.service.submit(replace(first, job=Job("r", 2, story)))
        )
        await asyncio.sleep(0)
        await worker.service.fence(worker.service.epoch + 1, home.router.id)
        await second
        return worker.service.prefill.attempts

    assert not await on_loop(worker, fence_between())


async def test_of_three_attempts_at_a_prefill_worker_the_last_goes_on(monkeypatch):
    """The second and the third come while the first is still being ended."""
    monkeypatch.setattr(PrefillSide, "_hand_over", lambda *_: asyncio.Event().wait())
    first, *others = (Submit(Job("r", i, (1,)), Work.PREFILL, 1) for i in (1, 2, 3))
    async with asyncio.TaskGroup() as tasks:
        side = PrefillSide(None, True, tasks, EventLog())
        await side.start(first)
        await asyncio.gather(*map(side.start, others))
        assert side.attempts == {("r", 3)}
        await side.abort("r", 3)


async def test_a_worker_that_leaves_waits_until_its_last_words_were_heard(home, story):
    asking = await home.begin(story, KIVI, heard=5, max_tokens=25)
    leaving = home.workers.pop("d")
    leaving.stop(30.0)
    # the loop of the router hears nothing meanwhile
    while leaving.service.decode._jobs:
        assert not leaving.wait(0.01)
    assert not leaving.wait(0.1)
    assert len((await asking)[0]) == 25
    await until(lambda: leaving.wait(0.0))


async def test_a_worker_without_a_router_leaves(runners):
    async with house(Config(cluster=ClusterConfig(orphan_s=0.05))) as home:
        worker = home.add("d", Role.DECODE, runners[1])
        await until(lambda: worker.service.event_log.is_followed)
        await home.router.close()
        await until(lambda: worker.wait(0.0))


def cut_off(home: House) -> None:
    """The router says nothing more, as if it had been killed."""
    for peer in home.router.peers.values():
        peer.task.cancel()


async def test_what_comes_to_a_worker_that_nobody_follows_is_dropped_too(
    runners, story
):
    """A hand-off may be complete a moment after the router fell silent; nobody would hear it."""
    async with house(Config(transfer=TransferConfig(lease_s=0.05))) as home:
        worker, sampling = (
            home.add("d", Role.DECODE, runners[1]),
            GREEDY | {"max_tokens": 2000},
        )
        await until(lambda: worker.service.event_log.is_followed)
        cut_off(home)
        await until(lambda: not worker.service.event_log.is_followed)
        for attempt in (1, 2):
            job = Job("r", attempt, story, sampling=sampling)
            submit = Submit(
                job, Work.LOCAL, worker.service.epoch, router=home.router.id
            )
            assert await outcome(worker, worker.service.submit(submit)) == ""
            await until(lambda: not worker.service.decode.attempts)
            steps = worker.service.events({}, home.router.id)
            assert isinstance(
                (await on_loop(worker, anext(steps))).events[-1].error, PeerLostError
            )
            await outcome(worker, steps.aclose())


async def test_what_a_worker_is_given_before_any_router_came_goes_on(runners, story):
    async with house(Config(transfer=TransferConfig(lease_s=0.05))) as home:
        worker = home.workers["d"] = Worker(
            home.config, Role.DECODE, "d", runner=runners[1]
        )
        worker.start()
        service = worker.service
        job = Job("r", 1, story, sampling=GREEDY | {"max_tokens": 300})
        assert (
            await outcome(
                worker,
                service.submit(Submit(job, Work.LOCAL, service.epoch)),
            )
            == ""
        )
        await until(lambda: not service.decode.attempts)
        steps = service.events({}, "")
        assert (await on_loop(worker, anext(steps))).events[
            -1
        ].finish_reason == "length"
        await outcome(worker, steps.aclose())


async def test_a_rank_that_ends_while_its_group_warms_up_ends_the_worker(
    runners, monkeypatch
):
    """Compiling and recording take minutes, and there is no io loop yet."""
    async with house() as home:
        worker = Worker(home.config, Role.DECODE, "d", runner=runners[1])
        ranks = Mock(loading=nullcontext, pids=[])
        worker._ranks = ranks

        def lose_a_rank() -> None:
            ((on_end,), _) = ranks.watch.call_args
            on_end(RanksLostError("rank 1 has ended"))

        monkeypatch.setattr(worker, "_warm_up", lose_a_rank)
        worker.start()

        with pytest.raises(RanksLostError, match="rank 1 has ended"):
            await until(lambda: worker.wait(0.0))
        ranks.kill.assert_called()


async def test_an_engine_that_breaks_ends_its_worker_by_name(
    runners, story, monkeypatch
):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    async with paired(runners, deadline_s=0.5) as home:
        broken = Mock(side_effect=RuntimeError("the engine broke"))
        monkeypatch.setattr(home.workers["p"].engine, "step", broken)
        with pytest.raises(DisaggError):
            await home.complete(story, KIVI)
        worker = home.workers.pop("p")
        with pytest.raises(RuntimeError, match="the engine broke"):
            await until(lambda: worker.wait(0.0))


@pytest.mark.parametrize(
    "error", [RuntimeError("a clock stood still"), None], ids=["error", "end"]
)
async def test_a_supervised_task_that_ends_ends_its_worker(error, runners, monkeypatch):
    """Nothing that ends leases or frees what is orphaned may stop unnoticed."""
    go = threading.Event()

    async def keep_time(self: Receiver) -> None:
        while not go.is_set():
            await asyncio.sleep(0.01)
        if error is not None:
            raise error

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    monkeypatch.setattr(Receiver, "run", keep_time)
    async with house() as home:
        worker = home.add("d", Role.DECODE, runners[0])
        await until(lambda: worker.service.event_log.is_followed)
        go.set()
        del home.workers["d"]
        with pytest.raises(
            RuntimeError, match="a clock stood still" if error else "has ended"
        ):
            await until(lambda: worker.wait(0.0))


@pytest.mark.parametrize(
    ("side", "error"),
    [
        ("send", OverflowError("Integer value out of range")),
        ("admit", KeyError("codec")),
    ],
)
async def test_what_nobody_foresaw_ends_one_request_alone(
    side, error, home, story, monkeypatch
):
    """Whatever type an error has, the sequence that the engine holds for the hand-off is freed."""
    rules = home.workers["d"].service.receiver.reservations
    target, name = (sender, "pack") if side == "send" else (rules, "_on_admit")
    with monkeypatch.context() as patch:
        patch.setattr(target, name, Mock(side_effect=error))
        requests = [home.complete(story, KIVI) for _ in range(4)]
        failures = await asyncio.gather(*requests, return_exceptions=True)
        assert all(isinstance(failure, DisaggError) for failure in failures)
        await home.empty()
    tokens, _ = await home.complete(story, KIVI)
    assert len(tokens) == 12


async def test_the_next_router_finds_nothing_of_the_one_before(home, story):
    asking = await home.begin(story, KIVI)
    decode = home.workers["d"]
    service = decode.service
    job = Job("r", 1, story, sampling={"max_tokens": 4})
    with pytest.raises(ConfigError, match="follows router"):
        await anext(service.events({}, "other"))
    cut_off(home)
    await until(lambda: not service.event_log.is_followed)
    steps = service.events({}, "other")
    assert (await on_loop(decode, anext(steps))).events == ()
    assert not service.decode.attempts
    assert service.reservations.gauges()["running"] == 0
    assert await outcome(decode, service.reserve(job, service.epoch, "me")) == "config"
    assert await outcome(decode, service.reserve(job, service.epoch, "other")) == ""
    assert await outcome(decode, service.abort("r", 1, "")) == ""
    await outcome(decode, steps.aclose())
    await leave(asking)


async def outcome(worker: Worker, call: Coroutine[Any, Any, object]) -> str:
    """The reason of the error of a call on the worker's loop; none."""
    try:
        await on_loop(worker, call)
    except DisaggError as error:
        return error.reason
    return ""


async def test_damaged_frames_are_refused_by_name(home, story, monkeypatch):
    def damaged(frame: Frame) -> list[Buffer]:
        data = bytearray(b"".join(pack(frame)))
        data[-1] ^= 1
        return [bytes(data)]

    pack = sender.pack
    monkeypatch.setattr(sender, "pack", damaged)
    with pytest.raises(CorruptFrameError) as caught:
        await home.complete(story, KIVI)
    assert caught.value.exit_code == 6
    assert (await home.workers["p"].service.status()).info["failures"] == {
        "corrupt_frame": 3
    }
