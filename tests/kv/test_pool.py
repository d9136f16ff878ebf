import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from disagg.errors import CapacityError, LayoutError
from disagg.kv.arena import HostArena
from disagg.kv.plan import RecordShape
from disagg.kv.pool import Pool

SLAB_BYTES = 4096
SMALL = RecordShape("small", 256, zeroed=False)
ODD = RecordShape("odd", 640, zeroed=False)
ZEROED = RecordShape("zeroed", 256, zeroed=True)
HUGE = RecordShape("huge", SLAB_BYTES + 128, zeroed=False)


def make_pool(nbytes: int = 16384) -> Pool:
    return Pool(HostArena(bytearray(b"\xff" * nbytes)), SLAB_BYTES)


@pytest.fixture
def pool() -> Pool:
    return make_pool()


def keep(pool: Pool, key: bytes, count: int, shape: RecordShape = SMALL) -> list[int]:
    """Pages kept under a key that nobody owns; the note says the key."""
    pages = pool.allocate(shape, count)
    pool.keep(key, pages, key.decode())
    pool.release(pages)
    return pages


def test_a_page_id_is_its_address(pool):
    first, second = pool.allocate(ODD, 2)
    pool.arena.write([(second * 128 + 3, b"abc")])

    assert bytes(pool.arena.read(second * 128 + 3, 3)) == b"abc"
    assert abs(second - first) * 128 == 640


def test_partly_filled_pages_come_zeroed_unless_claimed(pool):
    (page,) = pool.claim(ZEROED, 1)
    assert bytes(pool.arena.read(page * 128, 256)) == b"\xff" * 256

    pool.release([page])
    (again,) = pool.allocate(ZEROED, 1)
    assert again == page
    assert bytes(pool.arena.read(page * 128, 256)) == bytes(256)


@pytest.mark.parametrize("take", [Pool.allocate, Pool.claim])
def test_what_does_not_fit_is_refused_and_takes_nothing(pool, take):
    with pytest.raises(CapacityError, match="25 pages of 640 bytes wanted, 24 free"):
        take(pool, ODD, 25)
    with pytest.raises(CapacityError, match="does not fit a slab of 4096"):
        take(pool, HUGE, 1)

    assert pool.referenced_pages == 0
    assert len(pool.allocate(ODD, 24)) == 24


def test_free_pages_are_neither_shared_nor_released(pool):
    pages = pool.allocate(SMALL, 1)
    pool.release(pages)

    with pytest.raises(LayoutError, match="nobody owns it"):
        pool.release(pages)
    with pytest.raises(LayoutError, match="cannot be shared"):
        pool.retain(pages)
    with pytest.raises(LayoutError, match="cannot be shared"):
        pool.keep(b"a", pages, None)
    assert pool.kept_keys() == []


def test_pages_only_kept_are_not_released(pool):
    pages = keep(pool, b"a", 1)
    with pytest.raises(LayoutError, match="only kept"):
        pool.release(pages)


def test_take_stops_at_the_first_unknown_key(pool):
    keep(pool, b"a", 2)
    pool.keep(b"b", [], "no pages are not kept")
    keep(pool, b"c", 1)

    (entry,) = pool.take([b"a", b"b", b"c"])
    assert entry.key == b"a"


def test_a_kept_key_stays_as_it_was_kept_first(pool):
    pages = keep(pool, b"a", 2)
    keep(pool, b"a", 1)

    (entry,) = pool.take([b"a"])
    assert (entry.pages, entry.note) == (tuple(pages), "a")


def test_kept_keys_are_listed_by_the_type_of_their_notes(pool):
    for key in (b"a", b"c"):
        keep(pool, key, 1)

    assert pool.kept_keys(str) == [b"a", b"c"]
    assert pool.kept_keys(int) == []


def test_an_empty_slab_serves_another_shape(pool):
    pages = pool.allocate(SMALL, 64)
    assert pool.free_pages(ODD) == 0

    pool.release(pages)
    assert pool.free_pages(ODD) == 24


