import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from disagg.errors import CapacityError, LayoutError
from disagg.kv.plan import RecordShape
from disagg.kv.pool import HostArena, Pool

SMALL, ODD = RecordShape("small", 256, False), RecordShape("odd", 640, False)
ZEROED = RecordShape("zeroed", 256, True)


def make_pool(nbytes: int = 16384) -> Pool:
    return Pool(HostArena(bytearray(b"\xff" * nbytes)), 4096)


@pytest.fixture
def pool() -> Pool:
    return make_pool()


def keep(pool: Pool, key: bytes, count: int, shape: RecordShape = SMALL) -> list[int]:
    pages = pool.allocate(shape, count)
    pool.keep(key, pages, key.decode())
    pool.release(pages)
    return pages


def test_a_page_id_is_its_address(pool):
    first, second = pool.allocate(ODD, 2)
    pool.arena.write([(second * 128 + 3, b"abc")])
    assert bytes(pool.arena.read(second * 128 + 3, 3)) == b"abc"
    assert abs(second - first) * 128 == 640


def test_pages_that_may_be_partly_filled_come_zeroed_unless_they_are_claimed(pool):
    (page,) = pool.claim(ZEROED, 1)
    assert bytes(pool.arena.read(page * 128, 256)) == b"\xff" * 256
    pool.release([page])
    (again,) = pool.allocate(ZEROED, 1)
    assert again == page
    assert bytes(pool.arena.read(page * 128, 256)) == bytes(256)


def test_what_does_not_fit_is_refused_by_size_and_takes_nothing(pool):
    for take in (pool.allocate, pool.claim):
        with pytest.raises(
            CapacityError, match="25 pages of 640 bytes wanted, 24 free"
        ):
            take(ODD, 25)
        with pytest.raises(CapacityError, match="does not fit a slab of 4096"):
            take(RecordShape("huge", 4224, False), 1)
    assert pool.referenced_pages == 0
    assert len(pool.allocate(ODD, 24)) == 24


def test_pages_that_nobody_owns_are_neither_shared_nor_released(pool):
    pages, kept = pool.allocate(SMALL, 1), keep(pool, b"a", 1)
    pool.release(pages)
    for what, some, why in (
        (pool.release, pages, "nobody owns it"),
        (pool.retain, pages, "cannot be shared"),
        (pool.release, kept, "only kept"),
    ):
        with pytest.raises(LayoutError, match=why):
            what(some)


def test_what_is_kept_is_found_up_to_the_first_unknown_key_as_it_was_kept_first(pool):
    pages = keep(pool, b"a", 2)
    for key in (b"a", b"c"):
        keep(pool, key, 1)
    pool.keep(b"b", [], "no pages are not kept")
    (found,) = pool.take([b"a", b"b", b"c"])
    assert (found.pages, found.note) == (tuple(pages), "a")
    assert (pool.kept_keys(str), pool.kept_keys(int)) == (
        [b"a", b"c"],
        [],
    )  # by their notes


def test_an_empty_slab_serves_another_shape(pool):
    pages = pool.allocate(SMALL, 64)
    assert pool.free_pages(ODD) == 0
    pool.release(pages)
    assert pool.free_pages(ODD) == 24


def test_integrity_check_sees_a_page_that_is_owned_and_free(pool):
    (page,) = pool.allocate(SMALL, 1)
    pool._slabs[pool._slab_index(page)].free.append(page)
    with pytest.raises(LayoutError):
        pool.check_integrity()


def read(pool: Pool, *keys: bytes) -> None:
    for key in keys:
        for kept in pool.take([key]):
            pool.release(kept.pages)


USES = {
    "those least recently used go first": (
        lambda pool: pool.used([b"a", b"b"]),
        b"abd",
    ),
    "of what was used together the first goes last": (
        lambda pool: pool.used([b"d", b"c", b"b", b"a"]),
        b"bcd",
    ),
    "being read is not being used": (lambda pool: read(pool, b"b", b"a"), b"bcd"),
    "what somebody owns is never taken": (lambda pool: pool.take([b"a", b"b"]), b"abd"),
}


