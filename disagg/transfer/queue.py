"""The queue for room: first come, first served, each until its caller's deadline."""

from collections import deque
from collections.abc import Callable

from disagg.errors import CapacityError, DisaggError, ReservationError
from disagg.transfer.messages import Grant, Request, Waiter


class Queue:
    """Requests that no records could be found for yet."""

    def __init__(self, limit: int):
        self._limit = limit
        self._waiters: deque[Waiter] = deque()

    def join(self, request: Request, now: float) -> Waiter:
        """A place at the end; the same request again shares the place it has.

        Raises ReservationError if that was for another prompt, CapacityError if the queue is full.
        """
        for waiter in self._waiters:
            known = waiter.request
            if (known.rid, known.attempt) == (request.rid, request.attempt):
                if not known.same_work(request):
                    raise ReservationError(f"{request.rid} waits with another prompt already")
                waiter.callers += 1
                return waiter
        if len(self._waiters) >= self._limit:
            raise CapacityError(f"{self._limit} requests are waiting for room already")
        waiter = Waiter(request, now + request.wait_s)
        self._waiters.append(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """One caller is gone; with the last one its place."""
        waiter.callers -= 1
        if not waiter.callers and waiter in self._waiters:
            self._waiters.remove(waiter)

    def serve(self, hold: Callable[[Request], Grant], now: float) -> list[Waiter]:
        """Grant in order while `hold` finds room; who waited to the deadline gets its error."""
        settled = []
        while self._waiters:
            waiter = self._waiters[0]
            try:
                waiter.grant = hold(waiter.request)
            except CapacityError as error:
                if now < waiter.deadline:
                    break
                waiter.error = error
            settled.append(self._waiters.popleft())
        return settled

    def late(self, now: float) -> list[Waiter]:
        """Waiters behind the first whose deadline is over; they get an error."""
        over = [waiter for waiter in self._waiters if waiter.deadline <= now]
        for waiter in over:
            message = f"no room for {waiter.request.tokens} tokens in {waiter.request.wait_s} s"
            self._settle(waiter, CapacityError(message))
        return over

    def refuse(self, error: DisaggError, rid: str | None = None, attempt: int = 0) -> list[Waiter]:
        """Refuse everybody, or the attempts of one request up to `attempt`."""
        chosen = [
            waiter
            for waiter in self._waiters
            if rid is None or (waiter.request.rid == rid and waiter.request.attempt <= attempt)
        ]
        for waiter in chosen:
            self._settle(waiter, error)
        return chosen

    def deadlines(self) -> list[float]:
        """When waiters give up."""
        return [waiter.deadline for waiter in self._waiters]

    def __len__(self) -> int:
        return len(self._waiters)

    def _settle(self, waiter: Waiter, error: DisaggError) -> None:
        waiter.error = error
        self._waiters.remove(waiter)
