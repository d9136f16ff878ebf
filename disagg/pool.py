"""The pool: one uint8 arena cut into slabs, and the count of who owns each page.

    arena │ slab 0: pages of layout A │ slab 1: raw pages │ slab 2: free │ ...

A slab serves one record shape at a time and returns to the free slabs when its last page is
released, so layouts of different sizes live in one arena and one batch. A page id is its
address (byte offset / 128). The arena is handed in; the pool never looks inside a page, except to
zero those that may be partly filled. Not thread-safe: one thread owns it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from disagg.errors import CapacityError, LayoutError
from disagg.page import ARENA_UNIT, align
from disagg.plan import RecordShape

DEFAULT_SLAB_BYTES = 1 << 20


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
        """Copy bytes to their offsets, many at once; they are in place when it returns."""

    def stage(self, spans: Sequence[tuple[int, int]]) -> Callable[[], list[memoryview]]:
        """Begin to read many (offset, nbytes) at once, as they are now; call it for the bytes."""

    def zero(self, start: int, nbytes: int) -> None:
        """Fill with zeros."""


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

    def stage(self, spans: Sequence[tuple[int, int]]) -> Callable[[], list[memoryview]]:
        views = [self.read(*span) for span in spans]
        return lambda: views

    def zero(self, start: int, nbytes: int) -> None:
        self._view[start : start + nbytes] = bytes(nbytes)


@dataclass
class Slab:
    """A stretch of the arena that holds records of one shape."""

    start: int
    shape: RecordShape
    free: list[int]
    capacity: int


class Pool:
    """Hands out records as page ids and takes them back; counts references."""

    def __init__(self, arena: Arena, slab_bytes: int = DEFAULT_SLAB_BYTES):
        self.arena = arena
        self.slab_bytes = align(slab_bytes, ARENA_UNIT)
        self.num_slabs = arena.nbytes // self.slab_bytes
        if not self.num_slabs:
            raise CapacityError(
                f"arena of {arena.nbytes} bytes is smaller than one slab of {self.slab_bytes}"
            )
        self._free_slabs = list(range(self.num_slabs - 1, -1, -1))
        self._slabs: dict[int, Slab] = {}
        self._open: dict[RecordShape, dict[int, Slab]] = {}  # slabs with a free page, oldest first
        self._references: dict[int, int] = {}

    # -- who owns what

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        """`count` page ids, each with one reference; CapacityError and nothing taken if no room."""
        pages = self.claim(shape, count)
        if shape.zeroed:
            for page in pages:
                self.arena.zero(page * ARENA_UNIT, shape.nbytes)
        return pages

    def claim(self, shape: RecordShape, count: int) -> list[int]:
        """As `allocate`, for who writes every byte: what was there before is there still."""
        if self.free_pages(shape) < count:
            raise CapacityError(
                f"{count} pages of {shape.nbytes} bytes wanted, {self.free_pages(shape)} free "
                f"in an arena of {self.arena.nbytes} bytes"
            )
        return [self._take(shape) for _ in range(count)]

    def retain(self, pages: Iterable[int]) -> None:
        """One more reference to each page; LayoutError for a page that nobody owns."""
        for page in pages:
            if page not in self._references:
                raise LayoutError(f"page {page} is not allocated, so it cannot be shared")
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less; a page with none left is free. LayoutError for a page not owned."""
        for page in pages:
            count = self._references.get(page, 0)
            if not count:
                raise LayoutError(f"page {page} is released but nobody owns it")
            if count > 1:
                self._references[page] = count - 1
            else:
                del self._references[page]
                self._give_back(page)

    # -- bytes

    def read(self, page: int, offset: int, nbytes: int) -> memoryview:
        """The bytes of a page from `offset`; a view where the arena is on the host."""
        return self.arena.read(page * ARENA_UNIT + offset, nbytes)

    def write(self, page: int, offset: int, data: memoryview | bytes) -> None:
        """Copy bytes into a page."""
        self.arena.write([(page * ARENA_UNIT + offset, data)])

    # -- what is left

    def free_pages(self, shape: RecordShape) -> int:
        """How many records of a shape can be allocated now."""
        if shape.nbytes > self.slab_bytes:
            raise CapacityError(
                f"a record of {shape.nbytes} bytes does not fit a slab of {self.slab_bytes}; "
                f"give the pool slabs of at least that size"
            )
        in_open = sum(len(slab.free) for slab in self._open.get(shape, {}).values())
        return in_open + len(self._free_slabs) * (self.slab_bytes // shape.nbytes)

    @property
    def referenced_pages(self) -> int:
        """Pages that somebody owns."""
        return len(self._references)

    @property
    def used_bytes(self) -> int:
        """Bytes of the owned pages."""
        slabs = self._slabs.values()
        return sum((x.capacity - len(x.free)) * x.shape.nbytes for x in slabs)

    def check_integrity(self) -> None:
        """Raise LayoutError unless every page is owned or free, once, in a slab of its shape."""
        seen: set[int] = set()
        for index, slab in self._slabs.items():
            size = slab.shape.nbytes
            owned = {p for p in self._references if self._slab_index(p) == index}
            free = set(slab.free)
            expected = {(slab.start + i * size) // ARENA_UNIT for i in range(slab.capacity)}
            if owned & free or owned | free != expected or len(free) != len(slab.free):
                raise LayoutError(
                    f"slab {index}: {len(owned)} owned and {len(free)} free pages "
                    f"do not make the {slab.capacity} it holds"
                )
            seen |= owned
        if seen != set(self._references):
            raise LayoutError(f"pages outside any slab: {sorted(set(self._references) - seen)}")
        if sorted([*self._free_slabs, *self._slabs]) != list(range(self.num_slabs)):
            raise LayoutError("a slab is neither free nor in use, or both")

    # -- slabs

    def _slab_index(self, page: int) -> int:
        return page * ARENA_UNIT // self.slab_bytes

    def _take(self, shape: RecordShape) -> int:
        slabs = self._open.setdefault(shape, {})
        if not slabs:
            index = self._free_slabs.pop()
            start, capacity = index * self.slab_bytes, self.slab_bytes // shape.nbytes
            pages = [(start + i * shape.nbytes) // ARENA_UNIT for i in range(capacity)]
            slabs[index] = self._slabs[index] = Slab(start, shape, pages[::-1], capacity)
        index, slab = next(iter(slabs.items()))
        page = slab.free.pop()
        if not slab.free:
            del slabs[index]
        self._references[page] = 1
        return page

    def _give_back(self, page: int) -> None:
        index = self._slab_index(page)
        slab = self._slabs[index]
        slab.free.append(page)
        slabs = self._open.setdefault(slab.shape, {})
        if len(slab.free) == slab.capacity:
            slabs.pop(index, None)
            del self._slabs[index]
            self._free_slabs.append(index)
        else:
            slabs[index] = slab
