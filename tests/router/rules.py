"""The router's rules, fed with one event at a time."""

from disagg.errors import DisaggError
from disagg.router.actions import Action, TokenOutput
from disagg.router.requests import RequestTable
from disagg.transfer.messages import Job, Load, TokenEvent, WorkerInfo


class Rules:
    """A table that places requests after every event, if that is due.

    The rest, `requests` and `workers` among it, is the table's own.
    """

    def __init__(self, *arguments: object):
        self.table = RequestTable(*arguments)

    def __getattr__(self, name: str):
        return getattr(self.table, name)

    def submit(
        self,
        job: Job,
        now: float,
        at: tuple[str, str] = ("", ""),
        client: str = "",
    ) -> list[Action]:
        actions = self.table.submit(job, now, at, client)
        return self.placed(actions, now)

    def cancel(self, rid: str, now: float) -> list[Action]:
        actions = self.table.cancel(rid, now)
        return self.placed(actions, now)

    def worker_up(self, info: WorkerInfo, now: float) -> list[Action]:
        actions = self.table.worker_up(info, now)
        return self.placed(actions, now)

    def worker_down(
        self,
        name: str,
        now: float,
        fenced: bool = False,
    ) -> list[Action]:
        actions = self.table.worker_down(name, now, fenced)
        return self.placed(actions, now)

    def update_load(self, worker: str, load: Load, now: float) -> list[Action]:
        self.table.update_load(worker, load)
        return self.placed([], now)

    def on_event(self, worker: str, event: TokenEvent, now: float) -> list[Action]:
        actions = self.table.on_event(worker, event, now)
        return self.placed(actions, now)

    def tick(self, now: float) -> list[Action]:
        actions = self.table.tick(now)
        return self.placed(actions, now)

    def token(
        self,
        worker: str,
        rid: str,
        attempt: int,
        index: int,
        token: int,
        now: float,
    ) -> list[Action]:
        event = TokenEvent(rid, attempt, index, token)
        return self.on_event(worker, event, now)

    def finished(
        self,
        worker: str,
        rid: str,
        attempt: int,
        count: int,
        reason: str,
        now: float,
    ) -> list[Action]:
        event = TokenEvent(rid, attempt, count - 1, finish_reason=reason)
        return self.on_event(worker, event, now)

    def refused(
        self,
        worker: str,
        rid: str,
        attempt: int,
        error: DisaggError,
        now: float,
    ) -> list[Action]:
        event = TokenEvent(rid, attempt, 0, error=error)
        return self.on_event(worker, event, now)

    def placed(self, actions: list[Action], now: float) -> list[Action]:
        """These actions, and those of placing requests."""
        while self.table.needs_placing:
            actions = actions + self.table.place(now)
        return actions


def end(rid: str, reason: str) -> TokenOutput:
    """The end of an answer, as its client gets it."""
    return TokenOutput(rid, finish_reason=reason)
