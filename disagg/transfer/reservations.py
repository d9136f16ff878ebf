"""The rules of the receiver: events in, results and actions out.

           reserve            attach           channel ends
    room ───────────► HELD ───────────► ATTACHED ───────────► BROKEN
                       │                 │  ▲ ▲                 │
                       │           frame └──┘ └──── attach ─────┘
                       │                 │ commit of the last part, all complete and verified
                       │                 └──────────► ADMITTED            (BROKEN too)
                       └─► EXPIRED (lease over) · ABORTED (router, fence, attempt+1),
                           the latter from ADMITTED too, until the engine is done

A hand-off between groups of ranks arrives in parts (`partition.py`). Each is attached, sent and
committed by itself; they have one lease, one abort and one admission. These rules run at rank 0.
Its followers store their parts by the rules of `incoming.py`, and the caller asks them: it opens
their parts before it answers `reserve`, and checks each part before it passes the commit on.

One thread calls it. A frame is checked, verified and copied within one call. The names of
ended reservations are remembered, so that late frames are refused by name and written nowhere.
"""

import secrets
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from disagg.errors import (
    AbortedError,
    CapacityError,
    CorruptFrameError,
    LayoutError,
    RequestError,
    ReservationError,
)
from disagg.kv.decode_slots import DecodeSlots
from disagg.kv.plan import Plan
from disagg.kv.pool import Pool
from disagg.kv.state import GroupState
from disagg.transfer.follower_calls import Opening
from disagg.transfer.incoming import IncomingPart, State
from disagg.transfer.messages import Ack, Attach, Attached, Grant, Job
from disagg.transfer.partition import Partition, part_nonce, part_of
from disagg.transfer.prefix_cache import PendingHandoff, PrefixCache, Scrub
from disagg.wire import Commit, PageFrame, Ticket, digest, pack

MAX_RID_CHARS, MAX_CODEC_CHARS = 256, 4096
MAX_TOMBSTONES = 1 << 16
# how long ended reservations and aborts are remembered, whatever the deadline of their request:
# calls end after 5 s, so none of an ended attempt can still be on its way. If one were, it would
# hold room for one lease
MEMORY_S = 900.0


@dataclass(frozen=True)
class ReceiverPolicy:
    """What a decode worker accepts.

    model:           fingerprint of config and weights
    plan_of:         the plan of a job's codec, whose records it allocates
    epoch:           its incarnation; a fence raises it by one
    lease_s:         a reservation ends this long after its sender's last sign of life
    decode_slots:    of the engine; a reservation takes one until its answer has ended
    watermark_bytes: what a reservation leaves free for sequences that grow
    may_reserve:     False while sequences of this worker wait for room
    share:           prompts share cached blocks of equal prefixes
    ranks:           of this worker
    """

    model: str
    plan_of: Callable[[str], Plan]
    epoch: int
    lease_s: float = 10.0
    decode_slots: DecodeSlots = field(default_factory=lambda: DecodeSlots(1 << 16))
    watermark_bytes: int = 0
    may_reserve: Callable[[], bool] = lambda: True
    share: bool = True
    ranks: int = 1

    def plan_for(self, job: Job) -> Plan:
        """The plan of a job on this rank.

        RequestError, ConfigError or LayoutError if it can never be served.
        """
        if (
            not job.rid
            or len(job.rid) > MAX_RID_CHARS
            or len(job.codec) > MAX_CODEC_CHARS
        ):
            raise RequestError(
                f"a request id has 1 to {MAX_RID_CHARS} characters, a codec spec at most "
                f"{MAX_CODEC_CHARS}; these have {len(job.rid)} and {len(job.codec)}"
            )
        if not job.prompt or job.tokens < len(job.prompt):
            raise RequestError(
                f"{job.name} has no prompt, or moves with "
                f"{job.tokens} of {len(job.prompt)} tokens"
            )
        plan = self.plan_of(job.codec)
        Partition(job.senders, self.ranks).received_plan(plan)
        return plan.moving if job.moved else plan


@dataclass(frozen=True)
class Admission:
    """A complete prompt for the engine, which owns its groups from now on."""

    job: Job
    groups: tuple[GroupState, ...]
    commit: Commit


