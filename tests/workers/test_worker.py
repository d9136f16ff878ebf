"""Two plain workers and real gRPC: a prompt goes through; whatever goes wrong leaves nothing."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from disagg.codecs import kivi
from disagg.codecs.base import Encoded
from disagg.codecs.kivi import Kivi
from disagg.config import ClusterConfig, Config, EngineConfig, TransferConfig
from disagg.engine.sequence import SamplingParams
from disagg.errors import (
    CapacityError,
    ConfigError,
    CorruptFrameError,
    DisaggError,
    LayoutError,
    PromptTooLongError,
    RequestError,
    ReservationError,
)
from disagg.llm import LLM
from disagg.model.runner import Runner
from disagg.page import ARENA_UNIT, Kind
from disagg.transfer import outbox
from disagg.transfer.convert import frame_message
from disagg.transfer.items import ArenaSource, Checklist
from disagg.transfer.ledger import Ledger
from disagg.transfer.messages import Admission, Placement, Request, Waiter
from disagg.transfer.work import Submit, Work
from disagg.wire import Buffer, Item, PageFrame, digest
from disagg.workers.decode import DecodeSide
from disagg.workers.members import Role
from disagg.workers.offering import Offering
from tests.workers.fakes import until
from tests.workers.pairs import GREEDY, House, house

LAYERS = 6
KIVI = "kivi:bits=2,group=64,residual=64"
Prompt = tuple[int, ...]


def pair(home: House, runners: list[Runner]) -> None:
    home.add("p", Role.PREFILL, runners[0])
    home.add("d", Role.DECODE, runners[1])


@pytest.mark.parametrize("codec", [KIVI, "raw", "0-1:kivi:bits=4;2-:kivi:bits=2,residual=32"])
def test_a_prompt_goes_through_and_leaves_nothing(
    codec: str, runners: list[Runner], story: Prompt
) -> None:
    async def scene() -> None:
        async with house() as home:
            pair(home, runners)
            tokens, last = await home.complete(story, codec)
            assert len(tokens) == 12
            assert last.finish_reason == "length"
            kv = last.kv
            assert kv["tokens"] == len(story)
            assert kv["fp16_bytes"] == 2 * kv["fp8_bytes"] == len(story) * 6 * 2 * 2 * 64 * 2
            assert kv["wire_bytes"] > kv["resident_bytes"] * 0.9
            await home.empty()

    asyncio.run(scene())


def test_the_service_says_what_one_process_says(runners: list[Runner], story: Prompt) -> None:
    async def scene() -> list[int]:
        async with house() as home:
            pair(home, runners)
            tokens, _ = await home.complete(story, KIVI, max_tokens=32)
            return tokens

    tokens = asyncio.run(scene())
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    assert list(LLM(codec=KIVI).generate([story], params)[0].tokens) == tokens


def test_many_prompts_at_once_get_the_answers_they_get_alone(
    runners: list[Runner], story: Prompt
) -> None:
    prompts = [story[:n] for n in (3, 64, 129, 200)]

    async def scene() -> None:
        async with house() as home:
            pair(home, runners)
            together = await asyncio.gather(*(home.complete(prompt, KIVI) for prompt in prompts))
            alone = [await home.complete(prompt, KIVI) for prompt in prompts]
            assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
            await home.empty()

    asyncio.run(scene())


def test_one_worker_of_both_roles_hands_over_to_itself(
    runners: list[Runner], story: Prompt
) -> None:
    async def scene() -> None:
        async with house() as home:
            home.add("w", Role.BOTH, runners[0])
            tokens, _ = await home.complete(story, KIVI)
            assert len(tokens) == 12
            await home.empty()

    asyncio.run(scene())


def test_the_first_frame_leaves_before_the_last_layer_starts(
    runners: list[Runner], story: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may not go on to the last layer until bytes have arrived at the other worker."""
    arrived, waited = threading.Event(), list[bool]()
    offer, begin_write = Offering.offer, Ledger.begin_write

    def offered(self: Offering, items: Sequence[Item]) -> None:
        offer(self, items)
        if items[0].layer == LAYERS - 2:
            waited.append(arrived.wait(30))

    def written(self: Ledger, frame: PageFrame, now: float) -> list[Placement]:
        arrived.set()
        return begin_write(self, frame, now)

    monkeypatch.setattr(Offering, "offer", offered)
    monkeypatch.setattr(Ledger, "begin_write", written)

    async def scene() -> None:
        async with house() as home:
            pair(home, runners)
            await home.complete(story, KIVI)

    asyncio.run(scene())
    assert waited == [True]


