"""WorkerService: how a router starts work on a worker and hears what came of it.

`WorkerHandler` is what a worker implements, `WorkerClient` is the same methods over a link, so a
router holds either and cannot tell. Nothing of gRPC is visible to them.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import grpc

from disagg.protos.v1 import worker_pb2 as pb
from disagg.transfer.channel import Link
from disagg.transfer.service import parse, rpc_handlers
from disagg.transfer.status import error_of
from disagg.transfer.work import Submit, TokenEvent, WorkerStatus

SERVICE = "disagg.v1.WorkerService"


class WorkerHandler(Protocol):
    """What a worker can be told. Refusals are errors of disagg.errors."""

    async def submit(self, submit: Submit) -> None:
        """Start work; returns when it is in the inbox."""

    def events(self, have: Mapping[str, int]) -> AsyncIterator[Sequence[TokenEvent]]:
        """One list per engine step. `have`: outputs of each rid that the caller has already."""

    async def acknowledge(self, have: Mapping[str, int]) -> None:
        """The caller has these outputs; they may be forgotten."""

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        """Give up an attempt and all before it, known or not."""

    async def fence(self, epoch: int) -> None:
        """A new epoch: drop everything of the old one."""

    async def status(self) -> WorkerStatus:
        """What it is and how busy."""


def worker_handler(handler: WorkerHandler) -> grpc.GenericRpcHandler:
    """What `channel.start_server` serves for a worker."""

    async def submit(data: bytes) -> bytes:
        await handler.submit(Submit.from_message(parse(pb.SubmitRequest, data)))
        return pb.SubmitResponse().SerializeToString()

    async def events(data: bytes) -> AsyncIterator[bytes]:
        have = dict(parse(pb.EventsRequest, data).have)
        async for step in handler.events(have):
            messages = [event.to_message() for event in step]
            yield pb.EventsResponse(events=messages).SerializeToString()

    async def acknowledge(data: bytes) -> bytes:
        await handler.acknowledge(dict(parse(pb.AcknowledgeRequest, data).have))
        return pb.AcknowledgeResponse().SerializeToString()

    async def abort(data: bytes) -> bytes:
        message = parse(pb.WorkerServiceAbortRequest, data)
        await handler.abort(message.rid, message.attempt, message.reason)
        return pb.WorkerServiceAbortResponse().SerializeToString()

    async def fence(data: bytes) -> bytes:
        await handler.fence(parse(pb.FenceRequest, data).epoch)
        return pb.FenceResponse().SerializeToString()

    async def status(data: bytes) -> bytes:
        parse(pb.StatusRequest, data)
        return (await handler.status()).to_message().SerializeToString()

    calls = {"Submit": submit, "Acknowledge": acknowledge, "Abort": abort}
    calls |= {"Fence": fence, "Status": status}
    return rpc_handlers(SERVICE, calls, server_stream={"Events": events})


class WorkerClient:
    """A worker elsewhere. Raises what it refused, PeerLostError and DeadlineError."""

    def __init__(self, link: Link, timeout_s: float = 5.0):
        self._link = link
        self._timeout_s = timeout_s

    async def submit(self, submit: Submit) -> None:
        """Start work; returns when it is in the inbox."""
        await self._call("Submit", submit.to_message(), pb.SubmitResponse)

    async def events(self, have: Mapping[str, int]) -> AsyncIterator[Sequence[TokenEvent]]:
        """One list per engine step, until the iterator is closed; PeerLostError if it breaks."""
        request = pb.EventsRequest(have=have).SerializeToString()
        method = self._link.channel.unary_stream(f"/{SERVICE}/Events")
        call = method(request, metadata=self._link.metadata)
        try:
            async for data in call:
                messages = pb.EventsResponse.FromString(data).events
                yield [TokenEvent.from_message(message) for message in messages]
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from failure
        finally:
            call.cancel()

    async def acknowledge(self, have: Mapping[str, int]) -> None:
        """These outputs arrived; the worker may forget them."""
        message = pb.AcknowledgeRequest(have=have)
        await self._call("Acknowledge", message, pb.AcknowledgeResponse)

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        """Give up an attempt and all before it, known there or not."""
        message = pb.WorkerServiceAbortRequest(rid=rid, attempt=attempt, reason=reason)
        await self._call("Abort", message, pb.WorkerServiceAbortResponse)

    async def fence(self, epoch: int) -> None:
        """A new epoch: the worker drops everything of the old one."""
        await self._call("Fence", pb.FenceRequest(epoch=epoch), pb.FenceResponse)

    async def status(self) -> WorkerStatus:
        """What the worker is and how busy."""
        message = await self._call("Status", pb.StatusRequest(), pb.StatusResponse)
        return WorkerStatus.from_message(message)

    async def _call(self, name: str, request: Any, answer: Any) -> Any:
        call = self._link.channel.unary_unary(f"/{SERVICE}/{name}")
        data = request.SerializeToString()
        try:
            reply = await call(data, timeout=self._timeout_s, metadata=self._link.metadata)
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from failure
        return answer.FromString(reply)
