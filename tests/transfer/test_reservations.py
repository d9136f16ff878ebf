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
def test_reserving_writes_little_and_the_hand_off_the_rest(tokens):
    desk = Desk(clock=count(0.0, 0.001).__next__)
    prompt = make_prompt(tokens)
    arena = desk.pool.arena
    arena.write([(0, b"\xa5" * arena.nbytes)])

    ticket = desk.begin(prompt)

    untouched = bytes(arena.read(0, arena.nbytes)).count(b"\xa5")
    assert arena.nbytes - untouched < 2 * 2 * 3 * 16 * 2 * 8 * 2

    desk.push(prompt, ticket)
    ack = desk.ledger.commit(prompt.commit(ticket))

    looks_at_the_clock = prompt.manifest.num_items
    assert ack.verify_ms == pytest.approx(looks_at_the_clock)
    assert prompt.equals(arena, desk.admitted().groups)


@pytest.mark.parametrize(
    "refusal",
    [
        errors.LayoutError("no such sampler"),
        OverflowError("too large"),
    ],
)
def test_a_prompt_that_the_engine_refuses_is_freed(desk, prompt, refusal):
    desk.admit = Mock(side_effect=refusal)
    ticket = desk.begin(prompt)
    desk.push(prompt, ticket)

    for error in (type(refusal), errors.AbortedError):  # and again, when sent again
        with pytest.raises(error, match=str(refusal)):
            desk.at(0.0).commit(prompt.commit(ticket))
        desk.assert_nothing_held()


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 299},
        {"plan": "0" * 16},
        {"digests": (1, 2)},
    ],
    ids=["tokens", "plan", "digests"],
)
def test_a_commit_of_another_prompt_is_refused(desk, prompt, change):
    ticket = desk.begin(prompt)
    desk.push(prompt, ticket)

    with pytest.raises(errors.LayoutError):
        desk.at(0.0).commit(replace(prompt.commit(ticket), **change))

    assert not desk.engine


def test_a_commit_with_the_digests_of_other_bytes_is_refused(desk, prompt):
    ticket = desk.begin(prompt)
    desk.push(prompt, ticket)

    with pytest.raises(errors.CorruptFrameError):
        desk.at(0.0).commit(make_prompt(300, seed=1).commit(ticket))

    assert not desk.engine


def test_a_commit_that_nests_too_deep_is_refused_by_name(desk, prompt):
    ticket = desk.begin(prompt)
    desk.push(prompt, ticket)
    deep = []
    for _ in range(2000):
        deep = [deep]

    with pytest.raises(errors.CorruptFrameError, match="pack"):
        desk.at(0.0).commit(replace(prompt.commit(ticket), extras={"deep": deep}))

    assert isinstance(desk.at(0.0).commit(prompt.commit(ticket)), Ack)


# -- who gets room
def test_a_moving_sequence_gets_more_room_until_its_pages_come(desk, prompt):
    first = desk.reserve(prompt, moved=len(prompt.ids) + 1)
    pages = desk.pool.referenced_pages

    moved = len(prompt.ids) + 2
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
    "an epoch that is over": (
        {"epoch": EPOCH - 1},
        errors.ReservationError,
    ),
    "an epoch to come": (
        {"epoch": EPOCH + 1},
        errors.ReservationError,
    ),
    "no tokens": (
        {"prompt": ()},
        errors.RequestError,
    ),
    "more tokens than the pool holds": (
        {"prompt": (1,) * 200_000},
        errors.PromptTooLongError,
    ),
    "no name": (
        {"rid": ""},
        errors.RequestError,
    ),
    "a name without end": (
        {"rid": "x" * 300},
        errors.RequestError,
    ),
    "a codec spec without end": (
        {"codec": "x" * 5000},
        errors.RequestError,
    ),
    "an unknown codec": (
        {"codec": "other"},
        errors.UnknownNameError,
    ),
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


def test_a_prompt_too_long_for_an_empty_pool_is_no_lack_of_room():
    """Slabs have ends that no record fits into: fewer bytes than the pool has can be too many."""
    wasted = []
    for tokens in range(1, 6000, 37):
        desk = Desk(SMALL)
        prompt = make_prompt(1)
        try:
            desk.reserve(prompt, prompt=(1,) * tokens)
        except errors.PromptTooLongError:
            if prompt.plan.nbytes(tokens) <= SMALL:
                wasted.append(tokens)

    assert wasted


def test_a_reservation_leaves_the_watermark_free(prompt):
    without_watermark = Desk(1 << 20)
    for rid in ("first", "second"):
        without_watermark.reserve(prompt, rid=rid)
    desk = Desk(1 << 20, watermark_bytes=without_watermark.pool.free_bytes)
    desk.reserve(prompt)
    desk.reserve(prompt, rid="second")

    with pytest.raises(errors.CapacityError, match="stay free"):
        desk.reserve(prompt, rid="third")


