"""The deltas of several answers in one stream."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from disagg.errors import CancelledError, reason_of
from disagg.server.output_text import TextDelta

QueueItem = tuple[int, TextDelta] | Exception | None


async def merged(
    streams: Sequence[AsyncGenerator[TextDelta]],
) -> AsyncGenerator[tuple[int, TextDelta]]:
    """The deltas of all streams as they arrive, each with the index of its stream.

    Consecutive deltas of one stream that wait for a slow client are joined. The first error ends
    the iteration and cancels the other streams with its reason; leaving it closes them.
    """
    reason = CancelledError.reason
    queue = _DeltaQueue()

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
                yield item
    finally:
        for task in tasks:
            task.cancel(reason)
        await asyncio.gather(*tasks, return_exceptions=True)


class _DeltaQueue:
    """Indexed deltas, errors, and None for the end of a stream, in order of arrival."""

    def __init__(self) -> None:
        self._items: deque[QueueItem] = deque()
        self.has_items = asyncio.Event()

    def put(self, item: QueueItem) -> None:
        """Add an item, joined with the last one if both are deltas of one stream."""
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
