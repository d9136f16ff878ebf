import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from disagg.errors import CapacityError, LayoutError
from disagg.plan import RecordShape
from disagg.pool import HostArena, Pool

SMALL, ODD, ZEROED = (
    RecordShape("small", 256, False),
    RecordShape("odd", 640, False),
    RecordShape("zeroed", 256, True),
)


def make_pool(nbytes: int = 16384, slab: int = 4096) -> Pool:
    return Pool(HostArena(bytearray(b"\xff" * nbytes)), slab)


def test_a_page_id_is_its_address() -> None:
    pool = make_pool()
    first, second = pool.allocate(ODD, 2)
    pool.write(second, 3, b"abc")
    assert bytes(pool.arena.read(second * 128 + 3, 3)) == b"abc"
    assert abs(second - first) * 128 == 640


def test_pages_that_may_be_partly_filled_come_zeroed() -> None:
    pool = make_pool()
    (page,) = pool.allocate(ZEROED, 1)
    assert bytes(pool.read(page, 0, 256)) == bytes(256)


def test_claimed_pages_are_left_as_they_are() -> None:
    pool = make_pool()
    (page,) = pool.claim(ZEROED, 1)
    assert bytes(pool.read(page, 0, 256)) == b"\xff" * 256
    pool.release([page])
    (again,) = pool.allocate(ZEROED, 1)
    assert again == page
    assert bytes(pool.read(page, 0, 256)) == bytes(256)


def test_an_allocation_too_large_takes_nothing() -> None:
    pool = make_pool()
    for take in (pool.allocate, pool.claim):
        with pytest.raises(CapacityError, match="25 pages of 640 bytes wanted, 24 free"):
            take(ODD, 25)
    assert pool.referenced_pages == 0
    assert len(pool.allocate(ODD, 24)) == 24


def test_a_record_larger_than_a_slab_is_refused_by_size() -> None:
    with pytest.raises(CapacityError, match="does not fit a slab of 4096"):
        make_pool().allocate(RecordShape("huge", 4224, False), 1)


def test_an_empty_slab_serves_another_shape() -> None:
    pool = make_pool()
    pages = pool.allocate(SMALL, 64)
    assert pool.free_pages(ODD) == 0
    pool.release(pages)
    assert pool.free_pages(ODD) == 24


def test_a_shared_page_stays_until_its_last_owner_leaves() -> None:
    pool = make_pool()
    pages = pool.allocate(SMALL, 1)
    pool.retain(pages)
    pool.release(pages)
    assert pool.referenced_pages == 1
    pool.release(pages)
    assert pool.referenced_pages == 0
    with pytest.raises(LayoutError, match="nobody owns it"):
        pool.release(pages)
    with pytest.raises(LayoutError, match="cannot be shared"):
        pool.retain(pages)


def test_integrity_check_sees_a_page_that_is_owned_and_free() -> None:
    pool = make_pool()
    (page,) = pool.allocate(SMALL, 1)
    pool._slabs[pool._slab_index(page)].free.append(page)
    with pytest.raises(LayoutError):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Any order of allocate, retain and release keeps the pool's books."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.owned: list[int] = []

    @rule(shape=st.sampled_from([SMALL, ODD, ZEROED]), count=st.integers(0, 20))
    def allocate(self, shape: RecordShape, count: int) -> None:
        free = self.pool.free_pages(shape)
        if count > free:
            with pytest.raises(CapacityError):
                self.pool.allocate(shape, count)
        else:
            pages = self.pool.allocate(shape, count)
            assert not set(pages) & set(self.owned)
            self.owned.extend(pages)

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        if self.owned:
            page = data.draw(st.sampled_from(self.owned))
            self.pool.retain([page])
            self.owned.append(page)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owned:
            page = data.draw(st.sampled_from(self.owned))
            self.owned.remove(page)
            self.pool.release([page])

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check_integrity()
        assert self.pool.referenced_pages == len(set(self.owned))


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase
