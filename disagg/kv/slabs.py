"""The allocator of pages by record shape: an arena cut into slabs of one size.

    arena │ slab 0: pages of layout A │ slab 1: raw pages │ slab 2: free │ ...

A slab serves one record shape at a time. It returns to the free slabs when its last page is freed,
so records of different sizes share an arena. Of the slabs with a free page the fullest serves the
next one: nearly empty slabs drain, and can serve other shapes. A page id is an address: byte
offset / 128. Arithmetic over ids; the bytes stay where they are.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from disagg.errors import CapacityError, LayoutError
from disagg.kv.page import ARENA_UNIT, align
from disagg.kv.plan import RecordShape

DEFAULT_SLAB_BYTES = 1 << 20
# sizes of slabs to choose from: of so many of the largest records, in steps of this many bytes
LEAST_RECORDS = 3
MOST_RECORDS = 18
SLAB_STEP = 128 << 10
OPEN_SLABS = 2  # of each shape, that are partly free, about


def records_per_slab(shape: RecordShape, slab_bytes: int) -> int:
    """How many records of a shape a slab holds; CapacityError if not one."""
    if shape.nbytes > slab_bytes:
        raise CapacityError(
            f"a record of {shape.nbytes} bytes does not fit a slab of {slab_bytes}; "
            f"give the pool slabs of at least that size"
        )
    return slab_bytes // shape.nbytes


def num_slabs_for(records: Mapping[RecordShape, int], slab_bytes: int) -> int:
    """How many slabs hold these records and no others; CapacityError if one fits no slab."""
    return sum(
        -(-count // records_per_slab(shape, slab_bytes))
        for shape, count in records.items()
    )


def choose_slab_bytes(
    arena_bytes: int,
    largest_record: int,
    prompts: Iterable[Mapping[RecordShape, int]],
) -> int:
    """The size of slabs under which an arena holds most of each of these prompts.

    largest_record: of most codecs; all of them have records of less than three times its size

    A slab wastes the end that is too short for a record, so the records at hand decide. Slabs that
    are partly free waste more, so small arenas get small slabs.
    """
    prompts = list(prompts)
    own_records = [shape.nbytes for records in prompts for shape in records]
    least = max(DEFAULT_SLAB_BYTES, LEAST_RECORDS * largest_record, *own_records)
    most = least * MOST_RECORDS // LEAST_RECORDS
    sizes = range(align(least, SLAB_STEP), most + SLAB_STEP, SLAB_STEP)
    num_shapes = len(set().union(*prompts))

    def usable_part(slab_bytes: int) -> float:
        num_slabs = arena_bytes // slab_bytes - OPEN_SLABS * num_shapes
        part = min(_used_part(records, slab_bytes) for records in prompts)
        return num_slabs * slab_bytes * part

    return max(sizes, key=usable_part)


def _used_part(records: Mapping[RecordShape, int], slab_bytes: int) -> float:
    """The part of many slabs, full of these records, that is not an end of a slab."""
    num_slabs = sum(
        count / records_per_slab(shape, slab_bytes) for shape, count in records.items()
    )
    record_bytes = sum(count * shape.nbytes for shape, count in records.items())
    return record_bytes / num_slabs / slab_bytes


@dataclass
class Slab:
    """A stretch of the arena that holds records of one shape.

    pages: the page ids that it holds, in use or free
    free:  those that are free
    owned: how many have an owner
    """

    shape: RecordShape
    pages: range
    free: list[int]
    owned: int = 0


class OpenSlabs:
    """The slabs of one record shape with a free page; the fullest is the first to be filled."""

    def __init__(self) -> None:
        self.free_pages = 0
        # by the number of free pages: slabs by index
        self._by_free: dict[int, dict[int, Slab]] = {}

    def add(self, index: int, slab: Slab) -> None:
        self.free_pages += len(slab.free)
        if slab.free:
            self._by_free.setdefault(len(slab.free), {})[index] = slab

    def remove(self, index: int, slab: Slab) -> None:
        """Take a slab out, before the number of its free pages changes."""
        self.free_pages -= len(slab.free)
        if slab.free:
            slabs = self._by_free[len(slab.free)]
            del slabs[index]
            if not slabs:
                del self._by_free[len(slab.free)]

    def fullest(self) -> tuple[int, Slab]:
        """Index and slab with the fewest free pages."""
        return next(iter(self._by_free[min(self._by_free)].items()))


class SlabAllocator:
    """Hands out pages of any record shape and takes them back. A page in use may have an owner."""

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
        self._open: dict[RecordShape, OpenSlabs] = {}
        # by shape: pages that have an owner, and slabs that have such a page
        self._owned_pages = Counter[RecordShape]()
        self._owned_slabs = Counter[RecordShape]()

    def allocate(self, shape: RecordShape, count: int) -> list[int]:
        """`count` pages, owned; the caller has checked that there are as many free."""
        open_slabs = self._open.setdefault(shape, OpenSlabs())
        allocated: list[int] = []
        while len(allocated) < count:
            if not open_slabs.free_pages:
                self._open_slab(shape)
            index, slab = open_slabs.fullest()
            open_slabs.remove(index, slab)
            num_pages = min(count - len(allocated), len(slab.free))
            pages = slab.free[-num_pages:]
            del slab.free[-num_pages:]
            open_slabs.add(index, slab)
            self._count_owned(slab, num_pages)
            allocated += reversed(pages)
        self.used_bytes += count * shape.nbytes
        return allocated

    def _open_slab(self, shape: RecordShape) -> None:
        index = self._free_slabs.pop()
        capacity = records_per_slab(shape, self.slab_bytes)
        first = index * self.slab_bytes // ARENA_UNIT
        step = shape.nbytes // ARENA_UNIT
        pages = range(first, first + capacity * step, step)
        slab = Slab(shape, pages, free=[*reversed(pages)])
        self._slabs[index] = slab
        self._open[shape].add(index, slab)

    def own(self, page: int) -> None:
        """A page in use that had no owner gets one."""
        self._count_owned(self.slab_of(page), 1)

    def disown(self, page: int) -> None:
        """A page in use loses its last owner."""
        self._count_owned(self.slab_of(page), -1)

    def _count_owned(self, slab: Slab, change: int) -> None:
        was_owned = slab.owned > 0
        slab.owned += change
        self._owned_pages[slab.shape] += change
        self._owned_slabs[slab.shape] += (slab.owned > 0) - was_owned

    def free(self, page: int) -> None:
        """Take back a page without owner, and its slab if that was the last page in use."""
        index = self.slab_index(page)
        slab = self._slabs[index]
        open_slabs = self._open[slab.shape]
        open_slabs.remove(index, slab)
        slab.free.append(page)
        self.used_bytes -= slab.shape.nbytes
        if len(slab.free) < len(slab.pages):
            open_slabs.add(index, slab)
            return
        del self._slabs[index]
        self._free_slabs.append(index)

    def free_pages(self, shape: RecordShape, spared: int = 0) -> int:
        """How many records of a shape can be allocated, with `spared` free slabs left untouched."""
        per_slab = records_per_slab(shape, self.slab_bytes)
        num_slabs = max(0, len(self._free_slabs) - spared)
        num_open = self._open[shape].free_pages if shape in self._open else 0
        return num_open + num_slabs * per_slab

    def has_room(self, records: Mapping[RecordShape, int]) -> bool:
        """Whether all these records fit beside the pages that have owners."""
        num_slabs = self.num_slabs - self._owned_slabs.total()
        for shape, count in records.items():
            per_slab = records_per_slab(shape, self.slab_bytes)
            missing = max(0, count - self._room_beside(shape))
            num_slabs -= -(-missing // per_slab)
        return num_slabs >= 0

    @property
    def free_bytes(self) -> int:
        """Bytes without an owner: whole slabs, and pages of the others; not the ends of those."""
        num_slabs = self.num_slabs - self._owned_slabs.total()
        pages = sum(x.nbytes * self._room_beside(x) for x in self._owned_slabs)
        return num_slabs * self.slab_bytes + pages

    def _room_beside(self, shape: RecordShape) -> int:
        """Pages without an owner in slabs with pages that have one."""
        per_slab = self.slab_bytes // shape.nbytes
        return self._owned_slabs[shape] * per_slab - self._owned_pages[shape]

    def slab_index(self, page: int) -> int:
        """The index of the slab that holds a page."""
        return page * ARENA_UNIT // self.slab_bytes

    def slab_of(self, page: int) -> Slab:
        """The slab that holds a page."""
        return self._slabs[self.slab_index(page)]

    def check_integrity(
        self, pages_in_use: Collection[int], owned: Collection[int]
    ) -> None:
        """LayoutError unless every page is in use or free, once, in a slab of its shape.

        owned: those of the pages in use that have an owner
        """
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
        self._check_counts(Counter(map(self.slab_index, owned)))

    def _check_counts(self, num_owned: Mapping[int, int]) -> None:
        used_bytes = 0
        free_pages = 0
        owned_slabs = Counter[RecordShape]()
        for index, slab in self._slabs.items():
            used_bytes += (len(slab.pages) - len(slab.free)) * slab.shape.nbytes
            free_pages += len(slab.free)
            owned_slabs[slab.shape] += slab.owned > 0
            check_count("owned pages of a slab", slab.owned, num_owned.get(index, 0))
        open_pages = sum(slabs.free_pages for slabs in self._open.values())
        check_count("bytes", self.used_bytes, used_bytes)
        check_count("free pages", open_pages, free_pages)
        check_count("owned pages", self._owned_pages.total(), sum(num_owned.values()))
        check_count("slabs with owned pages", +self._owned_slabs, +owned_slabs)


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
