"""Control of workers as methods, the same whether they are here or elsewhere.

`WorkerHandler` is what a worker implements, `WorkerClient` is the same methods over a link, so a
router holds either and cannot tell. Failures are errors of disagg.errors; a transport that broke is
PeerLostError, which leaves open whether the peer is dead.
"""

from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
)
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from disagg.protos.v1 import worker_pb2 as pb
from disagg.transfer.messages import (
    Grant,
    Job,
    StepEvents,
    Submit,
    WorkerStatus,
    fill,
    parse,
    read,
)
from disagg.transfer.rpc import Link, failures_of, rpc_handlers

WORKER_SERVICE = "disagg.v1.WorkerService"
CALL_S = 5.0  # every call but the events
PART_BYTES = 1 << 20  # of a message of events, unless a single one is larger


class WorkerHandler(Protocol):
    """What a worker can be told. Refusals are errors of disagg.errors."""

    async def reserve(self, job: Job, epoch: int, router: str) -> Grant:
        """Room for a job, at once; CapacityError where there is none."""

    async def submit(self, submit: Submit) -> None:
        """Start work; returns when it is in the inbox."""

    def events(self, have: Mapping[str, int], router: str) -> AsyncIterator[StepEvents]:
        """One per engine step, and one each second.

        have: outputs of each rid that the caller has already · router: who follows
        """

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        """Forget an attempt and all before it, known or not, and what was said of them."""

    async def fence(self, epoch: int, router: str) -> None:
        """The next epoch: drop everything of the old one. Refused while another router follows."""

    async def status(self) -> WorkerStatus:
        """What it is and how busy."""


def worker_handler(handler: WorkerHandler) -> grpc.GenericRpcHandler:
    """What `rpc.start_server` serves for a worker: the fields of a request are the arguments."""

    def call(name: str, data: bytes) -> Any:
        request = parse(getattr(pb, f"{name}Request"), data)
        given = (
            {"submit": Submit.from_message(request)}
            if name == "Submit"
            else read(request)
        )
        return getattr(handler, name.lower())(**given)

    def unary(name: str) -> Callable[[bytes], Awaitable[bytes]]:
        async def run(data: bytes) -> bytes:
            answer = await call(name, data)
            message = (
                answer.to_message() if answer else getattr(pb, f"{name}Response")()
            )
            return message.SerializeToString()

        return run

    async def events(messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        async for data in messages:  # only one comes
            async for step in call("Events", data):
                for part in _parts(step.to_message()):
                    yield part.SerializeToString()

    methods = pb.DESCRIPTOR.services_by_name["WorkerService"].methods_by_name
    calls = {name: unary(name) for name in methods if name != "Events"}
    return rpc_handlers(WORKER_SERVICE, calls, {"Events": events})


def _parts(step: pb.EventsResponse) -> Iterator[pb.EventsResponse]:
    """A step in messages that gRPC carries, however much a router has to catch up with."""
    part, nbytes = pb.EventsResponse(load=step.load), 0
    for event in step.events:
        nbytes += event.ByteSize()
        if part.events and nbytes > PART_BYTES:
            yield part
            part, nbytes = pb.EventsResponse(load=step.load), event.ByteSize()
        part.events.append(event)
    yield part


class WorkerClient(WorkerHandler):
    """A worker elsewhere. Raises what it refused, PeerLostError and DeadlineError."""

    def __init__(self, link: Link):
        self._link = link

    async def reserve(self, job: Job, epoch: int, router: str) -> Grant:
        request = fill(pb.ReserveRequest, job=job, epoch=epoch, router=router)
        return Grant.from_message(await self._ask(request))

    async def submit(self, submit: Submit) -> None:
        await self._ask(submit.to_message())

    async def events(
        self, have: Mapping[str, int], router: str
    ) -> AsyncGenerator[StepEvents, None]:
        """Until the iterator is closed; PeerLostError if the stream breaks."""
        request = pb.EventsRequest(have=have, router=router).SerializeToString()
        method = self._link.channel.unary_stream(f"/{WORKER_SERVICE}/Events")
        call = method(request, metadata=self._link.metadata)
        try:
            with failures_of(self._link.address):
                async for data in call:
                    yield StepEvents.from_message(parse(pb.EventsResponse, data))
        finally:
            call.cancel()

    async def abort(self, rid: str, attempt: int, reason: str) -> None:
        await self._ask(pb.AbortRequest(rid=rid, attempt=attempt, reason=reason))

    async def fence(self, epoch: int, router: str) -> None:
        await self._ask(pb.FenceRequest(epoch=epoch, router=router))

    async def status(self) -> WorkerStatus:
        return WorkerStatus.from_message(await self._ask(pb.StatusRequest()))

    async def _ask(self, request: Message) -> Message:
        name = request.DESCRIPTOR.name.removesuffix("Request")
        method, data = f"/{WORKER_SERVICE}/{name}", request.SerializeToString()
        answer = await self._link.call(method, data, CALL_S)
        return parse(getattr(pb, f"{name}Response"), answer)
