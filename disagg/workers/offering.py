"""One prompt between the engine's thread, which computes it, and the io loop, which sends it.

From a device its pages come by way of the host: copied beside the kernels, waited for by a thread.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor

from disagg.engine.messages import Prefilled
from disagg.plan import Plan
from disagg.pool import Arena
from disagg.state import GroupState
from disagg.transfer.items import ArenaSource, Checklist
from disagg.transfer.sender import Sender
from disagg.transfer.sending import Receipt
from disagg.wire import Item

ENCODE_MS = "encode_ms"  # what a commit calls the time that encoding took


class Offering:
    """The engine's end of a hand-off: called on its thread, passed on to the io loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        arena: Arena,
        tokens: int,
        overlap: bool,
        copies: Executor,
    ):
        self.sender: Sender | None = None
        self._source: ArenaSource | None = None
        self._loop = loop
        self._arena = arena
        self._tokens = tokens
        self._overlap = overlap
        self._copies = copies
        self._kept: list[Item] = []

    # -- on the engine's thread

    def begin(self, plan: Plan, groups: Sequence[GroupState]) -> None:
        """The records are there; from now on they can be read."""
        self._source = ArenaSource(self._arena, Checklist(plan, self._tokens), groups)

    def offer(self, items: Sequence[Item]) -> None:
        """Bytes are final: they may leave, unless nothing shall leave before all is computed."""
        assert self._source is not None
        if not self._overlap:
            self._kept.extend(items)
        elif self._arena.on_host:
            self._loop.call_soon_threadsafe(self._pass, items)
        else:
            self._copies.submit(self._land, items, self._source.stage(items))

    # -- on the thread that waits for copies

    def _land(self, items: Sequence[Item], copied: Callable[[], None]) -> None:
        copied()
        self._loop.call_soon_threadsafe(self._pass, items)

    # -- on the io loop

    def read(self, items: Sequence[Item]) -> list[memoryview]:
        """The bytes of items of one kind and layer group that were offered."""
        assert self._source is not None
        return self._source.read(items)

    def computed(self) -> None:
        """The prompt is done: what was kept back goes out."""
        self._pass(self._kept)

    def _pass(self, items: Iterable[Item]) -> None:
        assert self.sender is not None
        self.sender.offer(items)


def handoff_stats(done: Prefilled, plan: Plan, receipt: Receipt) -> dict[str, int | float | str]:
    """The figures of a hand-off that a client may ask for: bytes of the prompt's KV, milliseconds.

    wire_bytes:   every message of the hand-off, both ways, control included
    cached_bytes: not sent, because the decode worker had them of another prompt
    """
    usage = done.usage
    return {
        "codec": plan.spec,
        "tokens": usage.tokens,
        "fp16_bytes": usage.fp16_bytes,
        "fp8_bytes": usage.fp8_bytes,
        "wire_bytes": receipt.wire_bytes,
        "cached_bytes": receipt.skipped_bytes,
        "resident_bytes": usage.resident_bytes,
        "encode_ms": usage.encode_ms,
        "queue_ms": receipt.queue_ms,
        "wire_ms": receipt.wire_ms,
        "verify_ms": receipt.verify_ms,
        "exposed_ms": receipt.exposed_ms,
        "admit_ms": receipt.admit_ms,
    }
