"""Sends one prompt to a decode worker: reserve, push while it is computed, commit, acknowledged.

The engine's side is `offer` and `finish`, which never wait. The io loop's side is `reserve` and
`run`: it survives broken streams (attach again, send what is missing) and an expired lease
(reserve again), and ends in a receipt or in one typed error, with nothing left reserved.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from disagg.errors import DeadlineError, DisaggError, PeerLostError, ReservationError
from disagg.page import FinalAt
from disagg.plan import Plan
from disagg.transfer.channel import Link
from disagg.transfer.client import Client
from disagg.transfer.items import Checklist
from disagg.transfer.messages import Ack, Attached, Grant, Nack, Request, State
from disagg.transfer.outbox import Outbox, Source
from disagg.transfer.sending import Options, Receipt, Sending
from disagg.transfer.stream import Stream
from disagg.transfer.units import units_of
from disagg.wire import CommitFrame, Item, PlainValue, Ticket

RETRY_S = 0.1
MAX_REFUSALS = 3  # streams in a row that ended by a ReservationError


class Sender:
    """One hand-off, from its prefill worker. Lives on the io loop."""

    def __init__(
        self,
        link: Link,
        request: Request,
        plan: Plan,
        source: Source,
        options: Options | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.request = request
        self.grant: Grant | None = None
        options = options or Options()
        outbox = Outbox(Checklist(plan, request.tokens), source, options.frame_bytes)
        self._sending = Sending(outbox, options, clock)
        self._client = Client(link)
        self._gen = 0

    # -- the engine's side, by call_soon_threadsafe

    def offer(self, items: Iterable[Item]) -> None:
        """The bytes of these items are final; they leave in this order, each offered once."""
        self._sending.offer(items)

    def finish(
        self,
        first_token: int,
        extras: Mapping[str, PlainValue] | None = None,
        timings: Mapping[str, float] | None = None,
    ) -> None:
        """All items were offered; what only prefill knows goes with the commit."""
        self._sending.finish(first_token, extras or {}, timings or {})

    @property
    def nbytes(self) -> int:
        """Bytes of all records of the prompt."""
        return self._sending.outbox.checklist.total_bytes

    @property
    def bytes_in_flight(self) -> int:
        """Bytes sent and not yet answered; at most two frames."""
        return self._sending.outbox.bytes_in_flight

    # -- the io loop's side

    async def reserve(self) -> Grant:
        """Wait for room at the receiver; CapacityError after `request.wait_s`.

        Also raises ReservationError, LayoutError, RequestError and PeerLostError.
        """
        timeout_s = self.request.wait_s + self._sending.options.call_s
        self.grant = await self._client.reserve(self.request, timeout_s)
        self._gen = 0
        self._sending.outbox.reserved(self.grant.offered, self._cached_items(self.grant))
        return self.grant

    async def run(self) -> Receipt:
        """Push until the receiver acknowledges. Cancel the task to give the hand-off up.

        Raises DeadlineError, PeerLostError after `silence_s`, and whatever the receiver refused.
        """
        deadline_s = self._sending.options.deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                ack = await self._until_acknowledged()
                self.grant = None
        except TimeoutError as error:
            raise DeadlineError(
                f"the hand-off of {self.request.rid} took longer than {deadline_s} s"
            ) from error
        finally:
            await asyncio.shield(self.release())
        return self._sending.receipt(ack, self._client.wire_bytes)

    async def release(self) -> None:
        """Give the reservation up, if the peer can still be told; else its lease ends it."""
        if self.grant is None:
            return
        ticket, self.grant = self._ticket(self.grant), None
        with contextlib.suppress(DisaggError):
            await self._client.release(ticket, self._sending.options.call_s)

    async def _until_acknowledged(self) -> Ack:
        sending, refusals, broken_at = self._sending, 0, -math.inf
        sending.heard = sending.clock()
        while True:
            attached_at = math.inf
            try:
                attached, attached_at = await self._attach(), sending.clock()
                if attached.state is State.ADMITTED:
                    return await self._commit_again()
                sending.outbox.there(attached.have)
                return await self._stream(attached)
            except _StreamRefused as refusal:
                refusals += 1
                if refusals == MAX_REFUSALS:
                    raise refusal.error from refusal
            except PeerLostError:
                now, silence_s = sending.clock(), sending.options.silence_s
                if sending.advanced_at >= broken_at or now - attached_at > silence_s:
                    broken_at = now  # it went well until now
                elif now - broken_at > silence_s:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _attach(self) -> Attached:
        """A new stream of the reservation, or of a new one where the lease had ended."""
        while True:
            grant = self.grant or await self.reserve()
            self._gen += 1
            try:
                attached = await self._client.attach(
                    self._ticket(grant), self._sending.options.call_s
                )
            except DeadlineError as error:
                raise PeerLostError(str(error)) from error
            if attached.state is not State.EXPIRED:
                return attached
            self.grant = None

    async def _stream(self, attached: Attached) -> Ack:
        grant = self.grant
        assert grant is not None
        self._sending.streams += 1
        push = self._client.push(attached.push_port)
        stream = Stream(self._sending, push, self._ticket(grant), attached.lease_s)
        try:
            return await stream.run()
        except ReservationError as error:
            raise _StreamRefused(error) from error

    async def _commit_again(self) -> Ack:
        """The answer to a commit whose acknowledgement was lost."""
        commit, grant = self._sending.commit(), self.grant
        if commit is None or grant is None:
            raise ReservationError(f"{self.request.rid} was admitted before it was committed")
        frame = CommitFrame(self._ticket(grant), commit)
        answer = await self._client.commit(frame, self._sending.options.call_s)
        if isinstance(answer, Nack):
            raise ReservationError(f"{self.request.rid} is admitted but lacks {answer.missing}")
        return answer

    def _cached_items(self, grant: Grant) -> Iterator[Item]:
        """Items as good as ours: those of units with our keys, unless they hang on the prompt."""
        plan = self._sending.outbox.checklist.plan
        for index, count in enumerate(grant.cached[: len(plan.groups)]):
            group = plan.groups[index]
            if count and self.request.keys and group.final_at is not FinalAt.PROMPT:
                for unit in units_of(plan, self.request.tokens)[index][:count]:
                    yield from unit.items(group)

    def _ticket(self, grant: Grant) -> Ticket:
        return Ticket(grant.nonce, grant.epoch, self._gen)


class _StreamRefused(Exception):
    """A stream ended by a ReservationError; attaching again tells whether that is final."""

    def __init__(self, error: ReservationError):
        super().__init__(str(error))
        self.error = error
