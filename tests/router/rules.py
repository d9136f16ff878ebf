"""The router's rules, told of one event at a time."""

from disagg.errors import DisaggError
from disagg.router.actions import Action
from disagg.router.requests import RequestTable
from disagg.transfer.messages import TokenEvent


class Rules(RequestTable):
    """What workers say, by its parts."""

    def token(
        self, worker: str, rid: str, attempt: int, index: int, token: int, now: float
    ) -> list[Action]:
        return self.hear(worker, TokenEvent(rid, attempt, index, token), now)

    def finished(
        self, worker: str, rid: str, attempt: int, count: int, reason: str, now: float
    ) -> list[Action]:
        return self.hear(worker, TokenEvent(rid, attempt, count - 1, None, reason), now)

    def refused(
        self, worker: str, rid: str, attempt: int, error: DisaggError, now: float
    ) -> list[Action]:
        return self.hear(worker, TokenEvent(rid, attempt, 0, error=error), now)