def test_without_overlap_nothing_leaves_before_all_is_computed(
    runners: list[Runner], story: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    offer, begin_write = Offering.offer, Ledger.begin_write

    def offered(self: Offering, items: Sequence[Item]) -> None:
        order.append("offer")
        offer(self, items)

    def written(self: Ledger, frame: PageFrame, now: float) -> list[Placement]:
        order.append("write")
        return begin_write(self, frame, now)

    monkeypatch.setattr(Offering, "offer", offered)
    monkeypatch.setattr(Ledger, "begin_write", written)

    async def scene() -> None:
        config = Config(transfer=replace(TransferConfig(), overlap=False))
        async with house(config) as home:
            pair(home, runners)
            tokens, _ = await home.complete(story, KIVI)
            assert len(tokens) == 12

    asyncio.run(scene())
    assert order.index("write") == order.count("offer")


def test_encoder_wire_pool_and_kernel_have_the_same_bytes(
    runners: list[Runner], story: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest of every layer page of KIVI: as encoded, as committed, as stored, as attended."""
    encoded, attended = set[int](), set[int]()
    wired: dict[Item, int] = {}
    stored: dict[Item, int] = {}
    encode, attend, admit = Kivi.encode, kivi.attend_quantized, DecodeSide.admit

    def encoding(self: Kivi, *args: Any, **options: Any) -> Encoded:
        found = encode(self, *args, **options)
        encoded.update(digest(page.numpy().tobytes()) for page in found.blocks)
        return found

    def attending(q: Tensor, arena: Tensor, pages: Tensor, *rest: Any) -> Any:
        fmt, base, heads = rest[2:5]
        for page in pages.flatten().tolist():
            start = page * ARENA_UNIT + base
            block = arena[start : start + heads * fmt.block_bytes]
            attended.add(digest(block.numpy().tobytes()))
        return attend(q, arena, pages, *rest)

    async def scene() -> None:
        async with house() as home:
            pair(home, runners)
            engine = home.workers["d"].engine

            def admitting(self: DecodeSide, admission: Admission) -> None:
                checklist = Checklist(engine.plan(KIVI), admission.tokens)
                read = ArenaSource(engine.pool.arena, checklist, admission.groups)
                for item, seen in zip(checklist.items, admission.commit.digests, strict=True):
                    if item.kind is Kind.PAGE:
                        wired[item] = seen
                        stored[item] = digest(read(item))
                admit(self, admission)

            home.workers["d"].receiver._on_admit = partial(admitting, home.workers["d"].decode)
            await home.complete(story, KIVI, max_tokens=2)

    monkeypatch.setattr(Kivi, "encode", encoding)
    monkeypatch.setattr(kivi, "attend_quantized", attending)
    asyncio.run(scene())
    assert len(stored) == LAYERS * ((len(story) - 64) // 64)
    assert wired == stored
    assert set(stored.values()) == encoded == attended


def test_leaving_an_answer_frees_both_sides(runners: list[Runner], story: Prompt) -> None:
    async def scene() -> None:
        async with house() as home:
            pair(home, runners)
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
            pair(home, runners)
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
            pair(home, runners)
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


@pytest.mark.parametrize(
    ("codec", "error"),
    [
        ("kivy", ConfigError),
        ("kivi:bits=3", ConfigError),
        ("0:raw", ConfigError),
        ("²-:raw", ConfigError),
        ("\ud800", DisaggError),
    ],
    ids=["name", "value", "plan", "digit", "half-a-character"],
)
def test_a_codec_that_cannot_be_is_refused_by_name(
    codec: str, error: type[DisaggError], runners: list[Runner], story: Prompt
) -> None:
    async def scene() -> None:
        async with house() as home:
            pair(home, runners)
            with pytest.raises(error):
                await home.complete(story, codec)
            await home.empty()

    asyncio.run(scene())


def test_a_bug_in_a_prefill_worker_ends_the_request_at_once(
    runners: list[Runner], story: Prompt, caplog: pytest.LogCaptureFixture
) -> None:
    def plan(spec: str) -> None:
        raise ValueError(f"nobody foresaw {spec}")

    async def scene() -> None:
        async with house(deadline_s=1e6) as home:
            pair(home, runners)
            home.workers["p"].engine.plan = plan  # type: ignore[assignment]
            with pytest.raises(DisaggError, match="ValueError: nobody foresaw raw"):
                await home.complete(story, "raw")
            assert home.workers["p"].prefill.failures["internal"] >= 1

    asyncio.run(scene())
    assert any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ((1,) * 5000, {}, PromptTooLongError),
        ((10**6,), {}, RequestError),
        ((1, 2), {"top_p": 0.0}, RequestError),
    ],
    ids=["too-long", "no-such-token", "no-such-sampling"],
)
def test_a_request_that_cannot_be_is_refused_by_name(
    prompt: Prompt, params: dict[str, float], error: type[DisaggError], runners: list[Runner]
) -> None:
    async def scene() -> None:
        async with house() as home:
            pair(home, runners)
            with pytest.raises(error):
                await home.complete(prompt, KIVI, **params)
            await home.empty()

    asyncio.run(scene())


def test_a_prompt_that_no_pool_can_hold_is_refused(runners: list[Runner], story: Prompt) -> None:
    async def scene() -> None:
        async with house(Config(engine=replace(EngineConfig(), arena_bytes=1 << 20))) as home:
            pair(home, runners)
            with pytest.raises(PromptTooLongError):
                await home.complete(story * 8, "raw")
            await home.empty()

    asyncio.run(scene())


def test_an_answer_that_outgrows_its_pool_ends_with_what_it_has(
    runners: list[Runner], story: Prompt
) -> None:
    async def scene() -> None:
        small = replace(EngineConfig(), arena_bytes=2 << 20, watermark=0.0)
        async with house(Config(engine=small)) as home:
            pair(home, runners)
            tokens, last = await home.complete(story, "raw", max_tokens=2000)
            assert last.finish_reason == "length"
            assert 12 < len(tokens) < 2000
            assert home.router.dispatch.retries == 0
            await home.empty()

    asyncio.run(scene())


def test_prompts_wait_for_room_at_the_decode_worker(runners: list[Runner], story: Prompt) -> None:
    """Four prompts for a decode worker that holds one or two at a time: all are answered."""

    async def scene() -> None:
        small = replace(EngineConfig(), arena_bytes=4 << 20, watermark=0.0)
        async with house(Config(engine=small)) as home:
            pair(home, runners)
            answers = await asyncio.gather(*(home.complete(story * 3, KIVI) for _ in range(4)))
            assert len({tuple(tokens) for tokens, _ in answers}) == 1
            await home.empty()

    asyncio.run(scene())


def test_a_receiver_that_refuses_at_once_is_asked_less_and_less_and_the_bytes_count(
    runners: list[Runner], story: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, asked, refusals = Ledger.reserve, list[float](), 3

    def reserved(self: Ledger, request: Request, now: float) -> Waiter:
        asked.append(now)
        if len(asked) <= refusals:
            raise CapacityError("the queue is full")
        return reserve(self, request, now)

    async def scene() -> None:
        config = Config(transfer=replace(TransferConfig(), dedup=False))
        async with house(config) as home:
            pair(home, runners)
            _, plain = await home.complete(story, KIVI)
            monkeypatch.setattr(Ledger, "reserve", reserved)
            _, last = await home.complete(story, KIVI)
            gaps = [later - sooner for sooner, later in pairwise(asked)]
            assert len(gaps) == refusals
            assert all(gap >= 0.05 * 2**i for i, gap in enumerate(gaps))
            more = last.kv["wire_bytes"] - plain.kv["wire_bytes"]  # type: ignore[operator]
            assert more > refusals * 60  # a request has a name of 32 characters, and more
            await home.empty()

    asyncio.run(scene())


def test_another_model_is_refused_by_its_fingerprint(
    runners: list[Runner], story: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with house() as home:
            monkeypatch.setattr(runners[1], "fingerprint", "another")
            pair(home, runners)
            with pytest.raises(LayoutError, match="model"):
                await home.complete(story, KIVI)
            await home.empty()

    asyncio.run(scene())


def test_a_decode_worker_takes_no_prompts_and_a_stale_epoch_no_work(runners: list[Runner]) -> None:
    async def scene() -> None:
        async with house() as home:
            pair(home, runners)
            prefill, decode = home.workers["p"], home.workers["d"]
            work = Submit("r", 1, Work.PREFILL, decode.epoch, (1, 2))
            with pytest.raises(RequestError, match="decode"):
                await decode.submit(work)
            with pytest.raises(ReservationError, match="epoch"):
                await prefill.submit(replace(work, epoch=prefill.epoch - 1))

    asyncio.run(scene())


def test_a_fenced_worker_drops_what_it_decodes(runners: list[Runner], story: Prompt) -> None:
    async def scene() -> None:
        async with house() as home:
            pair(home, runners)
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
            pair(home, runners)
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
            pair(home, runners)
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
            pair(home, runners)
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
    def damaged(parts: Sequence[Buffer]) -> bytes:
        frame = bytearray(b"".join(parts))
        frame[-1] ^= 1
        return frame_message([bytes(frame[:-3] if damage == "cut" else frame)])

    monkeypatch.setattr(outbox, "frame_message", damaged)

    async def scene() -> None:
        async with house() as home:
            pair(home, runners)
            with pytest.raises(CorruptFrameError) as caught:
                await home.complete(story, KIVI)
            assert caught.value.exit_code == 6
            await home.empty()

    asyncio.run(scene())