class Reservation:
    """One hand-off at its decode worker, in parts that arrive at its ranks.

    nonce:     of part 0; see `partition.part_nonce`
    pending:   its records and the items that arrived; None once it was admitted or is over
    parts:     of all ranks, until its end. Items of followers that arrived are not in them
    pages:     page ids that other prompts may own too
    commits:   by part, while other parts are not committed yet
    committed: hashes of the commits by part, and `acks` the answers to them
    """

    def __init__(self, nonce: int, pending: PendingHandoff, partition: Partition):
        self.nonce = nonce
        self.rid = pending.job.rid
        self.attempt = pending.job.attempt
        self.name = pending.job.name
        self.partition = partition
        self.pending: PendingHandoff | None = pending
        self.parts: tuple[IncomingPart, ...] = tuple(
            IncomingPart(self.name, received) for received in pending.parts
        )
        self.ended: State | None = None
        self.reason = ""
        self.lease_until = 0.0
        self.ended_at = 0.0
        self.pages = pending.shared
        self.commits: dict[int, Commit] = {}
        self.committed: dict[int, int] = {}
        self.acks: dict[int, Ack] = {}

    @property
    def nonces(self) -> list[int]:
        """Those of its parts."""
        return [part_nonce(self.nonce, part) for part in range(self.partition.count)]

    @property
    def state(self) -> State:
        """Attached if any part is; broken if any is, and none is attached."""
        if self.ended is not None:
            return self.ended
        states = {part.state for part in self.parts}
        live_states = (State.ATTACHED, State.BROKEN)
        return next((x for x in live_states if x in states), State.HELD)

    def end(self, state: State) -> None:
        """Forget what has arrived, but not the names and the answers."""
        self.ended = state
        self.pending = None
        self.parts = ()
        self.commits.clear()

    def live(self) -> PendingHandoff:
        """Its records; ReservationError once it is over."""
        if self.pending is not None:
            return self.pending
        kind = AbortedError if self.state is State.ABORTED else ReservationError
        raise kind(f"{self.name} is {self.state}: {self.reason}")

    def part(self, ticket: Ticket) -> int:
        """The part that a ticket names."""
        return part_of(self.nonce, ticket.nonce)

    def rank(self, part: int) -> int:
        """The rank that stores a part."""
        return self.partition.receiver_of(part)

    def opening(self) -> Opening:
        """What a follower needs to know of it."""
        pending = self.live()
        return Opening(
            nonce=self.nonce,
            codec=pending.job.codec,
            tokens=pending.job.tokens,
            moves=pending.job.moved > 0,
            senders=pending.job.senders,
            records=[state.ids_by_kind() for state in pending.groups],
            cached={i: x.digests for i, x in enumerate(pending.parts) if self.rank(i)},
        )


