"""How much of a prefill worker's arena prompts for one decode worker may hold.

A prompt keeps its records here until its decode worker has them all. One that is slow or stalled
would fill the arena with prompts that nobody takes, and prompts for the others could not be
computed: so prompts for one decode worker hold at most a share of it, and the next of them waits,
in order, for one of them to end. A prompt that is larger than the share goes alone.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

SHARE = 0.5


class Holding:
    """Bytes held, by decode worker. Lives on the io loop."""

    def __init__(self, arena_bytes: int):
        self._limit = int(SHARE * arena_bytes)
        self._bytes: Counter[str] = Counter()
        self._queues: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # keep the order
        self._ended = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, decode_address: str, nbytes: int) -> AsyncIterator[None]:
        """Wait until a prompt may hold so many bytes; it gives them back at the end."""

        def fits() -> bool:
            held = self._bytes[decode_address]
            return not held or held + nbytes <= self._limit

        async with self._queues[decode_address], self._ended:
            await self._ended.wait_for(fits)
            self._bytes[decode_address] += nbytes
        try:
            yield
        finally:
            self._bytes[decode_address] -= nbytes
            async with self._ended:
                self._ended.notify_all()
