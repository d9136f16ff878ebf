"""The queued requests, in the order in which they are placed: clients take turns.

    client a   a0 a1 a2 a3    its next turn is number 6
    client b   b0 b1          its next turn is number 5
    placed     b0 | a0 b1 | a1 | a2 | a3      a bar ends a turn

Within a turn the lowest rank goes first. So the next request of a client, if it can begin, waits
for at most two of each other client. A request that finds no room gives its turn back.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import merge

from disagg.router.request_state import RequestState

# (False for an exclusive request, rank, serial, request): sorted, and no two are equal
Entry = tuple[bool, float, int, RequestState]
# (False for an exclusive request, turn, rank, serial, request)
Turn = tuple[bool, int, float, int, RequestState]


class RequestQueue:
    """Exclusive requests come first, then one request of each client, then another one of each.

    Within a client, the lowest rank comes first. A request for which a worker is kept free comes no
    later than its rank among all requests says.
    """

    def __init__(self) -> None:
        self._entry_of: dict[str, Entry] = {}  # by rid
        # by client, sorted; clients without any are left out
        self._entries: dict[str, list[Entry]] = {}
        # the latest turn in which a request got room
        self._turn = 0
        # by client, its next turn, if it is a later one
        self._turns: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entry_of)

    def __iter__(self) -> Iterator[RequestState]:
        """The requests as they are now; they may be removed meanwhile."""
        lists = [entries.copy() for entries in self._entries.values()]
        if len(lists) == 1:
            (entries,) = lists
            return (entry[-1] for entry in entries)
        return self._by_turns(lists)

    @property
    def waiting(self) -> dict[str, int]:
        """The number of queued requests by client; only clients that have any."""
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
        """Remove a request that asks for room; it takes its client's next turn."""
        self.discard(request)
        request.turn = self._next_turn(request.client)
        self._turns[request.client] = request.turn + 1

    def give_back(self, request: RequestState) -> None:
        """A request that started got no room: its turn, if it has not passed, is to come."""
        has_passed = request.turn < self._turn
        if not has_passed and request.client in self._turns:
            self._turns[request.client] -= 1

    def end_turn(self, request: RequestState) -> None:
        """A request that started has room. Clients cannot save up earlier turns."""
        self._turn = max(self._turn, request.turn)
        self._turns = {
            client: next_turn
            for client, next_turn in self._turns.items()
            if next_turn > self._turn
        }

    def _next_turn(self, client: str) -> int:
        return max(self._turn, self._turns.get(client, 0))

    def _by_turns(self, lists: list[list[Entry]]) -> Iterator[RequestState]:
        kept_for = [
            request
            for entries in lists
            for *_, request in entries
            if request.has_kept_worker and not request.exclusive
        ]
        kept_for.sort(key=lambda request: -request.rank)
        turns = map(self._turns_of, lists)
        for *_, request in merge(*turns):
            if request.exclusive:
                yield request
                continue
            while kept_for and kept_for[-1].rank <= request.rank:
                yield kept_for.pop()
            if not request.has_kept_worker:
                yield request

    def _turns_of(self, entries: list[Entry]) -> Iterator[Turn]:
        """The requests of one client with their turns. One that does not start uses up no turn.

        So a request without room does not delay others of its client that have some.
        """
        for is_shared, rank, serial, request in entries:
            turn = self._next_turn(request.client)
            yield is_shared, turn, rank, serial, request