def test_the_fullest_slab_is_filled_first_so_that_others_drain(pool):
    pages = pool.allocate(SMALL, 48)
    first, second, third = pages[:16], pages[16:32], pages[32:]
    pool.release([*first[:12], *second[:4], *third[:8]])

    more = pool.allocate(SMALL, 6)
    pool.release(first[12:])

    assert set(more[:4]) == set(second[:4])
    assert set(more[4:]) < set(third[:8])
    assert pool.free_pages(ODD) == 12


def test_room_is_for_all_records_together_and_counts_slabs(pool):
    pool.allocate(SMALL, 17)

    assert pool.free_bytes == 15 * SMALL.nbytes + 2 * SLAB_BYTES
    assert pool.has_room({SMALL: 31, ODD: 6})
    assert not pool.has_room({SMALL: 31, ODD: 7})
    assert not pool.has_room({ODD: 13})


def test_cached_pages_are_room_if_no_page_beside_them_is_owned(pool):
    keep(pool, b"a", 48)

    assert pool.has_room({ODD: 24})
    assert pool.free_bytes == 4 * SLAB_BYTES

    pool.take([b"a"])
    assert not pool.has_room({ODD: 7})


def test_all_cached_pages_can_be_evicted_but_no_owned_one(pool):
    keep(pool, b"a", 2)
    keep(pool, b"b", 2)
    pool.take([b"b"])

    pool.evict_all()

    assert pool.kept_keys() == [b"b"]


def test_integrity_check_sees_a_page_owned_and_free(pool):
    (page,) = pool.allocate(SMALL, 1)
    pool._slabs.slab_of(page).free.append(page)

    with pytest.raises(LayoutError):
        pool.check_integrity()


def read(pool: Pool, *keys: bytes) -> None:
    """Take what is kept under each key, and release it."""
    for key in keys:
        for entry in pool.take([key]):
            pool.release(entry.pages)


# a, b, c and d are kept in this order; then one of these happens, and one of them is evicted
USES = {
    "least recently used first": (lambda pool: pool.used([b"a", b"b"]), b"abd"),
    "of keys used together the first key last": (
        lambda pool: pool.used([b"d", b"c", b"b", b"a"]),
        b"bcd",
    ),
    "reading is not using": (lambda pool: read(pool, b"b", b"a"), b"bcd"),
    "owned pages never": (lambda pool: pool.take([b"a", b"b"]), b"abd"),
}


@pytest.mark.parametrize(("use", "remaining"), USES.values(), ids=USES)
@pytest.mark.parametrize(
    ("shape", "count"), [(SMALL, 16), (ODD, 6)], ids=["own", "other"]
)
def test_cached_pages_make_room(pool, use, remaining, shape, count):
    for key in (b"a", b"b", b"c", b"d"):
        keep(pool, key, 16)
    use(pool)

    pool.allocate(shape, count)
    assert [ord(key) for key in pool.kept_keys()] == [*remaining]
    with pytest.raises(CapacityError):
        pool.allocate(SMALL, 65)


@pytest.mark.parametrize(
    ("shape", "count"), [(SMALL, 49), (ODD, 20)], ids=["own", "other"]
)
def test_nothing_is_evicted_for_what_does_not_fit_anyway(pool, shape, count):
    pool.allocate(SMALL, 16)
    keep(pool, b"a", 16)

    with pytest.raises(CapacityError):
        pool.claim(shape, count)
    assert pool.kept_keys() == [b"a"]


def test_a_third_shape_evicts_the_least_recently_used_of_all(pool):
    keep(pool, b"a", 32)
    keep(pool, b"b", 12, ODD)
    pool.used([b"a"])

    pool.allocate(ZEROED, 1)
    assert pool.kept_keys() == [b"a"]


