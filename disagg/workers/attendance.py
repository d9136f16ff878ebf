"""Is a router listening? Without one a worker frees what it has, and in the end leaves."""

import asyncio
from collections.abc import Callable

FIRST_ROUTER_S = 60.0  # a worker that no router ever visits waits this long


class Attendance:
    """Two timers that run while no router listens. Lives on the io loop.

    after `lease_s`:  `give_up` - nobody waits for the tokens any more
    after `orphan_s`: `leave` - the worker has no owner
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lease_s: float,
        orphan_s: float,
        give_up: Callable[[], object],
        leave: Callable[[], object],
    ):
        self._loop = loop
        self._after = [(lease_s, give_up), (orphan_s, leave)]
        self._timers = [loop.call_later(max(FIRST_ROUTER_S, orphan_s), leave)]

    def routers(self, count: int) -> None:
        """So many routers listen now."""
        self.close()
        if count == 0:
            self._timers = [self._loop.call_later(*each) for each in self._after]

    def close(self) -> None:
        """Stop the timers."""
        for timer in self._timers:
            timer.cancel()
