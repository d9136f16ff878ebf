"""Aborts of attempts that are over, sent again while a worker still reports such an attempt."""

import math
from collections.abc import Iterable

from disagg.router.actions import AbortAttempt
from disagg.router.request_state import RequestState
from disagg.transfer.messages import TokenEvent

# an abort is not repeated sooner
ABORT_AGAIN_S = 1.0


class Aborts:
    """When each worker was last asked to abort a request."""

    def __init__(self) -> None:
        self._sent_at: dict[tuple[str, str], float] = {}  # by worker and rid

    def abort(
        self, request: RequestState, workers: Iterable[str], now: float
    ) -> list[AbortAttempt]:
        """Abort the current attempt of a request at these workers."""
        return [
            self._send(worker, request.rid, request.job.attempt, now)
            for worker in workers
        ]

    def abort_stale(
        self, worker: str, event: TokenEvent, now: float
    ) -> list[AbortAttempt]:
        """A worker reports an attempt that is over: its abort was lost, so send another one.

        Not for figures, which may come after the end, and not if one was sent a moment ago.
        """
        has_only_figures = (
            event.token is None and not event.error and not event.finish_reason
        )
        sent_at = self._sent_at.get((worker, event.rid), -math.inf)
        if has_only_figures or now < sent_at + ABORT_AGAIN_S:
            return []
        return [self._send(worker, event.rid, event.attempt, now)]

    def forget_old(self, now: float) -> None:
        """Drop the times that delay no other abort."""
        self._sent_at = {
            key: sent_at
            for key, sent_at in self._sent_at.items()
            if now < sent_at + ABORT_AGAIN_S
        }

    def _send(self, worker: str, rid: str, attempt: int, now: float) -> AbortAttempt:
        self._sent_at[worker, rid] = now
        return AbortAttempt(worker, rid, attempt)
