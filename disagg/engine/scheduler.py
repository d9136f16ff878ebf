"""Which sequences compute in the next step: decoding ones first, then chunks of prompts.

    waiting ──its turn, and room for all records of the prompt──► active ──► finished
       ▲                                                            │
       └─────────────── preempted: records freed ◄──────────────────┘ newest first, when a
                                                                      tail cannot grow
Prompts share the tokens that decoding leaves, in the order of `urgency`: a short one computes in
the step after its arrival, a long one gets the rest, and the longer any of them waits the fewer can
pass it. Room is given in the same order: a prompt without room keeps those behind it waiting.

Room is counted in compressed bytes: what the plan of a sequence really stores. Knows no model.
"""

from bisect import insort
from dataclasses import dataclass

from disagg.engine.sequence import Sequence, Status, urgency
from disagg.errors import CapacityError
from disagg.kv.decode_slots import DecodeSlots
from disagg.kv.pool import Pool
from disagg.kv.state import GroupState, allocate_groups
from disagg.paged.page_tables import appendable


@dataclass(frozen=True)
class ScheduledTokens:
    """The next `count` tokens of a sequence, in the coming step.

    draft: the last of them, if they are guesses: those that may come behind its last token
    """

    sequence: Sequence
    count: int
    draft: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """The tokens to feed."""
        num_pending = self.count - len(self.draft)
        return [*self.sequence.pending(num_pending), *self.draft]

    @property
    def decodes(self) -> bool:
        """Whether the tokens attend on pages; else they are a chunk of a prompt."""
        return self.sequence.status is Status.DECODE

    @property
    def completes(self) -> bool:
        """Whether its last pending token is among these: its logits give the next token."""
        num_pending = self.count - len(self.draft)
        return self.sequence.n + num_pending == self.sequence.length

    @property
    def scores(self) -> bool:
        """Whether each of the tokens is scored by the logits before it."""
        return self.sequence.scored and not self.decodes

    @property
    def outputs(self) -> int:
        """How many of its last tokens need logits."""
        return self.count if self.scores else self.choices

    @property
    def choices(self) -> int:
        """How many next tokens are sampled: one behind its last token, and each of its draft."""
        return 1 + len(self.draft) if self.completes else 0


