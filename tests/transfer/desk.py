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
    """Reservations, their pool, and an engine that keeps what it gets."""

    def __init__(
        self,
        nbytes: int = 1 << 20,
        pool: Pool | None = None,
        clock: Callable[[], float] | None = None,
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
            on_drop=lambda *what: self.drop(*what),
            clock=clock or (lambda: self.now),
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

    def known_tokens(self, rid: str) -> int:
        """Leading tokens of a reserved prompt that all layer groups had the units of."""
        return self.ledger._live[rid].live().cached_tokens

    def here(self, ticket: Ticket) -> dict[int, int]:
        return self.ledger._by_nonce[ticket.nonce].live().received.digests

    def ask(
        self, prompt: Prompt, grant: Grant, gen: int = 1, now: float = 0.0
    ) -> Attached:
        """Attach; `attach` when it has to succeed."""
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
        return self.attach(prompt, self.reserve(prompt, now, **changes), now=now)

    def store(self, frame: PageFrame, now: float = 0.0, channel: object = None) -> int:
        """Pieces that were written for a frame."""
        arena = self.pool.arena
        with patch.object(arena, "write", wraps=arena.write) as write:
            self.at(now).store(frame, channel)
        return len(write.call_args.args[0])

    def push(self, prompt: Prompt, ticket: Ticket, now: float = 0.0) -> int:
        """Send all that is not there; the bytes of it."""
        here, sent = {*self.here(ticket)}, 0
        for place, item in enumerate(prompt.manifest.items):
            if place not in here:
                self.store(prompt.frame(ticket, [item]), now)
                sent += prompt.manifest.nbytes(item)
        return sent

    def give(self, prompt: Prompt, rid: str = "r", **changes: object) -> int:
        """A whole hand-off; the bytes that were sent. What is here keeps its digests."""
        ticket = self.begin(prompt, rid=rid, **changes)
        sent = self.push(prompt, ticket)
        digests = tuple(seen for _, seen in sorted(self.here(ticket).items()))
        commit = replace(prompt.commit(ticket), digests=digests)
        assert isinstance(self.at(0.0).commit(commit), Ack)
        return sent

    def admitted(self) -> Admission:
        (admission,) = self.engine.values()
        return admission

    def free(self, *rids: str) -> None:
        """The engine is done, with all if none is named."""
        for rid in rids or list(self.engine):
            admission = self.engine.pop(rid)
            for state in admission.groups:
                self.pool.release(list(state.ids()))
            self.at(0.0).finished(rid, admission.job.attempt)

    def scrub(
        self, max_bytes: int = 1 << 30
    ) -> dict[CorruptFrameError, list[tuple[str, int]]]:
        scrub = self.ledger.cache.begin_scrub(max_bytes)
        return self.at(0.0).end_scrub(scrub, scrub.verify())

    def assert_nothing_held(self) -> None:
        self.pool.check_integrity()
        assert self.pool.referenced_pages == 0
        assert not any(self.ledger.gauges().values())


def corrupt(frame: PageFrame) -> PageFrame:
    """The same digests for one other bit."""
    broken = bytearray(frame.payload[-1])
    broken[0] ^= 1
    return replace(frame, payload=(*frame.payload[:-1], bytes(broken)))


def bend(source: random.Random, data: bytes) -> bytes:
    """A message with a few bytes changed, cut out, doubled or put in."""
    bent = bytearray(data)
    for _ in range(source.choice((0, 1, 1, 2, 8))):
        place = source.randrange(len(bent) + 1)
        length = source.choice((1, 1, 2, 4, 30))
        how = source.randrange(4)
        if how == 0:
            bent[place : place + length] = source.randbytes(
                min(length, len(bent) - place)
            )
        elif how == 1:
            del bent[place : place + length]
        elif how == 2:
            bent[place:place] = bent[place : place + length]
        else:
            bent[place:place] = source.choice((b"\0", b"\xff", b"\x80" * 9)) * length
    return bytes(bent)
