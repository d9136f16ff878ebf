"""What a sender sends, in which order, and how much of it at once. No sockets."""

from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.errors import CorruptFrameError
from disagg.transfer.records import items_in_frame
from disagg.transfer.sender import Outbox
from disagg.wire import Item, Ticket, unpack
from tests.transfer.prompts import Prompt

TICKET = Ticket(3, 7, 1)
FRAME = 2000  # cut small, so that a prompt is many frames
PLENTY = 1 << 30


def make_outbox(prompt: Prompt, credit: int = PLENTY, frame_bytes: int = FRAME) -> Outbox:
    outbox = Outbox(prompt.checklist, prompt.read, frame_bytes)
    outbox.attached({}, credit)
    return outbox


def drain(outbox: Outbox) -> list[Item]:
    """Send everything, each frame acknowledged at once."""
    sent: list[Item] = []
    while parcel := outbox.next_parcel(TICKET):
        frame = unpack(b"".join(parcel.parts))
        frame.verify()
        sent += frame.items()
        outbox.answered()
    return sent


def by_kind(prompt: Prompt, items: Iterable[Item]) -> dict[tuple, list[Item]]:
    """Items of one kind, group and size, each list in its order."""
    found: dict[tuple, list[Item]] = {}
    for item in items:
        found.setdefault((item[:2], prompt.checklist.nbytes(item)), []).append(item)
    return found


def test_items_of_a_kind_leave_in_the_order_of_offering(prompt):
    outbox = make_outbox(prompt)
    for layer in (0, 1, 2):
        outbox.offer(prompt.checklist.layer(layer), float(layer))
    assert by_kind(prompt, drain(outbox)) == by_kind(prompt, prompt.checklist.items)
    assert outbox.drained


def test_every_frame_begins_with_the_item_that_waits_longest(prompt):
    outbox = make_outbox(prompt)
    waiting = list(reversed(prompt.checklist.items))
    for now, item in enumerate(waiting):
        outbox.offer([item], float(now))
    while parcel := outbox.next_parcel(TICKET):
        items = unpack(b"".join(parcel.parts)).items()
        assert items[0] == waiting[0]
        waiting = [item for item in waiting if item not in items]
        outbox.answered()
    assert not waiting
    assert outbox.manifest() == prompt.commit().digests


def test_frames_are_filled_over_layers_while_something_is_on_its_way(prompt):
    outbox = make_outbox(prompt, frame_bytes=1 << 20)
    outbox.offer(prompt.checklist.layer(0), 0.0)
    first = outbox.next_parcel(TICKET)
    assert outbox.next_parcel(TICKET) is None
    outbox.offer(prompt.checklist.layer(1), 1.0)
    assert outbox.next_parcel(TICKET) is None
    outbox.offer(prompt.checklist.layer(2), 2.0)  # the last: nothing more will come
    rest = []
    while parcel := outbox.next_parcel(TICKET):
        rest.append(unpack(b"".join(parcel.parts)).items())
    begun = unpack(b"".join(first.parts)).items()
    waiting = by_kind(prompt, (x for x in prompt.checklist.items if x not in begun))
    assert {tuple(items) for items in rest} == {tuple(items) for items in waiting.values()}


def test_what_does_not_fill_a_frame_leaves_when_nothing_is_on_its_way(prompt):
    outbox = make_outbox(prompt, frame_bytes=1 << 20)
    outbox.offer(prompt.checklist.layer(0), 0.0)
    outbox.next_parcel(TICKET)
    assert outbox.next_parcel(TICKET) is None
    outbox.answered()
    assert outbox.next_parcel(TICKET) is not None


def test_only_full_frames_leave_beside_others_while_more_will_come(prompt):
    outbox = make_outbox(prompt)
    outbox.offer(prompt.checklist.layer(0), 0.0)
    outbox.next_parcel(TICKET)
    beside = []
    while parcel := outbox.next_parcel(TICKET):
        beside.append(unpack(b"".join(parcel.parts)))
    assert beside
    for frame in beside:
        assert len(frame.payload) == items_in_frame(FRAME, len(frame.payload[0]))
    assert not outbox.drained


def test_a_layer_leaves_before_the_next_is_offered(prompt):
    outbox = make_outbox(prompt)
    outbox.offer(prompt.checklist.layer(0), 0.0)
    assert drain(outbox) == list(prompt.checklist.layer(0))
    assert not outbox.drained


