"""How much the ends of a connection may send: the windows of HTTP/2, for one stream at a time.

Nothing is sent or read here. RFC 9113, sections 5.2 and 6.9.
"""

from collections.abc import Mapping

from hyperframe.frame import SettingsFrame, WindowUpdateFrame

from disagg.transfer.http2_frames import DEFAULT_FRAME, DEFAULT_WINDOW, LARGEST_FRAME, WIDEST

REOPEN_BYTES = WIDEST // 2


class Room:
    """What the peer lets us send."""

    def __init__(self) -> None:
        self._initial = DEFAULT_WINDOW  # of a stream that begins
        self._frame_bytes = DEFAULT_FRAME
        self._window = DEFAULT_WINDOW  # in all
        self._stream, self._stream_window = 0, DEFAULT_WINDOW  # and on this stream

    def begin(self, stream: int) -> None:
        """A stream begins, unless it is the one there is."""
        if stream != self._stream:
            self._stream, self._stream_window = stream, self._initial

    def take(self, nbytes: int) -> int:
        """How much of so many bytes may leave in one frame; it counts as sent."""
        most = min(self._frame_bytes, self._window, self._stream_window)
        count = min(nbytes, max(0, most))  # a peer may take room back: windows can be below 0
        self._window -= count
        self._stream_window -= count
        return count

    def widen(self, stream: int, nbytes: int) -> None:
        """The peer took so much in; stream 0: all of them together."""
        if stream == 0:
            self._window += nbytes
        elif stream == self._stream:
            self._stream_window += nbytes

    def apply(self, settings: Mapping[int, int]) -> None:
        """What the peer wishes; ConnectionError for what nobody may."""
        window = settings.get(SettingsFrame.INITIAL_WINDOW_SIZE, self._initial)
        frame = settings.get(SettingsFrame.MAX_FRAME_SIZE, self._frame_bytes)
        if window > WIDEST or not DEFAULT_FRAME <= frame <= LARGEST_FRAME:
            raise ConnectionAbortedError(
                f"the peer asks for windows of {window} bytes and frames of {frame}"
            )
        self._stream_window += window - self._initial
        self._initial, self._frame_bytes = window, frame


class Taken:
    """What came since our windows were opened again; those are as wide as can be."""

    def __init__(self) -> None:
        self._bytes = 0  # in all
        self._stream, self._stream_bytes = 0, 0  # and of this stream

    def count(self, stream: int, nbytes: int) -> list[WindowUpdateFrame]:
        """More came; what to tell the peer, if it is time."""
        if stream != self._stream:
            self._stream, self._stream_bytes = stream, 0
        self._bytes += nbytes
        self._stream_bytes += nbytes
        frames = []
        if self._bytes > REOPEN_BYTES:
            frames.append(WindowUpdateFrame(0, self._bytes))
            self._bytes = 0
        if self._stream_bytes > REOPEN_BYTES:
            frames.append(WindowUpdateFrame(stream, self._stream_bytes))
            self._stream_bytes = 0
        return frames
