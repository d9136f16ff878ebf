"""The two services as methods: workers as a router sees them, receivers as a sender sees them.

`WorkerHandler` is what a worker implements, `WorkerClient` is the same methods over a link, so a
router holds either and cannot tell. `KvClient` has the calls of a hand-off that are no frames.
Failures are errors of disagg.errors; a transport that broke is PeerLostError, which leaves open
whether the peer is dead.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Protocol, TypeVar

import grpc
from google.protobuf.message import Message

from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.protos.v1 import worker_pb2 as pb
from disagg.transfer.messages import (
    Ack,
    Attach,
    Attached,
    Grant,
    Job,
    Nack,
    Step,
    Submit,
    WorkerStatus,
    answer_from,
    parse,
    ticket_to,
)
from disagg.transfer.rpc import Link, error_of, rpc_handlers
from disagg.wire import CommitFrame, Ticket, frame_message, pack

WORKER_SERVICE = "disagg.v1.WorkerService"
KV_SERVICE = "disagg.v1.KvTransferService"
PUSH, PROBE = f"/{KV_SERVICE}/Push", f"/{KV_SERVICE}/Probe"

Answer = TypeVar("Answer", bound=Message)


class WorkerHandler(Protocol):
    """What a worker can be told. Refusals are errors of disagg.errors."""

    async def reserve(self, job: Job, epoch: int) -> Grant:
        """Room for a job, at once; CapacityError where there is none."""

    async def submit(self, submit: Submit) -> None:
        """Start work; returns when it is in the inbox."""

    def events(self, have: Mapping[str, int], router: str) -> AsyncIterator[Step]:
        """One per engine step, and one each second.

        have: outputs of each rid that the caller has already · router: who follows
        """

    async def acknowledge(self, have: Mapping[str, int]) -> None:
        """The caller has these outputs; they may be forgotten."""

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        """Give up an attempt and all before it, known or not."""

    async def fence(self, epoch: int, router: str) -> None:
        """The next epoch: drop everything of the old one. Refused while another router follows."""

    async def status(self) -> WorkerStatus:
        """What it is and how busy."""


def worker_handler(handler: WorkerHandler) -> grpc.GenericRpcHandler:
    """What `rpc.start_server` serves for a worker."""

    async def reserve(data: bytes) -> bytes:
        message = parse(pb.ReserveRequest, data)
        grant = await handler.reserve(Job.from_message(message.job), message.epoch)
        return grant.to_message().SerializeToString()

    async def submit(data: bytes) -> bytes:
        await handler.submit(Submit.from_message(parse(pb.SubmitRequest, data)))
        return pb.SubmitResponse().SerializeToString()

    async def events(data: bytes) -> AsyncGenerator[bytes, None]:
        message = parse(pb.EventsRequest, data)
        async for step in handler.events(dict(message.have), message.router):
            yield step.to_message().SerializeToString()

    async def acknowledge(data: bytes) -> bytes:
        await handler.acknowledge(dict(parse(pb.AcknowledgeRequest, data).have))
        return pb.AcknowledgeResponse().SerializeToString()

    async def abort(data: bytes) -> bytes:
        message = parse(pb.AbortRequest, data)
        await handler.abort(message.rid, message.attempt, message.reason)
        return pb.AbortResponse().SerializeToString()

    async def fence(data: bytes) -> bytes:
        message = parse(pb.FenceRequest, data)
        await handler.fence(message.epoch, message.router)
        return pb.FenceResponse().SerializeToString()

    async def status(data: bytes) -> bytes:
        parse(pb.StatusRequest, data)
        return (await handler.status()).to_message().SerializeToString()

    calls = {"Reserve": reserve, "Submit": submit, "Acknowledge": acknowledge}
    calls |= {"Abort": abort, "Fence": fence, "Status": status}
    return rpc_handlers(WORKER_SERVICE, calls, server_stream={"Events": events})


class WorkerClient:
    """A worker elsewhere. Raises what it refused, PeerLostError and DeadlineError."""

    def __init__(self, link: Link, timeout_s: float = 5.0):
        self._link = link
        self._timeout_s = timeout_s

    async def reserve(self, job: Job, epoch: int) -> Grant:
        """Room for a job, at once; CapacityError where there is none."""
        message = pb.ReserveRequest(job=job.to_message(), epoch=epoch)
        return Grant.from_message(await self._call("Reserve", message, pb.ReserveResponse))

    async def submit(self, submit: Submit) -> None:
        """Start work; returns when it is in the inbox."""
        await self._call("Submit", submit.to_message(), pb.SubmitResponse)

    async def events(self, have: Mapping[str, int], router: str) -> AsyncIterator[Step]:
        """One per engine step, until the iterator is closed; PeerLostError if it breaks."""
        request = pb.EventsRequest(have=have, router=router).SerializeToString()
        method = self._link.channel.unary_stream(f"/{WORKER_SERVICE}/Events")
        call = method(request, metadata=self._link.metadata)
        try:
            async for data in call:
                yield Step.from_message(parse(pb.EventsResponse, data))
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure, self._link.address) from failure
        finally:
            call.cancel()

    async def acknowledge(self, have: Mapping[str, int]) -> None:
        """These outputs arrived; the worker may forget them."""
        message = pb.AcknowledgeRequest(have=have)
        await self._call("Acknowledge", message, pb.AcknowledgeResponse)

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        """Give up an attempt and all before it, known there or not."""
        message = pb.AbortRequest(rid=rid, attempt=attempt, reason=reason)
        await self._call("Abort", message, pb.AbortResponse)

    async def fence(self, epoch: int, router: str) -> None:
        """The next epoch: the worker drops everything of the old one."""
        await self._call("Fence", pb.FenceRequest(epoch=epoch, router=router), pb.FenceResponse)

    async def status(self) -> WorkerStatus:
        """What the worker is and how busy."""
        message = await self._call("Status", pb.StatusRequest(), pb.StatusResponse)
        return WorkerStatus.from_message(message)

    async def _call(self, name: str, request: Message, answer: type[Answer]) -> Answer:
        method, data = f"/{WORKER_SERVICE}/{name}", request.SerializeToString()
        return parse(answer, await self._link.call(method, data, self._timeout_s))


class KvClient:
    """The receiver of a decode worker elsewhere. Each call: the answer, and bytes both ways."""

    def __init__(self, link: Link):
        self._link = link

    async def attach(self, attach: Attach, timeout_s: float) -> tuple[Attached, int]:
        """Take a reservation over; what is there."""
        data = attach.to_message().SerializeToString()
        reply, nbytes = await self._call("Attach", data, timeout_s)
        return Attached.from_message(parse(kv.AttachResponse, reply)), nbytes

    async def renew(self, tickets: Sequence[Ticket], timeout_s: float) -> tuple[set[int], int]:
        """A sign of life for reservations; the nonces of those that are over."""
        data = kv.RenewRequest(tickets=list(map(ticket_to, tickets))).SerializeToString()
        reply, nbytes = await self._call("Renew", data, timeout_s)
        return set(parse(kv.RenewResponse, reply).over), nbytes

    async def commit(self, frame: CommitFrame, timeout_s: float) -> tuple[Ack | Nack, int]:
        """The end of a hand-off; waits for its frames that are on the way."""
        reply, nbytes = await self._call("Commit", frame_message(pack(frame)), timeout_s)
        return answer_from(parse(kv.CommitResponse, reply)), nbytes

    async def _call(self, name: str, data: bytes, timeout_s: float) -> tuple[bytes, int]:
        reply = await self._link.call(f"/{KV_SERVICE}/{name}", data, timeout_s)
        return reply, len(data) + len(reply)
