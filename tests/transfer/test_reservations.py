"""Hand-offs by the receiver's rules: no socket, and a number as clock.

What may happen in any order is in test_reservations_machine.py.
"""

from collections import OrderedDict
from dataclasses import replace
from itertools import count
from unittest.mock import Mock

import pytest

from disagg import errors
from disagg.kv.decode_slots import DecodeSlots
from disagg.kv.page import Item, Kind
from disagg.transfer import reservations
from disagg.transfer.messages import Ack, Attach, Grant
from disagg.wire import Ticket
from tests.transfer.desk import SMALL, Desk
from tests.transfer.prompts import (
    BY_PAGE,
    EPOCH,
    MODEL,
    PLAN,
    make_prompt,
    make_related,
)


# -- a whole hand-off, and its commit
@pytest.mark.parametrize("tokens", [1, 5, 63, 124, 300, 2108])
def test_reserving_writes_little_and_the_hand_off_the_rest(
    tokens,
):
    desk, prompt = Desk(clock=count(0.0, 0.001).__next__), make_prompt(tokens)
    arena = desk.pool.arena
    arena.write([(0, b"\xa5" * arena.nbytes)])
    ticket = desk.begin(prompt)
    untouched = bytes(arena.read(0, arena.nbytes)).count(b"\xa5")
    assert arena.nbytes - untouched < 2 * 2 * 3 * 16 * 2 * 8 * 2
    desk.push(prompt, ticket)
    ack = desk.ledger.commit(prompt.commit(ticket))
    assert ack.verify_ms == pytest.approx(
        prompt.manifest.num_items
    )  # a look at the clock each
    assert prompt.equals(arena, desk.admitted().groups)


@pytest.mark.parametrize(
    "refusal", [errors.LayoutError("no such sampler"), OverflowError("too large")]
)
def test_what_the_engine_refuses_for_whatever_reason_is_freed_and_told(
    desk, prompt, refusal
):
    desk.admit, ticket = Mock(side_effect=refusal), desk.begin(prompt)
    desk.push(prompt, ticket)
    for error in (type(refusal), errors.AbortedError):
        with pytest.raises(error, match=str(refusal)):
            desk.at(0.0).commit(prompt.commit(ticket))
        desk.assert_nothing_held()


def test_a_commit_of_another_prompt_is_refused(desk, prompt):
    ticket = desk.begin(prompt)
    desk.push(prompt, ticket)
    for change in ({"tokens": 299}, {"plan": "0" * 16}, {"digests": (1, 2)}):
        with pytest.raises(errors.LayoutError):
            desk.at(0.0).commit(replace(prompt.commit(ticket), **change))
    with pytest.raises(errors.CorruptFrameError):
        desk.at(0.0).commit(make_prompt(300, seed=1).commit(ticket))
    assert not desk.engine


def test_a_commit_that_nests_too_deep_is_refused_by_name(desk, prompt):
    ticket, deep = desk.begin(prompt), []
    desk.push(prompt, ticket)
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(errors.CorruptFrameError, match="pack"):
        desk.at(0.0).commit(replace(prompt.commit(ticket), extras={"deep": deep}))
    assert isinstance(desk.at(0.0).commit(prompt.commit(ticket)), Ack)


# -- who gets room
def test_a_moving_sequence_gets_more_room_until_its_pages_come(desk, prompt):
    first = desk.reserve(prompt, moved=len(prompt.ids) + 1)
    pages, moved = desk.pool.referenced_pages, len(prompt.ids) + 2
    second = desk.reserve(prompt, moved=moved)
    assert second != first
    assert desk.pool.referenced_pages == pages
    desk.attach(make_prompt(moved), second)
    for change in (
        {"prompt": prompt.ids[1:]},
        {"codec": "other"},
        {"moved": moved + 1},
    ):
        with pytest.raises(errors.ReservationError, match="another prompt"):
            desk.reserve(prompt, **{"moved": moved} | change)