def test_an_empty_pool_takes_a_prompt_whatever_the_watermark(prompt):
    desk = Desk(1 << 20, watermark_bytes=1 << 20)

    desk.reserve(prompt)

    with pytest.raises(errors.CapacityError, match="stay free"):
        desk.reserve(prompt, rid="second")


def test_shared_records_do_not_count_against_the_watermark():
    prompt = make_related(64 * 40, 1, 64 * 40, BY_PAGE)
    spare = (1 << 20) - BY_PAGE.nbytes(prompt.tokens) - BY_PAGE.nbytes(190)
    desk = Desk(1 << 20, plan=BY_PAGE, watermark_bytes=spare)
    desk.give(prompt, "one")

    desk.reserve(prompt, rid="two")


def test_reservations_and_running_sequences_share_one_limit(prompt):
    desk = Desk(decode_slots=DecodeSlots(2))
    desk.give(prompt, "one")
    desk.reserve(prompt, rid="two")

    with pytest.raises(errors.CapacityError, match="2 sequences"):
        desk.reserve(prompt, rid="three")

    desk.reserve(prompt, rid="two", attempt=1)  # replaces the lower attempt
    desk.free("one")
    desk.reserve(prompt, rid="three")


def test_a_moving_sequence_has_records_of_its_own_for_all_tokens(desk, prompt):
    desk.give(prompt, "one")
    keys = desk.pool.kept_keys()
    longer = make_prompt(prompt.tokens + 200)
    ids = longer.ids[: prompt.tokens]

    grant = desk.reserve(longer, prompt=ids, moved=longer.tokens)
    ticket = desk.attach(longer, grant)

    assert desk.push(longer, ticket) == longer.manifest.total_bytes
    assert isinstance(desk.at(1.0).commit(longer.commit(ticket)), Ack)
    assert desk.pool.kept_keys() == keys


def test_a_sequence_that_moves_has_at_least_its_prompt(desk, prompt):
    with pytest.raises(errors.RequestError, match="moves with 7"):
        desk.reserve(prompt, moved=7)


@pytest.mark.parametrize("broken", ["claim", "take", "used"])
def test_an_error_of_any_type_while_records_are_taken_leaks_none(
    prompt, monkeypatch, broken
):
    desk = Desk()
    shared = make_related(300, 1, 256)
    desk.give(shared, "one")
    failing = Mock(side_effect=OverflowError("not expected"))

    with monkeypatch.context() as patch:
        patch.setattr(desk.pool, broken, failing)
        with pytest.raises(OverflowError):
            desk.reserve(shared, rid="two")

    desk.free()
    desk.assert_nothing_held()


# -- attaching, frames and channels
def _attach_of(prompt, grant: Grant, gen: int = 1) -> Attach:
    ticket = Ticket(grant.nonce, EPOCH, gen)
    return Attach(ticket, MODEL, prompt.plan.fingerprint, prompt.tokens)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "b-model"},
        {"plan": "0" * 16},
        {"tokens": 299},
    ],
    ids=["model", "plan", "prompt"],
)
def test_attaching_with_another_layout_is_a_layout_error(desk, prompt, change):
    attach = _attach_of(prompt, desk.reserve(prompt))

    with pytest.raises(errors.LayoutError):
        desk.at(0.0).attach(replace(attach, **change))


def test_a_ticket_of_another_epoch_is_over(desk, prompt):
    attach = _attach_of(prompt, desk.reserve(prompt))
    ticket = replace(attach.ticket, epoch=EPOCH - 1)

    assert desk.at(0.0).renew([ticket]) == (ticket.nonce,)
    with pytest.raises(errors.ReservationError, match=f"epoch {EPOCH - 1} is over"):
        desk.at(0.0).attach(replace(attach, ticket=ticket))


def test_an_attachment_gets_a_lease_and_credit_for_two_frames(desk, prompt):
    attach = _attach_of(prompt, desk.reserve(prompt))

    attached = desk.at(0.0).attach(attach)

    assert attached.lease_s == 10.0
    assert attached.credit == 2 * prompt.manifest.frame_bytes


def test_a_frame_of_a_stream_that_never_attached_is_refused(desk, prompt):
    attach = _attach_of(prompt, desk.reserve(prompt))
    desk.at(0.0).attach(attach)

    with pytest.raises(errors.ReservationError, match="stream 2 of"):
        desk.store(prompt.frames(replace(attach.ticket, gen=2))[0])


def test_an_item_twice_in_one_frame_is_written_once(desk, prompt):
    item = Item(Kind.PAGE, 0, 2, 1)
    frame = prompt.frame(desk.begin(prompt), [item, item])

    assert desk.store(frame) == 1


