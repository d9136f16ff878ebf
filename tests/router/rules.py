"""The router's rules, fed with one event at a time."""

from disagg.errors import DisaggError
from disagg.router.actions import Action, TokenOutput
from disagg.router.requests import RequestTable
from disagg.transfer.messages import TokenEvent


class Rules(RequestTable):
    """A table with a method for each kind of event that a worker reports."""

    def token(
        self, worker: str, rid: str, attempt: int, index: int, token: int, now: float
    ) -> list[Action]:
        event = TokenEvent(rid, attempt, index, token)
        return self.on_event(worker, event, now)

    def finished(
        self, worker: str, rid: str, attempt: int, count: int, reason: str, now: float
    ) -> list[Action]:
        event = TokenEvent(rid, attempt, count - 1, finish_reason=reason)
        return self.on_event(worker, event, now)

    def refused(
        self, worker: str, rid: str, attempt: int, error: DisaggError, now: float
    ) -> list[Action]:
        event = TokenEvent(rid, attempt, 0, error=error)
        return self.on_event(worker, event, now)


def end(rid: str, reason: str) -> TokenOutput:
    """The end of an answer, as its client gets it."""
    return TokenOutput(rid, finish_reason=reason)