@pytest.mark.parametrize(("use", "left"), USES.values(), ids=USES)
@pytest.mark.parametrize(
    ("shape", "count"), [(SMALL, 16), (ODD, 6)], ids=["own", "other"]
)
def test_cached_pages_make_room(pool, use, left, shape, count):
    for key in (b"a", b"b", b"c", b"d"):
        keep(pool, key, 16)
    use(pool)
    pool.allocate(shape, count)
    assert [ord(key) for key in pool.kept_keys()] == [*left]
    with pytest.raises(CapacityError):
        pool.allocate(SMALL, 65)


@pytest.mark.parametrize(
    ("shape", "count"), [(SMALL, 49), (ODD, 20)], ids=["own", "other"]
)
def test_nothing_cached_goes_for_what_would_not_fit_without_it(pool, shape, count):
    pool.allocate(SMALL, 16)
    keep(pool, b"a", 16)
    with pytest.raises(CapacityError):
        pool.claim(shape, count)
    assert pool.kept_keys() == [b"a"]


def test_room_for_a_third_shape_is_made_of_what_was_used_least_recently(pool):
    keep(pool, b"a", 32)
    keep(pool, b"b", 12, ODD)
    pool.used([b"a"])
    pool.allocate(ZEROED, 1)
    assert pool.kept_keys() == [b"a"]


@pytest.mark.parametrize(("slabs", "spared"), [(16, 2), (200, 4)])
def test_what_is_kept_leaves_some_slabs_to_other_shapes_and_few_of_many(slabs, spared):
    pool = make_pool(slabs * 4096)
    for number in range(17 * slabs):
        keep(pool, b"%d" % number, 1)
    assert pool.cached_bytes == (slabs - spared) * 4096
    pool.allocate(ODD, 1)
    assert pool.cached_bytes == (slabs - spared) * 4096


def calls_to_make_room(units: int) -> int:
    """Python calls of a claim of 100 pages that evicts, where the older half of all is in use."""
    pool = make_pool(units * SMALL.nbytes)
    pages = pool.claim(SMALL, units)
    for page in pages:
        pool.keep(b"%d" % page, [page], None)
    pool.release(pages[units // 2 :])
    calls = 0

    def count(_frame: object, event: str, _what: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        pool.claim(SMALL, 100)
    finally:
        sys.setprofile(None)
    return calls


def test_making_room_costs_what_it_evicts_and_not_what_is_kept():
    assert calls_to_make_room(4096) <= calls_to_make_room(512)


def test_notes_of_the_order_of_use_do_not_pile_up(pool):
    for key in (b"a", b"b", b"c", b"d"):
        keep(pool, key, 16)
    for _ in range(500):
        pool.used([b"c", b"b", b"d"])
    assert sum(map(len, pool._oldest.values())) < 100
    pool.allocate(SMALL, 32)
    assert set(pool.kept_keys()) == {b"b", b"c"}


def test_two_threads_never_own_the_same_page():
    pool = make_pool(1 << 19)

    def churn(name: int) -> set[int]:
        own: set[int] = set()
        for turn in range(200):
            pages = pool.allocate(SMALL, 3)
            pool.keep(b"%d %d" % (name, turn), pages[1:2], None)
            pool.release(pages[1:])
            own.add(pages[0])
        return own

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
        free, cached = self.pool.free_pages(shape), self.pool.cached_pages
        try:
            pages = self.pool.allocate(shape, count)
        except CapacityError:
            assert count > free
            assert not self.pool.cached_pages or self.owned
        else:
            assert count <= free or cached
            assert not set(pages) & {page for pages in self.owned for page in pages}
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
            place = data.draw(st.integers(0, len(self.owned) - 1))
            self.pool.release(self.owned.pop(place))

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def keep(self, data: st.DataObject, key: bytes) -> None:
        if self.owned:
            self.pool.keep(key, data.draw(st.sampled_from(self.owned)), None)

    @rule(keys=st.permutations(KEYS))
    def take(self, keys: list[bytes]) -> None:
        self.owned += [list(kept.pages) for kept in self.pool.take(keys)]
        self.pool.used(keys)

    @rule(key=st.sampled_from(KEYS))
    def drop(self, key: bytes) -> None:
        self.pool.drop(key)

    @invariant()
    def every_page_is_counted_once(self) -> None:
        self.pool.check_integrity()
        assert self.pool.referenced_pages == len(
            {x for pages in self.owned for x in pages}
        )


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)
TestPoolMachine = PoolMachine.TestCase
