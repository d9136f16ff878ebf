"""Prompts with a common beginning: what is sent once, who owns it, and what is found altered."""

from dataclasses import replace
from itertools import chain

import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.errors import CapacityError, CorruptFrameError, ReservationError
from disagg.kv.arena import HostArena
from disagg.kv.page import ARENA_UNIT, Item, Kind
from disagg.kv.pool import Pool
from disagg.kv.prefix_keys import PrefixBlock, content_keys, units_of
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
def test_of_a_second_prompt_nothing_in_the_shared_part_is_sent_again(tokens, shared):
    first, second = (
        make_related(tokens + 37, 1, shared),
        make_related(tokens, 2, shared),
    )
    known, desk = shared_bytes(second.checklist, shared), Desk(1 << 21)
    assert desk.give(first, "one") == first.checklist.total_bytes
    assert desk.give(second, "two") == second.checklist.total_bytes - known
    assert known > 0
    admissions = [desk.engine["one"], desk.engine["two"]]
    for prompt, admission in zip((first, second), admissions, strict=True):
        assert prompt.equals(desk.pool.arena, admission.groups)
    pages = [x.groups[1].page_ids() for x in admissions]
    whole = shared // 64
    assert pages[0][:whole] == pages[1][:whole]
    assert not set(pages[0][whole:]) & set(pages[1][whole:])
    desk.free()
    desk.assert_nothing_held()
    assert desk.pool.cached_pages > 0


def test_a_reservation_says_how_much_is_here_and_what():
    """One layer group shares its first segment, the other one pages beyond it too."""
    first, second = make_related(2300, 1, 2110), make_related(2250, 2, 2110)
    desk = Desk(1 << 21)
    desk.give(first, "one")
    grant = desk.reserve(second, rid="two")
    assert desk.known_tokens("two") == 2048
    attached = desk.ask(second, grant)
    units = units_of(PLAN, 2250)
    named = [*units[0][:1], *units[1][:32]]
    items = [item for unit in named for item in unit.items(PLAN.groups[unit.group])]
    sent, place = first.digests(), second.checklist.place
    assert attached.here() == {place(x): sent[first.checklist.place(x)] for x in items}


def test_to_know_a_prompt_a_receiver_makes_no_list_of_its_items(monkeypatch):
    """A long one has 70,000: making them stopped its loop for longer than a decode step takes."""
    prompt, desk = make_prompt(2300), Desk(1 << 21)
    desk.give(prompt, "one")
    monkeypatch.setattr(PrefixBlock, "items", lambda *none: 1 / 0)
    monkeypatch.setattr(Manifest, "items", property(lambda none: 1 / 0))
    assert len(desk.ask(prompt, desk.reserve(prompt, rid="two")).have) > 64


def test_a_record_that_is_shared_is_never_written_whatever_a_frame_says():
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


def test_what_was_not_committed_is_offered_to_nobody(desk):
    first = make_related(500, 1, 400)
    desk.push(first, desk.begin(first, rid="one"))
    desk.reserve(make_related(450, 2, 400), rid="two")
    assert desk.known_tokens("two") == 0


def test_a_codec_of_its_own_shares_nothing_with_the_usual_one():
    desk = Desk(plan_of={"": PLAN, "other": OTHER_PLAN}.__getitem__)
    first, second = make_related(500, 1, 400), make_related(500, 1, 400, OTHER_PLAN)
    desk.give(first, "one")
    assert desk.give(second, "two", codec="other") == second.checklist.total_bytes
    desk.reserve(second, rid="three", codec="other")
    assert desk.known_tokens("three") == 384


def test_cached_pages_make_room_for_new_prompts_but_not_while_reserved():
    """Five slabs: 127 cached pages fill one, the large prompt needs all of them."""
    first, second = (make_related(n, n, 8192, BY_PAGE) for n in (8250, 8300))
    large, desk = make_prompt(26000, 9, BY_PAGE), Desk(5 << 14, plan=BY_PAGE)
    desk.give(first, "one")
    desk.free()
    assert desk.pool.cached_pages == 127
    desk.begin(second, rid="two")
    assert desk.known_tokens("two") == 127 * 64
    with pytest.raises(CapacityError):
        desk.reserve(large, rid="large")
    desk.at(0.0).abort("two", 0, "client gone")
    desk.give(large, "large")
    desk.free()
    desk.assert_nothing_held()


