"""KvTransferService as a decode worker's peers call it: typed, one method per call, bytes counted.

Every message of both directions is added to `wire_bytes`. Failures are errors of disagg.errors;
a transport that broke is `PeerLostError`, which leaves open whether the peer is dead.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from disagg.protos.v1 import kv_transfer_pb2 as pb
from disagg.transfer import convert
from disagg.transfer.channel import Link
from disagg.transfer.messages import Ack, Attached, Grant, Nack, Request
from disagg.transfer.status import error_of
from disagg.transfer.streams import StreamCall
from disagg.wire import Buffer, CommitFrame, Ticket, pack

SERVICE = "disagg.v1.KvTransferService"
PUSH = f"/{SERVICE}/Push"


class Client:
    """Calls of one hand-off to one decode worker."""

    def __init__(self, link: Link):
        self.wire_bytes = 0
        self._link = link

    async def reserve(self, request: Request, timeout_s: float) -> Grant:
        """Room for a prompt; waits in the receiver's queue."""
        message = convert.request_to(request)
        return convert.grant_from(
            await self._call("Reserve", message, pb.ReserveResponse, timeout_s)
        )

    async def attach(self, ticket: Ticket, timeout_s: float) -> Attached:
        """A new stream for a reservation; what has arrived."""
        message = pb.AttachRequest(ticket=convert.ticket_to(ticket))
        return convert.attached_from(
            await self._call("Attach", message, pb.AttachResponse, timeout_s)
        )

    async def commit(self, frame: CommitFrame, timeout_s: float) -> Ack | Nack:
        """The commit once more, outside of a stream."""
        message = convert.frame_message(pack(frame))
        return convert.answer_from(
            await self._call("Commit", message, pb.CommitResponse, timeout_s)
        )

    async def abort(self, rid: str, attempt: int, reason: str, timeout_s: float) -> None:
        """Give up an attempt, known there or not."""
        message = pb.AbortRequest(rid=rid, attempt=attempt, reason=reason)
        await self._call("Abort", message, pb.AbortResponse, timeout_s)

    async def release(self, ticket: Ticket, timeout_s: float) -> None:
        """Give a reservation up."""
        message = pb.ReleaseRequest(ticket=convert.ticket_to(ticket))
        await self._call("Release", message, pb.ReleaseResponse, timeout_s)

    def push(self, port: int) -> "PushCall":
        """A stream of frames to a port that `attach` named."""
        return PushCall(self, self._link.streams.call(port, PUSH))

    async def _call(self, name: str, request: Any, answer: Any, timeout_s: float) -> Any:
        data = request if isinstance(request, bytes) else request.SerializeToString()
        self.wire_bytes += len(data)
        call = self._link.channel.unary_unary(f"/{SERVICE}/{name}")
        try:
            reply = await call(data, timeout=timeout_s, metadata=self._link.metadata)
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from failure
        self.wire_bytes += len(reply)
        return answer.FromString(reply)


class PushCall:
    """One stream of a hand-off: frames out, answers in."""

    def __init__(self, client: Client, call: StreamCall):
        self._client = client
        self._call = call

    async def send(self, parts: Sequence[Buffer]) -> bool:
        """Hand one message to the transport; waits while that is full.

        False if the stream is over; then `answers` knows why.
        """
        size = sum(map(len, parts))
        if not await self._call.send(parts, size):
            return False
        self._client.wire_bytes += size
        return True

    async def answers(self) -> AsyncGenerator[pb.PushResponse, None]:
        """What the receiver says, until it ends the stream."""
        async with aclosing(self._call.answers()) as answers:
            async for reply in answers:
                self._client.wire_bytes += len(reply)
                yield pb.PushResponse.FromString(bytes(reply))

    def finish(self) -> None:
        """All was said: leave the connection to the next stream."""
        self._call.finish()

    def cancel(self) -> None:
        """End the stream from our side, unless it is finished."""
        self._call.cancel()
