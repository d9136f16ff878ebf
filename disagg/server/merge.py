"""The deltas of several answers in one stream."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal

from disagg.errors import CancelledError, reason_of
from disagg.server.output_text import TextDelta

FIRST_WAIT_S = 1.0  # without any delta, until it is said that there is none
WAIT_S = 10.0  # and then again

# None: a stream has ended
QueueItem = tuple[int, TextDelta] | Exception | Literal["waiting"] | None


async def merged(
    streams: Sequence[AsyncGenerator[TextDelta]],
) -> AsyncGenerator[tuple[int, TextDelta] | None]:
    """The deltas of all streams as they arrive, each with the index of its stream.

    None: nothing has arrived for FIRST_WAIT_S at the beginning, or for some WAIT_S.
    Consecutive deltas of one stream that wait for a slow client are joined. The first error ends
    the iteration and cancels the other streams with its reason; leaving it closes them.
    """
    reason = CancelledError.reason
    queue = _DeltaQueue()
    queue.watch(FIRST_WAIT_S)

    async def read(index: int, stream: AsyncGenerator[TextDelta]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    queue.put((index, delta))
            queue.put(None)
        except Exception as error:
            queue.put(error)

    tasks = [
        asyncio.create_task(read(index, stream)) for index, stream in enumerate(streams)
    ]
    try:
        open_streams = len(tasks)
        while open_streams:
            await queue.has_items.wait()
            item = queue.pop()
            if isinstance(item, Exception):
                reason = reason_of(item)
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield None if item == "waiting" else item
    finally:
        queue.stop_watching()
        for task in tasks:
            task.cancel(reason)
        await asyncio.gather(*tasks, return_exceptions=True)


class _DeltaQueue:
    """Indexed deltas, errors, and ends of streams, in order of arrival."""

    def __init__(self) -> None:
        self._items: deque[QueueItem] = deque()
        self.has_items = asyncio.Event()
        self._is_quiet = True  # since the timer was set
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, wait_s: float) -> None:
        """Add "waiting" if nothing arrives for this long, and again after every WAIT_S."""
        self._is_quiet = True
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(wait_s, self._look)

    def stop_watching(self) -> None:
        """No more items are of interest."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if self._is_quiet and not self._items:
            self.put("waiting")
        self.watch(WAIT_S)

    def put(self, item: QueueItem) -> None:
        """Add an item, joined with the last one if both are deltas of one stream."""
        self._is_quiet = False
        last = self._items[-1] if self._items else None
        if isinstance(item, tuple) and isinstance(last, tuple) and item[0] == last[0]:
            index, delta = item
            self._items[-1] = (index, last[1].joined(delta))
        else:
            self._items.append(item)
        self.has_items.set()

    def pop(self) -> QueueItem:
        """The oldest item, once `has_items` is set."""
        item = self._items.popleft()
        if not self._items:
            self.has_items.clear()
        return item
