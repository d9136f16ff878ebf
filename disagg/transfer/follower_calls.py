"""Hand-offs of a group: what rank 0 of a worker asks of its followers.

    receiving   open, attach, check, close      the parts that a follower stores
    sending     send, finish, stop              the parts that a follower sends
    always      digests, ping                   what its cached items are, whether it is frozen

`FollowerHandler` is what a follower implements. `FollowerClient` has the same methods over a link,
so rank 0 can hold either. Failures are errors of disagg.errors; a follower that is gone is
PeerLostError, and the end of its whole group: `Followers.watch` says so.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, Self

import grpc
from google.protobuf.message import Message

from disagg.errors import DisaggError, RanksLostError, RequestError
from disagg.kv.page import Kind
from disagg.protos.v1 import rank_pb2 as pb
from disagg.transfer.messages import (
    Attach,
    Attached,
    Parsed,
    Submit,
    parse,
    parse_commit,
    parse_json,
)
from disagg.transfer.rpc import Link, rpc_handlers
from disagg.transfer.stats import HandoffStats
from disagg.wire import Commit, pack

RANK_SERVICE = "disagg.v1.RankService"
CALL_S = 5.0  # every call but Finish
RETRY_S = 0.5  # between two calls to close
DIGESTS_S = 1.0  # the verification of cached blocks does not wait for longer
PING_S = 1.0  # between two pings
log = logging.getLogger(__name__)

Records = Mapping[Kind, list[int]]  # page ids of a layer group, by kind
Span = tuple[int, int]  # first byte in an arena, number of bytes


@dataclass(frozen=True)
class Opening:
    """A reservation whose parts a follower will store: where, and what is in place.

    codec:   spec of the plan
    tokens:  in the records
    moves:   they are those of a sequence that moves while it decodes
    senders: ranks of the worker that hands them over
    records: of each layer group
    cached:  digests by item index, by part
    """

    nonce: int
    codec: str
    tokens: int
    moves: bool = False
    senders: int = 1
    records: Sequence[Records] = ()
    cached: Mapping[int, Mapping[int, int]] = field(default_factory=dict)

    def to_proto(self) -> pb.OpenPartsRequest:
        records = [
            pb.RecordPages(group=group, kind=kind, pages=pages)
            for group, by_kind in enumerate(self.records)
            for kind, pages in by_kind.items()
        ]
        cached = [
            pb.CachedItems(part=part, places=digests, digests=digests.values())
            for part, digests in self.cached.items()
        ]
        return pb.OpenPartsRequest(
            nonce=self.nonce,
            codec=self.codec,
            tokens=self.tokens,
            moves=self.moves,
            senders=self.senders,
            records=records,
            cached=cached,
        )

    @classmethod
    def from_proto(cls, message: pb.OpenPartsRequest) -> Self:
        num_groups = 1 + max((x.group for x in message.records), default=-1)
        records: list[dict[Kind, list[int]]] = [{} for _ in range(num_groups)]
        for entry in message.records:
            records[entry.group][Kind(entry.kind)] = list(entry.pages)
        cached = {
            entry.part: dict(zip(entry.places, entry.digests, strict=True))
            for entry in message.cached
        }
        return cls(
            nonce=message.nonce,
            codec=message.codec,
            tokens=message.tokens,
            moves=message.moves,
            senders=message.senders,
            records=records,
            cached=cached,
        )


class FollowerHandler(Protocol):
    """The methods of a follower that rank 0 of its group calls."""

    async def open(self, opening: Opening) -> None:
        """A prompt may arrive. The same opening again changes nothing."""

    async def attach(self, attach: Attach) -> Attached:
        """A sender takes a part over. The answer lacks lease and credit."""

    async def check(self, commit: Commit) -> float:
        """Whether a part is complete, with the digests of its commit; its `verify_ms`.

        Raises as `ReceivedItems.check` does if it is not.
        """

    async def close(self, nonce: int) -> None:
        """Forget the parts of a reservation; from now on nothing of them is written."""

    async def send(self, submit: Submit, name: str) -> None:
        """Begin to send the parts of a sequence, by the engine's name of it."""

    async def finish(
        self, name: str, first_token: int, deadline_s: float
    ) -> HandoffStats:
        """Commit the parts of a sequence; returns when all are acknowledged.

        deadline_s: for this call; the parts have that of their job
        """

    async def stop(self, name: str) -> None:
        """Give up what is not acknowledged; the records are not read any more."""

    async def digests(self, spans: Sequence[Span]) -> list[int]:
        """The digests of bytes of its arena."""

    async def ping(self) -> None:
        """Answer at once."""


