"""A pool whose pages may outlive their owners: kept under a key until their room is needed.

    owned ──keep──► owned and kept ──last owner releases──► cached ──room is needed──► free
                          ▲                                   │
                          └───────────────take────────────────┘

Cached pages are counted apart: they are nobody's, and an allocation that finds no room takes those
least recently used. What somebody owns is never taken.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from disagg.errors import LayoutError
from disagg.plan import RecordShape
from disagg.pool import DEFAULT_SLAB_BYTES, Arena, Pool


@dataclass(frozen=True)
class Kept:
    """Pages that stay for whoever asks for them by key; `note` is of whoever kept them."""

    pages: tuple[int, ...]
    note: object


class KeepingPool(Pool):
    """A pool that is a cache beside: `claim` evicts, `take` finds again."""

    def __init__(self, arena: Arena, slab_bytes: int = DEFAULT_SLAB_BYTES):
        super().__init__(arena, slab_bytes)
        self.cached_pages = 0  # kept, and owned by nobody else
        self.cached_bytes = 0
        self._kept: dict[bytes, Kept] = {}  # those least recently used first
        self._kept_pages: set[int] = set()

    # -- what outlives its owners

    def keep(self, key: bytes, pages: Sequence[int], note: object) -> None:
        """Keep owned pages under a key until their room is needed; what is kept already stays."""
        if key in self._kept or not self._kept_pages.isdisjoint(pages):
            return
        self.retain(pages)
        self._kept[key] = Kept(tuple(pages), note)
        self._kept_pages.update(pages)

    def take(self, keys: Sequence[bytes]) -> list[Kept]:
        """What the leading keys keep, up to the first unknown one; the caller owns it too."""
        found = []
        for key in keys:
            if key not in self._kept:
                break
            found.append(self._kept[key])
            self.retain(found[-1].pages)
        return found

    def used(self, keys: Sequence[bytes]) -> None:
        """What these keys keep was of use: it goes last when room is needed, the first key last."""
        for key in reversed(keys):
            if kept := self._kept.pop(key, None):
                self._kept[key] = kept

    def drop(self, key: bytes) -> None:
        """Keep no longer; pages that somebody owns stay until they are released."""
        if kept := self._kept.pop(key, None):
            for page in kept.pages:
                if self.owners(page) == 1:
                    self._count(page, -1)
                self._kept_pages.discard(page)
            super().release(kept.pages)

    @property
    def kept_keys(self) -> list[bytes]:
        """The keys of what is kept."""
        return list(self._kept)

    def owners(self, page: int) -> int:
        """How many references a page has, that of being kept included."""
        return self._references.get(page, 0)

    # -- as any pool, with cached pages apart

    def claim(self, shape: RecordShape, count: int) -> list[int]:
        """`count` page ids, each with one reference; CapacityError and nothing taken if no room.

        Cached pages go where that makes room.
        """
        while self.free_pages(shape) < count and self._evict():
            pass
        return super().claim(shape, count)

    def retain(self, pages: Iterable[int]) -> None:
        for page in pages:
            if page in self._kept_pages and self.owners(page) == 1:
                self._count(page, -1)
            super().retain((page,))

    def release(self, pages: Sequence[int]) -> None:
        for page in pages:
            kept = page in self._kept_pages
            if kept and self.owners(page) == 1:
                raise LayoutError(f"page {page} is released but only kept: nobody owns it")
            super().release((page,))
            if kept and self.owners(page) == 1:
                self._count(page, 1)

    @property
    def referenced_pages(self) -> int:
        """Pages that somebody owns; cached ones are apart."""
        return super().referenced_pages - self.cached_pages

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that somebody owns."""
        return super().used_bytes - self.cached_bytes

    def gauges(self) -> dict[str, int]:
        """What is owned, what is only cached, and the size of all."""
        return {
            "referenced_pages": self.referenced_pages,
            "used_bytes": self.used_bytes,
            "cached_pages": self.cached_pages,
            "cached_bytes": self.cached_bytes,
            "arena_bytes": self.arena.nbytes,
        }

    def check_integrity(self) -> None:
        super().check_integrity()
        cached = sum(self.owners(page) == 1 for page in self._kept_pages)
        if cached != self.cached_pages:
            raise LayoutError(f"{cached} pages are cached, {self.cached_pages} are counted")

    def _count(self, page: int, change: int) -> None:
        self.cached_pages += change
        self.cached_bytes += change * self._slabs[self._slab_index(page)].shape.nbytes

    def _evict(self) -> bool:
        """Drop what was kept and not used for longest; False if somebody owns all of it."""
        for key, kept in self._kept.items():
            if all(self.owners(page) == 1 for page in kept.pages):
                self.drop(key)
                return True
        return False