class Scheduler:
    """The queues of an engine, and the rules by which sequences get room and tokens."""

    def __init__(
        self,
        pool: Pool,
        max_batch_tokens: int,
        decode_slots: DecodeSlots,
        watermark: float,
    ):
        self.waiting: list[Sequence] = []  # in order of arrival, as `active`
        self.active: list[Sequence] = []
        self.held: dict[str, Sequence] = {}
        # the sequence that has had the pool to itself since it started
        self.alone_since_start: Sequence | None = None
        # the sequence that is to start again with the pool to itself
        self.exclusive: Sequence | None = None
        self._pool = pool
        self._max_batch_tokens = max_batch_tokens
        self._decode_slots = decode_slots
        self._reserve_bytes = int(pool.arena.nbytes * watermark)

    @property
    def slots(self) -> int:
        """How many more sequences may compute, those that wait already subtracted."""
        free = min(self._decode_slots.free, self._decode_slots.count - len(self.active))
        return max(0, free - len(self.waiting))

    @property
    def free_bytes(self) -> int:
        """Room for prompts: bytes without an owner, minus those reserved for growing sequences."""
        return max(0, self._pool.free_bytes - self._reserve_bytes)

    def queue(self, sequence: Sequence) -> None:
        """Wait for room."""
        insort(self.waiting, sequence, key=lambda x: x.order)

    def activate(self, sequence: Sequence) -> None:
        """Compute from the next step on."""
        self.alone_since_start = None
        insort(self.active, sequence, key=lambda x: x.order)

    def hold(self, sequence: Sequence) -> None:
        """Compute no more, and keep the records for another worker."""
        self.active.remove(sequence)
        self._give_slot_back(sequence)
        self.held[sequence.rid] = sequence

    def find(self, rid: str) -> Sequence | None:
        """The sequence of a request, in whichever queue it is."""
        for sequence in [*self.waiting, *self.active, *self.held.values()]:
            if sequence.rid == rid:
                return sequence
        return None

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of all queues and free its records."""
        for queue in (self.waiting, self.active):
            if sequence in queue:
                queue.remove(sequence)
        self.held.pop(sequence.rid, None)
        self._free(sequence)
        if self.exclusive is sequence:
            self.exclusive = None

    def schedule_decodes(self) -> list[ScheduledTokens]:
        """One token of every decoding sequence; more where several are pending.

        The token budget never holds decoding back; replays use what it leaves.
        """
        decoding = [x for x in self.active if x.status is Status.DECODE]
        spare = max(0, self._max_batch_tokens - len(decoding))
        scheduled = []
        for sequence in decoding:
            count = self._decode_count(sequence, spare)
            scheduled.append(ScheduledTokens(sequence, count))
            spare -= count - 1
        return scheduled

    def outgrown(self) -> list[Sequence]:
        """Decoding sequences whose text has become too long for the rotation of their keys."""
        return [
            x for x in self.active if x.status is Status.DECODE and x.outgrows_rotation
        ]

    def _decode_count(self, sequence: Sequence, spare: int) -> int:
        """How many pending tokens a sequence feeds at once, at most 1 + `spare`.

        With the pool to itself, a sequence feeds a token that seals a page by itself: the tokens
        behind it use the room that sealing frees.
        """
        n, groups = sequence.n, sequence.plan.paged
        if sequence is self.exclusive:
            seals = any(group.sealed(n + 1) > group.sealed(n) for group in groups)
            if seals:
                return 1
        count = min(sequence.length - n, 1 + spare)
        if count <= 1:
            return 1
        return min(appendable(group, n, count) for group in groups)

    def prompts(self, now: float) -> list[Sequence]:
        """Sequences whose prompts are not computed, most urgent first; those without room too."""
        begun = [x for x in self.active if x.status is Status.PREFILL]

        def key(sequence: Sequence) -> tuple[bool, float, int]:
            tokens_left = sequence.length - sequence.n
            waited_s = now - sequence.born
            is_exclusive = sequence is self.exclusive
            return not is_exclusive, urgency(tokens_left, waited_s), sequence.order

        return sorted([*begun, *self.waiting], key=key)

    def admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence records for its prompt; False: there is no room now.

        CapacityError if it had the whole pool to itself and that was not enough.
        """
        is_alone = not self._pool.referenced_pages
        if not self._may_start(sequence, is_alone):
            return False
        if not self._take_slot(sequence):
            return False
        try:
            sequence.groups = self._allocate(sequence, is_alone)
        except CapacityError:
            self._give_slot_back(sequence)
            if is_alone:
                raise
            return False
        self.waiting.remove(sequence)
        self.activate(sequence)
        if is_alone and not sequence.emitted:
            self.alone_since_start = sequence
        return True

    def _allocate(self, sequence: Sequence, is_alone: bool) -> tuple[GroupState, ...]:
        """Records for a prompt; CapacityError takes none."""
        try:
            return allocate_groups(sequence.plan, sequence.prompt_len, self._pool)
        except CapacityError:
            if not is_alone:
                raise
            # cached pages lie scattered over too many slabs
            self._pool.evict_all()
            return allocate_groups(sequence.plan, sequence.prompt_len, self._pool)

    def _may_start(self, sequence: Sequence, is_alone: bool) -> bool:
        """Whether the rules let a sequence start now; is_alone: the pool is empty."""
        if len(self.active) >= self._decode_slots.count:
            return False
        may_be_first = is_alone and sequence is self.exclusive
        if self.exclusive is not None and not may_be_first:
            return False
        if self.active and self._pool.used_bytes >= sequence.retry_below_bytes:
            return False
        if is_alone:
            return True
        records = sequence.plan.records(sequence.length + 1)
        nbytes = sum(count * shape.nbytes for shape, count in records.items())
        return nbytes <= self.free_bytes and self._pool.has_room(records)

    def _take_slot(self, sequence: Sequence) -> bool:
        """Give a sequence a decode slot where it needs one; False: none is free.

        A sequence that moves on needs none, and one may come with a slot promised to it.
        """
        if sequence.slot_promised or sequence.handoff:
            return True
        sequence.has_slot = self._decode_slots.take()
        return sequence.has_slot

    def preempt(self) -> Sequence | None:
        """Free the newest sequence that can start again, and let it wait; None: there is none.

        One that was offered to another worker is never preempted.
        """
        for sequence in reversed(self.active):
            if sequence.handoff is None:
                self.restart(sequence)
                sequence.retry_below_bytes = self._pool.used_bytes
                return sequence
        return None

    def restart(self, sequence: Sequence) -> None:
        """Free the records of a sequence, and let it wait."""
        self.active.remove(sequence)
        self._free(sequence)
        self.queue(sequence)

    def _free(self, sequence: Sequence) -> None:
        for state in sequence.groups:
            self._pool.release(state.ids())
        sequence.groups = ()
        sequence.n = 0
        sequence.workspace = None
        self._give_slot_back(sequence)

    def _give_slot_back(self, sequence: Sequence) -> None:
        """Free its decode slot for others, unless another part of the worker promised it."""
        if sequence.has_slot:
            sequence.has_slot = False
            self._decode_slots.give()
