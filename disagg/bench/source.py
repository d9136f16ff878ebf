"""The process that sends prompts: a prefill worker's end of a hand-off, without torch.

It sends whatever bytes lie in its arena; `encoder.py` is the same process with an encoder in it.
"""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from disagg.bench.child import cpu_seconds
from disagg.bench.link import CONGESTION, push_stream
from disagg.bench.sink import EPOCH, MODEL
from disagg.plan import Plan
from disagg.pool import Arena, HostArena, Pool
from disagg.state import GroupState, allocate_group
from disagg.transfer.channel import Link, connect, tune_malloc
from disagg.transfer.items import KIND_ORDER, ArenaSource, Checklist
from disagg.transfer.messages import Request
from disagg.transfer.pace import Pace
from disagg.transfer.security import Security
from disagg.transfer.sender import Sender
from disagg.transfer.sending import Options, Receipt
from disagg.wire import Item

DEADLINE_S = 3600.0


@dataclass(frozen=True)
class Prompt:
    """A prompt's records in an arena of its own."""

    spec: str
    plan: Plan
    tokens: int
    arena: Arena
    states: list[GroupState]

    @cached_property
    def items(self) -> list[Item]:
        """Its items kind by kind, so that frames are full."""
        items = Checklist(self.plan, self.tokens).items
        return sorted(items, key=lambda item: (KIND_ORDER.index(item.kind), item.group))


@dataclass(frozen=True)
class Sent:
    """One prompt sent.

    began_at:  when its first layer had its turn, on the monotonic clock of the host
    seconds:   from then to the acknowledgement
    offered_s: of these, until the last layer was offered
    cpu_s:     processor time of the sending process
    """

    rid: str
    began_at: float
    seconds: float
    offered_s: float
    cpu_s: float
    receipt: Receipt


class Source:
    """What a benchmark asks of it."""

    def __init__(self) -> None:
        tune_malloc()
        self._stack = AsyncExitStack()
        self._links: dict[str, Link] = {}
        self._prompts: dict[str, Prompt] = {}
        self._rids = map(str, itertools.count())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def connect(self, name: str, address: str, security: Security | None) -> None:
        """A link to a sink, under a name."""
        self._links[name] = connect(address, security, CONGESTION)
        self._stack.push_async_callback(self._links[name].close)

    async def fill(self, spec: str, plan: Plan, tokens: int, slabs: int, slab_bytes: int) -> None:
        """Make a prompt of arbitrary bytes."""
        buffer = np.full(slabs * slab_bytes, 0, np.uint8)  # in huge pages, as the arena of a worker
        pool = Pool(HostArena(buffer.data), slab_bytes)
        states = [allocate_group(group, tokens, pool) for group in plan.groups]
        prompt = Prompt(spec, plan, tokens, pool.arena, states)
        checklist = Checklist(plan, tokens)
        read = ArenaSource(prompt.arena, checklist, states)
        for number, item in enumerate(prompt.items):
            view = read(item)
            view[:] = bytes([number % 251]) * view.nbytes
        self._prompts[spec] = prompt

    async def send(self, link: str, spec: str, pace: Pace | None, frame_bytes: int) -> Sent:
        """Send a prompt whose bytes are there."""

        async def offer_all(prompt: Prompt, sender: Sender) -> None:
            sender.offer(prompt.items)

        return await self._send(link, self._prompts[spec], pace, frame_bytes, offer_all)

    async def send_for(
        self, seconds: float, link: str, spec: str, bytes_per_s: float | None, frame_bytes: int
    ) -> tuple[float, float, int]:
        """Send a prompt again and again: when that began and ended, and the bytes of records."""
        pace = bytes_per_s and Pace(bytes_per_s, frame_bytes)
        began, nbytes = time.monotonic(), 0
        while time.monotonic() < began + seconds:
            sent = await self.send(link, spec, pace or None, frame_bytes)
            nbytes += sent.receipt.payload_bytes
        return began, time.monotonic(), nbytes

    async def send_raw(self, host: str, port: int, spec: str) -> tuple[float, float]:
        """Send as many bytes of a prompt's arena over a socket: seconds, processor seconds."""
        prompt = self._prompts[spec]
        nbytes = Checklist(prompt.plan, prompt.tokens).total_bytes
        cpu, began = cpu_seconds(), time.perf_counter()
        count = await asyncio.to_thread(push_stream, host, port, prompt.arena.read(0, nbytes))
        assert count == nbytes
        return time.perf_counter() - began, cpu_seconds() - cpu

    async def _send(
        self,
        link: str,
        prompt: Prompt,
        pace: Pace | None,
        frame_bytes: int,
        offer: Callable[[Prompt, Sender], Awaitable[None]],
    ) -> Sent:
        """Reserve, let `offer` hand over the items, and wait for the acknowledgement."""
        plan, tokens = prompt.plan, prompt.tokens
        request = Request(
            next(self._rids), 0, EPOCH, tokens, MODEL, plan.fingerprint, spec=prompt.spec
        )
        read = ArenaSource(prompt.arena, Checklist(plan, tokens), prompt.states)
        options = Options(deadline_s=DEADLINE_S, frame_bytes=frame_bytes, pace=pace)
        sender = Sender(self._links[link], request, plan, read, options)
        await sender.reserve()
        cpu, began_at, began = cpu_seconds(), time.monotonic(), time.perf_counter()
        running = asyncio.create_task(sender.run())
        await offer(prompt, sender)
        offered = time.perf_counter()
        sender.finish(0)
        receipt = await running
        return Sent(
            rid=request.rid,
            began_at=began_at,
            seconds=time.perf_counter() - began,
            offered_s=offered - began,
            cpu_s=cpu_seconds() - cpu,
            receipt=receipt,
        )