def test_an_item_twice_with_two_digests_is_corrupt(desk, prompt):
    item = Item(Kind.PAGE, 0, 2, 1)
    ticket = desk.begin(prompt)
    frame = prompt.frame(ticket, [item, item])
    wrong = replace(frame, digests=(frame.digests[0], 5))

    with pytest.raises(errors.CorruptFrameError, match=str(item)):
        desk.store(wrong)

    desk.store(prompt.frame(ticket, [item]))


def test_an_attempt_that_comes_after_a_later_one_is_refused(desk, prompt):
    desk.reserve(prompt)
    desk.reserve(prompt, attempt=2)

    with pytest.raises(errors.ReservationError, match="comes after attempt 2"):
        desk.reserve(prompt, attempt=1)
    with pytest.raises(errors.ReservationError, match="superseded"):
        desk.reserve(prompt, 20.0)


def test_an_attempt_that_runs_is_refused(desk, prompt):
    desk.reserve(prompt, attempt=2)
    desk.at(20.0).expire()
    desk.give(prompt, attempt=2)  # its lease was over, nothing else

    with pytest.raises(errors.ReservationError, match="which is admitted"):
        desk.reserve(prompt, attempt=2)


def test_an_abort_ends_the_attempts_up_to_its_own(desk, prompt):
    desk.give(prompt, attempt=2)
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

    desk.reserve(prompt, 5.0, rid="b")  # too many
    desk.reserve(prompt, reservations.MEMORY_S + 2.5, rid="c")  # too old

    for rid in "ad":
        with pytest.raises(errors.ReservationError, match="aborted"):
            desk.reserve(prompt, reservations.MEMORY_S + 2.5, rid=rid)


def test_frames_of_one_hand_off_come_on_one_channel(desk, prompt):
    ticket = desk.begin(prompt)
    first, second, *_ = prompt.frames(ticket)
    desk.store(first, channel=object())

    with pytest.raises(errors.ReservationError, match="another channel"):
        desk.store(second, channel=object())


def test_the_end_of_a_channel_breaks_its_attachments_alone(desk, prompt):
    ended = object()
    other = object()
    tickets = {rid: desk.begin(prompt, rid=rid) for rid in ("a", "b", "c", "d")}
    for rid, channel in (("a", ended), ("b", ended), ("c", other)):
        desk.store(prompt.frames(tickets[rid])[0], channel=channel)
    attached_again = Ticket(tickets["b"].nonce, EPOCH, 2)
    desk.attach(prompt, desk.reserve(prompt, rid="b"), 2)
    desk.store(prompt.frames(attached_again)[1], channel=other)
    whole = desk.begin(prompt, rid="e")
    for frame in prompt.frames(whole):
        desk.store(frame, channel=ended)

    desk.ledger.channel_ended(ended)

    assert isinstance(desk.at(0.0).commit(prompt.commit(whole)), Ack)
    with pytest.raises(errors.ReservationError, match="broken"):
        desk.store(prompt.frames(tickets["a"])[1], channel=ended)
    assert desk.ledger.gauges() == {"reservations": 4, "streams": 3, "running": 1}
    desk.store(prompt.frames(attached_again)[2], channel=other)
    desk.store(prompt.frames(tickets["c"])[1], channel=other)
    desk.store(prompt.frames(tickets["d"])[1], channel=other)


# -- leases, and the cost of a frame
def test_any_sign_of_life_renews_a_lease(desk, prompt):
    signs = ("renew", "none", "frame", "attach", "same job")
    tickets = {sign: desk.begin(prompt, rid=sign) for sign in signs}
    frames = prompt.frames(tickets["frame"])
    attach_grant = Grant(tickets["attach"].nonce, EPOCH)

    for now in (7.0, 14.0, 21.0):
        assert desk.at(now).renew([tickets["renew"]]) == ()
        desk.store(frames[int(now) % 2], now)
        desk.reserve(prompt, now, rid="same job")
        desk.attach(prompt, attach_grant, int(now), now)

    assert desk.at(22.0).renew(tickets.values()) == (tickets["none"].nonce,)
    assert desk.ledger.counts["expired"] == 1


def test_a_lease_ends_without_a_sign_of_life(desk, prompt):
    ticket = desk.begin(prompt)

    desk.at(10.0).expire()  # just over

    desk.assert_nothing_held()
    attach = _attach_of(prompt, Grant(ticket.nonce, EPOCH), gen=2)
    with pytest.raises(
        errors.ReservationError, match="expired: no sign of life"
    ) as late:
        desk.at(19.0).attach(attach)
    assert late.type is not errors.AbortedError


class Counting(OrderedDict):
    """A table that counts the entries that a loop over it visits."""

    steps = 0

    def __iter__(self):
        for key in super().__iter__():
            self.steps += 1
            yield key

    def values(self):
        return map(self.get, self)


def test_a_frame_costs_the_same_whatever_ended_before(prompt, monkeypatch):
    """Tombstones and leases were once all visited for every frame."""
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
