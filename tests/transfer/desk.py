"""Reservations over a pool, with what a receiver does around them, for their tests."""

import random
from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

from disagg.errors import CorruptFrameError
from disagg.kv.pool import Pool
from disagg.transfer.messages import Ack, Attach, Attached, Grant
from disagg.transfer.reservations import Admission, Reservations
from disagg.wire import PageFrame, Ticket
from tests.transfer.prompts import MODEL, Prompt, make_policy, make_pool

SMALL = 7 << 14  # room for one prompt of 300 tokens, not for two


class Desk:
    """Reservations, their pool, and an engine that keeps what it is given.

    now: the clock of the reservations, unless another is passed
    """

    def __init__(
        self,
        nbytes: int = 1 << 20,
        pool: Pool | None = None,
        clock: Callable[[], float] | None = None,
        on_close: Callable[[int, Callable[[], None]], None] = lambda nonce, free: (
            free()
        ),
        **policy: object,
    ):
        self.pool = pool or make_pool(nbytes)
        self.now = 0.0
        self.policy = make_policy(**policy)
        self.engine: dict[str, Admission] = {}
        self.dropped: list[tuple[str, int, str]] = []
        self.ledger = Reservations(
            self.policy,
            self.pool,
            on_admit=lambda admission: self.admit(admission),
            on_drop=lambda *dropped: self.drop(*dropped),
            clock=clock or (lambda: self.now),
            on_close=on_close,
        )

    def admit(self, admission: Admission) -> None:
        assert admission.job.rid not in self.engine
        self.engine[admission.job.rid] = admission

    def drop(self, rid: str, attempt: int, reason: str) -> None:
        self.dropped.append((rid, attempt, reason))

    def at(self, now: float) -> Reservations:
        self.now = now
        return self.ledger

    def reserve(self, prompt: Prompt, now: float = 0.0, /, **changes: object) -> Grant:
        epoch = changes.pop("epoch", self.ledger.epoch)
        return self.at(now).reserve(prompt.job(**changes), epoch)

    def cached_tokens(self, rid: str) -> int:
        """Leading tokens of a reserved prompt whose blocks all layer groups had cached."""
        return self.ledger._live[rid].live().cached_tokens

    def received(self, ticket: Ticket) -> dict[int, int]:
        """Digests of the items in place, by index."""
        return self.ledger._by_nonce[ticket.nonce].live().parts[0].digests

    def ask(
        self, prompt: Prompt, grant: Grant, gen: int = 1, now: float = 0.0
    ) -> Attached:
        """The answer to an attachment; `attach` if it has to succeed."""
        ticket = Ticket(grant.nonce, grant.epoch, gen)
        attach = Attach(ticket, MODEL, prompt.plan.fingerprint, prompt.tokens)
        return self.at(now).attach(attach)

    def attach(
        self, prompt: Prompt, grant: Grant, gen: int = 1, now: float = 0.0
    ) -> Ticket:
        assert not self.ask(prompt, grant, gen, now).admitted
        return Ticket(grant.nonce, grant.epoch, gen)

    def begin(self, prompt: Prompt, now: float = 0.0, /, **changes: object) -> Ticket:
        """Reserve and attach."""
        grant = self.reserve(prompt, now, **changes)
        return self.attach(prompt, grant, now=now)

    def store(self, frame: PageFrame, now: float = 0.0, channel: object = None) -> int:
        """Pieces that were written for a frame."""
        arena = self.pool.arena
        with patch.object(arena, "write", wraps=arena.write) as write:
            self.at(now).store(frame, channel)
        return len(write.call_args.args[0])

    def push(self, prompt: Prompt, ticket: Ticket, now: float = 0.0) -> int:
        """Send all items that are missing; how many bytes they have."""
        received = set(self.received(ticket))
        sent_bytes = 0
        for index, item in enumerate(prompt.manifest.items):
            if index not in received:
                self.store(prompt.frame(ticket, [item]), now)
                sent_bytes += prompt.manifest.nbytes(item)
        return sent_bytes

    def give(self, prompt: Prompt, rid: str = "r", **changes: object) -> int:
        """A whole hand-off; how many bytes were sent. Cached items keep their digests."""
        ticket = self.begin(prompt, rid=rid, **changes)
        sent_bytes = self.push(prompt, ticket)
        received = self.received(ticket)
        digests = tuple(received[index] for index in sorted(received))
        commit = replace(prompt.commit(ticket), digests=digests)
        assert isinstance(self.at(0.0).commit(commit), Ack)
        return sent_bytes

    def admitted(self) -> Admission:
        (admission,) = self.engine.values()
        return admission

    def free(self, *rids: str) -> None:
        """The engine is done with these prompts, or with all if none is named."""
        for rid in rids or list(self.engine):
            admission = self.engine.pop(rid)
            for state in admission.groups:
                self.pool.release(list(state.ids()))
            self.at(0.0).finished(rid, admission.job.attempt)

    def scrub(
        self, max_bytes: int = 1 << 30
    ) -> dict[CorruptFrameError, list[tuple[str, int]]]:
        scrub = self.ledger.cache.begin_scrub(max_bytes)
        damaged = scrub.verify()
        return self.at(0.0).end_scrub(scrub, damaged)

    def assert_nothing_held(self) -> None:
        self.pool.check_integrity()
        assert self.pool.referenced_pages == 0
        assert not any(self.ledger.gauges().values())


def corrupt(frame: PageFrame) -> PageFrame:
    """The same digests, with one bit of the payload flipped."""
    broken = bytearray(frame.payload[-1])
    broken[0] ^= 1
    return replace(frame, payload=(*frame.payload[:-1], bytes(broken)))


def bend(source: random.Random, data: bytes) -> bytes:
    """A message with a few bytes changed, cut out, doubled or put in."""
    bent = bytearray(data)
    for _ in range(source.choice((0, 1, 1, 2, 8))):
        start = source.randrange(len(bent) + 1)
        length = source.choice((1, 1, 2, 4, 30))
        change = source.randrange(4)
        if change == 0:
            count = min(length, len(bent) - start)
            bent[start : start + length] = source.randbytes(count)
        elif change == 1:
            del bent[start : start + length]
        elif change == 2:
            bent[start:start] = bent[start : start + length]
        else:
            inserted = source.choice((b"\0", b"\xff", b"\x80" * 9))
            bent[start:start] = inserted * length
    return bytes(bent)
