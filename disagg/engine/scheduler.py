"""Who computes in the next step: decoding sequences first, then chunks of prompts.

    waiting ──its turn, and room for all records of the prompt──► active ──► finished
       ▲                                                            │
       └─────────────── preempted: records freed ◄──────────────────┘ newest first, when a
                                                                      tail cannot grow
Prompts share the tokens that decoding leaves in the order of `urgency`: a short one computes in the
step after it came, a long one has what is left, and the longer any waits the less can pass it. Room
is given in the same order: who finds none keeps those behind it from taking it.

Room is counted in compressed bytes: what the plan of a sequence really stores. Knows no model.
"""

from bisect import insort
from dataclasses import dataclass

from disagg.engine.sequence import Sequence, Status, urgency
from disagg.errors import CapacityError
from disagg.kv.decode_slots import DecodeSlots
from disagg.kv.pool import Pool
from disagg.kv.state import allocate_group
from disagg.paged.page_tables import block_size


@dataclass(frozen=True)
class ScheduledTokens:
    """The next `count` tokens of a sequence, in the coming step."""

    sequence: Sequence
    count: int

    @property
    def decodes(self) -> bool:
        """Whether the tokens attend on pages; else they are a chunk of a prompt."""
        return self.sequence.status is Status.DECODE

    @property
    def completes(self) -> bool:
        """Whether no known token is left to feed: the last logits give the next one."""
        return self.sequence.n + self.count == self.sequence.length

    @property
    def scores(self) -> bool:
        """Whether every token of it is to be scored by the logits before it."""
        return self.sequence.scored and not self.decodes

    @property
    def outputs(self) -> int:
        """How many of its last tokens need logits."""
        return self.count if self.scores else int(self.completes)


class Scheduler:
    """The queues of an engine, and the rules by which sequences get room and tokens."""

    def __init__(
        self, pool: Pool, max_batch_tokens: int, rows: DecodeSlots, watermark: float
    ):
        self.waiting: list[Sequence] = []
        self.active: list[Sequence] = []  # both in order of arrival
        self.held: dict[str, Sequence] = {}
        self.alone: Sequence | None = None  # has had the pool to itself all along
        self.sole: Sequence | None = None  # is to start again with the pool to itself
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._rows = rows
        self._reserve_bytes = int(pool.arena.nbytes * watermark)

    @property
    def slots(self) -> int:
        """How many more sequences may compute, those that wait counted."""
        free = min(self._rows.free, self._rows.count - len(self.active))
        return max(0, free - len(self.waiting))

    @property
    def free_bytes(self) -> int:
        """Room for prompts: what nobody owns, but for what is kept for sequences that grow."""
        return max(
            0, self._pool.arena.nbytes - self._pool.used_bytes - self._reserve_bytes
        )

    def queue(self, sequence: Sequence) -> None:
        """Wait for room."""
        insort(self.waiting, sequence, key=lambda x: x.order)

    def activate(self, sequence: Sequence) -> None:
        """Compute from the next step on."""
        self.alone = None
        insort(self.active, sequence, key=lambda x: x.order)

    def hold(self, sequence: Sequence) -> None:
        """Compute no more, and keep the records for another worker."""
        self.active.remove(sequence)
        self._leave(sequence)
        self.held[sequence.rid] = sequence

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
        self._free(sequence)
        self.sole = None if self.sole is sequence else self.sole

    def decode_shares(self) -> list[ScheduledTokens]:
        """One token of every decoding sequence; more where known tokens wait to be fed.

        Decoding is never held back by the token budget; replays use what it leaves. One with
        the pool to itself feeds a token that seals alone: those behind it use what that frees.
        """
        decoding = [x for x in self.active if x.status is Status.DECODE]
        spare = max(0, self._max_batch_tokens - len(decoding))
        shares = []
        for sequence in decoding:
            groups, n = sequence.plan.groups, sequence.n
            seals = sequence is self.sole and any(
                x.sealed(n + 1) > x.sealed(n) for x in groups
            )
            wanted = 1 if seals else min(sequence.length - n, 1 + spare)
            count = min(block_size(x, n, wanted) for x in groups) if wanted > 1 else 1
            shares.append(ScheduledTokens(sequence, count))
            spare -= count - 1
        return shares

    def prompts(self, now: float) -> list[Sequence]:
        """Whose prompts are not computed, the most urgent first; some have no room yet."""
        begun = [x for x in self.active if x.status is Status.PREFILL]
        key = {
            x: urgency(x.length - x.n, now - x.born) for x in (*begun, *self.waiting)
        }
        return sorted(key, key=lambda x: (x is not self.sole, key[x], x.order))

    def admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence records for its prompt; False: there is no room now.

        CapacityError if it had the whole pool to itself and that was not enough.
        """
        if len(self.active) >= self._rows.count:
            return False
        alone = not self._pool.referenced_pages
        if self.sole is not None and not (alone and sequence is self.sole):
            return False
        if self.active and self._pool.used_bytes >= sequence.crowd:
            return False
        if not alone and sequence.plan.nbytes(sequence.length + 1) > self.free_bytes:
            return False
        if not (sequence.promised or sequence.handoff):
            sequence.seated = self._rows.take()
            if not sequence.seated:
                return False
        try:
            for group in sequence.plan.groups:
                sequence.groups += (
                    allocate_group(group, sequence.prompt_len, self._pool),
                )
        except CapacityError:
            self._free(sequence)
            if alone:
                raise
            return False
        self.waiting.remove(sequence)
        self.activate(sequence)
        self.alone = None if sequence.emitted or not alone else sequence
        return True

    def preempt(self) -> Sequence | None:
        """Free the newest sequence that can start again, and let it wait; None: there is none.

        What was offered to another worker stays.
        """
        for sequence in reversed(self.active):
            if sequence.handoff is None:
                self.restart(sequence)
                sequence.crowd = self._pool.used_bytes
                return sequence
        return None

    def restart(self, sequence: Sequence) -> None:
        """Free what a sequence has, and let it wait."""
        self.active.remove(sequence)
        self._free(sequence)
        self.queue(sequence)

    def _free(self, sequence: Sequence) -> None:
        for state in sequence.groups:
            self._pool.release(state.ids())
        sequence.groups, sequence.n, sequence.workspace = (), 0, None
        self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Its row is for others; one that was promised to it is not the engine's to give."""
        if sequence.seated:
            sequence.seated = False
            self._rows.give()
