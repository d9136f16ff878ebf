"""Two plain workers and real gRPC: a prompt goes through; whatever goes wrong leaves nothing."""

import asyncio
import ctypes
import gc
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

from disagg.bench.result import describe_machine
from disagg.config import Config, EngineConfig, TransferConfig
from disagg.engine.arena import DeviceArena
from disagg.engine.engine import Engine
from disagg.kernels import ops
from disagg.kernels.cpu import library
from disagg.kernels.cpu.step import LayerCalls
from disagg.kernels.formats import PageFormat
from disagg.kernels.sealing import Target
from disagg.kernels.view import View
from disagg.kv.page import ARENA_UNIT, Item, Kind
from disagg.kv.pool import Pool
from disagg.paged import layer as layers
from disagg.transfer.messages import Role
from disagg.transfer.records import ArenaSource, Manifest
from disagg.transfer.reservations import Admission, Reservations
from disagg.wire import WIRE_VERSION, digest
from disagg.worker.decode import DecodeSide
from disagg.worker.handoff import OutgoingHandoff
from tests.transfer.peer import until
from tests.worker.pairs import KIVI, alone, house, paired

LAYERS = 6


@pytest.mark.parametrize(
    "codec", [KIVI, "raw", "0-1:kivi:bits=4;2-:kivi:bits=2,residual=32"]
)
async def test_a_prompt_goes_through_as_in_one_process_and_leaves_nothing(
    codec, home, story
):
    tokens, last = await home.complete(story, codec, max_tokens=32)
    assert tokens == alone(story, codec, 32)
    assert last.finish_reason == "length"
    kv = last.kv
    assert kv["tokens"] == len(story)
    assert kv["fp16_bytes"] == 2 * kv["fp8_bytes"] == len(story) * 6 * 2 * 2 * 64 * 2
    plan = home.workers["d"].engine.plan(codec)
    assert kv["payload_bytes"] == Manifest(plan, len(story)).total_bytes
    assert kv["payload_bytes"] < kv["wire_bytes"] < 1.05 * kv["payload_bytes"]
    assert min(kv["encode_ms"], kv["wire_ms"], kv["verify_ms"], kv["admit_ms"]) > 0
    assert (kv["resident_bytes"], kv["attaches"]) == (plan.nbytes(len(story)), 1)


async def test_a_worker_of_both_roles_hands_nothing_over_and_computes_nothing_twice(
    runners, story
):
    async with house() as home:
        home.add("w", Role.BOTH, runners[0])
        (tokens, one), (again, two) = [
            await home.complete(story, KIVI) for _ in range(2)
        ]
        assert tokens == again
        assert (len(tokens), one.kv["tokens"], one.kv["cached_tokens"]) == (
            12,
            len(story),
            0,
        )
        assert one.kv["wire_bytes"] == two.kv["wire_bytes"] == 0
        assert two.kv["cached_tokens"] > len(story) - 17
        async with aclosing(
            home.router.generate(story, {"max_tokens": 9}, KIVI)
        ) as outputs:
            first = await anext(outputs)  # who stops here has its figures
            assert first.kv["cached_tokens"] == two.kv["cached_tokens"]
        await home.empty()
        home.add("d", Role.DECODE, runners[1])
        await until(lambda: home.router.table.workers.keys() == {"w", "d"})
        home.workers["w"].service.role = Role.PREFILL  # and so the router is told
        home.router.table.workers["w"].info = home.workers["w"].info
        assert (await home.complete(story, KIVI))[0] == tokens
        await home.empty()


async def test_an_answer_of_one_token_ships_nothing(home, runners, story, monkeypatch):
    """Asked for, it never reaches a decode worker; ended by its text, it leaves one at once."""
    (first,), last = await home.complete(story, KIVI, max_tokens=1)
    assert (last.finish_reason, last.kv["wire_bytes"]) == ("length", 0)
    monkeypatch.setattr(runners[0], "info", replace(runners[0].info, eos_ids=(first,)))
    tokens, last = await home.complete(story, KIVI, ignore_eos=False)
    assert (tokens, last.finish_reason) == ([first], "stop")
    await home.empty()
    assert (
        home.workers["d"].engine.pool.gauges()["cached_pages"] == 0
    )  # nothing committed


async def test_workers_of_one_service_speak_the_same(home):
    prefill, decode = home.workers["p"], home.workers["d"]

    status = await prefill.service.status()

    assert prefill.info.speaks == decode.info.speaks == status.speaks
    assert f"model {prefill.info.model}" in status.speaks
    assert f"wire {WIRE_VERSION}" in status.speaks