class Followers:
    """The followers of a worker, as rank 0 asks them. Lives on the io loop.

    handlers:  of rank 1, rank 2 and so on
    addresses: "host:port" of each, where it takes frames
    clock:     in seconds; it never goes back
    """

    def __init__(
        self,
        handlers: Sequence[FollowerHandler] = (),
        addresses: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ):
        self._clock = clock
        self.addresses = tuple(addresses)
        self.handlers = handlers
        self._openings: dict[int, asyncio.Future[Any]] = {}  # by nonce
        self._closing = set[asyncio.Task[None]]()

    async def open(self, opening: Opening) -> None:
        """Open the parts of a reservation on all followers."""
        calls = [handler.open(opening) for handler in self.handlers]
        task = asyncio.gather(*calls)
        self._openings[opening.nonce] = task
        try:
            await task
        finally:
            self._openings.pop(opening.nonce, None)

    async def attach(self, rank: int, attach: Attach) -> Attached:
        """A sender takes over a part of a follower."""
        return await self.handlers[rank - 1].attach(attach)

    async def check(self, rank: int, commit: Commit) -> float:
        """Whether a part of a follower is complete; its `verify_ms`."""
        return await self.handlers[rank - 1].check(commit)

    async def digests(self, rank: int, spans: Sequence[Span]) -> list[int]:
        """The digests of bytes in the arena of a follower."""
        return await self.handlers[rank - 1].digests(spans)

    async def watch(self, timeout_s: float) -> None:
        """Until a follower has not answered for this long: RanksLostError. Endless without any.

        A step would notice, but a group whose hand-offs fail has no next step.
        """
        watches = [
            self._watch_one(rank, handler, timeout_s)
            for rank, handler in enumerate(self.handlers, 1)
        ]
        await asyncio.gather(*watches, asyncio.Event().wait())

    async def _watch_one(
        self, rank: int, handler: FollowerHandler, timeout_s: float
    ) -> None:
        answered_at = self._clock()
        was_silent = False
        while True:
            try:
                await handler.ping()
                answered_at = self._clock()
                was_silent = False
            except DisaggError as error:
                is_silent = self._clock() > answered_at + timeout_s
                # twice in a row: this process may have been frozen
                if is_silent and was_silent:
                    raise RanksLostError(
                        f"rank {rank} has not answered for {timeout_s:g} s: {error}"
                    ) from error
                was_silent = is_silent
            await asyncio.sleep(PING_S)

    def close(self, nonce: int, free: Callable[[], None]) -> None:
        """Close the parts of a reservation everywhere, then free its records."""
        if not self.handlers:
            free()
            return
        task = asyncio.ensure_future(self._close(nonce, free))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, nonce: int, free: Callable[[], None]) -> None:
        opening = self._openings.get(nonce)
        if opening is not None:
            await asyncio.wait([opening])
        for handler in self.handlers:
            await self._close_at(handler, nonce)
        free()

    async def _close_at(self, handler: FollowerHandler, nonce: int) -> None:
        """Close the parts at a follower: again until it answers, as it could still write to them.

        If it never does, it is gone, and this process will end with its group.
        """
        while True:
            try:
                return await handler.close(nonce)
            except DisaggError as error:
                log.warning("reservation %016x is not closed: %s", nonce, error)
            await asyncio.sleep(RETRY_S)


