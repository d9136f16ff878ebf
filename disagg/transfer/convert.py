"""Plain messages as protobuf messages and back, with a limit on every size that a peer chose.

Conversions from a peer raise RequestError for what no honest peer sends.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from typing import TypeVar

from disagg.errors import CorruptFrameError, RequestError
from disagg.page import Kind
from disagg.protos.v1 import kv_transfer_pb2 as pb
from disagg.transfer.messages import Ack, Attached, Grant, Nack, Request, State
from disagg.wire import Buffer, Item, Ticket, pack_digests, unpack_digests

MAX_KEYS = 1 << 16
MAX_KEY_BYTES = 64
_BYTES_TAG = b"\x0a"  # field 1, length-delimited: what PushRequest and CommitRequest begin with

Answer = TypeVar("Answer", pb.PushResponse, pb.CommitResponse)

_KINDS = {
    Kind.PAGE: pb.KIND_PAGE,
    Kind.SEGMENT: pb.KIND_SEGMENT,
    Kind.SIDE: pb.KIND_SIDE,
    Kind.RAW: pb.KIND_RAW,
}
_KINDS_BACK = {value: kind for kind, value in _KINDS.items()}
_STATES = {
    State.ATTACHED: pb.HANDOFF_STATE_ATTACHED,
    State.ADMITTED: pb.HANDOFF_STATE_ADMITTED,
    State.EXPIRED: pb.HANDOFF_STATE_EXPIRED,
}
_STATES_BACK = {value: state for state, value in _STATES.items()}


def frame_parts(buffers: Iterable[Buffer]) -> list[Buffer]:
    """A frame as the parts of a PushRequest: nothing is copied but the first, its header."""
    head, *rest = buffers
    size = len(head) + sum(map(len, rest))
    return [b"".join([_BYTES_TAG, _varint(size), head]), *rest]


def frame_message(buffers: Iterable[Buffer]) -> bytes:
    """A frame as the bytes of a PushRequest or a CommitRequest."""
    return b"".join(frame_parts(buffers))


def message_frame(message: Buffer) -> memoryview:
    """The frame in the bytes of a PushRequest, not copied."""
    view = memoryview(message)
    if view[:1] != _BYTES_TAG:
        raise CorruptFrameError("a message on the stream is not a frame")
    size = shift = 0
    for place, byte in enumerate(view[1:11], 2):
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            if size != len(view) - place:
                break
            return view[place:]
    raise CorruptFrameError(f"a message of {len(view)} bytes is not one frame")


def ticket_to(ticket: Ticket) -> pb.Ticket:
    """As protobuf."""
    return pb.Ticket(nonce=ticket.nonce, epoch=ticket.epoch, gen=ticket.gen)


def ticket_from(message: pb.Ticket) -> Ticket:
    """From protobuf."""
    return Ticket(message.nonce, message.epoch, message.gen)


def request_to(request: Request) -> pb.ReserveRequest:
    """As protobuf."""
    return pb.ReserveRequest(**vars(request))


def request_from(message: pb.ReserveRequest) -> Request:
    """From protobuf; RequestError for more or longer keys than any prompt has."""
    if len(message.keys) > MAX_KEYS or any(len(key) > MAX_KEY_BYTES for key in message.keys):
        raise RequestError(f"at most {MAX_KEYS} keys of {MAX_KEY_BYTES} bytes are accepted")
    return Request(
        rid=message.rid,
        attempt=message.attempt,
        epoch=message.epoch,
        tokens=message.tokens,
        model=message.model,
        plan=message.plan,
        wait_s=message.wait_s,
        spec=message.spec,
        keys=tuple(message.keys),
    )


def grant_to(grant: Grant) -> pb.ReserveResponse:
    """As protobuf."""
    offered = items_to(grant.offered, grant.offered.__getitem__)
    return pb.ReserveResponse(
        nonce=grant.nonce,
        epoch=grant.epoch,
        lease_s=grant.lease_s,
        offered=offered,
        cached=grant.cached,
    )


def grant_from(message: pb.ReserveResponse) -> Grant:
    """From protobuf."""
    offered = digests_from(message.offered)
    return Grant(message.nonce, message.epoch, message.lease_s, offered, tuple(message.cached))


def attached_to(attached: Attached) -> pb.AttachResponse:
    """As protobuf."""
    have = items_to(attached.have, attached.have.__getitem__)
    return pb.AttachResponse(
        state=_STATES[attached.state],
        have=have,
        lease_s=attached.lease_s,
        push_port=attached.push_port,
    )


def attached_from(message: pb.AttachResponse) -> Attached:
    """From protobuf; RequestError for a state that we do not know."""
    if message.state not in _STATES_BACK:
        raise RequestError(f"attach was answered with unknown state {message.state}")
    state, have = _STATES_BACK[message.state], digests_from(message.have)
    return Attached(state, have, message.lease_s, message.push_port)


def answer_to(answer: Ack | Nack, message: type[Answer]) -> Answer:
    """As a PushResponse or a CommitResponse."""
    if isinstance(answer, Ack):
        return message(ack=pb.Ack(verify_ms=answer.verify_ms, admit_ms=answer.admit_ms))
    return message(nack=pb.Nack(missing=items_to(answer.missing)))


def answer_from(message: pb.PushResponse | pb.CommitResponse) -> Ack | Nack:
    """From protobuf; RequestError if it is neither."""
    if message.HasField("ack"):
        return Ack(message.ack.verify_ms, message.ack.admit_ms)
    if message.HasField("nack"):
        return Nack(tuple(item for x in message.nack.missing for item in _items(x)))
    raise RequestError("a commit was answered with neither ack nor nack")


def items_to(
    items: Iterable[Item], digest_of: Callable[[Item], int] | None = None
) -> list[pb.ItemSet]:
    """Items as sets of one kind, group and layer, with their digests if asked."""
    sets = []
    for (kind, group, layer), run in groupby(sorted(items), lambda item: item[:3]):
        chosen = list(run)
        digests = pack_digests([digest_of(item) for item in chosen]) if digest_of else b""
        records = [item.record for item in chosen]
        sets.append(
            pb.ItemSet(
                kind=_KINDS[kind], group=group, layer=layer, records=records, digests=digests
            )
        )
    return sets


def digests_from(sets: Iterable[pb.ItemSet]) -> Mapping[Item, int]:
    """Items with their digests; CorruptFrameError unless each has one."""
    found: dict[Item, int] = {}
    for message in sets:
        digests = unpack_digests(message.digests)
        if len(digests) != len(message.records):
            raise CorruptFrameError(f"{len(digests)} digests for {len(message.records)} items")
        found.update(zip(_items(message), digests, strict=True))
    return found


def _items(message: pb.ItemSet) -> list[Item]:
    kind = _KINDS_BACK.get(message.kind)
    if kind is None:
        raise RequestError(f"an item of unknown kind {message.kind}")
    return [Item(kind, message.group, message.layer, record) for record in message.records]


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
