"""Step 6: how fast codecs encode, and KV from one device to another through frames.

Encoding is that of one layer, in place, beside a copy of as many bytes. A hand-off is
between two processes that have an arena on the device each: layers are encoded, copied
to pinned memory on a stream of their own, framed, sent over loopback, verified and
copied into the other arena, also over a paced link. Both ends report their waits.

    sender     encode ─► stage (waits for the copy) ─► frames ══╗
    receiver   arena ◄─ write (seconds on its loop) ◄─ verify ◄═╝
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.gpu import cases
from benchmarks.gpu.attention import Call, make_inputs
from benchmarks.gpu.cases import Case
from benchmarks.gpu.compiling import Compiles
from benchmarks.gpu.layer import DirtyArena, Layer, interpreted
from benchmarks.gpu.setting import Setting
from disagg.bench.child import Child
from disagg.bench.handoff import (
    DEADLINE_S,
    EPOCH,
    MODEL,
    PromptRecords,
    ReceivingEnd,
    SendingEnd,
    Way,
)
from disagg.bench.inputs import SLAB_BYTES, make_prompt, shape_of, slabs_for
from disagg.bench.kernels import SPECS, time_cpu
from disagg.bench.link import LOOPBACK
from disagg.bench.result import Row
from disagg.codecs.planning import KVShape, codec_of, parse_plan
from disagg.engine.arena import DeviceArena
from disagg.kv.arena import Copies
from disagg.kv.page import Item
from disagg.kv.plan import Plan
from disagg.kv.pool import Pool
from disagg.kv.state import allocate_group
from disagg.paged.append import RecordIds
from disagg.paged.layer import LayerRecords, PromptChunk, write_prompt
from disagg.paged.page_tables import upload
from disagg.transfer.control import WorkerClient
from disagg.transfer.messages import Attach
from disagg.transfer.records import ArenaSource, Manifest
from disagg.transfer.reservations import ReceiverPolicy
from disagg.transfer.sender import Sender
from disagg.wire import Ticket

TOKENS, TINY_TOKENS = 8192, 256
ENCODE_ROOM = {"cuda": 1 << 30, "cpu": 8 << 20}
RUNS, TINY_RUNS = 10, 1
TINY_SPECS = (cases.KIVI,)
HANDED = (cases.RAW, cases.KIVI, cases.BANDED, "kivi:bits=2,group=64")
GBPS = (0.0, 25.0)  # 0: as fast as loopback is
ROUNDS, TINY_ROUNDS = 4, 2
TINY_SHAPE = KVShape.uniform(2, 2, 64, "float16")


def rows(setting: Setting) -> Iterator[Row]:
    """Rows of encoding, then of hand-offs."""
    with interpreted() if setting.rehearsal else nullcontext():
        yield from encode_rows(setting)
    yield from hand_off_rows(setting)


# -- encoding


def encode_rows(setting: Setting) -> Iterator[Row]:
    """A row for every codec: gb_per_s of fp16 input, and copies in that time."""
    device, tokens = setting.device, TINY_TOKENS if setting.rehearsal else TOKENS
    nbytes = ENCODE_ROOM[device.type]
    arena = DirtyArena(
        torch.empty(nbytes, dtype=torch.uint8, device=device), nbytes - 128
    )
    kvq = make_inputs(tokens + 512, setting.rehearsal, device)
    for spec in TINY_SPECS if setting.rehearsal else SPECS:
        row: Row = {"what": "encode", "codec": spec, "tokens": tokens}
        compiles = Compiles()
        try:
            with compiles.counting():
                row |= _encode(spec, tokens, arena, kvq, setting.rehearsal)
        except Exception as error:
            row["failure"] = f"{type(error).__name__}: {error}"[:300]
        yield row | {"compiled": compiles.count}


def _encode(
    spec: str,
    tokens: int,
    arena: DirtyArena,
    kvq: tuple[Tensor, Tensor, Tensor],
    rehearsal: bool,
) -> Row:
    arena.clear()
    case = Case(spec, sequences=1)
    layer = Layer(cases.tiny([case])[0] if rehearsal else case, arena)
    k, v, q = kvq
    k, v = k[:, :tokens], v[:, :tokens]
    layer.write_prompt(k, v, q)
    target = torch.empty_like(k), torch.empty_like(v)

    def copy() -> None:
        target[0].copy_(k)
        target[1].copy_(v)

    calls: list[Call] = [copy, partial(layer.encode, 0, k, v, q)]
    runs = TINY_RUNS if rehearsal else RUNS
    copied, us = time_cpu([partial(_finish, call, k.device) for call in calls], runs)
    nbytes = 2 * k.numel() * k.element_size()
    return {
        "milliseconds": us / 1e3,
        "gb_per_s": nbytes / us / 1e3,
        "copies": us / copied,
    }


def _finish(call: Call, device: torch.device) -> None:
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- hand-offs


class TimedArena(DeviceArena):
    """An arena on a device that counts the time its callers wait.

    stage_s: until staged bytes were on the host · write_s: in `write`
    """

    def __init__(self, tensor: Tensor):
        super().__init__(tensor)
        self.stage_s = self.write_s = 0.0

    def stage(self, spans: Sequence[tuple[int, int]], fresh: bool = False) -> Copies:
        copies = super().stage(spans, fresh)

        def wait() -> list[memoryview]:
            began = time.perf_counter()
            measured = copies()
            self.stage_s += time.perf_counter() - began
            return measured

        return wait

    def write(self, pieces: Sequence[tuple[int, memoryview | bytes]]) -> None:
        began = time.perf_counter()
        super().write(pieces)
        self.write_s += time.perf_counter() - began


def pool_on(device: str, nbytes: int) -> tuple[Pool, TimedArena, Tensor]:
    """A pool over bytes of a device; a CPU stands in for one."""
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    arena = TimedArena(tensor)
    return Pool(arena, SLAB_BYTES), arena, tensor


def sum_of(tensor: Tensor) -> int:
    """Of all bytes, in parts: each takes eight times its room."""
    return sum(int(x.sum(dtype=torch.int64)) for x in tensor.split(1 << 26))


class Sink(ReceivingEnd):
    """A decode worker whose arena is on a device."""

    async def open_on(
        self, device: str, plans: Mapping[str, Plan], nbytes: int
    ) -> None:
        """As `open`."""
        self._pool, self._arena, self._tensor = pool_on(device, nbytes)
        self._policy = ReceiverPolicy(MODEL, plans.__getitem__, EPOCH, share=False)

    async def waited(self) -> float:
        """Seconds that its loop spent in writes since the last time."""
        seconds, self._arena.write_s = self._arena.write_s, 0.0
        return seconds

    async def checksum(self) -> int:
        """Of all bytes that arrived; zeros take their place."""
        total = sum_of(self._tensor)
        self._tensor.zero_()
        return total


class Source(SendingEnd):
    """A prefill worker whose arena is on a device."""

    async def fill_on(self, device: str, spec: str, plan: Plan, tokens: int) -> None:
        """Make up a prompt whose layers are alike, and encode them all."""
        nbytes = slabs_for(plan, tokens) * SLAB_BYTES
        pool, self._arena, tensor = pool_on(device, nbytes)
        states = [allocate_group(group, tokens, pool) for group in plan.groups]
        manifest = Manifest(plan, tokens)
        self._prompts[spec] = PromptRecords(manifest, pool.arena, tensor, states)
        await asyncio.to_thread(
            self._encode_layers, self._prompts[spec], lambda _: None
        )

    async def hand_over(self, spec: str, way: Way) -> Row:
        """Encode a prompt and send it, layer by layer: seconds of each part.

        seconds: all · encode_s: until the last layer was started · stage_s: waits for
                 copies
        """
        prompt, channel = self._prompts[spec], self._channel(way)
        if channel.report is None:
            await channel.meet()
        plan, tokens = prompt.manifest.plan, prompt.manifest.tokens
        job = self._job(spec, tokens)
        grant = await WorkerClient(channel.link).reserve(job, way.target.epoch, "")
        ticket = Ticket(grant.nonce, grant.epoch, 0)
        attach = Attach(ticket, way.target.model, plan.fingerprint, tokens)
        source = ArenaSource(prompt.arena, prompt.manifest, prompt.states)
        sender = Sender(channel, attach, plan, DEADLINE_S)
        sender.queue.read_from(source)
        running = asyncio.create_task(sender.run())
        while not (sender.queue.credit or running.done()):
            await asyncio.sleep(1e-3)
        self._arena.stage_s, began = 0.0, time.monotonic()
        loop, copies = asyncio.get_running_loop(), ThreadPoolExecutor(1)

        def land(items: Sequence[Item], wait: Callable[[], None]) -> None:
            wait()
            loop.call_soon_threadsafe(sender.offer, items)

        def ready(items: Sequence[Item]) -> None:
            copies.submit(land, items, source.stage(items))

        await asyncio.to_thread(self._encode_layers, prompt, ready)
        encoded = time.monotonic() - began
        await asyncio.to_thread(copies.shutdown)
        await asyncio.sleep(0)
        sender.finish(first_token=1)
        stats = await running
        seconds = time.monotonic() - began
        nbytes = prompt.manifest.total_bytes
        waits = {"encode_s": encoded, "stage_s": self._arena.stage_s}
        return {
            "seconds": seconds,
            **waits,
            "nbytes": nbytes,
            "wire_bytes": stats.wire_bytes,
        }

    async def checksum(self, spec: str) -> int:
        """Of all bytes of a prompt's records, and what lies between: zeros."""
        return sum_of(self._prompts[spec].tensor)

    def _encode_layers(
        self, prompt: PromptRecords, ready: Callable[[Sequence[Item]], object]
    ) -> None:
        manifest = prompt.manifest
        arena = prompt.tensor
        for layer, index in enumerate(manifest.plan.group_of):
            group = manifest.plan.groups[index]
            record_ids = upload(RecordIds.of(prompt.states[index]), arena.device)
            source = make_prompt(manifest.tokens, group.heads, group.head_dim)  # cached
            chunk = PromptChunk(
                source.k.to(arena.device, torch.float16),
                source.v.to(arena.device, torch.float16),
                total=manifest.tokens,
            )
            records = LayerRecords(group, layer, arena)
            for written in write_prompt(codec_of(group), records, record_ids, chunk):
                ready([Item(written.kind, index, layer, i) for i in written.indices])


