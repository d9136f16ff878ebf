"""What a sender sends, in which order, and how much of it at once. No sockets."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import pairwise

import pytest

from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import TransferConfig
from disagg.errors import CorruptFrameError
from disagg.kv.page import Item
from disagg.transfer.messages import Ack, Attached
from disagg.transfer.records import Manifest
from disagg.transfer.sender import SendQueue
from disagg.transfer.stats import HandoffStats
from disagg.wire import MAX_FRAME_BYTES, PageFrame, Ticket, pack, unpack
from tests.transfer.prompts import Prompt, make_prompt

TICKET = Ticket(3, 7, 1)
FRAME = 2000  # cut small, so that a prompt is many frames
PLENTY = 1 << 30


def make_outbox(
    prompt: Prompt,
    items: Iterable[Item] = (),
    credit: int = PLENTY,
    frame_bytes: int = FRAME,
) -> SendQueue:
    """One that was offered these items."""
    outbox = SendQueue(prompt.checklist, prompt.read, frame_bytes)
    outbox.attached({}, credit)
    outbox.offer(items, 0.0)
    return outbox


def beside(outbox: SendQueue) -> Iterator[PageFrame]:
    """What it sends without an answer."""
    while parcel := outbox.next_parcel(TICKET, 0.0):
        yield unpack(b"".join(parcel.parts))


def frames(outbox: SendQueue) -> Iterator[PageFrame]:
    """What it sends, each frame acknowledged at once."""
    for frame in beside(outbox):
        yield frame
        outbox.answered()


def size_of(frame: PageFrame) -> int:
    return sum(map(len, pack(frame)))


def drain(prompt: Prompt, outbox: SendQueue) -> list[Item]:
    return [item for frame in frames(outbox) for item in prompt.items_of(frame)]


def test_items_leave_in_the_order_of_offering(prompt):
    outbox, backwards = make_outbox(prompt), list(reversed(prompt.checklist.items))
    for now, item in enumerate(backwards):
        outbox.offer([item], float(now))
    assert drain(prompt, outbox) == backwards
    assert outbox.drained
    assert outbox.commit(TICKET, 5, {}).digests == prompt.commit().digests


def test_what_does_not_fill_a_frame_waits_for_more_while_something_is_on_its_way(
    prompt,
):
    outbox = make_outbox(prompt, prompt.checklist.layer(0), frame_bytes=1 << 20)
    layers = [[*prompt.checklist.layer(layer)] for layer in range(3)]
    assert [prompt.items_of(x) for x in beside(outbox)] == [layers[0]]
    outbox.offer(layers[1][:3], 1.0)
    assert not list(beside(outbox))
    outbox.offer(layers[1][3:], 2.0)
    assert not list(beside(outbox))
    outbox.answered()
    assert [prompt.items_of(x) for x in beside(outbox)] == [layers[1]]
    outbox.offer(layers[2], 3.0)  # the last: nothing more will come
    assert [prompt.items_of(x) for x in beside(outbox)] == [layers[2]]


@pytest.mark.parametrize(("tokens", "size"), [(300, FRAME), (300, 750), (4000, 4328)])
def test_frames_are_as_full_as_their_size_allows_and_larger_items_travel_alone(
    tokens, size
):
    prompt = make_prompt(tokens)
    sent = list(frames(make_outbox(prompt, prompt.checklist.items, frame_bytes=size)))
    large = [frame for frame in sent if size_of(frame) > size]
    assert bool(large) == (size == 750)
    assert all(len(frame.payload) == 1 for frame in large)
    for first, second in pairwise(sent):
        both = sum(map(len, first.payload)) + len(second.payload[0])
        assert both > size - 512 - 20 * (len(first.payload) + 1)


def test_the_largest_frames_that_can_be_configured_fit_into_messages_and_into_the_credit():
    """Else nothing of a prompt would ever leave."""
    frame_bytes = next(x for x in fields(TransferConfig) if x.name == "frame_bytes")
    plan = parse_plan("raw", KVShape(2, 8, 128, "float32", (None, None)))
    checklist = Manifest(plan, 2048)

    class Zeros:
        def read(self, items: Sequence[Item]) -> list[memoryview]:
            return [memoryview(bytes(checklist.nbytes(item))) for item in items]

    outbox = SendQueue(checklist, Zeros(), frame_bytes.metadata["most"])
    outbox.attached({}, 2 * checklist.frame_bytes)  # as every receiver gives
    outbox.offer(checklist.items, 0.0)
    sizes = list(map(size_of, frames(outbox)))
    assert outbox.drained
    assert 3 << 20 < max(sizes) <= MAX_FRAME_BYTES


@pytest.mark.parametrize("credit", [0, 802, 803, 2427, 2428, 2 * FRAME, PLENTY])
def test_as_much_is_in_flight_as_the_credit_and_two_frames_allow(prompt, credit):
    sizes = [
        size_of(frame) for frame in frames(make_outbox(prompt, prompt.checklist.items))
    ]
    assert sizes[:2] == [803, 1625]
    outbox, first, last = make_outbox(prompt, prompt.checklist.items, credit), 0, 0
    for answers in (0, 1, 2, 0, 3, 1) * 3:
        while outbox.next_parcel(TICKET, 0.0):
            last += 1
        assert (
            outbox.bytes_in_flight == sum(sizes[first:last]) <= min(credit, 2 * FRAME)
        )
        assert sum(sizes[first : last + 1]) > min(credit, 2 * FRAME) or last == len(
            sizes
        )
        for _ in sizes[first:last][:answers]:
            outbox.answered()
            first += 1


def test_after_a_broken_stream_only_what_is_not_there_goes_out(prompt):
    outbox = make_outbox(prompt, prompt.checklist.items)
    first, *_ = beside(outbox)
    outbox.attached(dict(zip(first.places, first.digests, strict=True)), PLENTY)
    assert outbox.bytes_in_flight == 0
    there = prompt.items_of(first)
    assert drain(prompt, outbox) == [
        x for x in prompt.checklist.items if x not in there
    ]


def test_items_that_the_receiver_has_are_skipped_and_committed_by_its_digests(prompt):
    outbox = make_outbox(prompt)
    known = list(prompt.checklist.items[:9])
    outbox.attached(dict.fromkeys(range(9), 1), PLENTY)
    outbox.offer(prompt.checklist.items, 0.0)
    assert drain(prompt, outbox) == [*prompt.checklist.items[9:]]
    figures = outbox.figures(HandoffStats("", 0, 0, 0), Ack(), 0.0)
    assert figures.cached_bytes == sum(map(prompt.checklist.nbytes, known))
    assert (
        outbox.commit(TICKET, 5, {}).digests == (1,) * 9 + prompt.commit().digests[9:]
    )


@pytest.mark.parametrize("there", ["nothing", "other digests"])
def test_items_that_were_sent_and_are_not_there_as_they_were_are_sent_again(
    prompt, there
):
    """After a new reservation, and where another computed them."""
    outbox = make_outbox(prompt, prompt.checklist.items)
    drain(prompt, outbox)
    count = 0 if there == "nothing" else prompt.checklist.num_items
    outbox.attached(dict.fromkeys(range(count), 1), PLENTY)
    assert drain(prompt, outbox) == [*prompt.checklist.items]


def test_records_that_change_while_they_are_sent_break_their_promise(prompt):
    """The digest of the first packing goes into the commit; other bytes later do not match it."""

    class Changing:
        reads = 0

        def read(self, items: Sequence[Item]) -> list[memoryview]:
            self.reads += 1
            return [
                memoryview(bytes([self.reads]) * prompt.checklist.nbytes(x))
                for x in items
            ]

    outbox = SendQueue(prompt.checklist, Changing(), FRAME)
    outbox.offer(prompt.checklist.items, 0.0)
    packed = []
    for _ in range(2):
        outbox.attached({}, PLENTY)
        packed.append(outbox.next_parcel(TICKET, 0.0).parts)
    (first, *bytes_then), (second, *bytes_now) = packed
    assert first == second
    assert bytes_then != bytes_now


def test_a_receiver_that_acknowledges_or_has_what_was_never_sent_is_a_typed_error(
    prompt,
):
    outbox = make_outbox(prompt)
    with pytest.raises(CorruptFrameError):
        outbox.answered()
    with pytest.raises(CorruptFrameError):
        outbox.attached({prompt.checklist.num_items: 1}, PLENTY)
    with pytest.raises(CorruptFrameError):
        Attached(have=(1, 2), digests=(3,)).received()
