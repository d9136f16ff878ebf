"""Which workers may take requests of one kind, and how long a prompt they have room for."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from disagg.router.worker_state import WorkerState


class RequestKind(NamedTuple):
    """What decides, besides the length of its prompt, which workers may take a request.

    at:         names of the workers that it has to use, as in `RequestState`
    min_tokens: decode workers with this `min_tokens` or more serve it whole; 0: it is handed off
    num_kept:   number of the workers kept for longer prompts that it may use all the same
    """

    at: tuple[str, str]
    is_single_token: bool
    min_tokens: int
    num_kept: int

    @property
    def is_local(self) -> bool:
        """Whether one worker answers it, without a hand-off."""
        return self.is_single_token or self.min_tokens > 0


class CandidateWorker(NamedTuple):
    """A worker, and what it may take.

    room:      length of the longest prompt that it may have room for
    busy_rank: it would not begin prompts of this rank or a higher one soon
    """

    worker: WorkerState
    room: float
    busy_rank: float


class Candidates:
    """The workers that may take requests of one kind, and can hand over to each other.

    A few sorted lists say at once whether any of them has room for a request, however many there
    are of either.
    """

    def __init__(
        self,
        prefills: Iterable[CandidateWorker],
        decodes: Iterable[CandidateWorker],
        kind: RequestKind,
    ):
        self.is_local = kind.is_local
        # the least busy come first, so that those that begin a prompt soon are the first ones
        self.prefills = sorted(prefills, key=lambda x: -x.busy_rank)
        self.decodes = list(decodes)
        self._idleness = [-x.busy_rank for x in self.prefills]
        rooms = (x.room for x in self.prefills)
        self._most_room = list(accumulate(rooms, max))  # of the first 1, 2, 3 ..
        self.decode_room = max((x.room for x in self.decodes), default=0.0)

    def fits(self, rank: float, tokens: int) -> bool:
        """Whether a prompt would begin soon, and there may be room for it and for its sequence."""
        if tokens > self.prefill_room(rank):
            return False
        return self.is_local or tokens <= self.decode_room

    def prefill_room(self, rank: float) -> float:
        """Length of the longest prompt of this rank that would begin soon; 0: none would."""
        num_soon = bisect_left(self._idleness, -rank)
        return self._most_room[num_soon - 1] if num_soon else 0.0

    def prefills_for(self, rank: float, tokens: int = 0) -> list[WorkerState]:
        """The prefill workers that would begin such a prompt soon and have room for it."""
        num_soon = bisect_left(self._idleness, -rank)
        return [x.worker for x in self.prefills[:num_soon] if tokens <= x.room]

    def decodes_for(self, tokens: int) -> list[WorkerState]:
        """The decode workers that have room for such a prompt."""
        return [x.worker for x in self.decodes if tokens <= x.room]
