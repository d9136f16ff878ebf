"""HTTP/2 frames as objects and bytes; nothing is sent here. RFC 9113."""

from collections.abc import Sequence
from dataclasses import dataclass

from hyperframe.exceptions import HyperframeError
from hyperframe.frame import Frame, SettingsFrame

NO_HTTP2 = "the peer does not speak HTTP/2"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_CONTROL_BYTES = 16 << 10  # of a frame that is not DATA, and of all headers of a call
WIDEST = (1 << 31) - 1
DEFAULT_WINDOW, DEFAULT_FRAME = (1 << 16) - 1, 1 << 14  # until the peer says otherwise
LARGEST_FRAME = (1 << 24) - 1
DATA_TYPE, END_STREAM = 0, 1

SETTINGS = {
    SettingsFrame.MAX_CONCURRENT_STREAMS: 1,
    SettingsFrame.INITIAL_WINDOW_SIZE: WIDEST,
    SettingsFrame.MAX_FRAME_SIZE: LARGEST_FRAME,
    SettingsFrame.MAX_HEADER_LIST_SIZE: MAX_CONTROL_BYTES,
}

Fields = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Headers:
    """Headers or trailers of a stream; `ends`: nothing follows."""

    stream: int
    fields: dict[str, str]
    ends: bool


@dataclass(frozen=True)
class Data:
    """`nbytes` of payload of a stream begin; they are taken by `read_payload`."""

    stream: int
    nbytes: int
    ends: bool


@dataclass(frozen=True)
class Reset:
    """The peer gave a stream up."""

    stream: int
    code: int


Event = Headers | Data | Reset


def data_head(nbytes: int, flags: int, stream: int) -> bytes:
    """What goes before the payload of a DATA frame."""
    return nbytes.to_bytes(3, "big") + bytes([DATA_TYPE, flags]) + stream.to_bytes(4, "big")


def cut(parts: list[memoryview], nbytes: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `nbytes` of some parts, and the rest."""
    first: list[memoryview] = []
    for place, part in enumerate(parts):
        if nbytes < len(part):
            return [*first, part[:nbytes]], [part[nbytes:], *parts[place + 1 :]]
        first.append(part)
        nbytes -= len(part)
    return first, []


def parse(head: bytes, body: bytes) -> Frame:
    """A frame that is not DATA; ConnectionError for what is none."""
    try:
        frame, _ = Frame.parse_frame_header(memoryview(head))
        frame.parse_body(memoryview(body))
    except HyperframeError as error:
        raise ConnectionAbortedError(f"an HTTP/2 frame cannot be read: {error}") from error
    return frame
