"""A ledger over a pool, with what a receiver does around it, for its tests."""

from itertools import count

from disagg.transfer.ledger import Ledger
from disagg.transfer.messages import Admission, Admit, Grant, State
from disagg.wire import PageFrame, Ticket
from tests.transfer.prompts import (
    Prompt,
    make_pool,
    make_terms,
)

SMALL = 7 << 14  # room for one prompt of 300 tokens, not for two


class Desk:
    """A ledger over a pool, with what the receiver does around it."""

    def __init__(self, nbytes: int = 1 << 20, **terms: object):
        self.pool = make_pool(nbytes)
        nonces = count(1000)
        self.ledger = Ledger(make_terms(self.pool, **terms), self.pool, lambda: next(nonces))

    def reserve(self, prompt: Prompt, now: float = 0.0, **changes: object) -> Grant:
        waiter = self.ledger.reserve(prompt.request(**changes), now)
        if waiter.error:
            raise waiter.error
        assert waiter.grant
        return waiter.grant

    def attach(self, grant: Grant, gen: int = 1, now: float = 0.0) -> Ticket:
        ticket = Ticket(grant.nonce, grant.epoch, gen)
        assert self.ledger.attach(ticket, now).state is State.ATTACHED
        return ticket

    def store(self, frame: PageFrame, now: float = 0.0) -> None:
        write = self.ledger.begin_write(frame, now)
        written = False
        try:
            frame.verify()
            for placement in write.placements:
                self.pool.arena.write([(placement.start, placement.data)])
            written = True
        finally:
            self.ledger.end_write(write, written)

    def push(self, prompt: Prompt, ticket: Ticket, now: float = 0.0) -> None:
        for frame in prompt.frames(ticket):
            self.store(frame, now)

    def admitted(self) -> list[Admission]:
        return [x.admission for x in self.ledger.take_actions() if isinstance(x, Admit)]

    def assert_nothing_held(self) -> None:
        self.pool.check_integrity()
        assert self.pool.referenced_pages == 0
        assert not any(self.ledger.gauges().values())
