"""Frames: how records cross between workers. Objects to bytes and back; nothing is sent here.

    prelude, 32 bytes: magic · version · type · sizes · xxh3 │ header: msgpack │ payload: bytes

Frames carry *items*: an item is one layer page of one record. Both workers derive the same list of
a prompt's items, so each item is named by its index in that list and never by an address. A page
frame carries items, each with its digest. The commit frame is the last of a hand-off and names the
digest of every item. The checksum of the prelude covers prelude and header, and the digests in the
header cover the payload: every byte is checked once. Packing joins nothing and unpacking copies
nothing.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from typing import Any

import msgpack
from xxhash import xxh3_64_intdigest

from disagg.errors import CorruptFrameError, VersionError

MAGIC = b"dgKV"
WIRE_VERSION = 4
FRAME_BYTES = 2 << 20  # a frame is cut at this payload; a larger item travels alone
MAX_HEADER_BYTES = 256 << 10  # of one frame
MAX_ITEMS = 4096  # of one frame
MAX_FRAME_BYTES = (4 << 20) - 16  # in its message, as much as gRPC takes at once

# protobuf: field 1, length-delimited; of PushRequest and CommitRequest
_FRAME_TAG = b"\x0a"
_PRELUDE = struct.Struct("<4sHHQQ")
_CHECKSUM = struct.Struct("<Q")
PRELUDE_BYTES = _PRELUDE.size + _CHECKSUM.size

Buffer = bytes | memoryview
PlainValue = (
    None
    | bool
    | int
    | float
    | str
    | bytes
    | list["PlainValue"]
    | dict[str, "PlainValue"]
)


@dataclass(frozen=True)
class Ticket:
    """The reservation that a frame belongs to.

    nonce: of the reservation
    epoch: the incarnation of the decode worker that made it
    gen:   how often a stream attached; frames of an older stream are refused
    """

    nonce: int
    epoch: int
    gen: int


@dataclass(frozen=True)
class PageFrame:
    """Some items of a prompt.

    indices: of the items, in the order of `transfer.records.Manifest`
    digests: of their bytes · payload: these bytes, an item each
    """

    ticket: Ticket
    indices: tuple[int, ...]
    digests: tuple[int, ...]
    payload: tuple[Buffer, ...]


@dataclass(frozen=True)
class Commit:
    """The last frame of a hand-off: the digests of all items, and values that only prefill knows.

    Only a commit completes a hand-off; the end of a stream does not.

    tokens:      length of the prompt
    plan:        fingerprint of the plan that fixes the order of the items
    digests:     one per item, in the order of `transfer.records.Manifest`
    first_token: sampled by prefill; decode starts after it
    extras:      plain values that only prefill knows (log-probabilities, say)
    """

    ticket: Ticket
    tokens: int
    plan: str
    digests: tuple[int, ...]
    first_token: int
    extras: Mapping[str, PlainValue] = field(default_factory=dict)


Frame = PageFrame | Commit


FrameType = IntEnum("FrameType", ["PAGES", "COMMIT"])  # numbers in the prelude

_INDICES = "places"  # the name of `PageFrame.indices` on the wire
# names and types in msgpack: of every header, of page frames, and of the payload of a commit
_HEADER_FIELDS: dict[str, type] = {
    "nonce": int,
    "epoch": int,
    "gen": int,
    "digests": bytes,
}
_PAGES_FIELDS: dict[str, type] = {**_HEADER_FIELDS, _INDICES: list, "sizes": list}
_COMMIT_FIELDS: dict[str, type] = {
    "tokens": int,
    "plan": str,
    "digests": bytes,
    "first_token": int,
    "extras": dict,
}


def digest(data: Buffer) -> int:
    """xxh3_64 of the bytes of an item."""
    return xxh3_64_intdigest(data)


def pack(frame: Frame) -> list[Buffer]:
    """The buffers of a frame, for the sender to join; payloads are not copied."""
    if isinstance(frame, PageFrame):
        frame_type = FrameType.PAGES
        digests = pack_digests(frame.digests)
        payload: Sequence[Buffer] = frame.payload
    else:
        frame_type = FrameType.COMMIT
        payload = (_pack_commit(frame),)
        digests = pack_digests([digest(payload[0])])
    header: dict[str, object] = {
        "nonce": frame.ticket.nonce,
        "epoch": frame.ticket.epoch,
        "gen": frame.ticket.gen,
        "digests": digests,
    }
    if isinstance(frame, PageFrame):
        header[_INDICES] = frame.indices
        header["sizes"] = [*map(len, payload)]
    packed_header = msgpack.packb(header)
    payload_bytes = sum(map(len, payload))
    prelude = _PRELUDE.pack(
        MAGIC, WIRE_VERSION, frame_type, len(packed_header), payload_bytes
    )
    checksum = _CHECKSUM.pack(digest(prelude + packed_header))
    return [prelude + checksum + packed_header, *payload]


def unpack(data: Buffer) -> Frame:
    """The frame of these bytes; a page frame holds views of them, not verified yet.

    Raises VersionError for another version, CorruptFrameError for anything else that is wrong.
    """
    view = memoryview(data)
    size = frame_bytes(view)
    if len(view) != size:
        raise CorruptFrameError(f"a frame of {len(view)} bytes says that it has {size}")
    _, _, frame_type, header_bytes, payload_bytes = _PRELUDE.unpack_from(view)
    (checksum,) = _CHECKSUM.unpack_from(view, _PRELUDE.size)
    prelude = view[: _PRELUDE.size]
    packed_header = view[PRELUDE_BYTES : PRELUDE_BYTES + header_bytes]
    payload = view[size - payload_bytes :]
    if checksum != digest(bytes(prelude) + bytes(packed_header)):
        raise CorruptFrameError("the checksum of a frame header does not match")
    if frame_type == FrameType.PAGES:
        header = _read_map("frame header", packed_header, _PAGES_FIELDS)
        return _page_frame(_ticket(header), header, payload)
    if frame_type == FrameType.COMMIT:
        header = _read_map("frame header", packed_header, _HEADER_FIELDS)
        if unpack_digests(header["digests"]) != (digest(payload),):
            raise CorruptFrameError("the digest of a commit frame does not match")
        return _unpack_commit(_ticket(header), payload)
    raise CorruptFrameError(f"a frame of unknown type {frame_type}")


def frame_bytes(start: Buffer) -> int:
    """The size of a frame, from its prelude; at most MAX_FRAME_BYTES."""
    if len(start) < PRELUDE_BYTES:
        raise CorruptFrameError(
            f"a frame of {len(start)} bytes is shorter than its prelude"
        )
    magic, version, _, header_bytes, payload_bytes = _PRELUDE.unpack_from(start)
    if magic != MAGIC:
        raise CorruptFrameError(f"a frame begins with {magic!r}, not with {MAGIC!r}")
    if version != WIRE_VERSION:
        raise VersionError(
            f"a frame of version {version}; this worker speaks {WIRE_VERSION}"
        )
    if header_bytes > MAX_HEADER_BYTES:
        raise CorruptFrameError(f"a frame header of {header_bytes} bytes")
    size: int = PRELUDE_BYTES + header_bytes + payload_bytes
    if size > MAX_FRAME_BYTES:
        raise CorruptFrameError(f"a frame of {size} bytes, where {MAX_FRAME_BYTES} go")
    return size


def frame_message(parts: Sequence[Buffer]) -> bytes:
    """The buffers of a frame as the bytes of a PushRequest or a CommitRequest: one copy."""
    return b"".join([_FRAME_TAG, _varint(sum(map(len, parts))), *parts])


def message_frame(message: Buffer) -> memoryview:
    """The frame in the bytes of a PushRequest or a CommitRequest, not copied."""
    view = memoryview(message)
    # the frame begins after the tag and a size of 1 to 5 bytes
    for start in range(2, min(7, len(view) + 1)):
        if view[:start] == _FRAME_TAG + _varint(len(view) - start):
            return view[start:]
    raise CorruptFrameError(f"a message of {len(view)} bytes is not one frame")


def pack_digests(digests: Sequence[int]) -> bytes:
    """Eight bytes each, little-endian."""
    return struct.pack(f"<{len(digests)}Q", *digests)


def unpack_digests(data: bytes) -> tuple[int, ...]:
    """The digests in `data`; CorruptFrameError if its length is no multiple of 8."""
    if len(data) % 8:
        raise CorruptFrameError(f"{len(data)} bytes of digests; they come 8 bytes each")
    return struct.unpack(f"<{len(data) // 8}Q", data)


def _pack_commit(commit: Commit) -> bytes:
    fields = {
        "tokens": commit.tokens,
        "plan": commit.plan,
        "digests": pack_digests(commit.digests),
        "first_token": commit.first_token,
        "extras": commit.extras,
    }
    packed: bytes = msgpack.packb(fields)
    return packed


def _unpack_commit(ticket: Ticket, payload: memoryview) -> Commit:
    fields = _read_map("commit", payload, _COMMIT_FIELDS)
    return Commit(
        ticket=ticket,
        tokens=fields["tokens"],
        plan=fields["plan"],
        digests=unpack_digests(fields["digests"]),
        first_token=fields["first_token"],
        extras=fields["extras"],
    )


def _ticket(header: Mapping[str, Any]) -> Ticket:
    return Ticket(header["nonce"], header["epoch"], header["gen"])


def _page_frame(
    ticket: Ticket, header: Mapping[str, Any], payload: memoryview
) -> PageFrame:
    indices = tuple(header[_INDICES])
    sizes = header["sizes"]
    digests = unpack_digests(header["digests"])
    has_items = 0 < len(indices) <= MAX_ITEMS
    is_even = len(indices) == len(sizes) == len(digests)
    if not has_items or not is_even or sum(sizes) != len(payload):
        counts = (len(indices), len(sizes), len(digests))
        raise CorruptFrameError(
            f"{counts} indices, sizes and digests in one frame of {len(payload)} bytes"
        )
    ends = zip(sizes, accumulate(sizes), strict=True)
    views = tuple(payload[end - size : end] for size, end in ends)
    return PageFrame(ticket, indices, digests, views)


def _read_map(name: str, data: Buffer, types: Mapping[str, type]) -> dict[str, Any]:
    """A msgpack map with exactly these fields of exactly these types; integers are >= 0."""
    try:
        fields = msgpack.unpackb(data, ext_hook=_refuse_extension)
    except (ValueError, msgpack.UnpackException) as error:
        raise CorruptFrameError(f"{name} is not msgpack: {error}") from error
    if not isinstance(fields, dict) or fields.keys() != types.keys():
        raise CorruptFrameError(f"{name} does not have the fields {', '.join(types)}")
    for field_name, expected in types.items():
        if not _is_valid(fields[field_name], expected):
            raise CorruptFrameError(
                f"{name}: {field_name} is no {expected.__name__}, or below 0"
            )
    return fields


def _is_valid(value: object, expected: type) -> bool:
    """Whether a value has exactly this type; integers, and those of a list, are >= 0."""
    if type(value) is not expected:
        return False
    if isinstance(value, list):
        return all(type(x) is int and x >= 0 for x in value)
    if isinstance(value, int):
        return value >= 0
    return True


def _refuse_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} is not used here")


def _varint(value: int) -> bytes:
    """As protobuf writes a size: seven bits a byte, the lowest first."""
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])
