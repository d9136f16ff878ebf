"""Prompts with a common beginning: what is sent once, who owns it, and what is found altered."""

from dataclasses import replace
from itertools import chain

import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.errors import CapacityError, CorruptFrameError, ReservationError
from disagg.kv.arena import HostArena
from disagg.kv.page import ARENA_UNIT, Item, Kind
from disagg.kv.pool import Pool
from disagg.kv.prefix_keys import PrefixBlock, content_keys, prefix_blocks
from disagg.transfer.messages import Job
from disagg.transfer.prefix_cache import CachedBlock, PendingHandoff, PrefixCache
from disagg.transfer.records import Addresses, Manifest
from disagg.transfer.reservations import Admission, State
from disagg.wire import Ticket
from tests.transfer.desk import Desk
from tests.transfer.prompts import (
    BY_PAGE,
    EPOCH,
    MODEL,
    OTHER_PLAN,
    PLAN,
    Prompt,
    make_pool,
    make_prompt,
    make_related,
    shared_bytes,
)


# -- what is shared
@pytest.mark.parametrize(("tokens", "shared"), [(1200, 1000), (2300, 2110), (190, 130)])
def test_the_shared_part_of_a_second_prompt_is_not_sent_again(tokens, shared):
    first = make_related(tokens + 37, 1, shared)
    second = make_related(tokens, 2, shared)
    cached_bytes = shared_bytes(second.manifest, shared)
    desk = Desk(1 << 21)

    assert cached_bytes > 0
    assert desk.give(first, "one") == first.manifest.total_bytes
    assert desk.give(second, "two") == second.manifest.total_bytes - cached_bytes

    one, two = desk.engine["one"], desk.engine["two"]
    assert first.equals(desk.pool.arena, one.groups)
    assert second.equals(desk.pool.arena, two.groups)
    whole = shared // 64
    first_pages = one.groups[1].page_ids()
    second_pages = two.groups[1].page_ids()
    assert first_pages[:whole] == second_pages[:whole]
    assert not set(first_pages[whole:]) & set(second_pages[whole:])

    desk.free()
    desk.assert_nothing_held()
    assert desk.pool.cached_pages > 0


@pytest.mark.parametrize("plan", [PLAN, BY_PAGE], ids=["segments", "pages"])
def test_blocks_of_several_earlier_prompts_have_their_digests(plan):
    """The first blocks of the third prompt come from the first one, the others from the second."""
    first = make_related(2300, 1, 2110, plan)
    second = make_related(6000, 2, 2110, plan)
    desk = Desk(1 << 22, plan=plan)
    desk.give(first, "one")
    desk.give(second, "two")

    ticket = desk.begin(second, rid="three")

    received = desk.received(ticket)
    assert desk.cached_tokens("three") > 4096
    assert received.items() <= second.digests().items()


def test_a_cached_prompt_is_looked_up_in_long_ranges(monkeypatch):
    """A prompt of 32,768 exact tokens took a tenth of a second, a range for each page and layer."""
    prompt = make_prompt(64 * 100, plan=BY_PAGE)
    desk = Desk(1 << 22, plan=BY_PAGE)
    desk.give(prompt, "one")
    indices_of = Manifest.indices_of
    ranges = []

    def noted(manifest, block):
        for indices in indices_of(manifest, block):
            ranges.append(indices)
            yield indices

    monkeypatch.setattr(Manifest, "indices_of", noted)

    desk.reserve(prompt, rid="two")

    assert desk.cached_tokens("two") > 64 * 90
    assert len(ranges) <= 4


def test_a_reservation_answers_which_items_are_cached():
    """One layer group shares its first segment, the other one pages beyond it too."""
    first = make_related(2300, 1, 2110)
    second = make_related(2250, 2, 2110)
    desk = Desk(1 << 21)
    desk.give(first, "one")

    grant = desk.reserve(second, rid="two")
    attached = desk.ask(second, grant)

    assert desk.cached_tokens("two") == 2048
    blocks = prefix_blocks(PLAN, 2250)
    first_digests = first.digests()
    expected = {}
    for block in (*blocks[0][:1], *blocks[1][:32]):
        for item in block.items(PLAN.groups[block.group]):
            digest = first_digests[first.manifest.index_of(item)]
            expected[second.manifest.index_of(item)] = digest
    assert attached.received() == expected


def test_a_cached_prompt_is_reserved_without_a_list_of_its_items(monkeypatch):
    """A long prompt has 70,000: a list of them stopped the loop for longer than a decode step."""
    prompt = make_prompt(2300)
    desk = Desk(1 << 21)
    desk.give(prompt, "one")
    monkeypatch.setattr(PrefixBlock, "items", lambda *none: 1 / 0)
    monkeypatch.setattr(Manifest, "items", property(lambda none: 1 / 0))
    assert len(desk.ask(prompt, desk.reserve(prompt, rid="two")).have) > 64


