"""The events of a worker, kept until its router has them, and who that router is. On the io loop.

publish ──► record of the request ──► the router that follows
             │                        when it comes back, it gets the events that it lacks
             ├── tokens that the router acknowledges are dropped
             └── forgotten when the router aborts the request: it is over, or given up

A worker follows one router at a time: another one is refused until the first is gone.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from disagg.errors import ConfigError
from disagg.transfer.messages import Load, StepEvents, TokenEvent
from disagg.worker.event_record import EventRecord

HEARTBEAT_S = 1.0  # a step without events, so that silence means something


class EventLog:
    """The events of a worker, by request. `load`: returns what the worker could take now.

    router: the one that follows, or followed last
    """

    def __init__(self, load: Callable[[], Load] = Load):
        self.router = ""
        self._load = load
        # by rid, the events of its latest attempt
        self._records: dict[str, EventRecord] = {}
        # of the router that follows now
        self._inbox: asyncio.Queue[list[TokenEvent]] | None = None

    @property
    def num_requests(self) -> int:
        """Requests with events that no router has asked to forget."""
        return len(self._records)

    @property
    def is_followed(self) -> bool:
        """Whether a router listens."""
        return self._inbox is not None

    def check(self, router: str) -> None:
        """ConfigError while another router than this one follows."""
        if self.is_followed and router != self.router:
            raise ConfigError(
                f"this worker follows router {self.router}, not {router}; two services cannot "
                "share workers: stop one, or give each a cluster of its own"
            )

    def publish(self, events: Iterable[TokenEvent] = ()) -> None:
        """Send events to the router and keep them; the load of the worker goes with them."""
        events = list(events)
        for event in events:
            self._keep(event)
        if self._inbox is not None:
            self._inbox.put_nowait(events)

    async def subscribe(
        self, have: Mapping[str, int], router: str = ""
    ) -> AsyncGenerator[StepEvents]:
        """The events that a router lacks, then every new one; an empty step from time to time.

        have: rid -> number of tokens that it has, for all its requests on this worker

        Ends when the same router subscribes again. ConfigError while another one follows.
        """
        self.check(router)
        self.router = router
        inbox: asyncio.Queue[list[TokenEvent]] = asyncio.Queue()
        self._inbox = inbox
        try:
            yield self._step(self._missing_events(have))
            while self._inbox is inbox:
                events: list[TokenEvent] = []
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        events = await inbox.get()
                # a slow router gets all that happened meanwhile at once
                while not inbox.empty():
                    events += inbox.get_nowait()
                yield self._step(events)
        finally:
            if self._inbox is inbox:
                self._inbox = None

    def acknowledge(self, have: Mapping[str, int]) -> None:
        """Drop tokens that the router has: by rid, those below an index."""
        for rid, num_tokens in have.items():
            if (record := self._records.get(rid)) is not None:
                record.drop_below(num_tokens)

    def last_event(self, rid: str, attempt: int) -> TokenEvent | None:
        """The last event of an attempt, unless it was forgotten."""
        record = self._records.get(rid)
        if record is not None and record.attempt == attempt:
            return record.last
        return None

    def forget(self, rid: str, attempt: int) -> None:
        """An attempt was given up: drop its events."""
        record = self._records.get(rid)
        if record is not None and record.attempt <= attempt:
            del self._records[rid]

    def clear(self) -> None:
        """Forget everything."""
        self._records.clear()

    def _keep(self, event: TokenEvent) -> None:
        """Add an event to the record of its attempt; an attempt that a later one replaced has none.

        Figures are the last event of a hand-off: sent once, and its record is forgotten.
        """
        record = self._records.get(event.rid)
        if record is None or record.attempt < event.attempt:
            self._records[event.rid] = EventRecord(event)
        elif record.attempt == event.attempt:
            record.append(event)
        else:
            return
        if event.token is None and event.stats:
            del self._records[event.rid]

    def _missing_events(self, have: Mapping[str, int]) -> Iterator[TokenEvent]:
        for rid, record in self._records.items():
            yield from record.lacked(have.get(rid, 0))

    def _step(self, events: Iterable[TokenEvent]) -> StepEvents:
        return StepEvents(tuple(events), self._load())
