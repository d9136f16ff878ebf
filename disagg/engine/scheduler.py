"""Who computes in the next step: decoding sequences first, then chunks of prompts.

    waiting ──room: all records of the prompt──► active ──► finished
       ▲                                           │
       └──────── preempted: records freed ◄────────┘ newest first, when a tail cannot grow

Room is counted in compressed bytes: what the plan of a sequence really stores. Knows no model.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from disagg.codecs.tables import block_size
from disagg.engine.sequence import Sequence
from disagg.errors import CapacityError
from disagg.metrics import Status
from disagg.pool import Pool
from disagg.state import GroupState, allocate_group


@dataclass(frozen=True)
class Share:
    """The next `count` tokens of a sequence, in the coming step."""

    sequence: Sequence
    count: int

    @property
    def decodes(self) -> bool:
        """Whether the tokens attend on pages; else they are a chunk of a prompt."""
        return self.sequence.life.status is Status.DECODE

    @property
    def completes(self) -> bool:
        """Whether no known token is left to feed: the last logits give the next one."""
        return self.sequence.n + self.count == self.sequence.length


class Scheduler:
    """The queues of an engine, and the rules by which sequences get room and tokens."""

    def __init__(self, pool: Pool, max_batch_tokens: int, max_sequences: int, watermark: float):
        self.waiting: list[Sequence] = []
        self.active: list[Sequence] = []  # both in order of arrival
        self.held: dict[str, Sequence] = {}
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self._free_bytes = int(pool.arena.nbytes * watermark)

    def queue(self, sequence: Sequence) -> None:
        """Wait for room, behind older sequences."""
        insort(self.waiting, sequence, key=lambda x: x.order)

    def activate(self, sequence: Sequence) -> None:
        """Compute from the next step on."""
        insort(self.active, sequence, key=lambda x: x.order)

    def find(self, rid: str) -> Sequence | None:
        """The sequence of a request, in whatever state."""
        everywhere = [*self.waiting, *self.active, *self.held.values()]
        return next((x for x in everywhere if x.rid == rid), None)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of all queues and free its records."""
        for queue in (self.waiting, self.active):
            if sequence in queue:
                queue.remove(sequence)
        self.held.pop(sequence.rid, None)
        self.free(sequence)

    def free(self, sequence: Sequence) -> None:
        """Release all that a sequence has stored."""
        for state in sequence.groups:
            self._pool.release(list(state.ids()))
        sequence.groups, sequence.n, sequence.workspace = (), 0, None

    def decode_shares(self) -> list[Share]:
        """One token of every decoding sequence; more where known tokens wait to be fed.

        Decoding is never held back by the token budget; replays use what it leaves.
        """
        decoding = [x for x in self.active if x.life.status is Status.DECODE]
        spare = max(0, self._max_batch_tokens - len(decoding))
        shares = []
        for sequence in decoding:
            wanted = min(sequence.length - sequence.n, 1 + spare)
            count = min(block_size(group, sequence.n, wanted) for group in sequence.plan.groups)
            shares.append(Share(sequence, count))
            spare -= count - 1
        return shares

    def prefill_shares(self, used: int) -> list[Share]:
        """Chunks of prompts, oldest first, in the token budget that `used` tokens leave."""
        left, shares = self._max_batch_tokens - used, []
        for sequence in self.active:
            count = min(sequence.prompt_len - sequence.n, left)
            if sequence.life.status is Status.PREFILL and count > 0:
                shares.append(Share(sequence, count))
                left -= count
        return shares

    def next_admissible(self) -> Sequence | None:
        """The oldest waiting sequence, now with records for its prompt; None: it has to wait.

        CapacityError if it had the whole pool to itself and that was not enough.
        """
        if not self.waiting or len(self.active) >= self._max_sequences:
            return None
        sequence = self.waiting[0]
        alone = not self._pool.referenced_pages
        needed = sequence.plan.nbytes(sequence.length + 1) + self._free_bytes
        if not alone and needed > self._pool.arena.nbytes - self._pool.used_bytes:
            return None
        try:
            sequence.groups = self._allocate(sequence)
        except CapacityError:
            if alone:
                raise
            return None
        self.waiting.remove(sequence)
        self.activate(sequence)
        return sequence

    def preempt(self) -> Sequence | None:
        """Free the newest sequence that can start again, and let it wait; None: there is none.

        What was offered to another worker stays.
        """
        for sequence in reversed(self.active):
            if sequence.handoff is None:
                self.remove(sequence)
                self.queue(sequence)
                return sequence
        return None

    def _allocate(self, sequence: Sequence) -> tuple[GroupState, ...]:
        taken: list[GroupState] = []
        try:
            for group in sequence.plan.groups:
                taken.append(allocate_group(group, sequence.prompt_len, self._pool))
        except CapacityError:
            self._release_all(taken)
            raise
        return tuple(taken)

    def _release_all(self, states: Iterable[GroupState]) -> None:
        for state in states:
            self._pool.release(list(state.ids()))