def hand_off_rows(setting: Setting) -> Iterator[Row]:
    """A row for every codec and link: medians in milliseconds, GB/s of records.

    encode_ms: until the sender's last kernel was started; stage_ms: its waits for
    copies to the host; write_ms: of the receiver's loop in its arena · alike: both
    arenas have the same bytes
    """
    shape = TINY_SHAPE if setting.rehearsal else shape_of()
    specs = TINY_SPECS if setting.rehearsal else HANDED
    tokens = TINY_TOKENS if setting.rehearsal else TOKENS
    device, plans = (
        setting.device.type,
        {spec: parse_plan(spec, shape) for spec in specs},
    )
    nbytes = max(slabs_for(plan, tokens) for plan in plans.values()) * SLAB_BYTES
    for spec, plan in plans.items():
        if setting.seconds_left < 0:
            return
        try:
            with Child(Source) as source, Child(Sink) as sink:
                sink.ask("open_on", device, {spec: plan}, nbytes)
                source.ask("fill_on", device, spec, plan, tokens)
                yield from _links(setting, spec, source, sink)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"[:300]
            yield {"what": "hand-off", "codec": spec, "failure": failure}


def _links(setting: Setting, spec: str, source: Child, sink: Child) -> Iterator[Row]:
    target = sink.ask("listen", LOOPBACK)
    for gbps in GBPS:
        way = Way(target, direct=True, bytes_per_s=1e9 * gbps / 8 or None)
        measured: list[Row] = []
        for _ in range(TINY_ROUNDS if setting.rehearsal else ROUNDS):
            one = source.ask("hand_over", spec, way)
            alike = source.ask("checksum", spec) == sink.ask("checksum")
            assert sink.ask("settle") == 1
            measured.append(one | {"write_s": sink.ask("waited"), "alike": alike})
        yield _hand_off(spec, gbps, measured[1:])  # the first opened the connection


