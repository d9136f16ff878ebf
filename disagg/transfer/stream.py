"""One stream of a hand-off: frames as they come and credit allows, until the commit is answered.

Three things run beside each other: feeding the transport, listening to the receiver, and watching
that what is in flight gets answered. Whichever fails first ends the stream; the sender decides
what follows.
"""

import asyncio
from contextlib import aclosing

from disagg.errors import PeerLostError
from disagg.transfer.client import PushCall
from disagg.transfer.convert import answer_from, frame_parts
from disagg.transfer.messages import Ack
from disagg.transfer.sending import Sending
from disagg.wire import CommitFrame, Frame, RenewFrame, Ticket, pack

RENEWALS_PER_LEASE = 3


class Stream:
    """Frames of one ticket over one call."""

    def __init__(self, sending: Sending, call: PushCall, ticket: Ticket, lease_s: float):
        self._sending = sending
        self._call = call
        self._ticket = ticket
        self._renew_s = lease_s / RENEWALS_PER_LEASE
        self._committed = False  # a commit is out and not answered
        self._sent_at = sending.clock()

    async def run(self) -> Ack:
        """Send until the receiver acknowledges; PeerLostError if the transport broke or stalls."""
        feeding = asyncio.create_task(self._feed())
        listening = asyncio.create_task(self._listen())
        waiting: set[asyncio.Task] = {feeding, listening}
        check_s = self._sending.options.stall_s / 4
        try:
            while not listening.done():
                done, _ = await asyncio.wait(
                    waiting, timeout=check_s, return_when=asyncio.FIRST_COMPLETED
                )
                if feeding in done:
                    feeding.result()
                    waiting.discard(feeding)
                self._check_progress()
            ack = listening.result()
            self._call.finish()
            return ack
        finally:
            self._call.cancel()
            for task in (feeding, listening):
                task.cancel()
            await asyncio.gather(feeding, listening, return_exceptions=True)

    async def _feed(self) -> None:
        """Send while there is something; returns when the transport takes no more."""
        sending, alive = self._sending, await self._send(RenewFrame(self._ticket))
        while alive:
            sending.wake.clear()
            if parcel := sending.outbox.next_parcel(self._ticket):
                await self._keep_pace(parcel.size)
                sending.note_sent(parcel)
                self._sent_at = sending.clock()
                alive = await self._call.send(parcel.parts)
            elif not self._committed and (commit := sending.commit()):
                self._committed = True
                alive = await self._send(CommitFrame(self._ticket, commit))
            else:
                alive = await self._wait_or_renew()

    async def _wait_or_renew(self) -> bool:
        try:
            async with asyncio.timeout(self._renew_s):
                await self._sending.wake.wait()
        except TimeoutError:
            return await self._send(RenewFrame(self._ticket))
        return True

    async def _send(self, frame: Frame) -> bool:
        self._sent_at = self._sending.clock()
        return await self._call.send(frame_parts(pack(frame)))

    async def _keep_pace(self, nbytes: int) -> None:
        sending = self._sending
        if sending.options.pace is not None:
            delay = sending.options.pace.delay(nbytes, sending.clock())
            if delay > 0:
                await asyncio.sleep(delay)

    async def _listen(self) -> Ack:
        """Take in credit until the commit is acknowledged."""
        async with aclosing(self._call.answers()) as replies:
            async for reply in replies:
                self._sending.hear(reply.credit.frames > 0 or not reply.HasField("credit"))
                if reply.HasField("credit"):
                    self._sending.outbox.grant(reply.credit.bytes, reply.credit.frames)
                else:
                    answer = answer_from(reply)
                    if isinstance(answer, Ack):
                        return answer
                    self._sending.outbox.missing(answer.missing)
                    self._committed = False
                self._sending.wake.set()
        raise PeerLostError("the receiver ended the stream before the commit was answered")

    def _check_progress(self) -> None:
        sending = self._sending
        owed = self._committed or sending.outbox.bytes_in_flight > 0
        quiet_s = sending.clock() - max(sending.heard, self._sent_at)
        if owed and quiet_s > sending.options.stall_s:
            raise PeerLostError(f"no answer to what is in flight for {quiet_s:.1f} s")
