"""The process that prompts are sent to: a decode worker without a model, and without torch.

The receiver, ledger, pool and server are the ones that serve; what was admitted is
freed when the parent asks.
"""

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Self

import numpy as np

from disagg.bench.child import cpu_seconds
from disagg.bench.link import StreamServer
from disagg.plan import Plan
from disagg.pool import HostArena, Pool
from disagg.transfer.channel import start_server, tune_malloc
from disagg.transfer.messages import Admission
from disagg.transfer.receiver import Receiver
from disagg.transfer.security import Security
from disagg.transfer.terms import Terms

MODEL, EPOCH = "synthetic", 1


class Sink:
    """What a benchmark asks of it."""

    def __init__(self) -> None:
        tune_malloc()
        self._stack = AsyncExitStack()
        self._receivers: list[Receiver] = []  # one for each way in
        self._terms: Terms | None = None
        self._pool: Pool | None = None
        self._admitted: list[Admission] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def open(self, plans: Mapping[str, Plan], num_slabs: int, slab_bytes: int) -> None:
        """A new pool, and the plans of some specs; what listened before is closed."""
        await self._stack.aclose()
        self._receivers.clear()
        buffer = np.full(num_slabs * slab_bytes, 0, np.uint8)  # touched: no page faults later
        self._pool = pool = Pool(HostArena(buffer.data), slab_bytes)
        first = next(iter(plans.values()))
        self._terms = Terms(MODEL, first, EPOCH, pool.arena.nbytes, plan_of=plans.__getitem__)

    async def listen(self, host: str, security: Security | None) -> str:
        """The address of a new receiver before the pool."""
        assert self._pool is not None
        assert self._terms is not None
        receiver = Receiver(self._terms, self._pool, self._pool.arena, self._admit, self._drop)
        self._receivers.append(await self._stack.enter_async_context(receiver))
        handlers = [receiver.serve(host, security)]
        server, address = await start_server(handlers, host, security)
        self._stack.push_async_callback(server.stop, None)
        return address

    async def listen_raw(self, host: str, nbytes: int) -> int:
        """The port of a socket that reads so many bytes into memory."""
        server = StreamServer(host, nbytes)
        self._stack.callback(server.close)
        return server.port

    async def cpu_seconds(self) -> float:
        """Processor time of this process so far."""
        return cpu_seconds()

    async def settle(self) -> int:
        """How many prompts were admitted since the last time; all are freed by then."""
        assert self._pool is not None
        count = len(self._admitted)
        for admission in self._admitted:
            self._free(admission)
        self._admitted.clear()
        self._pool.check_integrity()
        assert not self._pool.referenced_pages
        return count

    def _admit(self, admission: Admission) -> None:
        self._admitted.append(admission)

    def _free(self, admission: Admission) -> None:
        assert self._pool is not None
        for state in admission.groups:
            self._pool.release(list(state.ids()))
        for receiver in self._receivers:
            receiver.finished(admission.rid, admission.attempt)

    def _drop(self, rid: str, attempt: int, reason: str) -> None:
        raise AssertionError(f"attempt {attempt} of {rid} is dropped: {reason}")
