"""The pool: one uint8 arena cut into slabs, and the count of who owns each page.

    arena │ slab 0: pages of layout A │ slab 1: raw pages │ slab 2: free │ ...

    free ──allocate──► owned ──keep──► owned and kept ──last owner releases──► cached ──► free
                                             ▲                                   │   room is needed
                                             └───────────────take────────────────┘

A slab serves one record shape at a time and returns to the free slabs when its last page is
released, so layouts of different sizes live in one arena and one batch. A page id is its
address (byte offset / 128). Kept pages stay under a key when nobody owns them any more; they are
counted apart, and an allocation that finds no room takes those least recently used: first of its
own shape, so that the last free slabs are there for others. To empty a slab for another shape takes
all that was kept in it, old and new.

The arena is handed in; the pool never looks inside a page, except to zero those that may be partly
filled. Any thread may call: every call is atomic. Bytes are not locked, they are their owner's.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from heapq import heappop, heappush
from threading import Lock, RLock
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from disagg.errors import CapacityError, LayoutError
from disagg.page import ARENA_UNIT, align
from disagg.plan import RecordShape

DEFAULT_SLAB_BYTES = 1 << 20
SPARED = 8  # of so many slabs one is left to other shapes while pages of the own can go; and
MOST_SPARED = 4  # no more than that: one for each kind of record
STALE = 64  # outdated places in the order of use that are put up with before it is made anew

P = ParamSpec("P")
R = TypeVar("R")
Copies = Callable[[], list[memoryview]]  # waits for bytes that are read, and gives them


class Arena(Protocol):
    """Bytes that pages live in, on a host or on a device.

    on_host: `read` gives views and costs nothing; else it copies, and `stage` copies many at once
    """

    on_host: bool

    @property
    def nbytes(self) -> int:
        """Size; a multiple of 128."""

    def read(self, start: int, nbytes: int) -> memoryview:
        """The bytes at an offset: a view on a host, a copy from a device."""

    def write(self, places: Sequence[tuple[int, memoryview | bytes]]) -> None:
        """Copy bytes to their offsets, many at once; whoever reads later finds them there, and the
        caller may use their memory again."""

    def stage(self, spans: Sequence[tuple[int, int]], fresh: bool = False) -> Copies:
        """Begin to read many (offset, nbytes); fresh: behind the kernels of this thread."""

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        """Fill many (offset, nbytes) with zeros."""


class HostArena:
    """An arena over any writable buffer: a bytearray, a numpy array, the memory of a CPU tensor."""

    on_host = True

    def __init__(self, buffer: bytearray | memoryview):
        self._view = memoryview(buffer).cast("B")

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def read(self, start: int, nbytes: int) -> memoryview:
        return self._view[start : start + nbytes]

    def write(self, places: Sequence[tuple[int, memoryview | bytes]]) -> None:
        for start, data in places:
            self._view[start : start + len(data)] = data

    def stage(self, spans: Sequence[tuple[int, int]], fresh: bool = False) -> Copies:
        views = [self.read(*span) for span in spans]
        return lambda: views

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        for start, nbytes in spans:
            self._view[start : start + nbytes] = bytes(nbytes)


@dataclass
class Slab:
    """A stretch of the arena that holds records of one shape."""

    start: int
    shape: RecordShape
    free: list[int]
    capacity: int


@dataclass(eq=False)
class Kept:
    """Pages that stay for whoever asks for them by key; `note` is of whoever kept them, if any.

    used: when last, counted by the pool · owned: how many of the pages somebody owns
    shape: of the first of them
    """

    pages: tuple[int, ...]
    shape: RecordShape
    note: object
    used: int = 0
    owned: int = 0


class Rows:
    """Rows of decode steps, as many as are recorded: what decodes has one, and so has whoever was
    promised to. Any thread may call.
    """

    def __init__(self, count: int):
        self.count = self.free = count
        self._lock = Lock()

    def take(self) -> bool:
        """One more; False if all are taken."""
        with self._lock:
            self.free -= (found := self.free > 0)
            return found

    def give(self) -> None:
        """One less."""
        with self._lock:
            self.free += 1


def atomic(call: "Callable[Concatenate[Pool, P], R]") -> "Callable[Concatenate[Pool, P], R]":
    """A method that holds the pool's lock."""

    @wraps(call)
    def locked(self: "Pool", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            return call(self, *args, **kwargs)

    return locked


class Pool:
    """Hands out records as page ids and takes them back; counts references; keeps what is asked."""

    def __init__(self, arena: Arena, slab_bytes: int = DEFAULT_SLAB_BYTES):
        self.arena = arena
        self.slab_bytes = align(slab_bytes, ARENA_UNIT)
        self.num_slabs = arena.nbytes // self.slab_bytes
        if not self.num_slabs:
            raise CapacityError(
                f"arena of {arena.nbytes} bytes is smaller than one slab of {self.slab_bytes}"
            )
        self.cached_pages = 0  # kept, and owned by nobody
        self.cached_bytes = 0
        self._lock = RLock()
        self._free_slabs = list(range(self.num_slabs - 1, -1, -1))
        self._slabs: dict[int, Slab] = {}
        self._open: dict[RecordShape, OrderedDict[int, Slab]] = {}  # with a free page, oldest first
        self._free: dict[RecordShape, int] = {}  # pages in those
        self._bytes = 0  # of the pages that have a reference
        self._references: dict[int, int] = {}  # that of being kept included
        self._kept: dict[bytes, Kept] = {}
        self._keepers: dict[int, tuple[bytes, Kept]] = {}  # of each kept page
        # by shape, a heap of what is only cached by `used`; some are gone
        self._oldest: dict[RecordShape, list[tuple[int, bytes]]] = {}
        self._uses = 0

    # -- who owns what

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        """`count` page ids, each with one reference; CapacityError and nothing taken if no room."""
        pages = self.claim(shape, count)
        if shape.zeroed:
            self.arena.zero([(page * ARENA_UNIT, shape.nbytes) for page in pages])
        return pages

    @atomic
    def claim(self, shape: RecordShape, count: int) -> list[int]:
        """As `allocate`, for who writes every byte: what was there before is there still.

        Cached pages go where that makes room, and stay where it cannot.
        """
        spared = min(self.num_slabs // SPARED, MOST_SPARED)
        if count * shape.nbytes <= self.arena.nbytes - self.used_bytes:
            for _ in range(count):
                if self.free_pages(shape, spared) >= count or not self._evict([shape]):
                    break
            while self.free_pages(shape) < count and self._evict(list(self._oldest)):
                pass
        if self.free_pages(shape) < count:
            raise CapacityError(
                f"{count} pages of {shape.nbytes} bytes wanted, {self.free_pages(shape)} free "
                f"in an arena of {self.arena.nbytes} bytes"
            )
        return [self._take(shape) for _ in range(count)]

    @atomic
    def retain(self, pages: Iterable[int]) -> None:
        """One more reference to each page; LayoutError for a page that nobody owns."""
        for page in pages:
            count = self._references.get(page, 0)
            if not count:
                raise LayoutError(f"page {page} is not allocated, so it cannot be shared")
            self._references[page] = count + 1
            if count == 1 and page in self._keepers:
                self._count_cached(page, -1)

    @atomic
    def release(self, pages: Iterable[int]) -> None:
        """One reference less; a page with none left is free. LayoutError for a page not owned."""
        for page in pages:
            count, kept = self._references.get(page, 0), page in self._keepers
            if count <= kept:
                why = "only kept: nobody owns it" if kept else "nobody owns it"
                raise LayoutError(f"page {page} is released but {why}")
            self._drop_reference(page)
            if kept and count == 2:
                self._count_cached(page, 1)

    # -- what outlives its owners

    @atomic
    def keep(self, key: bytes, pages: Sequence[int], note: object) -> None:
        """Keep owned pages under a key until their room is needed.

        No pages are not kept, and what is kept already stays as it is.
        """
        if not pages or key in self._kept or not self._keepers.keys().isdisjoint(pages):
            return
        self.retain(pages)
        shape = self._slabs[self._slab_index(pages[0])].shape
        kept = self._kept[key] = Kept(tuple(pages), shape, note, owned=len(pages))
        self._keepers |= dict.fromkeys(pages, (key, kept))
        self._use(key, kept)

    @atomic
    def take(self, keys: Sequence[bytes]) -> list[Kept]:
        """What the leading keys keep, up to the first unknown one; the caller owns it too."""
        found = []
        for key in keys:
            if key not in self._kept:
                break
            found.append(self._kept[key])
            self.retain(found[-1].pages)
        return found

    @atomic
    def used(self, keys: Sequence[bytes]) -> None:
        """What these keys keep was of use: it goes last when room is needed, the first key last."""
        for key in reversed(keys):
            if kept := self._kept.get(key):
                self._use(key, kept)

    @atomic
    def drop(self, key: bytes) -> None:
        """Keep no longer; pages that somebody owns stay until they are released."""
        if kept := self._kept.pop(key, None):
            for page in kept.pages:
                if self._references[page] == 1:
                    self._count_cached(page, -1)
                del self._keepers[page]
                self._drop_reference(page)

    @atomic
    def kept_keys(self, noted: type = object) -> list[bytes]:
        """The keys of what is kept with a note of this type, in the order of keeping."""
        return [key for key, kept in self._kept.items() if isinstance(kept.note, noted)]

    # -- what is left

    @atomic
    def free_pages(self, shape: RecordShape, spared: int = 0) -> int:
        """How many records of a shape can be allocated now, cached pages left alone.

        spared: free slabs that are left alone too
        """
        if shape.nbytes > self.slab_bytes:
            raise CapacityError(
                f"a record of {shape.nbytes} bytes does not fit a slab of {self.slab_bytes}; "
                f"give the pool slabs of at least that size"
            )
        slabs = max(0, len(self._free_slabs) - spared)
        return self._free.get(shape, 0) + slabs * (self.slab_bytes // shape.nbytes)

    @property
    @atomic
    def referenced_pages(self) -> int:
        """Pages that somebody owns; cached ones are apart."""
        return len(self._references) - self.cached_pages

    @property
    @atomic
    def used_bytes(self) -> int:
        """Bytes of the pages that somebody owns."""
        return self._bytes - self.cached_bytes

    @atomic
    def gauges(self) -> dict[str, int]:
        """What is owned, what is only cached, and the size of all."""
        return {
            "referenced_pages": self.referenced_pages,
            "used_bytes": self.used_bytes,
            "cached_pages": self.cached_pages,
            "cached_bytes": self.cached_bytes,
            "arena_bytes": self.arena.nbytes,
        }

    @atomic
    def check_integrity(self) -> None:
        """Raise LayoutError unless every page is owned or free, once, in a slab of its shape."""
        owned: dict[int, set[int]] = {index: set() for index in self._slabs}
        for page in self._references:
            owned.setdefault(self._slab_index(page), set()).add(page)
        if outside := owned.keys() - self._slabs.keys():
            raise LayoutError(f"pages outside any slab: in {sorted(outside)}")
        for index, slab in self._slabs.items():
            size, free = slab.shape.nbytes, set(slab.free)
            expected = {(slab.start + i * size) // ARENA_UNIT for i in range(slab.capacity)}
            if owned[index] & free or owned[index] | free != expected or len(free) < len(slab.free):
                raise LayoutError(
                    f"slab {index}: {len(owned[index])} owned and {len(free)} free pages "
                    f"do not make the {slab.capacity} it holds"
                )
        if sorted([*self._free_slabs, *self._slabs]) != list(range(self.num_slabs)):
            raise LayoutError("a slab is neither free nor in use, or both")
        self._check_counts()

    def _check_counts(self) -> None:
        slabs = self._slabs.values()
        cached = {page for page in self._keepers if self._references[page] == 1}
        held = {key: sum(x not in cached for x in kept.pages) for key, kept in self._kept.items()}
        counted = {
            "cached pages": (self.cached_pages, len(cached)),
            "cached bytes": (self.cached_bytes, sum(map(self._nbytes, cached))),
            "bytes": (self._bytes, sum((x.capacity - len(x.free)) * x.shape.nbytes for x in slabs)),
            "free pages": (sum(self._free.values()), sum(len(x.free) for x in slabs)),
            "owned kept pages": ({key: x.owned for key, x in self._kept.items()}, held),
        }
        for what, (noted, found) in counted.items():
            if noted != found:
                raise LayoutError(f"{what}: {noted} are noted, {found} are there")

    # -- slabs

    def _slab_index(self, page: int) -> int:
        return page * ARENA_UNIT // self.slab_bytes

    def _nbytes(self, page: int) -> int:
        return self._slabs[self._slab_index(page)].shape.nbytes

    def _take(self, shape: RecordShape) -> int:
        slabs = self._open.setdefault(shape, OrderedDict())
        if not slabs:
            index = self._free_slabs.pop()
            start, capacity = index * self.slab_bytes, self.slab_bytes // shape.nbytes
            pages = [(start + i * shape.nbytes) // ARENA_UNIT for i in range(capacity)]
            slabs[index] = self._slabs[index] = Slab(start, shape, pages[::-1], capacity)
            self._free[shape] = capacity
        index, slab = next(iter(slabs.items()))
        page = slab.free.pop()
        if not slab.free:
            del slabs[index]
        self._free[shape] -= 1
        self._bytes += shape.nbytes
        self._references[page] = 1
        return page

    def _drop_reference(self, page: int) -> None:
        self._references[page] -= 1
        if self._references[page]:
            return
        del self._references[page]
        index = self._slab_index(page)
        slab = self._slabs[index]
        slab.free.append(page)
        self._free[slab.shape] += 1
        self._bytes -= slab.shape.nbytes
        slabs = self._open[slab.shape]
        if len(slab.free) == slab.capacity:
            slabs.pop(index, None)
            del self._slabs[index]
            self._free[slab.shape] -= slab.capacity
            self._free_slabs.append(index)
        else:
            slabs[index] = slab

    # -- cached pages, in the order of use

    def _count_cached(self, page: int, change: int) -> None:
        """A kept page lost its last owner (1), or got one or is dropped (-1)."""
        self.cached_pages += change
        self.cached_bytes += change * self._nbytes(page)
        key, kept = self._keepers[page]
        kept.owned -= change
        if not kept.owned:
            self._note_place(key, kept)

    def _use(self, key: bytes, kept: Kept) -> None:
        self._uses += 1
        kept.used = self._uses
        if not kept.owned:
            self._note_place(key, kept)

    def _note_place(self, key: bytes, kept: Kept) -> None:
        """Nobody owns any of it: it may go when its turn comes. Older notes of it mean nothing."""
        oldest = self._oldest.setdefault(kept.shape, [])
        heappush(oldest, (kept.used, key))
        if len(oldest) > 2 * len(self._kept) + STALE:
            alike = ((key, x) for key, x in self._kept.items() if x.shape == kept.shape)
            oldest[:] = sorted((x.used, key) for key, x in alike if not x.owned)

    def _evict(self, shapes: Sequence[RecordShape]) -> bool:
        """Drop what was kept in these shapes and not used for longest; False if there is none."""
        found = [oldest[0] for shape in shapes if (oldest := self._clear(shape))]
        if found:
            self.drop(min(found)[1])
        return bool(found)

    def _clear(self, shape: RecordShape) -> list[tuple[int, bytes]]:
        """The heap of a shape, without outdated places in front."""
        oldest = self._oldest.get(shape, [])
        while oldest:
            used, key = oldest[0]
            kept = self._kept.get(key)
            if kept is not None and kept.used == used and not kept.owned:
                break
            heappop(oldest)
        return oldest