@pytest.mark.parametrize(("slabs", "spared"), [(16, 2), (200, 4)])
def test_cached_pages_leave_an_eighth_of_the_slabs_at_most_four(slabs, spared):
    pool = make_pool(slabs * SLAB_BYTES)
    for number in range(17 * slabs):
        keep(pool, b"%d" % number, 1)
    assert pool.cached_bytes == (slabs - spared) * SLAB_BYTES

    pool.allocate(ODD, 1)
    assert pool.cached_bytes == (slabs - spared) * SLAB_BYTES


def calls_to_make_room(units: int) -> int:
    """Python calls of a claim of 100 pages that evicts, with the older half of all pages owned."""
    pool = make_pool(units * SMALL.nbytes)
    pages = pool.claim(SMALL, units)
    for page in pages:
        pool.keep(b"%d" % page, [page], None)
    pool.release(pages[units // 2 :])

    calls = 0

    def count(_frame: object, event: str, _function: object) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1

    sys.setprofile(count)
    try:
        pool.claim(SMALL, 100)
    finally:
        sys.setprofile(None)
    return calls


def test_making_room_costs_what_it_evicts_and_not_what_is_kept():
    assert calls_to_make_room(4096) <= calls_to_make_room(512)


def test_stale_entries_of_the_heap_do_not_pile_up(pool):
    for key in (b"a", b"b", b"c", b"d"):
        keep(pool, key, 16)
    for _ in range(500):
        pool.used([b"c", b"b", b"d"])

    assert sum(map(len, pool._cache._order.values())) < 100
    pool.allocate(SMALL, 32)
    assert set(pool.kept_keys()) == {b"b", b"c"}


def test_two_threads_never_own_the_same_page():
    pool = make_pool(1 << 19)

    def churn(name: int) -> set[int]:
        owned: set[int] = set()
        for turn in range(200):
            pages = pool.allocate(SMALL, 3)
            pool.keep(b"%d %d" % (name, turn), pages[1:2], None)
            pool.release(pages[1:])
            owned.add(pages[0])
        return owned

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(churn, range(2))

    assert not first & second
    assert pool.referenced_pages == len(first) + len(second) == 400
    assert pool.used_bytes == 400 * SMALL.nbytes
    pool.check_integrity()


KEYS = [b"a", b"b", b"c"]


class PoolMachine(RuleBasedStateMachine):
    """Owners that allocate, share, keep, take and release in any order: the books stay right."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.owned: list[list[int]] = []

    @rule(shape=st.sampled_from([SMALL, ODD, ZEROED]), count=st.integers(0, 20))
    def allocate(self, shape: RecordShape, count: int) -> None:
        free = self.pool.free_pages(shape)
        cached = self.pool.cached_pages
        has_room = self.pool.has_room({shape: count})
        try:
            pages = self.pool.allocate(shape, count)
        except CapacityError:
            assert count > free
            assert not self.pool.cached_pages or self.owned
        else:
            assert has_room
            assert count <= free or cached
            assert not set(pages) & self.owned_pages()
            self.owned.append(pages)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        if self.owned:
            pages = data.draw(st.sampled_from(self.owned))
            self.pool.retain(pages)
            self.owned.append(pages)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owned:
            index = data.draw(st.integers(0, len(self.owned) - 1))
            self.pool.release(self.owned.pop(index))

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def keep(self, data: st.DataObject, key: bytes) -> None:
        if self.owned:
            self.pool.keep(key, data.draw(st.sampled_from(self.owned)), None)

    @rule(keys=st.permutations(KEYS))
    def take(self, keys: list[bytes]) -> None:
        self.owned += [list(entry.pages) for entry in self.pool.take(keys)]
        self.pool.used(keys)

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key: bytes) -> None:
        self.pool.drop(key)

    @invariant()
    def every_page_is_counted_once(self) -> None:
        self.pool.check_integrity()
        assert self.pool.referenced_pages == len(self.owned_pages())

    def owned_pages(self) -> set[int]:
        return {page for pages in self.owned for page in pages}


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestPoolMachine = PoolMachine.TestCase
