"""Frames: how records cross between workers. Objects to bytes and back; nothing is sent here.

    prelude, 32 bytes: magic · version · type · sizes · xxh3 │ header: msgpack │ payload: bytes

The unit is an *item*, one layer page of one record. Both sides derive the same list of a prompt's
items, so each is named by its place there and never by an address. A page frame carries items, each
with its digest; the commit frame is the last of a hand-off and names the digest of every item.
The prelude's checksum covers prelude and header, the header's digests cover the payload: every
byte is checked, each once. Packing joins nothing and unpacking copies nothing.
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

MAGIC, WIRE_VERSION = b"dgKV", 4
FRAME_BYTES = (
    2 << 20
)  # a frame is cut at this payload; a single larger item travels alone
MAX_HEADER_BYTES, MAX_ITEMS = 256 << 10, 4096  # of one frame
MAX_FRAME_BYTES = (4 << 20) - 16  # in its message, as much as gRPC takes at once

_FRAME_TAG = (
    b"\x0a"  # protobuf: field 1, length-delimited; of PushRequest and CommitRequest
)
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
    """Which reservation a frame belongs to.

    nonce: the reservation · epoch: the incarnation of the decode worker that made it
    gen:   how often a stream attached; frames of an older stream are refused
    """

    nonce: int
    epoch: int
    gen: int


@dataclass(frozen=True)
class PageFrame:
    """Some items of a prompt: the place, the digest and the bytes of each."""

    ticket: Ticket
    indices: tuple[int, ...]
    digests: tuple[int, ...]
    payload: tuple[Buffer, ...]


@dataclass(frozen=True)
class Commit:
    """The last frame of a hand-off: what must have arrived, and what only prefill knows. Only this
    completes it; the end of a stream does not.

    tokens:      length of the prompt
    plan:        fingerprint of the plan that fixes the order of the items
    digests:     one per item, in the order of `transfer.records.Checklist`
    first_token: sampled by prefill; decode starts behind it
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
_FIELDS: dict[str, type] = {"nonce": int, "epoch": int, "gen": int, "digests": bytes}
_PAGES = {"places": list, "sizes": list}
_COMMIT = {
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
    """The buffers of a frame, to be joined by whoever sends them; payloads are not copied."""
    header: dict[str, object] = vars(frame.ticket) | {"digests": b""}
    payload: Sequence[Buffer] = ()
    if isinstance(frame, PageFrame):
        what, payload = FrameType.PAGES, frame.payload
        header |= {"places": frame.indices, "sizes": [*map(len, payload)]}
        header["digests"] = pack_digests(frame.digests)
    else:
        commit = {name: getattr(frame, name) for name in _COMMIT}
        commit["digests"] = pack_digests(frame.digests)
        what, payload = FrameType.COMMIT, (msgpack.packb(commit),)
        header["digests"] = pack_digests([digest(payload[0])])
    packed = msgpack.packb(header)
    size = sum(map(len, payload))
    prelude = _PRELUDE.pack(MAGIC, WIRE_VERSION, what, len(packed), size)
    return [prelude + _CHECKSUM.pack(digest(prelude + packed)) + packed, *payload]


def unpack(data: Buffer) -> Frame:
    """The frame of these bytes; a page frame holds views of them, not verified yet.

    Raises VersionError for another version, CorruptFrameError for whatever else is wrong with it.
    """
    view = memoryview(data)
    if len(view) != (size := frame_bytes(view)):
        raise CorruptFrameError(f"a frame of {len(view)} bytes says that it has {size}")
    _, _, what, header_bytes, payload_bytes = _PRELUDE.unpack_from(view)
    prelude, packed = (
        view[: _PRELUDE.size],
        view[PRELUDE_BYTES : PRELUDE_BYTES + header_bytes],
    )
    payload = view[size - payload_bytes :]
    if _CHECKSUM.unpack_from(view, _PRELUDE.size) != (
        digest(bytes(prelude) + bytes(packed)),
    ):
        raise CorruptFrameError("the checksum of a frame header does not match")
    if what not in list(FrameType):
        raise CorruptFrameError(f"a frame of unknown type {what}")
    fields = _FIELDS | _PAGES if what == FrameType.PAGES else _FIELDS
    header = _read_map("frame header", packed, fields)
    ticket = Ticket(header["nonce"], header["epoch"], header["gen"])
    if what == FrameType.PAGES:
        return _page_frame(ticket, header, payload)
    if unpack_digests(header["digests"]) != (digest(payload),):
        raise CorruptFrameError("the digest of a commit frame does not match")
    commit = _read_map("commit", payload, _COMMIT)
    commit["digests"] = unpack_digests(commit["digests"])
    return Commit(ticket, **commit)


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
    for start in range(
        2, min(7, len(view) + 1)
    ):  # behind the tag and a size of 1 to 5 bytes
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


def _read_map(what: str, data: Buffer, fields: Mapping[str, type]) -> dict[str, Any]:
    """A msgpack map with exactly these fields of exactly these types; integers are >= 0."""
    try:
        found = msgpack.unpackb(data, ext_hook=_refuse_extension)
    except (ValueError, msgpack.UnpackException) as error:
        raise CorruptFrameError(f"{what} is not msgpack: {error}") from error
    if not isinstance(found, dict) or found.keys() != fields.keys():
        raise CorruptFrameError(f"{what} does not have the fields {', '.join(fields)}")
    for name, wanted in fields.items():
        value = found[name]
        counts = value if wanted is list else [value] if wanted is int else []
        if type(value) is not wanted or any(
            type(x) is not int or x < 0 for x in counts
        ):
            raise CorruptFrameError(
                f"{what}: {name} is no {wanted.__name__}, or below 0"
            )
    return found


def _page_frame(
    ticket: Ticket, header: Mapping[str, Any], payload: memoryview
) -> PageFrame:
    places, sizes, digests = (
        header["places"],
        header["sizes"],
        unpack_digests(header["digests"]),
    )
    counts = len(places), len(sizes), len(digests)
    if (
        not 0 < len(places) <= MAX_ITEMS
        or len({*counts}) > 1
        or sum(sizes) != len(payload)
    ):
        raise CorruptFrameError(
            f"{counts} places, sizes and digests in one frame of {len(payload)} bytes"
        )
    ends = zip(sizes, accumulate(sizes), strict=True)
    views = tuple(payload[end - size : end] for size, end in ends)
    return PageFrame(ticket, tuple(places), digests, views)


def _refuse_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} is not used here")


def _varint(value: int) -> bytes:
    """As protobuf writes a size: seven bits a byte, the lowest first."""
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])
