"""The queued requests, in the order in which they are placed: clients take turns.

    client a   a0 a1 a2 a3    has had its turn in this round
    client b   b0 b1          has not
    placed     b0 | a0 b1 | a1 | a2 | a3      a bar ends a round

In a round the lowest rank goes first. While a client has a request that can begin, every other
client begins at most two before it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge

from disagg.router.request_state import RequestState

# (False for an exclusive request, rank, serial, request): sorted, and no two are equal
Entry = tuple[bool, float, int, RequestState]
# (False for an exclusive request, round from now on, rank, serial, request)
Turn = tuple[bool, int, float, int, RequestState]


class RequestQueue:
    """Exclusive requests come first, then one of each client, then another one of each.

    Of one client, the lowest rank comes first. A request that a worker is kept for comes no later
    than by its rank among all.
    """

    def __init__(self) -> None:
        self._entry_of: dict[str, Entry] = {}  # by rid
        # by client, sorted; clients without any are left out
        self._entries: dict[str, list[Entry]] = {}
        # clients that had their turn in this round
        self._served: set[str] = set()

    def __len__(self) -> int:
        return len(self._entry_of)

    def __iter__(self) -> Iterator[RequestState]:
        """The requests as they are now; they may be removed meanwhile."""
        lists = [entries.copy() for entries in self._entries.values()]
        if len(lists) == 1:
            return (entry[-1] for entry in lists[0])
        return self._by_turns(lists)

    @property
    def waiting(self) -> dict[str, int]:
        """By client, how many of its requests are queued; only clients that have any."""
        return {client: len(entries) for client, entries in self._entries.items()}

    def add(self, request: RequestState) -> None:
        entry = (not request.exclusive, request.rank, request.serial, request)
        self._entry_of[request.rid] = entry
        insort(self._entries.setdefault(request.client, []), entry)

    def discard(self, request: RequestState) -> None:
        """Remove a request, if it is queued."""
        entry = self._entry_of.pop(request.rid, None)
        if entry is None:
            return
        entries = self._entries[request.client]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._entries[request.client]

    def start(self, request: RequestState) -> None:
        """Remove a request that begins: it takes its client's turn."""
        self.discard(request)
        if request.client in self._served:
            self._served.clear()  # the next round
        self._served.add(request.client)

    def _by_turns(self, lists: list[list[Entry]]) -> Iterator[RequestState]:
        kept_for = [x for entries in lists for x in entries if x[-1].has_kept_worker]
        kept_for.sort(reverse=True)
        for *_, request in merge(*map(self._turns_of, lists)):
            while kept_for and not request.exclusive:
                if kept_for[-1][-1].rank > request.rank:
                    break
                yield kept_for.pop()[-1]
            if request.exclusive or not request.has_kept_worker:
                yield request

    def _turns_of(self, entries: list[Entry]) -> Iterator[Turn]:
        """The requests of one client, each with its round."""
        first = int(entries[0][-1].client in self._served)
        for number, (is_shared, rank, serial, request) in enumerate(entries, first):
            yield is_shared, number, rank, serial, request
