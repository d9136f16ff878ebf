import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from disagg.errors import CapacityError, LayoutError
from disagg.plan import RecordShape
from disagg.pool import HostArena
from disagg.transfer.keeping import KeepingPool

SMALL, ODD = RecordShape("small", 256, False), RecordShape("odd", 640, True)


def make_pool(nbytes: int = 16384) -> KeepingPool:
    return KeepingPool(HostArena(bytearray(nbytes)), 4096)


def keep(pool: KeepingPool, key: bytes, count: int, shape: RecordShape = SMALL) -> list[int]:
    """Pages that are only cached."""
    pages = pool.allocate(shape, count)
    pool.keep(key, pages, key.decode())
    pool.release(pages)
    return pages


def test_kept_pages_outlive_their_owners_and_are_counted_apart():
    pool = make_pool()
    pages = keep(pool, b"a", 3)
    assert (pool.referenced_pages, pool.used_bytes) == (0, 0)
    assert (pool.cached_pages, pool.cached_bytes) == (3, 768)
    (kept,) = pool.take([b"a"])
    assert (kept.pages, kept.note) == (tuple(pages), "a")
    assert (pool.referenced_pages, pool.used_bytes, pool.cached_pages) == (3, 768, 0)


def test_what_is_found_ends_at_the_first_unknown_key():
    pool = make_pool()
    keep(pool, b"a", 1)
    keep(pool, b"c", 1)
    assert [kept.note for kept in pool.take([b"a", b"b", b"c"])] == ["a"]


def test_cached_pages_make_room_those_least_recently_used_first():
    pool = make_pool()
    for key in (b"a", b"b", b"c", b"d"):
        keep(pool, key, 16)
    pool.used([b"a", b"b"])
    pool.allocate(ODD, 6)
    assert pool.kept_keys == [b"d", b"b", b"a"]


def test_of_what_was_used_together_the_first_goes_last():
    pool = make_pool()
    for key in (b"a", b"b", b"c"):
        keep(pool, key, 16)
    pool.used([b"a", b"b", b"c"])
    pool.allocate(SMALL, 32)
    assert pool.kept_keys == [b"b", b"a"]


def test_what_somebody_owns_is_never_taken_for_room():
    pool = make_pool()
    keep(pool, b"a", 32)
    keep(pool, b"b", 32)
    pool.take([b"a"])
    with pytest.raises(CapacityError):
        pool.allocate(SMALL, 33)
    assert pool.take([b"a"])
    assert len(pool.allocate(SMALL, 32)) == 32


def test_pages_that_are_only_kept_cannot_be_released():
    pool = make_pool()
    pages = keep(pool, b"a", 1)
    with pytest.raises(LayoutError, match="only kept"):
        pool.release(pages)


def test_the_first_who_keeps_under_a_key_is_right():
    pool = make_pool()
    first = keep(pool, b"a", 1)
    keep(pool, b"a", 1)
    assert pool.take([b"a"])[0].pages == tuple(first)
    assert pool.cached_pages == 0


def test_what_is_dropped_stays_with_its_owners():
    pool = make_pool()
    pages = pool.allocate(SMALL, 2)
    pool.keep(b"a", pages, None)
    pool.drop(b"a")
    assert not pool.take([b"a"])
    assert pool.referenced_pages == 2
    pool.release(pages)
    assert pool.referenced_pages == pool.cached_pages == 0


class Machine(RuleBasedStateMachine):
    """Owners that allocate, keep, take and release at will."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool()
        self.owned: list[list[int]] = []

    @rule(shape=st.sampled_from([SMALL, ODD]), count=st.integers(1, 20))
    def allocate(self, shape: RecordShape, count: int) -> None:
        try:
            self.owned.append(self.pool.allocate(shape, count))
        except CapacityError:
            assert not self.pool.cached_pages or self.owned

    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c"]))
    def keep(self, data: st.DataObject, key: bytes) -> None:
        if self.owned:
            self.pool.keep(key, data.draw(st.sampled_from(self.owned)), None)

    @rule(keys=st.permutations([b"a", b"b", b"c"]))
    def take(self, keys: list[bytes]) -> None:
        self.owned += [list(kept.pages) for kept in self.pool.take(keys)]
        self.pool.used(keys)

    @rule(key=st.sampled_from([b"a", b"b", b"c"]))
    def drop(self, key: bytes) -> None:
        self.pool.drop(key)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owned:
            place = data.draw(st.integers(0, len(self.owned) - 1))
            self.pool.release(self.owned.pop(place))

    @invariant()
    def every_page_is_counted_once(self) -> None:
        self.pool.check_integrity()
        owned = {page for pages in self.owned for page in pages}
        assert self.pool.referenced_pages == len(owned)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