WRONG_JOBS = {
    "an epoch that is over": ({"epoch": EPOCH - 1}, errors.ReservationError),
    "an epoch to come": ({"epoch": EPOCH + 1}, errors.ReservationError),
    "no tokens": ({"prompt": ()}, errors.RequestError),
    "more tokens than the pool holds": (
        {"prompt": (1,) * 200_000},
        errors.PromptTooLongError,
    ),
    "no name": ({"rid": ""}, errors.RequestError),
    "a name without end": ({"rid": "x" * 300}, errors.RequestError),
    "a codec spec without end": ({"codec": "x" * 5000}, errors.RequestError),
    "a codec that nobody knows": ({"codec": "other"}, errors.UnknownNameError),
}


@pytest.mark.parametrize(("change", "error"), WRONG_JOBS.values(), ids=WRONG_JOBS)
def test_jobs_that_can_never_be_served_are_refused_by_name(prompt, change, error):
    def plan_of(spec):
        if spec:
            raise errors.UnknownNameError.of("codec", spec, ["toy"])
        return PLAN

    desk = Desk(plan_of=plan_of)
    with pytest.raises(error):
        desk.reserve(prompt, **change)
    desk.assert_nothing_held()


def test_what_an_empty_pool_cannot_hold_is_never_called_a_lack_of_room():
    """Slabs have ends that no record fits into: fewer bytes than the pool has can be too many."""
    wasted = []
    for tokens in range(1, 6000, 37):
        desk, prompt = Desk(SMALL), make_prompt(1)
        try:
            desk.reserve(prompt, prompt=(1,) * tokens)
        except errors.PromptTooLongError:
            if prompt.plan.nbytes(tokens) <= SMALL:
                wasted.append(tokens)
    assert wasted


def test_a_reservation_leaves_the_watermark_free(prompt):
    nbytes = prompt.plan.nbytes(300)
    desk = Desk(1 << 20, watermark_bytes=(1 << 20) - 2 * nbytes)
    desk.reserve(prompt)
    desk.reserve(prompt, rid="second")
    with pytest.raises(errors.CapacityError, match="stay free"):
        desk.reserve(prompt, rid="third")
    desk = Desk(1 << 20, watermark_bytes=1 << 20)
    desk.reserve(prompt)
    with pytest.raises(errors.CapacityError, match="stay free"):
        desk.reserve(prompt, rid="second")


def test_what_is_shared_with_others_does_not_count_as_room_wanted():
    prompt = make_related(64 * 40, 1, 64 * 40, BY_PAGE)
    spare = (1 << 20) - BY_PAGE.nbytes(prompt.tokens) - BY_PAGE.nbytes(190)
    desk = Desk(1 << 20, plan=BY_PAGE, watermark_bytes=spare)
    desk.give(prompt, "one")
    desk.reserve(prompt, rid="two")


def test_reservations_and_running_sequences_share_one_limit(desk, prompt):
    desk = Desk(rows=DecodeSlots(2))
    desk.give(prompt, "one")
    desk.reserve(prompt, rid="two")
    with pytest.raises(errors.CapacityError, match="2 sequences"):
        desk.reserve(prompt, rid="three")
    desk.reserve(prompt, rid="two", attempt=1)  # in the place of a lower attempt
    desk.free("one")
    desk.reserve(prompt, rid="three")


def test_a_moving_sequence_has_records_of_its_own_for_all_tokens(desk, prompt):
    desk.give(prompt, "one")
    longer = make_prompt(prompt.tokens + 200)
    keys = desk.pool.kept_keys()
    ids = longer.ids[: prompt.tokens]
    ticket = desk.attach(longer, desk.reserve(longer, prompt=ids, moved=longer.tokens))
    assert desk.push(longer, ticket) == longer.manifest.total_bytes
    assert isinstance(desk.at(1.0).commit(longer.commit(ticket)), Ack)
    assert desk.pool.kept_keys() == keys
    with pytest.raises(errors.RequestError, match="moves with 7"):
        desk.reserve(prompt, rid="new", moved=7)


