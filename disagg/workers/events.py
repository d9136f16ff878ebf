"""What a worker has to say, kept until the router has it. Lives on the io loop.

say ──► record of the request ──► every subscriber
             │                        a router that comes back names what it has and hears the rest
             └── acknowledged, aborted: forgotten
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from disagg.transfer.work import TokenEvent

HEARTBEAT_S = 1.0  # an empty message, so that silence means something


@dataclass
class Record:
    """What was said about one attempt of a request, and whether the router has it all.

    unnamed: it had ended when a router came and did not name it
    """

    attempt: int
    events: list[TokenEvent] = field(default_factory=list)
    acknowledged: bool = False
    unnamed: bool = False

    @property
    def ended(self) -> bool:
        """Whether nothing follows: the answer's end, an error, or the receipt of a hand-off."""
        last = self.events[-1] if self.events else None
        return last is not None and bool(last.finish_reason or last.error or last.stats)


class Events:
    """The outputs of a worker, by request. `on_change(n)` hears how many routers listen."""

    def __init__(self, on_change: Callable[[int], None] = lambda count: None):
        self._records: dict[str, Record] = {}
        self._subscribers: set[asyncio.Queue[list[TokenEvent]]] = set()
        self._on_change = on_change

    @property
    def kept(self) -> int:
        """Requests with something to say that no router has acknowledged."""
        return len(self._records)

    def say(self, events: Iterable[TokenEvent]) -> None:
        """Tell every router, and remember."""
        events = list(events)
        for event in events:
            record = self._records.get(event.rid)
            if record is None or record.attempt < event.attempt:
                record = self._records[event.rid] = Record(event.attempt)
            record.events.append(event)
            if record.ended and record.acknowledged:
                del self._records[event.rid]
        for subscriber in self._subscribers:
            subscriber.put_nowait(events)

    async def subscribe(self, have: Mapping[str, int]) -> AsyncIterator[list[TokenEvent]]:
        """What a router lacks, then everything new; an empty list from time to time.

        have: rid -> tokens that it has, of all requests that it cares about
        """
        self._drop_unnamed(have)
        inbox: asyncio.Queue[list[TokenEvent]] = asyncio.Queue()
        self._subscribers.add(inbox)
        self._on_change(len(self._subscribers))
        try:
            yield [
                event
                for rid, record in self._records.items()
                for event in record.events
                if event.token is None or event.finish_reason or event.index >= have.get(rid, 0)
            ]
            while True:
                events: list[TokenEvent] = []
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        events = await inbox.get()
                yield events
        finally:
            self._subscribers.discard(inbox)
            self._on_change(len(self._subscribers))

    def acknowledge(self, have: Mapping[str, int]) -> None:
        """A router has so many outputs of these requests, and wants no older ones again."""
        for rid, count in have.items():
            record = self._records.get(rid)
            if record is None:
                continue
            if record.ended:
                del self._records[rid]
            else:
                record.acknowledged = True
                record.events = [event for event in record.events if event.index >= count]

    def forget(self, rid: str, attempt: int) -> None:
        """An attempt was given up: nothing about it needs to be kept."""
        record = self._records.get(rid)
        if record is not None and record.attempt <= attempt:
            del self._records[rid]

    def clear(self) -> None:
        """Forget everything."""
        self._records.clear()

    def _drop_unnamed(self, have: Mapping[str, int]) -> None:
        """Forget what ended and no router wants: what should have told us so was lost.

        Only at the second time: a request may begin and end after the router wrote its names down.
        """
        for rid, record in list(self._records.items()):
            unnamed = record.ended and rid not in have
            if unnamed and record.unnamed:
                del self._records[rid]
            record.unnamed = unnamed
