"""Ranks of one host wait for each other: each counts its arrivals in memory that they share."""

import ctypes
from typing import Any

from disagg.kernels.cpu.library import MeetingC, load

COUNTER_BYTES = 64  # of a rank: a cache line


def is_served() -> bool:
    """Whether the library was built; Python alone cannot order what is written to memory."""
    return load() is not None


class Meetings:
    """The meetings of a group, as one rank comes to them. One thread of it at a time.

    address: of `ranks` counters in shared memory, COUNTER_BYTES each, which are 0 at first
    """

    def __init__(self, address: int, rank: int, ranks: int):
        library = load()
        assert library is not None
        self._library = library
        self._job = MeetingC(
            counters=address, rank=rank, ranks=ranks, number=0, late=-1
        )
        self._path = 0  # nothing here depends on the machine

    def arrive(self) -> None:
        """Come to the next meeting. Others see what was written before."""
        self._job.number += 1
        self._call(self._library.disagg_arrive)

    def wait(self, seconds: float) -> int | None:
        """Wait for the others: None once all have come, else a rank that has not."""
        self._job.wait_ns = int(1e9 * seconds)
        self._call(self._library.disagg_meet)
        late = int(self._job.late)
        return None if late < 0 else late

    def _call(self, function: Any) -> None:
        function(self._path, ctypes.addressof(self._job), 1)