def follower_handler(handler: FollowerHandler) -> grpc.GenericRpcHandler:
    """Serve a follower, as `rpc.start_server` takes it."""

    async def open_parts(data: bytes) -> bytes:
        await handler.open(Opening.from_proto(parse(pb.OpenPartsRequest, data)))
        return pb.OpenPartsResponse().SerializeToString()

    async def attach_part(data: bytes) -> bytes:
        request = parse(pb.AttachPartRequest, data)
        attached = await handler.attach(Attach.from_proto(request.attach))
        response = pb.AttachPartResponse(attached=attached.to_proto())
        return response.SerializeToString()

    async def check_part(data: bytes) -> bytes:
        commit = parse_commit(parse(pb.CheckPartRequest, data).frame)
        verify_ms = await handler.check(commit)
        return pb.CheckPartResponse(verify_ms=verify_ms).SerializeToString()

    async def close_parts(data: bytes) -> bytes:
        await handler.close(parse(pb.ClosePartsRequest, data).nonce)
        return pb.ClosePartsResponse().SerializeToString()

    async def send_parts(data: bytes) -> bytes:
        request = parse(pb.SendPartsRequest, data)
        await handler.send(Submit.from_proto(request.submit), request.name)
        return pb.SendPartsResponse().SerializeToString()

    async def finish_parts(data: bytes) -> bytes:
        request = parse(pb.FinishPartsRequest, data)
        stats = await handler.finish(
            request.name, request.first_token, request.deadline_s
        )
        response = pb.FinishPartsResponse(stats=json.dumps(asdict(stats)))
        return response.SerializeToString()

    async def stop_parts(data: bytes) -> bytes:
        await handler.stop(parse(pb.StopPartsRequest, data).name)
        return pb.StopPartsResponse().SerializeToString()

    async def read_digests(data: bytes) -> bytes:
        request = parse(pb.ReadDigestsRequest, data)
        spans = [*zip(request.starts, request.sizes, strict=False)]
        response = pb.ReadDigestsResponse(digests=await handler.digests(spans))
        return response.SerializeToString()

    async def ping(data: bytes) -> bytes:
        await handler.ping()
        return pb.PingResponse().SerializeToString()

    calls = {
        "OpenParts": open_parts,
        "AttachPart": attach_part,
        "CheckPart": check_part,
        "CloseParts": close_parts,
        "SendParts": send_parts,
        "FinishParts": finish_parts,
        "StopParts": stop_parts,
        "ReadDigests": read_digests,
        "Ping": ping,
    }
    return rpc_handlers(RANK_SERVICE, calls)


class FollowerClient(FollowerHandler):
    """A follower in another process. Raises its refusals, PeerLostError and DeadlineError."""

    def __init__(self, link: Link):
        self._link = link

    async def open(self, opening: Opening) -> None:
        await self._call("OpenParts", opening.to_proto(), pb.OpenPartsResponse)

    async def attach(self, attach: Attach) -> Attached:
        request = pb.AttachPartRequest(attach=attach.to_proto())
        response = await self._call("AttachPart", request, pb.AttachPartResponse)
        return Attached.from_proto(response.attached)

    async def check(self, commit: Commit) -> float:
        request = pb.CheckPartRequest(frame=b"".join(pack(commit)))
        response = await self._call("CheckPart", request, pb.CheckPartResponse)
        return response.verify_ms

    async def close(self, nonce: int) -> None:
        request = pb.ClosePartsRequest(nonce=nonce)
        await self._call("CloseParts", request, pb.ClosePartsResponse)

    async def send(self, submit: Submit, name: str) -> None:
        request = pb.SendPartsRequest(submit=submit.to_proto(), name=name)
        await self._call("SendParts", request, pb.SendPartsResponse)

    async def finish(
        self, name: str, first_token: int, deadline_s: float
    ) -> HandoffStats:
        request = pb.FinishPartsRequest(
            name=name, first_token=first_token, deadline_s=deadline_s
        )
        timeout_s = deadline_s + CALL_S  # the follower's own limit comes first
        response = await self._call(
            "FinishParts", request, pb.FinishPartsResponse, timeout_s
        )
        figures: dict[str, Any] = parse_json("stats", response.stats, dict)
        try:
            return HandoffStats(**figures)
        except TypeError as error:
            raise RequestError(f"figures of a hand-off: {error}") from error

    async def stop(self, name: str) -> None:
        request = pb.StopPartsRequest(name=name)
        await self._call("StopParts", request, pb.StopPartsResponse)

    async def digests(self, spans: Sequence[Span]) -> list[int]:
        starts, sizes = zip(*spans, strict=True) if spans else ((), ())
        request = pb.ReadDigestsRequest(starts=starts, sizes=sizes)
        response = await self._call(
            "ReadDigests", request, pb.ReadDigestsResponse, DIGESTS_S
        )
        return [*response.digests]

    async def ping(self) -> None:
        await self._call("Ping", pb.PingRequest(), pb.PingResponse)

    async def _call(
        self,
        method: str,
        request: Message,
        response: type[Parsed],
        timeout_s: float = CALL_S,
    ) -> Parsed:
        data = await self._link.call(
            f"/{RANK_SERVICE}/{method}", request.SerializeToString(), timeout_s
        )
        return parse(response, data)
