"""The order of frames, how full they are, and how many are in flight. No sockets."""

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


def make_queue(
    prompt: Prompt,
    items: Iterable[Item] = (),
    credit: int = PLENTY,
    frame_bytes: int = FRAME,
) -> SendQueue:
    """A queue that was offered these items."""
    queue = SendQueue(prompt.manifest, frame_bytes)
    queue.read_from(prompt.source)
    queue.restart({}, credit)
    queue.offer(items, 0.0)
    return queue


def send_unanswered(queue: SendQueue) -> Iterator[PageFrame]:
    """The frames that it sends without an answer."""
    while frame := queue.next_frame(TICKET, 0.0):
        yield unpack(b"".join(frame.parts))


def frames(queue: SendQueue) -> Iterator[PageFrame]:
    """All frames that it sends if each is answered at once."""
    for frame in send_unanswered(queue):
        yield frame
        queue.on_answer()


def size_of(frame: PageFrame) -> int:
    return sum(map(len, pack(frame)))


def drain(prompt: Prompt, queue: SendQueue) -> list[Item]:
    return [item for frame in frames(queue) for item in prompt.items_of(frame)]


def test_items_leave_in_the_order_of_offering(prompt):
    queue = make_queue(prompt)
    backwards = list(reversed(prompt.manifest.items))
    for now, item in enumerate(backwards):
        queue.offer([item], float(now))

    assert drain(prompt, queue) == backwards
    assert queue.drained
    assert queue.commit(TICKET, 5, {}).digests == prompt.commit().digests


def test_a_frame_not_full_waits_while_another_is_in_flight(prompt):
    layers = [[*prompt.manifest.layer(layer)] for layer in range(3)]
    queue = make_queue(prompt, layers[0], frame_bytes=1 << 20)

    def send() -> list[list[Item]]:
        return [prompt.items_of(frame) for frame in send_unanswered(queue)]

    assert send() == [layers[0]]
    queue.offer(layers[1][:3], 1.0)
    assert send() == []
    queue.offer(layers[1][3:], 2.0)
    assert send() == []
    queue.on_answer()
    assert send() == [layers[1]]
    queue.offer(layers[2], 3.0)  # the last layer: no more items will come
    assert send() == [layers[2]]


@pytest.mark.parametrize(("tokens", "size"), [(300, FRAME), (300, 750), (4000, 4328)])
def test_frames_are_full_and_larger_items_travel_alone(tokens, size):
    prompt = make_prompt(tokens)
    sent = list(frames(make_queue(prompt, prompt.manifest.items, frame_bytes=size)))
    large = [frame for frame in sent if size_of(frame) > size]

    assert bool(large) == (size == 750)
    assert all(len(frame.payload) == 1 for frame in large)
    for first, second in pairwise(sent):
        nbytes = sum(map(len, first.payload)) + len(second.payload[0])
        header_bytes = 512 + 20 * (len(first.payload) + 1)
        assert nbytes > size - header_bytes


def test_the_largest_frames_fit_into_messages_and_credit():
    """Else a prompt would never be sent."""
    frame_bytes = next(x for x in fields(TransferConfig) if x.name == "frame_bytes")
    plan = parse_plan("raw", KVShape.uniform(2, 8, 128, "float32"))
    manifest = Manifest(plan, 2048)

    class Zeros:
        def read(self, items: Sequence[Item]) -> list[memoryview]:
            return [memoryview(bytes(manifest.nbytes(item))) for item in items]

    queue = SendQueue(manifest, frame_bytes.metadata["most"])
    queue.read_from(Zeros())
    queue.restart({}, 2 * manifest.frame_bytes)  # as every receiver gives
    queue.offer(manifest.items, 0.0)

    sizes = list(map(size_of, frames(queue)))
    assert queue.drained
    assert 3 << 20 < max(sizes) <= MAX_FRAME_BYTES


