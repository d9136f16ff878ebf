"""Control of a worker by its router, in the same process or another.

`WorkerHandler` is what a worker implements. `WorkerClient` has the same methods over a link, so a
router can hold either. Failures are errors of disagg.errors; a broken transport is PeerLostError,
which does not say whether the peer is dead.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from typing import Protocol

import grpc
from google.protobuf.message import Message

from disagg.errors import VersionError
from disagg.protos.v1 import worker_pb2 as pb
from disagg.transfer.messages import (
    CONTROL_VERSION,
    Grant,
    Job,
    Parsed,
    StepEvents,
    Submit,
    WorkerStatus,
    parse,
)
from disagg.transfer.rpc import Link, failures_of, rpc_handlers

WORKER_SERVICE = "disagg.v1.WorkerService"
CALL_S = 5.0  # every call but Events
PART_BYTES = 1 << 20  # of one message of events, unless a single event is larger


class WorkerHandler(Protocol):
    """The methods of a worker that a router calls. Refusals are errors of disagg.errors."""

    async def reserve(self, job: Job, epoch: int, router: str) -> Grant:
        """Reserve room for a job at once; CapacityError if there is none."""

    async def submit(self, submit: Submit) -> None:
        """Start work; returns when it is in the inbox."""

    def events(self, have: Mapping[str, int], router: str) -> AsyncIterator[StepEvents]:
        """Yield the events of every engine step, and at least one message a second.

        have:   by rid, how many outputs the caller has already
        router: the caller, which the worker follows from now on
        """

    async def acknowledge(self, have: Mapping[str, int], router: str) -> None:
        """Drop outputs that the router has: by rid, those below an index."""

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        """Forget an attempt and all before it, known or not, with their outputs."""

    async def fence(self, epoch: int, router: str) -> None:
        """Begin the next epoch: drop all work of the old one.

        Refused while the worker follows another router.
        """

    async def status(self) -> WorkerStatus:
        """Report what the worker is and how busy."""


def worker_handler(handler: WorkerHandler) -> grpc.GenericRpcHandler:
    """Serve a worker, as `rpc.start_server` takes it: one function per method of the service."""

    async def reserve(data: bytes) -> bytes:
        request = parse(pb.ReserveRequest, data)
        grant = await handler.reserve(
            job=Job.from_proto(request.job),
            epoch=request.epoch,
            router=request.router,
        )
        return grant.to_proto().SerializeToString()

    async def submit(data: bytes) -> bytes:
        request = parse(pb.SubmitRequest, data)
        await handler.submit(submit=Submit.from_proto(request))
        return pb.SubmitResponse().SerializeToString()

    async def events(messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        async for data in messages:  # a router sends one request
            request = parse(pb.EventsRequest, data)
            _check_version(request.version, "the router")
            steps = handler.events(have=dict(request.have), router=request.router)
            async for step in steps:
                for part in _parts(step.to_proto()):
                    yield part.SerializeToString()

    async def acknowledge(data: bytes) -> bytes:
        request = parse(pb.AcknowledgeRequest, data)
        await handler.acknowledge(have=dict(request.have), router=request.router)
        return pb.AcknowledgeResponse().SerializeToString()

    async def abort(data: bytes) -> bytes:
        request = parse(pb.AbortRequest, data)
        await handler.abort(
            rid=request.rid, attempt=request.attempt, reason=request.reason
        )
        return pb.AbortResponse().SerializeToString()

    async def fence(data: bytes) -> bytes:
        request = parse(pb.FenceRequest, data)
        await handler.fence(epoch=request.epoch, router=request.router)
        return pb.FenceResponse().SerializeToString()

    async def status(data: bytes) -> bytes:
        request = parse(pb.StatusRequest, data)
        _check_version(request.version, "the router")
        answer = await handler.status()
        return answer.to_proto().SerializeToString()

    calls = {
        "Reserve": reserve,
        "Submit": submit,
        "Acknowledge": acknowledge,
        "Abort": abort,
        "Fence": fence,
        "Status": status,
    }
    return rpc_handlers(WORKER_SERVICE, calls, {"Events": events})


def _check_version(version: int, peer: str) -> None:
    """VersionError unless a peer speaks our version; 0 is older than versions."""
    if version != CONTROL_VERSION:
        raise VersionError(
            f"{peer} speaks version {version} of {WORKER_SERVICE}, this side {CONTROL_VERSION}:"
            " run the same release on both"
        )


def _version_in(speaks: Iterable[str]) -> int:
    """The version of this service that a worker speaks; 0: older than versions."""
    versions = (x.removeprefix("control ") for x in speaks if x.startswith("control "))
    version = next(versions, "0")
    return int(version) if version.isdecimal() else 0


def _parts(step: pb.EventsResponse) -> Iterator[pb.EventsResponse]:
    """Split a step into messages that gRPC can carry."""
    part = pb.EventsResponse(load=step.load)
    nbytes = 0
    for event in step.events:
        event_bytes = event.ByteSize()
        if part.events and nbytes + event_bytes > PART_BYTES:
            yield part
            part = pb.EventsResponse(load=step.load)
            nbytes = 0
        part.events.append(event)
        nbytes += event_bytes
    yield part


class WorkerClient(WorkerHandler):
    """A worker in another process. Raises its refusals, PeerLostError and DeadlineError."""

    def __init__(self, link: Link):
        self._link = link

    async def reserve(self, job: Job, epoch: int, router: str) -> Grant:
        request = pb.ReserveRequest(job=job.to_proto(), epoch=epoch, router=router)
        response = await self._call("Reserve", request, pb.ReserveResponse)
        return Grant.from_proto(response)

    async def submit(self, submit: Submit) -> None:
        await self._call("Submit", submit.to_proto(), pb.SubmitResponse)

    async def events(
        self, have: Mapping[str, int], router: str
    ) -> AsyncGenerator[StepEvents, None]:
        """Until the iterator is closed; PeerLostError if the stream breaks."""
        message = pb.EventsRequest(have=have, router=router, version=CONTROL_VERSION)
        request = message.SerializeToString()
        method = self._link.channel.unary_stream(f"/{WORKER_SERVICE}/Events")
        call = method(request, metadata=self._link.metadata)
        try:
            with failures_of(self._link.address):
                async for data in call:
                    yield StepEvents.from_proto(parse(pb.EventsResponse, data))
        finally:
            call.cancel()

    async def acknowledge(self, have: Mapping[str, int], router: str) -> None:
        request = pb.AcknowledgeRequest(have=have, router=router)
        await self._call("Acknowledge", request, pb.AcknowledgeResponse)

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        request = pb.AbortRequest(rid=rid, attempt=attempt, reason=reason)
        await self._call("Abort", request, pb.AbortResponse)

    async def fence(self, epoch: int, router: str) -> None:
        request = pb.FenceRequest(epoch=epoch, router=router)
        await self._call("Fence", request, pb.FenceResponse)

    async def status(self) -> WorkerStatus:
        request = pb.StatusRequest(version=CONTROL_VERSION)
        response = await self._call("Status", request, pb.StatusResponse)
        _check_version(_version_in(response.speaks), self._link.address)
        return WorkerStatus.from_proto(response)

    async def _call(
        self, method: str, request: Message, response: type[Parsed]
    ) -> Parsed:
        data = await self._link.call(
            f"/{WORKER_SERVICE}/{method}", request.SerializeToString(), CALL_S
        )
        return parse(response, data)