class Reservations:
    """All hand-offs of one decode worker.

    on_admit: called with every complete prompt; only enqueues. If it raises, the prompt is refused
              with that error and its records are freed.
    on_drop:  called with (rid, attempt, reason) of an admitted prompt that the engine must drop and
              free; only enqueues
    clock:    in seconds; it never goes back

    on_close: called with the nonce of a reservation that is over or admitted, and what frees its
              records: by default at once, by a group when its followers have closed their parts
    counts: reservations that "expired", cached blocks that were "damaged", and tokens of admitted
            prompts: "received_tokens", and "shared_tokens" of cached blocks
    """

    def __init__(
        self,
        policy: ReceiverPolicy,
        pool: Pool,
        on_admit: Callable[[Admission], None],
        on_drop: Callable[[str, int, str], None],
        clock: Callable[[], float] = time.monotonic,
        on_close: Callable[[int, Callable[[], None]], None] = lambda nonce, free: (
            free()
        ),
    ):
        self.policy = policy
        self.epoch = policy.epoch
        self.counts: Counter[str] = Counter()
        self.cache = PrefixCache(pool, policy.share, policy.ranks)
        self._on_admit, self._on_drop = on_admit, on_drop
        self._on_close = on_close
        self._arena = pool.arena
        self._clock = clock
        # by rid, in the order of renewal: the first lease to end comes first
        self._live: OrderedDict[str, Reservation] = OrderedDict()
        self._running: dict[str, Reservation] = {}  # by rid, while the engine has it
        self._by_nonce: dict[int, Reservation] = {}
        self._ended: deque[Reservation] = deque()  # oldest first
        # by rid, oldest first: the last attempt that was aborted, and when
        self._tombstones: OrderedDict[str, tuple[int, float]] = OrderedDict()

    # -- events of the router

    def reserve(self, job: Job, epoch: int) -> Grant:
        """Room for a prompt, at once or not at all. The same job again gets the same answer.

        Raises CapacityError if there is no room now, RequestError for a job that can never be
        served, ReservationError for another epoch, and for an attempt that ran, was aborted or has
        a later one. An attempt whose lease ended gets room again.
        """
        self.expire()
        plan = self.policy.plan_for(job)
        if epoch != self.epoch:
            raise ReservationError(f"epoch {epoch} is not {self.epoch}, the one of now")
        old = self._live.get(job.rid)
        if old and old.attempt == job.attempt:
            old_job = old.live().job
            if old_job.moved != job.moved and old.state is State.HELD:
                # the sequence emitted more tokens before it left
                self._stop(old, f"room for {job.tokens} tokens is needed now")
                return self.reserve(job, epoch)
            is_same = (
                old_job.prompt == job.prompt
                and old_job.codec == job.codec
                and old_job.moved == job.moved
                and old_job.senders == job.senders
            )
            if not is_same:
                raise ReservationError(f"{old.name} is reserved for another prompt")
            self._renew(old)
            return Grant(old.nonce, self.epoch)
        self._refuse_late(job)
        self.cache.check(plan, job.tokens)
        if job.attempt:  # lower attempts are over, also those that never came here
            self.abort(job.rid, job.attempt - 1, f"attempt {job.attempt} took over")
        return Grant(self._hold(job, plan).nonce, self.epoch)

    def abort(self, rid: str, attempt: int, reason: str) -> None:
        """End all attempts up to this one, and refuse those that come later."""
        self._bury(rid, attempt)
        for reservation in self._of(rid):
            if reservation.attempt <= attempt:
                self._stop(reservation, reason)

    def fence(self, epoch: int) -> None:
        """Begin the next epoch: all of the old one is over. The epoch of now changes nothing."""
        if epoch == self.epoch:
            return
        if epoch != self.epoch + 1:
            raise ReservationError(
                f"a fence to epoch {epoch}; this worker is in {self.epoch}"
            )
        self.epoch = epoch
        for reservation in self._of():
            self._stop(reservation, f"fenced: epoch {epoch} has begun")

    def opening(self, nonce: int) -> Opening:
        """What followers need to know of a reservation; ReservationError if it is over."""
        return self._by_nonce[nonce].opening()

    # -- events of the sender

    def follower_of(self, ticket: Ticket) -> int:
        """The rank of the follower to ask about a part; 0: none, or the hand-off is over.

        ReservationError for an unknown ticket.
        """
        reservation = self._find(ticket)
        part = reservation.part(ticket)
        return reservation.rank(part) if reservation.pending else 0

    def attach(self, attach: Attach) -> Attached:
        """A sender takes a part over, with a gen above those of all before.

        The items of a part of a follower are those that were cached.

        LayoutError if it encodes a prompt of another length, model or plan than was reserved.
        """
        self.expire()
        reservation = self._find(attach.ticket)
        if reservation.state is State.ADMITTED:
            return Attached(admitted=True)
        manifest = reservation.live().manifest
        reserved = (self.policy.model, manifest.plan.fingerprint, manifest.tokens)
        attached = (attach.model, attach.plan, attach.tokens)
        if attached != reserved:
            raise LayoutError(
                f"model, plan and tokens are {attached}; reserved were {reserved}"
            )
        part = reservation.parts[reservation.part(attach.ticket)]
        part.attach(attach.ticket.gen)
        self._renew(reservation)
        return Attached(
            have=list(part.received.digests.keys()),
            digests=list(part.received.digests.values()),
            lease_s=self.policy.lease_s,
            credit=2 * manifest.frame_bytes,
        )

    def renew(self, tickets: Iterable[Ticket]) -> tuple[int, ...]:
        """Extend the leases of a sender. The nonces of those that are over and not admitted."""
        self.expire()
        over = []
        for ticket in tickets:
            reservation = None
            if ticket.epoch == self.epoch:
                reservation = self._by_nonce.get(ticket.nonce)
            if reservation is None:
                over.append(ticket.nonce)
            elif reservation.pending:
                self._renew(reservation)
            elif reservation.state is not State.ADMITTED:
                over.append(ticket.nonce)
        return tuple(over)

    def store(self, frame: PageFrame, channel: object) -> None:
        """Verify a frame and copy its items to their addresses."""
        self.expire()
        reservation = self._find(frame.ticket)
        index = reservation.part(frame.ticket)
        reservation.live()
        if rank := reservation.rank(index):
            raise ReservationError(
                f"part {index} of {reservation.name} belongs to rank {rank}, not to rank 0"
            )
        part = reservation.parts[index]
        part.take_channel(frame, channel)
        self._renew(reservation)
        part.store(frame, self._arena, self._clock)

    def channel_ended(self, channel: object) -> None:
        """A channel ended, for any reason. Nothing is complete without a commit."""
        for reservation in self._live.values():
            for part in reservation.parts:
                part.channel_ended(channel)

    def commit(self, commit: Commit, verify_ms: float = 0.0) -> Ack:
        """Complete a part if all its items are here, with the digests of the commit.

        With the last part the hand-off is admitted. The same commit again gets the same answer and
        admits nothing. TransferError if an item is missing: a sender commits when all its frames
        were answered. Whether those of a follower are here, the caller has asked the follower.

        verify_ms: that a follower spent on the part
        """
        self.expire()
        began = self._clock()
        reservation = self._find(commit.ticket)
        index = reservation.part(commit.ticket)
        if reservation.state is State.ADMITTED:
            if reservation.committed[index] != _hash(commit):
                raise ReservationError(
                    f"{reservation.name} was admitted by another commit"
                )
            return reservation.acks[index]
        pending = reservation.live()
        part = reservation.parts[index]
        part.check_attached(commit.ticket, State.ATTACHED, State.BROKEN)
        if reservation.rank(index) == 0:
            part.received.check(commit)
            verify_ms = part.verify_ms
        reservation.committed[index] = _hash(commit)
        reservation.commits[index] = commit
        if len(reservation.commits) == len(reservation.parts):
            self._admit(reservation, pending)
        admit_ms = 1000 * (self._clock() - began)
        reservation.acks[index] = Ack(verify_ms, admit_ms)
        return reservation.acks[index]

    # -- events of the engine, and time

    def finished(self, rid: str, attempt: int) -> None:
        """The engine is done with a prompt and has freed it."""
        running = self._running.get(rid)
        if running and running.attempt == attempt:
            self._end(running, State.ADMITTED, "")

    def expire(self) -> None:
        """End leases and forget old names. Every event begins with it."""
        now = self._clock()
        while self._live:
            first = next(iter(self._live.values()))
            if first.lease_until > now:
                break
            self.counts["expired"] += 1
            reason = f"no sign of life for a lease, {self.policy.lease_s:g} s"
            self._stop(first, reason, State.EXPIRED)
        forget_before = now - MEMORY_S
        while self._ended and self._ended[0].ended_at < forget_before:
            for nonce in self._ended.popleft().nonces:
                self._by_nonce.pop(nonce, None)
        while self._tombstones:
            _, buried_at = next(iter(self._tombstones.values()))
            if buried_at >= forget_before:
                break
            self._tombstones.popitem(last=False)

    def end_scrub(
        self, scrub: Scrub, damaged: Mapping[bytes, CorruptFrameError]
    ) -> dict[CorruptFrameError, list[tuple[str, int]]]:
        """Drop damaged blocks, and end all reservations that use or were promised their pages.

        Returns (rid, attempt) of those reservations by the error of their block.
        """
        self.cache.end_scrub(scrub, damaged)
        ended = {}
        for block in scrub.blocks:
            if block.key not in damaged:
                continue
            error = damaged[block.key]
            owners = [x for x in self._of() if not x.pages.isdisjoint(block.pages)]
            for reservation in owners:
                self._stop(reservation, str(error))
            ended[error] = [(x.rid, x.attempt) for x in owners]
        self.counts["damaged"] += len(ended)
        return ended

    def gauges(self) -> dict[str, int]:
        """How many hand-offs are in which state; all zero when the worker is idle."""
        attached = [x for x in self._live.values() if x.state is State.ATTACHED]
        return {
            "reservations": len(self._live),
            "streams": len(attached),
            "running": len(self._running),
        }

    def _of(self, rid: str | None = None) -> list[Reservation]:
        """The live and the running reservations of one request, or of all."""
        reservations = [*self._running.values(), *self._live.values()]
        return [x for x in reservations if rid in (None, x.rid)]

    def _find(self, ticket: Ticket) -> Reservation:
        if ticket.epoch != self.epoch:
            raise ReservationError(
                f"epoch {ticket.epoch} is over; this worker is in {self.epoch}"
            )
        if reservation := self._by_nonce.get(ticket.nonce):
            return reservation
        raise ReservationError(f"no reservation {ticket.nonce:016x} is known here")

    def _refuse_late(self, job: Job) -> None:
        current = self._live.get(job.rid) or self._running.get(job.rid)
        if current and current.attempt >= job.attempt:
            raise ReservationError(
                f"{job.name} comes after {current.name}, which is {current.state}"
            )
        aborted_attempt, _ = self._tombstones.get(job.rid, (-1, 0.0))
        if job.attempt <= aborted_attempt:
            raise ReservationError(f"{job.name} was aborted or superseded")

    def _hold(self, job: Job, plan: Plan) -> Reservation:
        policy = self.policy
        if not policy.may_reserve():
            raise CapacityError("sequences here wait for room already")
        if not policy.decode_slots.take():
            raise CapacityError(
                f"{policy.decode_slots.count} sequences are here or promised room"
            )
        try:
            pending = self.cache.hold(policy.model, plan, job, policy.watermark_bytes)
        except BaseException:
            policy.decode_slots.give()
            raise
        partition = Partition(job.senders, policy.ranks)
        reservation = Reservation(secrets.randbits(64), pending, partition)
        self._live[job.rid] = reservation
        self._by_nonce.update(dict.fromkeys(reservation.nonces, reservation))
        self._renew(reservation)
        return reservation

    def _renew(self, reservation: Reservation) -> None:
        reservation.lease_until = self._clock() + self.policy.lease_s
        self._live.move_to_end(reservation.rid)

    def _admit(self, reservation: Reservation, pending: PendingHandoff) -> None:
        """Hand the records over to the engine; cache those that other prompts can share.

        CorruptFrameError if the parts do not begin the same answer.
        """
        commits = [commit for _, commit in sorted(reservation.commits.items())]
        commit = commits[0]
        first_tokens = {x.first_token for x in commits}
        if len(first_tokens) > 1:
            raise CorruptFrameError(
                f"the parts of {reservation.name} have the first tokens {sorted(first_tokens)}"
            )
        digests = [digest for x in commits for digest in x.digests]
        reservation.pages = self.cache.keep(pending, digests)
        reservation.end(State.ADMITTED)
        self._on_close(reservation.nonce, lambda: None)
        del self._live[reservation.rid]
        self._running[reservation.rid] = reservation
        self.counts["shared_tokens"] += pending.cached_tokens
        self.counts["received_tokens"] += commit.tokens - pending.cached_tokens
        try:
            self._on_admit(Admission(pending.job, pending.groups, commit))
        except BaseException as error:
            self.cache.release(pending.groups)
            self._end(reservation, State.ABORTED, str(error))
            raise

    def _stop(
        self, reservation: Reservation, reason: str, state: State = State.ABORTED
    ) -> None:
        admitted = reservation.state is State.ADMITTED
        self._end(reservation, state, reason)
        if admitted:
            self._on_drop(reservation.rid, reservation.attempt, reason)

    def _end(self, reservation: Reservation, state: State, reason: str) -> None:
        """Free what a reservation holds; only its names are remembered."""
        pending = reservation.pending
        reservation.end(state)
        reservation.reason = reason
        reservation.ended_at = self._clock()
        reservation.pages = frozenset()
        for table in (self._live, self._running):
            if table.get(reservation.rid) is reservation:
                del table[reservation.rid]
        self.policy.decode_slots.give()
        self._ended.append(reservation)
        if pending is not None:
            free = partial(self.cache.release, pending.groups)
            self._on_close(reservation.nonce, free)

    def _bury(self, rid: str, attempt: int) -> None:
        """No attempt up to this one may reserve any more."""
        earlier, _ = self._tombstones.pop(rid, (attempt, 0.0))
        self._tombstones[rid] = (max(earlier, attempt), self._clock())
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)


def _hash(commit: Commit) -> int:
    """A hash of a commit that does not depend on its attachment.

    CorruptFrameError for extras that nest deeper than any sender can pack.
    """
    try:
        _, payload = pack(commit)
    except ValueError as error:
        raise CorruptFrameError(f"a commit that cannot be packed: {error}") from error
    return digest(payload)