@pytest.mark.parametrize("credit", [0, 802, 803, 2427, 2428, 2 * FRAME, PLENTY])
def test_as_much_is_in_flight_as_the_credit_and_two_frames_allow(prompt, credit):
    items = prompt.manifest.items
    sizes = [size_of(frame) for frame in frames(make_queue(prompt, items))]
    assert sizes[:2] == [803, 1625]
    window = min(credit, 2 * FRAME)
    queue = make_queue(prompt, items, credit)
    num_answered = 0
    num_sent = 0

    for answers in (0, 1, 2, 0, 3, 1) * 3:
        while queue.next_frame(TICKET, 0.0):
            num_sent += 1
        assert queue.bytes_in_flight == sum(sizes[num_answered:num_sent]) <= window
        with_next = sum(sizes[num_answered : num_sent + 1])
        assert with_next > window or num_sent == len(sizes)
        for _ in sizes[num_answered:num_sent][:answers]:
            queue.on_answer()
            num_answered += 1


def test_after_a_broken_stream_only_missing_items_are_sent(prompt):
    queue = make_queue(prompt, prompt.manifest.items)
    first, *_ = send_unanswered(queue)

    queue.restart(dict(zip(first.indices, first.digests, strict=True)), PLENTY)
    assert queue.bytes_in_flight == 0
    received = prompt.items_of(first)
    missing = [x for x in prompt.manifest.items if x not in received]
    assert drain(prompt, queue) == missing


def test_items_the_receiver_has_are_committed_by_its_digests(prompt):
    queue = make_queue(prompt)
    cached = list(prompt.manifest.items[:9])
    queue.restart(dict.fromkeys(range(9), 1), PLENTY)
    queue.offer(prompt.manifest.items, 0.0)
    assert drain(prompt, queue) == [*prompt.manifest.items[9:]]
    figures = queue.stats(HandoffStats("", 0, 0, 0), Ack(), 0.0)
    assert figures.cached_bytes == sum(map(prompt.manifest.nbytes, cached))
    assert queue.commit(TICKET, 5, {}).digests == (1,) * 9 + prompt.commit().digests[9:]


@pytest.mark.parametrize("peer_has", ["nothing", "other digests"])
def test_items_the_receiver_lacks_or_has_altered_are_sent_again(prompt, peer_has):
    """After a new reservation, and if another prefill worker computed them."""
    queue = make_queue(prompt, prompt.manifest.items)
    drain(prompt, queue)
    count = 0 if peer_has == "nothing" else prompt.manifest.num_items
    queue.restart(dict.fromkeys(range(count), 1), PLENTY)
    assert drain(prompt, queue) == [*prompt.manifest.items]


def test_records_that_change_while_they_are_sent_are_noticed(prompt):
    """The digest of the first packing goes into the commit; other bytes later do not match it."""

    class Changing:
        reads = 0

        def read(self, items: Sequence[Item]) -> list[memoryview]:
            self.reads += 1
            return [
                memoryview(bytes([self.reads]) * prompt.manifest.nbytes(x))
                for x in items
            ]

    queue = SendQueue(prompt.manifest, FRAME)
    queue.read_from(Changing())
    queue.offer(prompt.manifest.items, 0.0)
    packed = []
    for _ in range(2):
        queue.restart({}, PLENTY)
        packed.append(queue.next_frame(TICKET, 0.0).parts)
    (first, *bytes_then), (second, *bytes_now) = packed
    assert first == second
    assert bytes_then != bytes_now


def test_an_answer_to_a_frame_that_was_never_sent_is_an_error(prompt):
    queue = make_queue(prompt)
    with pytest.raises(CorruptFrameError):
        queue.on_answer()
    with pytest.raises(CorruptFrameError):
        queue.restart({prompt.manifest.num_items: 1}, PLENTY)
    with pytest.raises(CorruptFrameError):
        Attached(have=(1, 2), digests=(3,)).received()
