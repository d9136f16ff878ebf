"""The memory that holds pages. `engine/arena.py` has the arena of a GPU."""

from collections.abc import Callable, Sequence
from typing import Protocol

Copies = Callable[
    [], list[memoryview]
]  # waits for staged reads and returns their bytes


class Arena(Protocol):
    """Memory that holds pages, on a host or on a device.

    on_host: `read` returns views and costs nothing; otherwise it copies, and `stage` copies many
             spans at once
    """

    on_host: bool

    @property
    def nbytes(self) -> int:
        """Size; a multiple of 128."""

    def read(self, start: int, nbytes: int) -> memoryview:
        """The bytes at an offset: a view on a host, a copy from a device."""

    def write(self, pieces: Sequence[tuple[int, memoryview | bytes]]) -> None:
        """Copy pieces (offset, bytes). Later reads see them; the caller may reuse its memory."""

    def stage(self, spans: Sequence[tuple[int, int]], fresh: bool = False) -> Copies:
        """Start reading many spans (offset, nbytes).

        fresh: read after the kernels that this thread has launched
        """

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        """Fill many spans (offset, nbytes) with zeros."""


class HostArena:
    """An arena over any writable buffer: a bytearray, a numpy array, the memory of a CPU tensor."""

    on_host = True

    def __init__(self, buffer: bytearray | memoryview):
        self._view = memoryview(buffer).cast("B")

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def read(self, start: int, nbytes: int) -> memoryview:
        return self._view[start : start + nbytes]

    def write(self, pieces: Sequence[tuple[int, memoryview | bytes]]) -> None:
        for start, data in pieces:
            self._view[start : start + len(data)] = data

    def stage(self, spans: Sequence[tuple[int, int]], fresh: bool = False) -> Copies:
        views = [self.read(start, nbytes) for start, nbytes in spans]
        return lambda: views

    def zero(self, spans: Sequence[tuple[int, int]]) -> None:
        for start, nbytes in spans:
            self._view[start : start + nbytes] = bytes(nbytes)