def test_frames_hold_one_kind_and_group_and_are_cut_at_their_size(prompt):
    outbox = make_outbox(prompt)
    outbox.offer(prompt.checklist.items, 0.0)
    frames = []
    while parcel := outbox.next_parcel(TICKET):
        frames.append(unpack(b"".join(parcel.parts)))
        assert parcel.size <= FRAME
        outbox.answered()
    for first, second in pairwise(frames):
        alike = first.kind is second.kind and first.group == second.group
        alike &= len(first.payload[0]) == len(second.payload[0])
        both = sum(map(len, first.payload)) + len(second.payload[0])
        assert not alike or both > FRAME - 512 - 20 * (len(first.payload) + 1)


def test_an_item_larger_than_a_frame_travels_alone(prompt):
    outbox = make_outbox(prompt, frame_bytes=600)
    outbox.offer(prompt.checklist.items, 0.0)
    large = 0
    while parcel := outbox.next_parcel(TICKET):
        frame = unpack(b"".join(parcel.parts))
        assert parcel.size <= 600 or len(frame.payload) == 1
        large += parcel.size > 600
        outbox.answered()
    assert large


def test_without_credit_nothing_leaves(prompt):
    rich, poor = make_outbox(prompt), make_outbox(prompt, credit=0)
    for outbox in (rich, poor):
        outbox.offer(prompt.checklist.items, 0.0)
    parcel = rich.next_parcel(TICKET)
    poor.credit = parcel.size - 1
    assert poor.next_parcel(TICKET) is None
    poor.credit = parcel.size
    assert poor.next_parcel(TICKET) == parcel
    assert poor.next_parcel(TICKET) is None


def test_two_frames_are_in_flight_however_much_credit_there_is(prompt):
    outbox = make_outbox(prompt)
    outbox.offer(prompt.checklist.items, 0.0)
    while outbox.next_parcel(TICKET):
        pass
    assert FRAME < outbox.bytes_in_flight <= 2 * FRAME


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bytes_in_flight_never_exceed_two_frames_or_the_credit(prompt, data):
    credit = data.draw(st.integers(0, 3 * FRAME))
    outbox = make_outbox(prompt, credit)
    outbox.offer(prompt.checklist.items, 0.0)
    flight: list[int] = []
    for answers in data.draw(st.lists(st.integers(0, 3), max_size=30)):
        while parcel := outbox.next_parcel(TICKET):
            flight.append(parcel.size)
        assert outbox.bytes_in_flight == sum(flight) <= min(credit, 2 * FRAME)
        for _ in flight[:answers]:
            outbox.answered()
        del flight[:answers]


def test_after_a_broken_stream_only_what_is_not_there_goes_out(prompt):
    outbox = make_outbox(prompt)
    outbox.offer(prompt.checklist.items, 0.0)
    first = unpack(b"".join(outbox.next_parcel(TICKET).parts)).items()
    outbox.next_parcel(TICKET)
    outbox.attached(prompt.digests(first), PLENTY)
    assert outbox.bytes_in_flight == 0
    assert by_kind(prompt, drain(outbox)) == by_kind(
        prompt, (x for x in prompt.checklist.items if x not in first)
    )


def test_after_a_new_reservation_everything_goes_out_again(prompt):
    outbox = make_outbox(prompt)
    outbox.offer(prompt.checklist.items, 0.0)
    drain(outbox)
    outbox.attached({}, PLENTY)
    assert by_kind(prompt, drain(outbox)) == by_kind(prompt, prompt.checklist.items)


def test_items_that_the_receiver_has_are_skipped_and_committed_by_its_digests(prompt):
    outbox = make_outbox(prompt)
    known = list(prompt.checklist.items[:9])
    outbox.attached(dict.fromkeys(known, 1), PLENTY)
    outbox.offer(prompt.checklist.items, 0.0)
    assert by_kind(prompt, drain(outbox)) == by_kind(prompt, prompt.checklist.items[9:])
    assert outbox.cached_bytes == sum(map(prompt.checklist.nbytes, known))
    assert outbox.manifest() == (1,) * 9 + prompt.commit().digests[9:]


def test_items_that_were_sent_and_are_there_with_another_digest_are_sent_again(prompt):
    outbox = make_outbox(prompt)
    outbox.offer(prompt.checklist.items, 0.0)
    drain(outbox)
    outbox.attached(dict.fromkeys(prompt.checklist.items, 1), PLENTY)
    assert by_kind(prompt, drain(outbox)) == by_kind(prompt, prompt.checklist.items)


def test_a_receiver_that_misses_or_acknowledges_what_was_never_sent_is_a_typed_error(prompt):
    outbox = make_outbox(prompt)
    with pytest.raises(CorruptFrameError):
        outbox.missing([prompt.checklist.items[0]])
    with pytest.raises(CorruptFrameError):
        outbox.answered()