@pytest.mark.parametrize("broken", ["claim", "take", "used"])
def test_an_error_of_any_type_while_records_are_taken_leaks_none(
    prompt, monkeypatch, broken
):
    desk, shared = Desk(), make_related(300, 1, 256)
    desk.give(shared, "one")
    with monkeypatch.context() as patch:
        patch.setattr(
            desk.pool, broken, Mock(side_effect=OverflowError("nobody expected it"))
        )
        with pytest.raises(OverflowError):
            desk.reserve(shared, rid="two")
    desk.free()
    desk.assert_nothing_held()


# -- attaching, frames and channels
def test_attaching_for_another_model_plan_or_prompt_is_a_layout_error(desk, prompt):
    grant = desk.reserve(prompt)
    right = Attach(Ticket(grant.nonce, EPOCH, 1), MODEL, prompt.plan.fingerprint, 300)
    for change in ({"model": "b-model"}, {"plan": "0" * 16}, {"tokens": 299}):
        with pytest.raises(errors.LayoutError):
            desk.at(0.0).attach(replace(right, **change))
    other = replace(right.ticket, epoch=EPOCH - 1)
    assert desk.at(0.0).renew([other]) == (grant.nonce,)
    with pytest.raises(errors.ReservationError, match=f"epoch {EPOCH - 1} is over"):
        desk.at(0.0).attach(replace(right, ticket=other))
    attached = desk.at(0.0).attach(right)
    with pytest.raises(errors.ReservationError, match="stream 2 of"):
        desk.store(prompt.frames(replace(right.ticket, gen=2))[0])
    assert (attached.lease_s, attached.credit) == (
        10.0,
        2 * prompt.manifest.frame_bytes,
    )


def test_an_item_twice_in_one_frame_is_written_once(desk, prompt):
    ticket = desk.begin(prompt)
    (item,) = items = [Item(Kind.PAGE, 0, 2, 1)]
    frame = prompt.frame(ticket, items * 2)
    assert desk.store(frame) == 1
    other = desk.begin(prompt, rid="other")
    wrong = replace(frame, ticket=other, digests=(frame.digests[0], 5))
    with pytest.raises(errors.CorruptFrameError, match=str(item)):
        desk.store(wrong)
    desk.store(prompt.frame(other, items))


def test_an_attempt_that_comes_too_late_is_refused(desk, prompt):
    desk.reserve(prompt)
    desk.reserve(prompt, attempt=2)
    with pytest.raises(errors.ReservationError, match="comes after attempt 2"):
        desk.reserve(prompt, attempt=1)
    with pytest.raises(errors.ReservationError, match="superseded"):
        desk.reserve(prompt, 20.0)
    desk.give(prompt, attempt=2)  # its lease was over, nothing else
    with pytest.raises(errors.ReservationError, match="which is admitted"):
        desk.reserve(prompt, attempt=2)
    desk.engine.clear()
    desk.give(prompt, attempt=3)
    desk.at(0.0).finished("r", 2)
    for attempt, running in ((2, 1), (3, 0), (2, 0)):
        desk.at(0.0).abort("r", attempt, "client gone")
        assert desk.ledger.gauges()["running"] == running
    with pytest.raises(errors.ReservationError, match="was aborted"):
        desk.reserve(prompt, attempt=3)


def test_aborts_are_forgotten_after_a_while_or_if_too_many(desk, prompt, monkeypatch):
    monkeypatch.setattr(reservations, "MAX_TOMBSTONES", 3)
    for now, rid in enumerate("abcad"):
        desk.at(float(now)).abort(rid, 0, "client gone")
    desk.reserve(prompt, 5.0, rid="b")
    desk.reserve(prompt, reservations.MEMORY_S + 2.5, rid="c")
    for rid in "ad":
        with pytest.raises(errors.ReservationError, match="aborted"):
            desk.reserve(prompt, reservations.MEMORY_S + 2.5, rid=rid)


