"""What a receiver does by itself: end leases and waits when they are due, verify what it keeps."""

import asyncio
import contextlib
from collections.abc import Callable

from disagg.transfer.ledger import Ledger

ROOM_CHECK_S = 0.25  # while somebody waits for room
SCRUB_S = 1.0
SCRUB_BYTES = 2 << 20  # at a time: as much as a frame


class Upkeep:
    """Two tasks on the io loop: `tick` when something is due, `scrub(bytes)` from time to time."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Callable[[], float],
        tick: Callable[[], None],
        scrub: Callable[[int], object],
    ):
        self._ledger = ledger
        self._clock = clock
        self._tick = tick
        self._scrub = scrub
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin; needs a running loop."""
        self._tasks = [asyncio.create_task(x) for x in (self._keep_time(), self._keep_verifying())]

    def wake(self) -> None:
        """Something happened: what is due may have changed."""
        self._changed.set()

    async def stop(self) -> None:
        """End; raises what ended a task before."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _due(self) -> float | None:
        """Seconds until there is something to do; None: not before something happens."""
        due = self._ledger.next_event()
        wait_s = None if due is None else max(0.0, due - self._clock())
        if self._ledger.gauges()["waiting"]:
            wait_s = min(wait_s or 0.0, ROOM_CHECK_S)
        return wait_s

    async def _keep_time(self) -> None:
        while True:
            wait_s = self._due()
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            self._tick()
            self._changed.clear()

    async def _keep_verifying(self) -> None:
        while True:
            await asyncio.sleep(SCRUB_S)
            self._scrub(SCRUB_BYTES)