async def test_a_worker_says_what_its_links_can_do(home, story):
    prefill, decode = home.workers["p"], home.workers["d"]
    address = home.router.peers["d"].info.address
    (line,) = await asyncio.to_thread(prefill.meet, [address])
    assert line.startswith(f"link to {address}: ")
    await home.complete(story, KIVI)
    info = (await prefill.service.status()).info
    (link,) = info["links"]
    assert (link["peer"], link["transport"]) == (address, "gRPC over TCP")
    assert min(link["round_trip_ms"], link["gbytes_per_s"]) > 0
    assert info["failures"] == {}
    assert (await decode.service.status()).info["links"] == []


async def test_a_worker_that_holds_nothing_fits_as_many_tokens_as_it_said_at_the_start(
    home,
):
    for worker in home.workers.values():
        assert (
            (await worker.service.status()).info["tokens_fit"] == worker.info.room > 0
        )


async def test_where_no_c_library_was_built_the_reference_serves_and_all_say_so_once(
    runners, story, monkeypatch, caplog
):
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(library, "paths", library.paths.__wrapped__)
    message = "torch: no C library, the reference serves"
    async with house() as home:
        home.add("w", Role.BOTH, runners[0])
        assert (await home.complete(story, KIVI))[0] == alone(story, KIVI)
        assert (await home.workers["w"].service.status()).info["backend"] == message
    says = f"w: {message}, computes in float32"
    assert [x for x in caplog.messages if "torch" in x] == [says]
    assert describe_machine()["kernels"] == message


async def test_frames_may_go_over_a_socket_of_their_own(runners, story):
    async with paired(
        runners, Config(transfer=TransferConfig(channel="direct"))
    ) as home:
        assert (await home.complete(story, KIVI))[0] == alone(story, KIVI)


async def test_only_the_thread_of_the_engine_computes_with_several(
    runners, monkeypatch
):
    thread_counts, run, before = [], Engine.run, torch.get_num_threads()

    def counted(*arguments: Any) -> None:
        thread_counts.append(torch.get_num_threads())
        run(*arguments)

    monkeypatch.setattr(Engine, "run", counted)
    async with paired(
        runners, Config(KIVI, engine=EngineConfig(torch_threads=before + 1))
    ):
        pass
    assert thread_counts == [before + 1] * 2
    assert torch.get_num_threads() == before
    torch.set_num_threads(before)  # of threads that begin later


def test_what_was_loaded_is_not_looked_at_again() -> None:
    subprocess.run([sys.executable, "-c", SETTLES], check=True, timeout=60)


SETTLES = """
import gc
from disagg.worker.worker import settle_memory

loaded = [[number] for number in range(100_000)]
settle_memory()
assert gc.get_freeze_count() >= 100_000
later = [[number] for number in range(1_000)]
assert len(gc.get_objects()) < 50_000
"""


async def test_pages_of_a_device_go_by_way_of_the_host(runners, story, monkeypatch):
    """A CPU stands for the device: its arena is only reached by copies."""

    def on_device(
        nbytes: int, slab_bytes: int, device: torch.device, scratch: int
    ) -> tuple[Pool, Tensor]:
        tensor = torch.empty(nbytes + scratch, dtype=torch.uint8, device=device)
        return Pool(DeviceArena(tensor[:nbytes]), slab_bytes), tensor

    figures = []
    for _ in range(2):
        async with paired(runners) as home:
            figures.append(await home.complete(story, KIVI))
        monkeypatch.setattr("disagg.engine.engine.make_pool", on_device)
    (plain, last), (staged, end) = figures
    assert staged == plain
    assert end.kv["wire_bytes"] == pytest.approx(last.kv["wire_bytes"], rel=0.01)


async def test_what_left_is_freed_without_the_garbage_collector(
    home, story, monkeypatch
):
    """Its collections stop every thread, the longer the more items prompts had."""
    begin, handoffs = OutgoingHandoff.begin, list[ref[OutgoingHandoff]]()

    def begun(self: OutgoingHandoff, *arguments: Any) -> None:
        handoffs.append(ref(self))
        begin(self, *arguments)

    monkeypatch.setattr(OutgoingHandoff, "begin", begun)
    gc.disable()
    try:
        for _ in range(2):  # the engine keeps what its last step was of
            await home.complete(story, KIVI)
        await until(lambda: len(handoffs) == 2 and handoffs[0]() is None)
    finally:
        gc.enable()


