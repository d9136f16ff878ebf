"""The queued requests, in the order in which they are placed."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from disagg.router.request_state import RequestState

# (False for an exclusive request, rank, serial, request): sorted, and no two are equal
Entry = tuple[bool, float, int, RequestState]


class RequestQueue:
    """Held sorted: exclusive requests first, then by rank. A request keeps its place in it."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._entry_of: dict[str, Entry] = {}  # by rid

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestState]:
        """The requests as they are now; they may be removed meanwhile."""
        for entry in self._entries.copy():
            yield entry[-1]

    def add(self, request: RequestState) -> None:
        entry = (not request.exclusive, request.rank, request.serial, request)
        self._entry_of[request.rid] = entry
        insort(self._entries, entry)

    def discard(self, request: RequestState) -> None:
        """Remove a request, if it is queued."""
        entry = self._entry_of.pop(request.rid, None)
        if entry is not None:
            del self._entries[bisect_left(self._entries, entry)]
