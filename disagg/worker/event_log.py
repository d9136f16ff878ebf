"""What a worker has to say, kept until the router has it, and who that router is. On the io loop.

say ──► record of the request ──► the router that follows
             │                        one that comes back names what it has and hears the rest
             └── the router tells to forget it: when it is over, or given up

A worker follows one router at a time: another one is refused until the first is gone.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import suppress

from disagg.errors import ConfigError
from disagg.transfer.messages import Load, StepEvents, TokenEvent

HEARTBEAT_S = 1.0  # a step without events, so that silence means something


class EventLog:
    """The outputs of a worker, by request. `load`: what it could take now."""

    def __init__(self, load: Callable[[], Load] = Load):
        self.router = ""  # who follows, or followed last
        self._load = load
        self._records: dict[
            str, list[TokenEvent]
        ] = {}  # of one attempt of each request
        self._inbox: asyncio.Queue[list[TokenEvent]] | None = None  # of who follows now

    @property
    def kept(self) -> int:
        """Requests of which something was said that no router has told to forget."""
        return len(self._records)

    @property
    def followed(self) -> bool:
        """Whether a router listens."""
        return self._inbox is not None

    def check(self, router: str) -> None:
        """ConfigError while another router than this one follows."""
        if self.followed and router != self.router:
            raise ConfigError(
                f"this worker follows router {self.router}, not {router}; two services cannot "
                "share workers: stop one, or give each a cluster of its own"
            )

    def say(self, events: Iterable[TokenEvent]) -> None:
        """Tell the router, and remember; without events, only what could be taken now.

        Figures are the last of a hand-off: said once, and with them it is forgotten.
        """
        events = list(events)
        for event in events:
            record = self._records.setdefault(event.rid, [])
            if record and record[0].attempt < event.attempt:
                record.clear()
            record.append(event)
            if event.stats and event.token is None:
                del self._records[event.rid]
        if self._inbox is not None:
            self._inbox.put_nowait(events)

    async def subscribe(
        self, have: Mapping[str, int], router: str = ""
    ) -> AsyncGenerator[StepEvents]:
        """What a router lacks, then everything new; a step without events from time to time.

        have: rid -> tokens that it has, of all requests that it cares about
        Ends when the same router subscribes again. ConfigError while another one follows.
        """
        self.check(router)
        self.router = router
        inbox: asyncio.Queue[list[TokenEvent]] = asyncio.Queue()
        self._inbox = inbox
        try:
            yield self._step(
                event
                for rid, record in self._records.items()
                for event in record
                if event.token is None
                or event.finish_reason
                or event.index >= have.get(rid, 0)
            )
            while self._inbox is inbox:
                events: list[TokenEvent] = []
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        events = await inbox.get()
                while (
                    not inbox.empty()
                ):  # a slow router hears all that happened meanwhile at once
                    events += inbox.get_nowait()
                yield self._step(events)
        finally:
            if self._inbox is inbox:
                self._inbox = None

    def last(self, rid: str, attempt: int) -> TokenEvent | None:
        """What was said last of an attempt, unless a router has told to forget it."""
        record = self._records.get(rid, [])
        return record[-1] if record and record[-1].attempt == attempt else None

    def forget(self, rid: str, attempt: int) -> None:
        """An attempt was given up: nothing about it needs to be kept."""
        record = self._records.get(rid)
        if record and record[0].attempt <= attempt:
            del self._records[rid]

    def clear(self) -> None:
        """Forget everything."""
        self._records.clear()

    def _step(self, events: Iterable[TokenEvent]) -> StepEvents:
        return StepEvents(tuple(events), self._load())