def test_a_shared_record_is_never_written():
    first, second = make_related(400, 1, 400), make_related(400, 1, 400, noise=5)
    desk = Desk()
    desk.give(first, "one")
    ticket = desk.begin(second, rid="two")
    item = Item(Kind.PAGE, 1, 1, 2)
    same = replace(first.frame(ticket, [item]), ticket=ticket)
    assert desk.store(same) == 0
    with pytest.raises(CorruptFrameError, match="page 2 of layer 1"):
        desk.store(second.frame(ticket, [item]))
    assert first.equals(desk.pool.arena, desk.engine["one"].groups)


def test_records_that_were_not_committed_are_not_shared(desk):
    first = make_related(500, 1, 400)
    desk.push(first, desk.begin(first, rid="one"))
    desk.reserve(make_related(450, 2, 400), rid="two")
    assert desk.cached_tokens("two") == 0


def test_prompts_of_different_codecs_share_nothing():
    desk = Desk(plan_of={"": PLAN, "other": OTHER_PLAN}.__getitem__)
    first, second = make_related(500, 1, 400), make_related(500, 1, 400, OTHER_PLAN)
    desk.give(first, "one")
    assert desk.give(second, "two", codec="other") == second.manifest.total_bytes
    desk.reserve(second, rid="three", codec="other")
    assert desk.cached_tokens("three") == 384


def test_cached_pages_make_room_but_not_while_reserved():
    """Five slabs: 127 cached pages fill one, the large prompt needs all of them."""
    first = make_related(8250, 8250, 8192, BY_PAGE)
    second = make_related(8300, 8300, 8192, BY_PAGE)
    large = make_prompt(26000, 9, BY_PAGE)
    desk = Desk(5 << 14, plan=BY_PAGE)

    desk.give(first, "one")
    desk.free()
    assert desk.pool.cached_pages == 127
    desk.begin(second, rid="two")
    assert desk.cached_tokens("two") == 127 * 64
    with pytest.raises(CapacityError):
        desk.reserve(large, rid="large")
    desk.at(0.0).abort("two", 0, "client gone")
    desk.give(large, "large")
    desk.free()
    desk.assert_nothing_held()


