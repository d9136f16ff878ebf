"""Pages that outlive their owners: each set under a key, until its room is needed.

The cache knows keys and the order of use; the pool counts the owners of a page. An entry is idle
while none of its pages has an owner; only idle entries may be evicted.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from disagg.kv.plan import RecordShape

MAX_STALE = 64  # stale entries of a heap before it is rebuilt


@dataclass(eq=False)
class CachedPages:
    """Pages kept under a key.

    shape: of the first page
    note:  the caller's own, returned with the pages
    used:  when they were last used, in ticks of the cache
    owned: how many of the pages have an owner
    """

    key: bytes
    pages: tuple[int, ...]
    shape: RecordShape
    note: object
    used: int = 0
    owned: int = 0


class PageCache:
    """Kept pages by key, and which of them to evict first: the idle entry not used for longest.

    Only `use` counts as using: an entry that becomes idle again keeps its age, so it may belong
    anywhere in the order of use. Each shape therefore has a heap of (used, key). When an entry is
    used, owned or dropped, its (used, key) stays in the heap, stale, and is skipped when it comes
    to the front. The cost of an eviction does not depend on how many pages are kept.

    entries: in the order of keeping · entry_of: the entry of each kept page
    """

    def __init__(self) -> None:
        self.entries: dict[bytes, CachedPages] = {}
        self.entry_of: dict[int, CachedPages] = {}
        self._order: dict[RecordShape, list[tuple[int, bytes]]] = {}
        self._ticks = 0

    def add(self, entry: CachedPages) -> None:
        """Keep an entry under a key that is not in use; it counts as used now."""
        self.entries[entry.key] = entry
        self.entry_of.update(dict.fromkeys(entry.pages, entry))
        self.use(entry)

    def remove(self, key: bytes) -> CachedPages | None:
        """Keep an entry no longer; None if there is none."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            for page in entry.pages:
                del self.entry_of[page]
        return entry

    def use(self, entry: CachedPages) -> None:
        """Evict this entry last."""
        self._ticks += 1
        entry.used = self._ticks
        if not entry.owned:
            self._push(entry)

    def on_owned(self, page: int) -> None:
        """A kept page without an owner got one."""
        self.entry_of[page].owned += 1

    def on_released(self, page: int) -> None:
        """A kept page lost its last owner."""
        entry = self.entry_of[page]
        entry.owned -= 1
        if not entry.owned:
            self._push(entry)

    def least_recently_used(self, shapes: Iterable[RecordShape]) -> CachedPages | None:
        """The idle entry of these shapes not used for longest; None if there is none."""
        oldest: CachedPages | None = None
        for shape in shapes:
            entry = self._first_idle(shape)
            if entry is not None and (oldest is None or entry.used < oldest.used):
                oldest = entry
        return oldest

    def shapes(self) -> list[RecordShape]:
        """The shapes that have had an idle entry."""
        return list(self._order)

    def _first_idle(self, shape: RecordShape) -> CachedPages | None:
        order = self._order.get(shape, [])
        while order:
            used, key = order[0]
            entry = self.entries.get(key)
            if entry is not None and entry.used == used and not entry.owned:
                return entry
            heappop(order)  # stale
        return None

    def _push(self, entry: CachedPages) -> None:
        """Put an idle entry into the heap of its shape."""
        order = self._order.setdefault(entry.shape, [])
        heappush(order, (entry.used, entry.key))
        if len(order) > 2 * len(self.entries) + MAX_STALE:
            order[:] = sorted(
                (other.used, other.key)
                for other in self.entries.values()
                if other.shape == entry.shape and not other.owned
            )
