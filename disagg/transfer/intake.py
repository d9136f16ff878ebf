"""The receiving end of one stream: messages in, answers out, credit kept. No sockets.

The first frame is a renew frame and names the reservation; it is answered with two frames of
credit. Every page frame gives its own bytes back once they are verified and stored.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable

from disagg.errors import CorruptFrameError, ReservationError
from disagg.pool import Arena
from disagg.protos.v1 import kv_transfer_pb2 as pb
from disagg.transfer import convert
from disagg.transfer.ledger import Ledger
from disagg.transfer.messages import Ack, Nack
from disagg.wire import Buffer, CommitFrame, PageFrame, RenewFrame, Ticket, unpack


class Intake:
    """One stream of one hand-off."""

    def __init__(
        self,
        ledger: Ledger,
        arena: Arena,
        admit: Callable[[CommitFrame, int], Ack | Nack],
        clock: Callable[[], float],
    ):
        self.done = False  # the commit was acknowledged
        self._ledger = ledger
        self._arena = arena
        self._admit = admit
        self._clock = clock
        self._ticket: Ticket | None = None
        self._credit = 0

    async def answers(
        self, messages: AsyncIterator[Buffer], act: Callable[[bool], None]
    ) -> AsyncGenerator[bytes, None]:
        """The answers to all messages, until the commit is acknowledged.

        act: does what the ledger decided; True if something may be due sooner than before
        """
        try:
            async for message in messages:
                reply = self.take(message)
                act(False)
                if reply is not None:
                    yield reply
                if self.done:
                    return
        finally:
            self.end()
            act(True)

    def take(self, message: Buffer) -> bytes | None:
        """The answer to one message, a PushResponse; none to a sign of life.

        Raises CorruptFrameError, VersionError, LayoutError or ReservationError; the stream ends
        with it, the reservation goes on until its lease is over.
        """
        frame = unpack(convert.message_frame(message))
        if self._ticket is None:
            return self._begin(frame.ticket, isinstance(frame, RenewFrame), len(message))
        if frame.ticket != self._ticket:
            raise ReservationError(f"a frame of {frame.ticket} on the stream of {self._ticket}")
        if isinstance(frame, RenewFrame):
            self._ledger.renew(frame.ticket, self._clock())
            self._count(len(message))
            return None
        if isinstance(frame, PageFrame):
            self._store(frame, len(message))
            return self._grant(len(message), 1, len(message))
        answer = self._admit(frame, len(message))
        self.done = isinstance(answer, Ack)
        return convert.answer_to(answer, pb.PushResponse).SerializeToString()

    def end(self) -> None:
        """The stream is over, however it ended."""
        if self._ticket is not None:
            self._ledger.stream_ended(self._ticket)

    def _begin(self, ticket: Ticket, renews: bool, nbytes: int) -> bytes:
        if not renews:
            raise CorruptFrameError("a stream begins with a renew frame")
        self._ledger.renew(ticket, self._clock())
        self._ticket = ticket
        handoff = self._ledger.handoff(ticket.nonce)
        assert handoff is not None
        return self._grant(handoff.checklist.window_bytes, 0, nbytes)

    def _store(self, frame: PageFrame, nbytes: int) -> None:
        """Verify and copy: from the check to the mark nothing else runs."""
        self._credit -= nbytes
        if self._credit < 0:
            raise CorruptFrameError(f"a frame of {nbytes} bytes is {-self._credit} beyond credit")
        began = self._clock()
        write = self._ledger.begin_write(frame, began)
        written = False
        try:
            frame.verify()
            self._arena.write(write.placements)
            written = True
        finally:
            self._ledger.end_write(write, written)
        handoff = self._ledger.handoff(frame.ticket.nonce)
        assert handoff is not None
        handoff.verify_ms += 1000 * (self._clock() - began)

    def _grant(self, credit: int, frames: int, received: int) -> bytes:
        self._credit += credit
        reply = pb.PushResponse(credit=pb.Credit(bytes=credit, frames=frames))
        data = reply.SerializeToString()
        self._count(received + len(data))
        return data

    def _count(self, nbytes: int) -> None:
        assert self._ticket is not None
        if handoff := self._ledger.handoff(self._ticket.nonce):
            handoff.wire_bytes += nbytes