def test_scattered_cached_pages_do_not_keep_their_prompt_out():
    """Three slabs with a cached page in each, and a prompt that needs a slab for its tail."""
    prompt = make_related(127 * 64 + 1, 1, 8192, BY_PAGE)
    pool = make_pool(3 << 14)
    cache = PrefixCache(pool)
    (group,) = BY_PAGE.groups
    shape = group.record(group.page)
    pages = pool.allocate(shape, pool.free_pages(shape))
    (keys,) = content_keys(MODEL, BY_PAGE, prompt.ids)
    (blocks,) = prefix_blocks(BY_PAGE, prompt.tokens)
    digests = prompt.commit().digests
    scattered = pages[:: len(pages) // 3]
    for key, block, page in zip(keys, blocks, scattered, strict=False):
        cached = CachedBlock(key, (page,), block, prompt.manifest, digests)
        pool.keep(key, (page,), cached)
    pool.release(pages)
    assert pool.cached_pages == 3

    pending = cache.hold(MODEL, BY_PAGE, prompt.job(), 0)

    assert (pending.cached_tokens, pending.parts[0].digests) == (0, {})
    cache.release(pending.groups)
    pool.check_integrity()
    assert pool.referenced_pages == 0


# -- bytes that change while they are cached: found, dropped, reported, never shared
def flip(
    desk: Desk, prompt: Prompt, admission: Admission, item: Item, offset: int = 0
) -> None:
    """Flip one bit of one byte of an item in the pool."""
    ((start, _),) = Addresses(prompt.manifest, admission.groups).spans(item)
    (byte,) = desk.pool.arena.read(start + offset, 1)
    desk.pool.arena.write([(start + offset, bytes([byte ^ 4]))])


def test_unchanged_pages_pass_though_tails_are_written_to(desk):
    prompt = make_related(700, 1, 700)
    desk.give(prompt, "one")
    for state in desk.engine["one"].groups:
        for page in (*state.tail, *([] if state.side is None else [state.side])):
            desk.pool.arena.write([(page * ARENA_UNIT, b"decode was here")])
    assert not desk.scrub()
    desk.free()
    assert not desk.scrub()
    desk.assert_nothing_held()


@pytest.mark.parametrize("which", [0, 7, 13, -1])
@pytest.mark.parametrize("place", [0, -1])
def test_a_cached_page_with_a_flipped_bit_is_named_and_dropped(desk, which, place):
    prompt = make_related(700, 1, 700)
    item = [x for x in prompt.manifest.items if x.kind in ("page", "segment")][which]
    desk.give(prompt, "one")
    admission = desk.engine["one"]
    desk.free()
    cached = desk.pool.cached_pages
    flip(desk, prompt, admission, item, place % prompt.manifest.nbytes(item))
    ((error, requests),) = desk.scrub().items()
    assert str(item) in str(error)
    assert requests == []
    assert desk.pool.cached_pages < cached
    assert desk.ledger.counts["damaged"] == 1
    assert not desk.scrub()
    sent = desk.give(prompt, "two")
    assert 0 < prompt.manifest.total_bytes - sent < shared_bytes(prompt.manifest, 700)
    assert prompt.equals(desk.pool.arena, desk.engine["two"].groups)


def test_requests_that_use_a_damaged_page_are_over(desk):
    prompts = {"one": make_related(500, 1, 400), "two": make_related(450, 2, 400)}
    prompts["other"] = make_related(300, 3, 0)
    for rid, prompt in prompts.items():
        desk.give(prompt, rid)
    ticket = desk.begin(prompts["two"], rid="promised")
    flip(desk, prompts["one"], desk.engine["one"], Item("page", 1, 1, 2))
    ((error, requests),) = desk.scrub().items()
    assert sorted(requests) == [("one", 0), ("promised", 0), ("two", 0)]
    dropped = sorted((rid, reason) for rid, _, reason in desk.dropped)
    assert dropped == [("one", str(error)), ("two", str(error))]
    with pytest.raises(ReservationError, match="altered"):
        desk.at(0.0).commit(prompts["two"].commit(ticket))
    assert desk.ledger.gauges() == {"reservations": 0, "streams": 0, "running": 1}
    desk.free()
    desk.assert_nothing_held()


def test_a_scrub_continues_the_last_one_and_owns_its_pages(desk):
    prompt = make_related(1500, 1, 1500)
    desk.give(prompt, "one")
    flip(desk, prompt, desk.engine["one"], Item("page", 1, 1, 11))
    desk.free()
    keys = desk.pool.kept_keys()
    scrub = desk.ledger.cache.begin_scrub(1 << 30)
    assert desk.pool.cached_pages == 0
    desk.ledger.cache.end_scrub(scrub, ())
    desk.assert_nothing_held()
    assert (
        desk.pool.kept_keys() == keys
    )  # what goes first when room is needed is as before
    assert sum(len(desk.scrub(1)) for _ in keys) == 1


def test_a_reservation_of_pages_that_are_being_verified_may_end(desk):
    prompt = make_related(500, 1, 500)
    desk.give(prompt, "one")
    admission = desk.engine["one"]
    desk.free()
    flip(desk, prompt, admission, Item("page", 1, 1, 0))
    scrub = desk.ledger.cache.begin_scrub(1 << 30)
    damaged = scrub.verify()
    grant = desk.reserve(prompt, rid="two")
    assert desk.cached_tokens("two")
    assert list(desk.at(0.0).end_scrub(scrub, damaged).values()) == [[("two", 0)]]
    ticket = Ticket(grant.nonce, EPOCH, 1)
    assert desk.ledger._find(ticket).state is State.ABORTED
    desk.assert_nothing_held()


def test_a_prefix_is_held_by_a_window_when_its_last_window_is() -> None:
    shape = KVShape.uniform(2, 2, 64, "float16", (None, 256))
    plan = parse_plan("kivi:bits=4,residual=64", shape)
    pool = Pool(HostArena(bytearray(32 << 20)))
    cache = PrefixCache(pool)
    prompt = list(range(1500))

    def commit(tokens: list[int]) -> PendingHandoff:
        """Hold a prompt and cache its blocks, with digests that depend on the tokens."""
        pending = cache.hold("model", plan, Job("r", 0, tuple(tokens)), 0)
        digests = {}
        for block in chain.from_iterable(prefix_blocks(plan, len(tokens))):
            for i, item in enumerate(block.items(plan.groups[block.group])):
                digests[item] = hash((block.group, block.end, i)) % 2**64
        items = pending.manifest.items
        for index, cached_digest in pending.parts[0].digests.items():
            assert digests[items[index]] == cached_digest
        cache.keep(pending, [digests.get(item, 0) for item in items])
        return pending

    commit(prompt[:1000])
    longer = commit(prompt[:1100])
    much_longer = commit(prompt[:1500])
    shorter = commit(prompt[:500])

    # the window of the longer prompt begins in cached pages of the first
    full, windowed = plan.groups
    sealed = full.sealed(1000)
    assert longer.cached_tokens == sealed
    cached_items = map(longer.manifest.item, longer.parts[0].digests)
    pages = (sealed - windowed.dropped(1100)) // 64
    in_window = [item for item in cached_items if item.group == 1]
    assert len(in_window) == pages * len(windowed.layers)
    assert much_longer.cached_tokens == full.sealed(1100)
    # the last window of the shorter prompt was dropped
    assert shorter.cached_tokens == windowed.dropped(500)
    for pending in (longer, much_longer, shorter):
        assert len(pending.groups[1].page_ids()) <= 256 // 64 + 1
