"""The pool: counts the owners of each page of an arena, and caches pages under keys.

    free ──allocate──► owned ──keep──► owned and kept ──last owner releases──► cached ──► free
                                             ▲                                   │   room is needed
                                             └───────────────take────────────────┘

`slabs.py` finds room for records of any shape, `page_cache.py` orders the pages kept under keys. An
allocation that finds no room evicts cached pages, least recently used first: those of its own shape
while some slabs are free, so that other shapes find room too, then those of any shape. To empty
a slab for another shape, all cached pages in it are evicted, old and new.

The pool never looks inside a page, except to zero those that may be partly filled. Any thread may
call: every call is atomic. Bytes are not locked; they belong to the owner of the page.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from threading import RLock
from typing import Concatenate, ParamSpec, TypeVar

from disagg.errors import CapacityError, LayoutError
from disagg.kv.arena import Arena
from disagg.kv.page import ARENA_UNIT
from disagg.kv.page_cache import CachedPages, PageCache
from disagg.kv.plan import RecordShape
from disagg.kv.slabs import (
    DEFAULT_SLAB_BYTES,
    SlabAllocator,
    check_count,
    records_per_slab,
)

# while pages of its own shape can be evicted, an allocation leaves one slab in 8 to other shapes,
# and at most 4: one for each kind of record
SLABS_PER_SPARED = 8
MAX_SPARED_SLABS = 4

P = ParamSpec("P")
R = TypeVar("R")


def atomic(
    method: "Callable[Concatenate[Pool, P], R]",
) -> "Callable[Concatenate[Pool, P], R]":
    """A method that holds the pool's lock."""

    @wraps(method)
    def locked(self: "Pool", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return method(self, *args, **kwargs)

    return locked


class Pool:
    """Hands out records as page ids and takes them back; counts owners; keeps pages under keys.

    cached_pages, cached_bytes: of the pages that are kept and have no owner
    """

    def __init__(self, arena: Arena, slab_bytes: int = DEFAULT_SLAB_BYTES):
        self.arena = arena
        self.cached_pages = 0
        self.cached_bytes = 0
        self._lock = RLock()
        self._slabs = SlabAllocator(arena.nbytes, slab_bytes)
        self._cache = PageCache()
        self._owners: dict[int, int] = {}  # how many, of each page that has any

    @property
    def slab_bytes(self) -> int:
        """Size of a slab: at least that of the largest record."""
        return self._slabs.slab_bytes

    @property
    def num_slabs(self) -> int:
        """How many slabs the arena has."""
        return self._slabs.num_slabs

    # -- owners

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        """`count` page ids, each with one owner; CapacityError and nothing taken if no room."""
        pages = self.claim(shape, count)
        if shape.zeroed:
            self.arena.zero([(page * ARENA_UNIT, shape.nbytes) for page in pages])
        return pages

    @atomic
    def claim(self, shape: RecordShape, count: int) -> list[int]:
        """Like `allocate`, for callers that write every byte: old bytes are not zeroed.

        Cached pages are evicted if that makes enough room, and stay otherwise.
        """
        if self._slabs.has_room({shape: count}):
            self._make_room(shape, count)
        free_pages = self._slabs.free_pages(shape)
        if free_pages < count:
            raise CapacityError(
                f"{count} pages of {shape.nbytes} bytes wanted, {free_pages} free "
                f"in an arena of {self.arena.nbytes} bytes"
            )
        pages = self._slabs.allocate(shape, count)
        self._owners.update(dict.fromkeys(pages, 1))
        return pages

    @atomic
    def retain(self, pages: Iterable[int]) -> None:
        """Add an owner to each page; LayoutError for a page neither owned nor kept."""
        for page in pages:
            owners = self._owners.get(page, 0)
            if not owners:
                if page not in self._cache.entry_of:
                    raise LayoutError(
                        f"page {page} is not allocated, so it cannot be shared"
                    )
                self._cache.on_owned(page)
                self._slabs.own(page)
                self._count_cached(page, -1)
            self._owners[page] = owners + 1

    @atomic
    def release(self, pages: Iterable[int]) -> None:
        """Remove an owner of each page; without any, it is cached if it is kept, and free if not.

        LayoutError for a page without an owner.
        """
        for page in pages:
            owners = self._owners.get(page, 0)
            is_kept = page in self._cache.entry_of
            if not owners:
                why = "only kept: nobody owns it" if is_kept else "nobody owns it"
                raise LayoutError(f"page {page} is released but {why}")
            if owners > 1:
                self._owners[page] = owners - 1
                continue
            del self._owners[page]
            self._slabs.disown(page)
            if is_kept:
                self._cache.on_released(page)
                self._count_cached(page, 1)
            else:
                self._slabs.free(page)

    # -- pages that outlive their owners

    @atomic
    def keep(self, key: bytes, pages: Sequence[int], note: object) -> None:
        """Keep owned pages under a key until their room is needed.

        Does nothing without pages, and where the key or a page is kept already.
        """
        if not pages or key in self._cache.entries:
            return
        if not self._cache.entry_of.keys().isdisjoint(pages):
            return
        for page in pages:
            if page not in self._owners:
                raise LayoutError(
                    f"page {page} is not allocated, so it cannot be shared"
                )
        shape = self._slabs.slab_of(pages[0]).shape
        self._cache.add(CachedPages(key, tuple(pages), shape, note, owned=len(pages)))

    @atomic
    def take(self, keys: Sequence[bytes]) -> list[CachedPages]:
        """Own the pages kept under the leading keys, up to the first unknown key."""
        entries = []
        for key in keys:
            entry = self._cache.entries.get(key)
            if entry is None:
                break
            self.retain(entry.pages)
            entries.append(entry)
        return entries

    @atomic
    def used(self, keys: Sequence[bytes]) -> None:
        """Evict the pages under these keys last, and those of the first key last of all."""
        for key in reversed(keys):
            entry = self._cache.entries.get(key)
            if entry is not None:
                self._cache.use(entry)

    @atomic
    def drop(self, key: bytes) -> None:
        """Keep this key no longer; pages that have owners stay until they are released."""
        entry = self._cache.remove(key)
        if entry is None:
            return
        for page in entry.pages:
            if page not in self._owners:
                self._count_cached(page, -1)
                self._slabs.free(page)

    @atomic
    def evict_all(self) -> None:
        """Keep no page any longer that has no owner."""
        while self._evict(self._cache.shapes()):
            pass

    @atomic
    def kept_keys(self, note_type: type = object) -> list[bytes]:
        """The keys of pages kept with a note of this type, in the order of keeping."""
        entries = self._cache.entries.values()
        return [entry.key for entry in entries if isinstance(entry.note, note_type)]

    @atomic
    def kept_of(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of these keys that pages are kept under, in the same order."""
        return [key for key in keys if key in self._cache.entries]

    def _make_room(self, shape: RecordShape, count: int) -> None:
        """Evict until `count` records fit, or until nothing is left to evict."""
        spared = min(self.num_slabs // SLABS_PER_SPARED, MAX_SPARED_SLABS)
        for _ in range(count):
            if self._slabs.free_pages(shape, spared) >= count:
                break
            if not self._evict([shape]):
                break
        while self._slabs.free_pages(shape) < count:
            if not self._evict(self._cache.shapes()):
                break

    def _evict(self, shapes: Iterable[RecordShape]) -> bool:
        """Drop the least recently used pages of these shapes; False if there are none."""
        entry = self._cache.least_recently_used(shapes)
        if entry is None:
            return False
        self.drop(entry.key)
        return True

    def _count_cached(self, page: int, change: int) -> None:
        self.cached_pages += change
        self.cached_bytes += change * self._slabs.slab_of(page).shape.nbytes

    # -- counts

    @atomic
    def free_pages(self, shape: RecordShape) -> int:
        """How many records of a shape can be allocated without evicting cached pages."""
        return self._slabs.free_pages(shape)

    @atomic
    def has_room(self, records: Mapping[RecordShape, int]) -> bool:
        """Whether all these records can be allocated, if cached pages are evicted for them."""
        return self._slabs.has_room(records)

    @property
    @atomic
    def free_bytes(self) -> int:
        """Bytes for further records, if cached pages are evicted for them."""
        return self._slabs.free_bytes

    def empty(self) -> SlabAllocator:
        """The slabs of this pool with all pages free."""
        return SlabAllocator(self.arena.nbytes, self.slab_bytes)

    def bytes_of(self, records: Mapping[RecordShape, int]) -> int:
        """Bytes of the arena that records take, with their parts of the ends of slabs."""
        num_slabs = sum(
            count / records_per_slab(shape, self.slab_bytes)
            for shape, count in records.items()
        )
        return round(num_slabs * self.slab_bytes)

    @property
    @atomic
    def referenced_pages(self) -> int:
        """Pages that have an owner; cached ones are counted apart."""
        return len(self._owners)

    @property
    @atomic
    def used_bytes(self) -> int:
        """Bytes of the pages that have an owner."""
        return self._slabs.used_bytes - self.cached_bytes

    @atomic
    def gauges(self) -> dict[str, int]:
        """Pages and bytes that are owned, those that are only cached, and the size of the arena."""
        return {
            "referenced_pages": self.referenced_pages,
            "used_bytes": self.used_bytes,
            "cached_pages": self.cached_pages,
            "cached_bytes": self.cached_bytes,
            "arena_bytes": self.arena.nbytes,
        }

    @atomic
    def check_integrity(self) -> None:
        """LayoutError unless every page is owned, kept or free, once, and all counts are right."""
        kept_pages = self._cache.entry_of.keys()
        in_use = self._owners.keys() | kept_pages
        self._slabs.check_integrity(in_use, self._owners.keys())
        cached = kept_pages - self._owners.keys()
        cached_bytes = sum(self._slabs.slab_of(page).shape.nbytes for page in cached)
        check_count("cached pages", self.cached_pages, len(cached))
        check_count("cached bytes", self.cached_bytes, cached_bytes)
        for key, entry in self._cache.entries.items():
            owned = sum(page in self._owners for page in entry.pages)
            check_count(f"owned pages kept under {key!r}", entry.owned, owned)
