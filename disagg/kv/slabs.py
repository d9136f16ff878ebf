"""The allocator of pages by record shape: an arena cut into slabs of one size.

    arena │ slab 0: pages of layout A │ slab 1: raw pages │ slab 2: free │ ...

A slab serves one record shape at a time. It returns to the free slabs when its last page is freed,
so records of different sizes share an arena. A page id is an address: byte offset / 128. Arithmetic
over ids; the bytes stay where they are.
"""

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from disagg.errors import CapacityError, LayoutError
from disagg.kv.page import ARENA_UNIT, align
from disagg.kv.plan import RecordShape


@dataclass
class Slab:
    """A stretch of the arena that holds records of one shape.

    pages: the page ids that it holds, in use or free · free: those that are free
    """

    shape: RecordShape
    pages: range
    free: list[int]


class SlabAllocator:
    """Hands out pages of any record shape and takes them back."""

    def __init__(self, arena_bytes: int, slab_bytes: int):
        self.slab_bytes = align(slab_bytes, ARENA_UNIT)
        self.num_slabs = arena_bytes // self.slab_bytes
        if not self.num_slabs:
            raise CapacityError(
                f"arena of {arena_bytes} bytes is smaller than one slab of {self.slab_bytes}"
            )
        self.used_bytes = 0  # of the pages in use
        self._slabs: dict[int, Slab] = {}
        self._free_slabs = list(range(self.num_slabs - 1, -1, -1))
        # by shape: the slabs with a free page, oldest first, and how many free pages they have
        self._open: dict[RecordShape, OrderedDict[int, Slab]] = {}
        self._free_pages: dict[RecordShape, int] = {}

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        """`count` pages; the caller has checked that there are as many free."""
        return [self._allocate_page(shape) for _ in range(count)]

    def _allocate_page(self, shape: RecordShape) -> int:
        open_slabs = self._open.setdefault(shape, OrderedDict())
        if not open_slabs:
            self._open_slab(shape)
        index, slab = next(iter(open_slabs.items()))
        page = slab.free.pop()
        if not slab.free:
            del open_slabs[index]
        self._free_pages[shape] -= 1
        self.used_bytes += shape.nbytes
        return page

    def _open_slab(self, shape: RecordShape) -> None:
        index = self._free_slabs.pop()
        capacity = self.slab_bytes // shape.nbytes
        first = index * self.slab_bytes // ARENA_UNIT
        step = shape.nbytes // ARENA_UNIT
        pages = range(first, first + capacity * step, step)
        slab = Slab(shape, pages, free=[*reversed(pages)])
        self._slabs[index] = slab
        self._open[shape][index] = slab
        self._free_pages[shape] = capacity

    def free(self, page: int) -> None:
        """Take a page back, and its slab if that was the last page in use."""
        index = self.slab_index(page)
        slab = self._slabs[index]
        shape = slab.shape
        open_slabs = self._open[shape]
        slab.free.append(page)
        self._free_pages[shape] += 1
        self.used_bytes -= shape.nbytes
        if len(slab.free) < len(slab.pages):
            open_slabs[index] = slab
            return
        open_slabs.pop(index, None)
        del self._slabs[index]
        self._free_pages[shape] -= len(slab.pages)
        self._free_slabs.append(index)

    def free_pages(self, shape: RecordShape, spared: int = 0) -> int:
        """How many records of a shape can be allocated, with `spared` free slabs left untouched."""
        if shape.nbytes > self.slab_bytes:
            raise CapacityError(
                f"a record of {shape.nbytes} bytes does not fit a slab of {self.slab_bytes}; "
                f"give the pool slabs of at least that size"
            )
        slabs = max(0, len(self._free_slabs) - spared)
        return self._free_pages.get(shape, 0) + slabs * (
            self.slab_bytes // shape.nbytes
        )

    def slab_index(self, page: int) -> int:
        """The index of the slab that holds a page."""
        return page * ARENA_UNIT // self.slab_bytes

    def slab_of(self, page: int) -> Slab:
        """The slab that holds a page."""
        return self._slabs[self.slab_index(page)]

    def check_integrity(self, pages_in_use: Collection[int]) -> None:
        """LayoutError unless every page is in use or free, once, in a slab of its shape."""
        in_use: dict[int, set[int]] = {index: set() for index in self._slabs}
        for page in pages_in_use:
            in_use.setdefault(self.slab_index(page), set()).add(page)
        outside = in_use.keys() - self._slabs.keys()
        if outside:
            raise LayoutError(f"pages outside any slab: in {sorted(outside)}")
        for index, slab in self._slabs.items():
            _check_slab(index, slab, in_use[index])
        if sorted([*self._free_slabs, *self._slabs]) != list(range(self.num_slabs)):
            raise LayoutError("a slab is neither free nor in use, or both")
        self._check_counts()

    def _check_counts(self) -> None:
        used_bytes = 0
        free_pages = 0
        for slab in self._slabs.values():
            used_bytes += (len(slab.pages) - len(slab.free)) * slab.shape.nbytes
            free_pages += len(slab.free)
        check_count("bytes", self.used_bytes, used_bytes)
        check_count("free pages", sum(self._free_pages.values()), free_pages)


def check_count(name: str, running: object, actual: object) -> None:
    """LayoutError unless a running count equals a count of the pages."""
    if running != actual:
        raise LayoutError(
            f"{name}: the running count is {running}, the pages have {actual}"
        )


def _check_slab(index: int, slab: Slab, in_use: set[int]) -> None:
    free = set(slab.free)
    is_free_twice = len(free) < len(slab.free)
    if is_free_twice or in_use & free or in_use | free != set(slab.pages):
        raise LayoutError(
            f"slab {index}: {len(in_use)} owned and {len(free)} free pages "
            f"are not its {len(slab.pages)} pages, each once"
        )
