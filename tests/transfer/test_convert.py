"""Messages as protobuf and back."""

import pytest

from disagg.errors import CorruptFrameError, RequestError, WireError
from disagg.page import Kind
from disagg.protos.v1 import kv_transfer_pb2 as pb
from disagg.transfer import convert
from disagg.transfer.messages import Ack, Attached, Grant, Nack, Request, State
from disagg.wire import Item, Ticket

ITEMS = {
    Item(Kind.RAW, 1, 2, 0): 2**64 - 1,
    Item(Kind.PAGE, 0, 1, 700): 5,
    Item(Kind.PAGE, 0, 0, 3): 6,
    Item(Kind.SIDE, 0, 0, 0): 7,
    Item(Kind.SEGMENT, 0, 0, 1): 8,
}


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 70_000])
def test_a_frame_message_is_a_protobuf_push_request(size):
    parts = [b"\x07" * size, b"\x08"]
    message = convert.frame_message(parts)
    assert pb.PushRequest.FromString(message).frame == b"".join(parts)
    assert message == pb.PushRequest(frame=b"".join(parts)).SerializeToString()
    assert convert.message_frame(message) == b"".join(parts)


@pytest.mark.parametrize(
    "message", [b"", b"\x0a", b"\x12\x01x", b"\x0a\x02x", b"\x0a\x01xy", b"\x0a" + b"\xff" * 12]
)
def test_a_message_that_is_not_one_frame_is_refused(message):
    with pytest.raises(CorruptFrameError):
        convert.message_frame(message)


def test_requests_grants_and_answers_survive():
    request = Request("r", 3, 7, 100, "m", "p", 1.5, "kivi:bits=2", (b"k1", b"k2"))
    assert convert.request_from(convert.request_to(request)) == request
    grant = Grant(2**64 - 1, 7, 10.0, ITEMS)
    assert convert.grant_from(convert.grant_to(grant)) == grant
    for state in (State.ATTACHED, State.ADMITTED, State.EXPIRED):
        attached = Attached(state, ITEMS, 3.0)
        assert convert.attached_from(convert.attached_to(attached)) == attached
    for message in (pb.PushResponse, pb.CommitResponse):
        assert convert.answer_from(convert.answer_to(Ack(1.0, 2.0), message)) == Ack(1.0, 2.0)
        nack = convert.answer_from(convert.answer_to(Nack(tuple(ITEMS)), message))
        assert set(nack.missing) == set(ITEMS)
    ticket = Ticket(1, 2, 3)
    assert convert.ticket_from(convert.ticket_to(ticket)) == ticket


def test_what_no_honest_peer_sends_is_a_typed_error():
    with pytest.raises(RequestError):
        convert.request_from(pb.ReserveRequest(keys=[b"x" * 65]))
    with pytest.raises(RequestError):
        convert.attached_from(pb.AttachResponse())
    with pytest.raises(RequestError):
        convert.answer_from(pb.PushResponse())
    with pytest.raises(RequestError):
        convert.digests_from([pb.ItemSet(records=[1], digests=b"\0" * 8)])
    with pytest.raises(WireError):
        convert.digests_from([pb.ItemSet(kind=pb.KIND_RAW, records=[1, 2], digests=b"\0" * 8)])
