"""Sequences that go on at another decode worker: no token lost or repeated, nothing left behind."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from benchmarks.moves import witnessed
from disagg.config import Config, EngineConfig
from disagg.engine import engine
from disagg.engine.messages import Moved
from disagg.engine.scheduler import ScheduledTokens
from disagg.errors import CapacityError, ReservationError, TransferError
from disagg.kv.page import Kind
from disagg.kv.plan import Plan
from disagg.kv.state import GroupState
from disagg.model.runner import Runner
from disagg.router import moves
from disagg.transfer import sender
from disagg.transfer.messages import Role, Submit, Work
from disagg.worker.handoff import MigrationHandoff
from tests.engine.margins import assert_same
from tests.model.reference import ReferenceModel
from tests.model.test_rotary import saved_longrope
from tests.model.tiny import random_prompt, save_tiny
from tests.transfer.peer import until
from tests.worker.pairs import KIVI, leave, paired

LONG, HEARD = 300, 20  # tokens of an answer that moves, and of them before it does


MOVED = [
    (KIVI, 230, False),
    ("0-1:raw;2-:kivi:bits=4,residual=32", 230, False),
    ("banded", 660, False),
    ("raw", 200, True),
]


@pytest.mark.parametrize(("codec", "tokens", "windowed"), MOVED)
async def test_a_worker_that_leaves_takes_no_token_along(
    codec, tokens, windowed, runners, story, monkeypatch, tmp_path
):
    """Sealed pages leave early; those of a window, of which some are dropped meanwhile, do not.

    The answer of the longest prompt fills a segment, of which only a prompt would have a record.
    """
    story = (story * 3)[:tokens]
    if windowed:
        folder = str(save_tiny("mistral", tmp_path))
        runners, story = (
            [Runner.load(folder) for _ in range(3)],
            tuple(random_prompt(tokens)),
        )
    early, begin = list[set[Kind]](), MigrationHandoff.begin

    def begins(
        self: MigrationHandoff, plan: Plan, groups: Sequence[GroupState]
    ) -> None:
        begin(self, plan, groups)
        early.append({item.kind for item in self.offered_items})

    monkeypatch.setattr(MigrationHandoff, "begin", begins)
    with witnessed() as (departures, came):
        async with paired(runners) as home:
            expected, _ = await home.complete(story, codec, max_tokens=LONG)
            asking = await home.begin_to_move(story, codec, HEARD, LONG)
            leaving = await home.relieve(runners[2])
            assert (await asking)[0] == expected
            assert leaving.service.decode.counts["moved"] == 1
            assert home.router.table.retries == home.router.table.unequal_tokens == 0
            await home.empty()
            assert not leaving.engine.pool.referenced_pages
    assert departures == came
    assert came.total() == 1
    assert (Kind.PAGE in early[0], Kind.RAW in early[0]) == (not windowed, False)


OF_OTHER_FORMS = [
    *("gemma3", "qwen2_5_vl", "qwen3_vl"),  # text of models that see images
    *("gemma4_text", "llama4_text"),  # layers differ in heads, and see chunks
    "deepseek_v3",  # latents
]


@pytest.mark.parametrize("kind", OF_OTHER_FORMS)
async def test_a_model_of_another_form_is_handed_off_and_moves(kind, tmp_path):
    folder = str(save_tiny(kind, tmp_path))
    prompt = tuple(random_prompt(120))
    reference = ReferenceModel(folder).generate(list(prompt), 60)
    runners = [Runner.load(folder) for _ in range(3)]
    config = Config(engine=EngineConfig(max_batch_tokens=50, arena_bytes=32 << 20))

    async with paired(runners, config) as home:
        asking = await home.begin_to_move(prompt, "raw", 8, 60)
        leaving = await home.relieve(runners[2])
        tokens, _ = await asking

    assert leaving.service.decode.counts["moved"] == 1
    assert_same(tokens, reference)


@pytest.mark.parametrize(
    "tokens", [100, 140], ids=["while it moves", "before it moves"]
)
async def test_a_text_that_grows_long_keeps_its_answer(tokens, tmp_path):
    """All its keys are rotated anew then, so it is computed again where it would have moved."""
    folder = saved_longrope(tmp_path)
    prompt = tuple(random_prompt(tokens))
    reference = ReferenceModel(folder).generate(list(prompt), 80)
    runners = [Runner.load(folder) for _ in range(3)]
    config = Config(engine=EngineConfig(max_batch_tokens=50, arena_bytes=32 << 20))

    async with paired(runners, config) as home:
        asking = await home.begin_to_move(prompt, "raw", 8, 80)
        leaving = await home.relieve(runners[2])
        answer, _ = await asking
        moved = leaving.service.decode.counts["moved"]
        assert moved + home.router.table.retries == 1

    assert_same(answer, reference)


async def test_a_sequence_that_outgrows_its_room_moves_as_well(
    home, runners, story, monkeypatch
):
    monkeypatch.setattr(moves, "MOVE_TOKENS", 1)
    expected, _ = await home.complete(story, KIVI, max_tokens=LONG)
    asking = await home.begin_to_move(story, KIVI, HEARD, LONG)
    home.add("d2", Role.DECODE, runners[2])
    source = home.workers["d"]
    source.assume(Role.NONE)
    home.may_go_on.set()
    assert (await asking)[0] == expected
    assert source.service.decode.counts["moved"] == 1
    assert home.router.table.retries == 0


@pytest.mark.parametrize("breaks", ["the codec", "the link"])
async def test_what_cannot_move_is_computed_elsewhere(
    breaks, home, runners, story, monkeypatch
):
    """GEAR seals other pages while it decodes than it makes of a prompt."""
    codec = "gear" if breaks == "the codec" else KIVI
    expected, _ = await home.complete(story, codec, max_tokens=LONG)
    asking = await home.begin(story, codec, HEARD, LONG)
    home.add("d2", Role.DECODE, runners[2])
    if breaks == "the link":
        cut = AsyncMock(side_effect=TransferError("the cable is cut"))
        monkeypatch.setattr(sender.Sender, "run", cut)
    source = home.workers["d"]
    source.assume(Role.PREFILL)
    await until(lambda: home.router.table.retries > 0)
    monkeypatch.undo()
    assert (await asking)[0] == expected
    assert not source.service.decode.counts
    assert home.router.peers["d"].info.role is Role.PREFILL


@pytest.mark.parametrize(
    ("part", "error"),
    [("allocate_step", CapacityError("no room")), ("build_batch", MemoryError())],
)
async def test_a_sequence_that_breaks_while_it_moves_starts_again_elsewhere(
    part, error, home, runners, story, monkeypatch
):
    expected, _ = await home.complete(story, KIVI, max_tokens=LONG)
    asking = await home.begin(story, KIVI, HEARD, LONG)
    home.add("d2", Role.DECODE, runners[2])
    does, errors = getattr(engine, part), [error]

    def breaks(shares: Sequence[ScheduledTokens], *arguments: Any) -> Any:
        if errors and any(share.decodes and share.sequence.handoff for share in shares):
            raise errors.pop()
        return does(shares, *arguments)

    monkeypatch.setattr(engine, part, breaks)
    home.workers["d"].assume(Role.NONE)
    assert (await asking)[0] == expected
    assert not errors
    assert home.router.table.retries == 1


async def test_a_worker_that_ends_before_all_has_moved_says_so(
    home, runners, story, monkeypatch
):
    """So that the router waits for nobody."""
    expected, _ = await home.complete(story, KIVI, max_tokens=LONG)
    asking = await home.begin(story, KIVI, HEARD, LONG)
    home.add("d2", Role.DECODE, runners[2])
    monkeypatch.setattr(sender.Sender, "finish", lambda *_: None)
    leaving = home.workers.pop("d")
    leaving.stop(0.5)
    await until(lambda: leaving.wait(0.0))
    monkeypatch.undo()
    home.router.died("d")
    assert home.router.table.retries == 1
    assert (await asking)[0] == expected


async def test_an_answer_that_is_left_while_it_moves_frees_both_workers(
    home, runners, story
):
    asking = await home.begin(story, KIVI, HEARD, LONG)
    home.add("d2", Role.DECODE, runners[2])
    source = home.workers["d"]
    source.assume(Role.NONE)
    await until(lambda: bool(source.service.decode._moves))
    await leave(asking)
    await home.empty()
    assert not source.service.decode._moves
    source.service.decode.context.deliver(
        [Moved("given-up#1/d", (1,))]
    )  # a step was on its way


async def test_a_sequence_that_ended_before_it_was_to_move_is_not_computed_again(
    home, story
):
    """A router that lags behind asks for it, and hears its last tokens then."""
    asking = await home.begin(story, KIVI, HEARD, LONG)
    worker = home.workers["d"]
    (job,) = worker.service.decode._jobs.values()
    while worker.service.decode._jobs:
        time.sleep(0.01)  # the loop of the router hears nothing meanwhile

    async def move(attempt: int) -> None:
        worker.service.decode.move(Submit(replace(job, attempt=attempt), Work.MOVE, 0))

    asyncio.run_coroutine_threadsafe(move(job.attempt), worker._loop).result()
    with pytest.raises(ReservationError, match="does not decode here"):
        asyncio.run_coroutine_threadsafe(move(job.attempt + 1), worker._loop).result()
    assert len((await asking)[0]) == LONG


async def test_a_move_that_is_given_up_before_it_begins_frees_its_sequence(home, story):
    asking = await home.begin(story, KIVI, HEARD, LONG)
    decode = home.workers["d"].service.decode
    ((name, job),) = decode._jobs.items()

    async def give_up() -> None:
        decode.move(Submit(replace(job, moved=job.tokens + LONG), Work.MOVE, 0))
        decode.drop(job.rid, job.attempt, "the router is gone")

    await asyncio.wrap_future(
        asyncio.run_coroutine_threadsafe(give_up(), home.workers["d"]._loop)
    )
    await until(lambda: not decode._moves)
    await until(lambda: home.workers["d"].engine._scheduler.find(name) is None)
    await leave(asking)
    await home.empty()
