"""The deltas of several answers in one stream."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal

from disagg.errors import CancelledError, reason_of
from disagg.server.output_text import TextDelta, joined

FIRST_WAIT_S = 1.0  # without any delta, until it is said that there is none
WAIT_S = 10.0  # and then again

# None: a stream has ended
Note = Exception | Literal["waiting"] | None


async def merged(
    streams: Sequence[AsyncGenerator[TextDelta]],
) -> AsyncGenerator[tuple[int, TextDelta] | None]:
    """The deltas of all streams as they arrive, each with the index of its stream.

    None: nothing has arrived for FIRST_WAIT_S at the beginning, or for some WAIT_S.
    Deltas of one stream that wait for a slow client are joined. The first error ends the iteration
    and cancels the other streams with its reason; leaving it closes them.
    """
    reason = CancelledError.reason
    queue = _DeltaQueue()
    queue.watch(FIRST_WAIT_S)

    async def read(index: int, stream: AsyncGenerator[TextDelta]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    queue.add(index, delta)
            queue.note(None)
        except Exception as error:
            queue.note(error)

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
    """Deltas that wait, joined for each stream, and then notes: errors and ends of streams."""

    def __init__(self) -> None:
        self._deltas: dict[
            int, list[TextDelta]
        ] = {}  # by stream, the longest waiting first
        self._notes: deque[Note] = deque()
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
        if self._is_quiet and not self.has_items.is_set():
            self.note("waiting")
        self.watch(WAIT_S)

    def add(self, index: int, delta: TextDelta) -> None:
        """The next delta of a stream."""
        self._is_quiet = False
        self._deltas.setdefault(index, []).append(delta)
        self.has_items.set()

    def note(self, note: Note) -> None:
        """What is told after all deltas."""
        self._is_quiet = False
        self._notes.append(note)
        self.has_items.set()

    def pop(self) -> tuple[int, TextDelta] | Note:
        """The deltas of the stream that has waited longest, or a note; once `has_items` is set."""
        item: tuple[int, TextDelta] | Note
        if self._deltas:
            index = next(iter(self._deltas))
            item = index, joined(self._deltas.pop(index))
        else:
            item = self._notes.popleft()
        if not self._deltas and not self._notes:
            self.has_items.clear()
        return item