def _hand_off(spec: str, gbps: float, measured: Sequence[Row]) -> Row:
    times = {
        f"{name}_ms": 1e3 * median(x[f"{name}_s"] for x in measured)
        for name in ("encode", "stage", "write")
    }
    seconds = median(x["seconds"] for x in measured)
    row = {"what": "hand-off", "codec": spec, "link_gbps": gbps or None}
    row |= {
        "milliseconds": 1e3 * seconds,
        "gb_per_s": measured[0]["nbytes"] / seconds / 1e9,
    }
    row |= times | {
        "nbytes": measured[0]["nbytes"],
        "wire_bytes": measured[0]["wire_bytes"],
    }
    if not all(x["alike"] for x in measured):
        row["failure"] = "the arenas differ"
    return row


def headline(rows: list[Row]) -> list[str]:
    """GB/s of encoding and of hand-offs."""
    encoded = [x for x in rows if x["what"] == "encode" and "gb_per_s" in x]
    handed = [x for x in rows if x["what"] == "hand-off" and "gb_per_s" in x]
    lines = [f"{x['codec']} {x['gb_per_s']:,.0f}" for x in encoded]
    lines = [f"encode, GB/s: {', '.join(lines)}"]
    for row in handed:
        link = f"{row['link_gbps']:g} Gb/s" if row["link_gbps"] else "loopback"
        lines.append(
            f"{row['codec']} over {link}: {row['milliseconds']:.0f} ms, "
            f"{row['gb_per_s']:.2f} GB/s; encode {row['encode_ms']:.0f}, "
            f"stage {row['stage_ms']:.0f}, write {row['write_ms']:.0f} ms"
        )
    return lines[:12]
