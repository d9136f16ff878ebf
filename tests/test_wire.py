"""Frames: what is packed is unpacked, and every byte of a frame is covered by something."""

import struct

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg import wire
from disagg.errors import CorruptFrameError, VersionError, WireError
from disagg.protos.v1 import kv_transfer_pb2 as kv

TICKET = wire.Ticket(nonce=2**64 - 3, epoch=7, gen=2)


def page_frame(parts: list[bytes]) -> wire.PageFrame:
    indices, digests = range(5, 5 + len(parts)), map(wire.digest, parts)
    return wire.PageFrame(
        TICKET, tuple(indices), tuple(digests), tuple(map(memoryview, parts))
    )


PAGES = page_frame([b"\x01" * 63, b"\x02" * 65, bytes(range(61))])
EXTRAS = {"ids": [1, 2, 3], "logprob": -0.5, "name": "x", "none": None}
COMMIT = wire.Commit(TICKET, 77, "fedcba9876543210", (1, 2**64 - 1, 3), 11, EXTRAS)
FRAMES = {"pages": PAGES, "commit": COMMIT}


def joined(frame: wire.Frame) -> bytes:
    return b"".join(wire.pack(frame))


def resealed(header: dict, payload: bytes, what: int = 1) -> bytes:
    """A frame with a right checksum around whatever header."""
    packed = msgpack.packb(header)
    prelude = struct.pack(
        "<4sHHQQ", b"dgKV", wire.WIRE_VERSION, what, len(packed), len(payload)
    )
    return prelude + struct.pack("<Q", wire.digest(prelude + packed)) + packed + payload


def page_header() -> dict:
    message = joined(PAGES)
    size = struct.unpack_from("<Q", message, 8)[0]
    return msgpack.unpackb(message[wire.PRELUDE_BYTES : wire.PRELUDE_BYTES + size])


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
def test_a_frame_survives_the_wire(frame):
    assert wire.unpack(joined(frame)) == frame


def test_packing_and_unpacking_copy_no_payload():
    buffer = bytearray(b"\x05" * 63)
    frame = page_frame([memoryview(buffer)])

    message = bytearray(joined(frame))

    assert wire.pack(frame)[1].obj is buffer
    assert wire.unpack(message).payload[0].obj is message


@pytest.mark.parametrize("name", FRAMES)
def test_every_corrupted_byte_is_noticed(name):
    message = bytearray(joined(FRAMES[name]))
    for place in range(len(message)):
        for flip in (1, 0x80, 0xFF):
            message[place] ^= flip
            with pytest.raises(WireError):
                check(wire.unpack(message))
            message[place] ^= flip
    check(wire.unpack(message))


def check(frame: wire.Frame) -> None:
    paged = isinstance(frame, wire.PageFrame)
    if paged and tuple(map(wire.digest, frame.payload)) != frame.digests:
        raise CorruptFrameError("as a receiver finds it")


@pytest.mark.parametrize("name", FRAMES)
def test_every_truncated_frame_is_refused(name):
    message = joined(FRAMES[name])
    for size in range(len(message)):
        with pytest.raises(CorruptFrameError):
            wire.unpack(message[:size])

    with pytest.raises(CorruptFrameError):
        wire.unpack(message + b"\0")


def test_a_frame_of_another_version_is_a_version_error():
    message = bytearray(joined(PAGES))
    message[4] += 1

    with pytest.raises(VersionError, match=f"version {wire.WIRE_VERSION + 1}"):
        wire.unpack(message)


def test_a_frame_above_the_limit_is_refused_before_it_is_read():
    prelude = struct.pack(
        "<4sHHQQ", b"dgKV", wire.WIRE_VERSION, 1, 100, wire.MAX_FRAME_BYTES
    )
    with pytest.raises(CorruptFrameError, match="where 4194288 go"):
        wire.unpack(prelude + bytes(8))


WRONG_HEADERS = {
    "a missing field": {"sizes": None},
    "an unknown field": {"surprise": 1},
    "a negative count": {"epoch": -1},
    "a boolean count": {"epoch": True},
    "fewer indices than sizes": {"places": [5, 6]},
    "an index that is no number": {"places": [5, 6, "7"]},
    "fewer digests than items": {"digests": b"\0" * 16},
    "half a digest": {"digests": b"\0" * 20},
    "no items": {"places": [], "sizes": [], "digests": b""},
    "sizes that are not the payload": {"sizes": [63, 63, 62]},
    "more items than allowed": {
        "places": [0] * (wire.MAX_ITEMS + 1),
        "sizes": [189] + [0] * wire.MAX_ITEMS,
        "digests": bytes(8 * (wire.MAX_ITEMS + 1)),
    },
    "an index that is a list": {"places": [[0], 1, 2]},
    "an extension": {"gen": msgpack.ExtType(4, b"x")},
    "a time": {"gen": msgpack.Timestamp(0, 0)},
}


@pytest.mark.parametrize("change", WRONG_HEADERS.values(), ids=WRONG_HEADERS)
def test_a_header_with_wrong_fields_is_refused(change):
    header = page_header() | change
    if header["sizes"] is None:
        del header["sizes"]

    with pytest.raises(CorruptFrameError):
        wire.unpack(resealed(header, b"\x01" * 189))


def test_a_frame_of_an_unknown_type_is_refused():
    with pytest.raises(CorruptFrameError, match="type 9"):
        wire.unpack(resealed(page_header(), b"\x01" * 189, what=9))


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 70_000])
def test_a_frame_message_is_a_protobuf_push_request(size):
    parts = [b"\x07" * size, b"\x08"]
    message = wire.frame_message(parts)

    assert message == kv.PushRequest(frame=b"".join(parts)).SerializeToString()
    assert message == kv.CommitRequest(frame=b"".join(parts)).SerializeToString()
    assert wire.message_frame(message) == b"".join(parts)
    assert wire.message_frame(message).obj is message


@pytest.mark.parametrize(
    "message",
    [b"", b"\x0a", b"\x12\x01x", b"\x0a\x02x", b"\x0a\x01xy", b"\x0a" + b"\xff" * 12],
)
def test_a_message_that_is_not_one_frame_is_refused(message):
    with pytest.raises(CorruptFrameError):
        wire.message_frame(message)


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.text()
        | st.binary(),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=9)
        ),
        max_leaves=12,
    ),
    st.binary(max_size=64),
    st.sampled_from([1, 2, 3]),
)
def test_any_header_ends_in_a_frame_or_a_typed_error(header, payload, what):
    if isinstance(header, dict):
        header = page_header() | header
    try:
        check(wire.unpack(resealed(header, payload, what)))
    except WireError:
        return