def test_cached_pages_that_lie_scattered_do_not_keep_out_who_would_share_them():
    """Three slabs, a page to share in each: a prompt that needs a slab for its tail."""
    prompt, pool = make_related(127 * 64 + 1, 1, 8192, BY_PAGE), make_pool(3 << 14)
    cache, (group,) = PrefixCache(pool), BY_PAGE.groups
    pages = pool.allocate(
        group.record(group.page), pool.free_pages(group.record(group.page))
    )
    keys, (units,) = (
        content_keys(MODEL, BY_PAGE, prompt.ids),
        units_of(BY_PAGE, prompt.tokens),
    )
    scattered = pages[:: len(pages) // 3]
    for key, unit, page in zip(keys[0], units, scattered, strict=False):
        note = CachedBlock(
            key, (page,), unit, prompt.checklist, prompt.commit().digests
        )
        pool.keep(key, (page,), note)
    pool.release(pages)
    assert pool.cached_pages == 3
    holding = cache.hold(MODEL, BY_PAGE, prompt.job(), 0)
    assert (holding.cached_tokens, holding.arrivals.here) == (0, {})
    cache.release(holding.groups)
    pool.check_integrity()
    assert pool.referenced_pages == 0


# -- bytes that change while they are kept: found, forgotten, told; and nobody gets them
def flip(
    desk: Desk, prompt: Prompt, admission: Admission, item: Item, place: int = 0
) -> None:
    """One bit of one byte of an item in the pool."""
    ((start, _),) = Addresses(prompt.checklist, admission.groups).spans(item)
    (byte,) = desk.pool.arena.read(start + place, 1)
    desk.pool.arena.write([(start + place, bytes([byte ^ 4]))])


def test_pages_that_are_as_they_were_pass_though_tails_are_written_to(desk):
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
def test_a_flipped_bit_in_a_cached_page_is_found_by_name_and_the_page_forgotten(
    desk, which, place
):
    prompt = make_related(700, 1, 700)
    item = [x for x in prompt.checklist.items if x.kind in ("page", "segment")][which]
    desk.give(prompt, "one")
    admission = desk.engine["one"]
    desk.free()
    cached = desk.pool.cached_pages
    flip(desk, prompt, admission, item, place % prompt.checklist.nbytes(item))
    ((error, requests),) = desk.scrub().items()
    assert str(item) in str(error)
    assert requests == []
    assert desk.pool.cached_pages < cached
    assert desk.ledger.counts["damaged"] == 1
    assert not desk.scrub()
    sent = desk.give(prompt, "two")
    assert 0 < prompt.checklist.total_bytes - sent < shared_bytes(prompt.checklist, 700)
    assert prompt.equals(desk.pool.arena, desk.engine["two"].groups)


def test_requests_that_decode_from_a_damaged_page_or_were_promised_it_are_over(desk):
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


def test_a_scrub_goes_on_where_the_last_one_stopped_and_owns_what_it_reads(desk):
    prompt = make_related(1500, 1, 1500)
    desk.give(prompt, "one")
    flip(desk, prompt, desk.engine["one"], Item("page", 1, 1, 11))
    desk.free()
    units, kept = len(desk.pool.kept_keys()), desk.pool.kept_keys()
    scrub = desk.ledger.cache.begin_scrub(1 << 30)
    assert desk.pool.cached_pages == 0
    desk.ledger.cache.end_scrub(scrub, ())
    desk.assert_nothing_held()
    assert (
        desk.pool.kept_keys() == kept
    )  # what goes first when room is needed is as before
    assert sum(len(desk.scrub(1)) for _ in range(units)) == 1


def test_whoever_reserves_damaged_pages_while_they_are_verified_loses_them(desk):
    prompt = make_related(500, 1, 500)
    desk.give(prompt, "one")
    admission = desk.engine["one"]
    desk.free()
    flip(desk, prompt, admission, Item("page", 1, 1, 0))
    scrub = desk.ledger.cache.begin_scrub(1 << 30)
    damaged = scrub.verify()
    grant = desk.reserve(prompt, rid="two")
    assert desk.known_tokens("two")
    assert list(desk.at(0.0).end_scrub(scrub, damaged).values()) == [[("two", 0)]]
    ticket = Ticket(grant.nonce, EPOCH, 1)
    assert desk.ledger._find(ticket).state is State.ABORTED
    desk.assert_nothing_held()


def test_a_prefix_is_held_by_a_window_when_its_last_window_is() -> None:
    shape = KVShape(2, 2, 64, "float16", (None, 256))
    plan, pool = (
        parse_plan("kivi:bits=4,residual=64", shape),
        Pool(HostArena(bytearray(32 << 20))),
    )
    cache, prompt = PrefixCache(pool), list(range(1500))

    def hold(tokens: list[int]) -> PendingHandoff:
        """Committed, with digests by the tokens that an item is of."""
        holding = cache.hold("model", plan, Job("r", 0, tuple(tokens)), 0)
        seen = {
            item: hash((unit.group, unit.end, i)) % 2**64
            for unit in chain.from_iterable(units_of(plan, len(tokens)))
            for i, item in enumerate(unit.items(plan.groups[unit.group]))
        }
        items = holding.arrivals.checklist.items
        assert all(
            seen[items[place]] == known
            for place, known in holding.arrivals.here.items()
        )
        cache.keep(holding, [seen.get(item, 0) for item in items])
        return holding

    hold(prompt[:1000])
    longer, much_longer, shorter = (hold(prompt[:n]) for n in (1100, 1500, 500))
    sealed = plan.groups[0].sealed(1000)
    assert (
        longer.cached_tokens == sealed
    )  # the window begins among what the first prompt kept
    found = [
        x
        for x in map(longer.arrivals.checklist.item, longer.arrivals.here)
        if x.group == 1
    ]
    pages = (sealed - plan.groups[1].dropped(1100)) // 64
    assert len(found) == pages * len(plan.groups[1].layers)
    assert much_longer.cached_tokens == plan.groups[0].sealed(1100)
    assert shorter.cached_tokens == plan.groups[1].dropped(
        500
    )  # its last window was dropped
    for holding in (longer, much_longer, shorter):
        assert len(holding.groups[1].page_ids()) <= 256 // 64 + 1