# -- leases, and what a frame costs
def test_the_end_of_a_channel_breaks_its_attachments_alone(desk, prompt):
    one, two = object(), object()
    tickets = {rid: desk.begin(prompt, rid=rid) for rid in ("a", "b", "c", "d")}
    for rid, channel in (("a", one), ("b", one), ("c", two)):
        desk.store(prompt.frames(tickets[rid])[0], channel=channel)
    with pytest.raises(errors.ReservationError, match="another channel"):
        desk.store(prompt.frames(tickets["a"])[1], channel=two)
    again = Ticket(tickets["b"].nonce, EPOCH, 2)
    desk.attach(prompt, desk.reserve(prompt, rid="b"), 2)
    desk.store(prompt.frames(again)[1], channel=two)
    whole = desk.begin(prompt, rid="e")
    for frame in prompt.frames(whole):
        desk.store(frame, channel=one)
    desk.ledger.channel_ended(one)
    assert isinstance(desk.at(0.0).commit(prompt.commit(whole)), Ack)
    with pytest.raises(errors.ReservationError, match="broken"):
        desk.store(prompt.frames(tickets["a"])[1], channel=one)
    assert desk.ledger.gauges() == {"reservations": 4, "streams": 3, "running": 1}
    desk.store(prompt.frames(again)[2], channel=two)
    desk.store(prompt.frames(tickets["c"])[1], channel=two)
    desk.store(prompt.frames(tickets["d"])[1], channel=two)


def test_a_lease_ends_without_a_sign_of_life_and_any_of_them_renews_it(desk, prompt):
    signs = ("renew", "none", "frame", "attach", "same job")
    tickets = {sign: desk.begin(prompt, rid=sign) for sign in signs}
    frames = {sign: prompt.frames(ticket) for sign, ticket in tickets.items()}
    for now in (7.0, 14.0, 21.0):
        assert desk.at(now).renew([tickets["renew"]]) == ()
        desk.store(frames["frame"][int(now) % 2], now)
        desk.reserve(prompt, now, rid="same job")
        desk.attach(prompt, Grant(tickets["attach"].nonce, EPOCH), int(now), now)
    assert desk.at(22.0).renew(tickets.values()) == (tickets["none"].nonce,)
    assert desk.ledger.counts["expired"] == 1
    desk.at(32.0).expire()  # just over
    desk.assert_nothing_held()
    attach = Attach(
        replace(tickets["none"], gen=2), MODEL, prompt.plan.fingerprint, 300
    )
    with pytest.raises(
        errors.ReservationError, match="expired: no sign of life"
    ) as late:
        desk.at(41.0).attach(attach)
    assert late.type is not errors.AbortedError


class Counting(OrderedDict):
    """A table that notes how often somebody goes through it."""

    steps = 0

    def __iter__(self):
        for key in super().__iter__():
            self.steps += 1
            yield key

    def values(self):
        return map(self.get, self)


def test_a_frame_costs_the_same_whatever_ended_before(prompt, monkeypatch):
    """The old rules copied all tombstones and asked all leases for every frame."""
    monkeypatch.setattr("disagg.transfer.reservations.OrderedDict", Counting)
    desk = Desk(1 << 22)
    for number in range(200):
        desk.at(0.0).abort(f"gone-{number}", 0, "client gone")
    tickets = [desk.begin(prompt, rid=f"r{number}") for number in range(40)]
    tables = [x for x in vars(desk.ledger).values() if isinstance(x, Counting)]
    assert sorted(map(len, tables)) == [40, 200]
    for table in tables:
        table.steps = 0
    desk.store(prompt.frames(tickets[7])[0])
    assert sum(table.steps for table in tables) <= 4