async def test_the_items_of_a_hand_off_are_not_listed_on_the_io_loop(
    home, story, monkeypatch
):
    """A long prompt has 65,536 of them."""
    listed: list[str] = []
    items = Manifest.items.func

    def noted(manifest: Manifest) -> tuple[Item, ...]:
        listed.append(threading.current_thread().name)
        return items(manifest)

    monkeypatch.setattr(Manifest.items, "func", noted)

    first, _ = await home.complete(story, KIVI)
    assert listed == []  # the engine offered all items

    again, _ = await home.complete(story, KIVI)
    assert again == first
    assert listed
    assert not any(name.endswith("-io") for name in listed)


@pytest.mark.parametrize("overlap", [True, False])
async def test_pages_leave_before_the_last_layer_or_when_done(
    overlap, runners, story, monkeypatch
):
    """With overlap the engine waits before the last layer until some are at the other worker."""
    order, arrived = list[str](), threading.Event()
    offer, store = OutgoingHandoff.offer, Reservations.store

    def offered(self: OutgoingHandoff, items: Sequence[Item]) -> None:
        order.append("offer")
        offer(self, items)
        if overlap and items[0].layer == LAYERS - 2:
            assert arrived.wait(30)

    def stored(self: Reservations, *event: Any) -> None:
        order.append("write")
        arrived.set()
        store(self, *event)

    monkeypatch.setattr(OutgoingHandoff, "offer", offered)
    monkeypatch.setattr(Reservations, "store", stored)
    async with paired(
        runners, Config(transfer=TransferConfig(overlap=overlap))
    ) as home:
        assert len((await home.complete(story, KIVI))[0]) == 12
    assert order.count("offer") >= LAYERS
    assert (order.index("write") == order.count("offer")) == (not overlap)


@pytest.mark.parametrize("one_call", [False, True])
async def test_encoder_wire_pool_and_kernel_have_the_same_bytes(
    one_call, home, story, monkeypatch
):
    """The digest of every layer page of KIVI: as encoded, as committed, as stored, as attended.

    one_call: by one call of the C library for each layer, from what that call is told
    """
    if one_call and not library.paths():
        pytest.skip("no C library was built")
    encoded, attended = set[int](), set[int]()
    wired: dict[Item, int] = {}
    stored: dict[Item, int] = {}
    encode, views_of = ops.encode, layers.views_of
    run, admit = LayerCalls.run, DecodeSide.admit

    def encoding(
        *args: Any, target: Target | None = None
    ) -> tuple[Tensor, Tensor | None]:
        blocks, _ = encode(*args)
        encoded.update(digest(page.numpy().tobytes()) for page in blocks)
        return encode(*args, target=target)

    def attending(*args: Any) -> list[View]:
        views = views_of(*args)
        for view in views:
            for page in (
                view.pages.flatten().tolist()
                if isinstance(view.fmt, PageFormat)
                else ()
            ):
                start = page * ARENA_UNIT + view.base
                block = view.arena[start : start + view.heads * view.fmt.block_bytes]
                attended.add(digest(block.numpy().tobytes()))
        return views

    def calling(self: LayerCalls, rank: int, *args: Any) -> Tensor:
        table = self._tables[0]  # of pages; the other one is of the tail
        nbytes = (
            self._job.attention.heads
            * library.FormatC.from_address(table.format).block_bytes
        )
        start = table.arena + table.base + rank * nbytes
        for page in (ctypes.c_int32 * table.num_pages).from_address(table.pages):
            attended.add(digest(ctypes.string_at(start + page * ARENA_UNIT, nbytes)))
        return run(self, rank, *args)

    engine = home.workers["d"].engine

    def admitting(self: DecodeSide, admission: Admission) -> None:
        manifest = Manifest(engine.plan(KIVI), admission.commit.tokens)
        source = ArenaSource(engine.pool.arena, manifest, admission.groups)
        for item, page_digest in zip(
            manifest.items, admission.commit.digests, strict=True
        ):
            if item.kind is Kind.PAGE:
                wired[item] = page_digest
                (data,) = source.read([item])
                stored[item] = digest(data)
        admit(self, admission)

    monkeypatch.setattr(ops, "encode", encoding)
    if one_call:
        monkeypatch.setattr(LayerCalls, "run", calling)
    else:
        monkeypatch.setattr(layers, "views_of", attending)
        monkeypatch.setattr(layers, "prepare", lambda *_: None)
    rules = home.workers["d"].service.receiver.reservations
    rules._on_admit = partial(admitting, home.workers["d"].service.decode)
    await home.complete(story, KIVI, max_tokens=2)
    assert len(stored) == LAYERS * ((len(story) - 64) // 64)
    assert wired == stored
    assert set(stored.values()) == encoded == attended
