"""Serves a router to doors: processes that have clients, each with one stream of all its requests.

    door ── begins, cancels ──► submit, cancel          ┐
    door ◄── one message a turn: tokens, ends, figures ─┴ deliver

A door that is gone has its requests cancelled at once. What a slow one has not read is bounded.
"""

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from disagg.errors import CapacityError, DisaggError
from disagg.protos.v1 import kv_transfer_pb2 as kv
from disagg.protos.v1 import router_pb2 as pb
from disagg.router.actions import TokenOutput
from disagg.router.contract import Submission
from disagg.router.failures import as_error
from disagg.router.request_state import token_array
from disagg.router.router import Router
from disagg.transfer.messages import parse, parse_json
from disagg.transfer.rpc import RpcHandler, rpc_handlers

ROUTER_SERVICE = "disagg.v1.RouterService"
STATE_S = 0.5  # between two messages to a door, at most
TURN_OUTPUTS = 1 << 14  # tokens and rarer things of one message
TURN_BYTES = 1 << 20  # of the JSON in one message, unless a single piece is larger
MAX_BEHIND = 1 << 20  # outputs that a door has not read; then its requests fail


class DoorHost(Protocol):
    """What the process of the router does for doors, beside requests."""

    @property
    def target_counts(self) -> Mapping[str, int]:
        """The target number of workers of each role."""

    @property
    def lacks_room(self) -> Mapping[str, str]:
        """What room workers wait for, in words, by name."""

    def scale(self, prefill: int | None, decode: int | None) -> None:
        """Scale each role to this count, in the background; None keeps the current one.

        It may block, as `drain` may.
        """

    def drain(self, name: str) -> None:
        """Replace a worker; it leaves once another one has taken its place."""

    def count(self, door: str, counts: bytes) -> None:
        """The series of a door, as `ScrapeRequest` has them, in place of its last ones."""

    def leave(self, door: str) -> None:
        """The last stream of a door of this name has ended."""

    async def scrape(self) -> bytes:
        """The series of all doors, the router and the workers, in Prometheus's text format."""


class DoorService:
    """The methods of `RouterService`. `max_behind`: outputs that a door may have unread."""

    def __init__(self, router: Router, host: DoorHost, max_behind: int = MAX_BEHIND):
        self._router = router
        self._host = host
        self._max_behind = max_behind
        self._doors: set[DoorStream] = set()

    @property
    def num_doors(self) -> int:
        """Doors whose stream is open."""
        return len(self._doors)

    def handler(self) -> RpcHandler:
        """As `rpc.start_server` takes it."""
        calls: dict[str, Callable[[bytes], Awaitable[bytes]]] = {
            "Report": self._report,
            "Scrape": self._scrape,
            "Scale": self._scale,
            "Drain": self._drain,
        }
        return rpc_handlers(ROUTER_SERVICE, calls, {"Generate": self._generate})

    async def _generate(
        self, messages: AsyncIterator[bytes]
    ) -> AsyncGenerator[bytes, None]:
        door = DoorStream(self._router, self._max_behind)
        reading = asyncio.create_task(self._read(door, messages))
        self._doors.add(door)
        try:
            while not reading.done():
                for response in await door.take():
                    yield response.SerializeToString()
                yield pb.GenerateResponse(state=self._state()).SerializeToString()
            reading.result()
        finally:
            reading.cancel()
            door.close()
            self._remove(door)
            await asyncio.gather(reading, return_exceptions=True)

    def _remove(self, door: "DoorStream") -> None:
        self._doors.remove(door)
        if all(other.name != door.name for other in self._doors):
            self._host.leave(door.name)

    async def _read(self, door: "DoorStream", messages: AsyncIterator[bytes]) -> None:
        """Perform what a door asks for, until it leaves."""
        async for data in messages:
            request = parse(pb.GenerateRequest, data)
            door.name = request.door or door.name
            if request.counts:
                self._host.count(door.name, request.counts)
            for begin in request.begins:
                door.begin(begin)
            for handle in request.cancels:
                door.cancel(handle)

    def _state(self) -> pb.RouterState:
        targets = self._host.target_counts
        return pb.RouterState(
            ready=self._router.ready,
            lacks=self._router.lacks(targets),
            targets=targets,
            waiting=self._router.waiting,
            lacks_room=self._host.lacks_room,
        )

    async def _report(self, data: bytes) -> bytes:
        parse(pb.ReportRequest, data)
        report = await self._router.report()
        return pb.ReportResponse(report=report.to_json()).SerializeToString()

    async def _scrape(self, data: bytes) -> bytes:
        request = parse(pb.ScrapeRequest, data)
        self._host.count(request.door, request.counts)
        text = await self._host.scrape()
        return pb.ScrapeResponse(text=text).SerializeToString()

    async def _scale(self, data: bytes) -> bytes:
        request = parse(pb.ScaleRequest, data)
        prefill = request.prefill if request.HasField("prefill") else None
        decode = request.decode if request.HasField("decode") else None
        await asyncio.to_thread(self._host.scale, prefill, decode)
        return pb.ScaleResponse().SerializeToString()

    async def _drain(self, data: bytes) -> bytes:
        request = parse(pb.DrainRequest, data)
        await asyncio.to_thread(self._host.drain, request.worker)
        return pb.DrainResponse().SerializeToString()


@dataclass
class Turn:
    """Outputs of one message. rare: all of them but tokens; nbytes: of its JSON."""

    handles: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rare: pb.GenerateResponse = field(default_factory=pb.GenerateResponse)
    nbytes: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.tokens) >= TURN_OUTPUTS or self.nbytes >= TURN_BYTES

    def message(self) -> pb.GenerateResponse:
        self.rare.handles.extend(self.handles)
        self.rare.tokens.extend(self.tokens)
        return self.rare


class DoorStream:
    """The requests of one door by handle, and the outputs that it has yet to read."""

    def __init__(self, router: Router, max_behind: int):
        self.name = ""
        self._router = router
        self._max_behind = max_behind
        self._requests: dict[int, DoorRequest] = {}
        self._turns: deque[Turn] = deque()
        self._num_behind = 0
        self._has_turns = asyncio.Event()
        self._failure: CapacityError | None = None

    def begin(self, begin: pb.Begin) -> None:
        """Submit a request; a refusal is its end."""
        if self._failure is not None:
            return
        request = DoorRequest(begin.handle, self, self._router)
        try:
            submission = _submission_of(begin)
            request.rid = self._router.submit(submission, request.deliver)
        except Exception as failure:
            # or the stream of all requests would break, and again whenever they are resubmitted
            error = as_error(failure, f"request {begin.handle} of a door")
            self.turn().rare.ends.append(_end_of(begin.handle, error))
        else:
            self._requests[begin.handle] = request

    def cancel(self, handle: int) -> None:
        """Its client is gone, or it has ended."""
        request = self._requests.pop(handle, None)
        if request is not None:
            self._router.cancel(request.rid)

    def close(self) -> None:
        """The door is gone: cancel everything."""
        for handle in list(self._requests):
            self.cancel(handle)

    async def take(self) -> list[pb.GenerateResponse]:
        """The next messages, or none for a while; CapacityError if the door is too far behind."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STATE_S):
                await self._has_turns.wait()
        if self._failure is not None:
            raise self._failure
        messages = [turn.message() for turn in self._turns]
        self._turns.clear()
        self._has_turns.clear()
        self._num_behind = 0
        return messages

    def turn(self) -> Turn:
        """Where the next output goes."""
        self._num_behind += 1
        if self._num_behind > self._max_behind:
            self._fail()
        if not self._turns or self._turns[-1].is_full:
            self._turns.append(Turn())
            self._has_turns.set()
        return self._turns[-1]

    def _fail(self) -> None:
        """Free what the door has not read; its requests end with the stream."""
        self._failure = CapacityError(
            f"the door has not read {self._num_behind} outputs; at most {self._max_behind} wait"
        )
        self._turns.clear()
        self._num_behind = 0
        # not at once: the router is about to deliver more
        asyncio.get_running_loop().call_soon(self.close)


@dataclass(eq=False)
class DoorRequest:
    """A request of a door. kv: figures that the door has; None: it has no token yet."""

    handle: int
    stream: DoorStream
    router: Router
    rid: str = ""
    kv: Mapping[str, object] | None = None

    def deliver(self, output: TokenOutput | DisaggError) -> None:
        """Add a token or an end to what the door reads next."""
        turn = self.stream.turn()
        if isinstance(output, DisaggError):
            turn.rare.ends.append(_end_of(self.handle, output))
            self.stream.cancel(self.handle)
            return
        if output.kv is not self.kv:
            self._add_figures(turn, output)
        if output.token is None:
            end = pb.End(handle=self.handle, finish_reason=output.finish_reason)
            turn.rare.ends.append(end)
            self.stream.cancel(self.handle)
            return
        if output.logprobs:
            logprobs = json.dumps(output.logprobs)
            turn.rare.scores.add(position=len(turn.tokens), logprobs=logprobs)
            turn.nbytes += len(logprobs)
        turn.handles.append(self.handle)
        turn.tokens.append(output.token)

    def _add_figures(self, turn: Turn, output: TokenOutput) -> None:
        self.kv = output.kv
        turn.rare.figures.add(
            handle=self.handle,
            waited_s=output.waited_s,
            kv=json.dumps(output.kv) if output.kv else "",
            codec=self.router.codec_of(self.rid),
        )


def _submission_of(begin: pb.Begin) -> Submission:
    """RequestError for sampling that is not a JSON object."""
    return Submission(
        prompt=token_array(begin.prompt),
        params=parse_json("sampling", begin.sampling, dict),
        codec=begin.codec,
        at=(begin.prefill, begin.decode),
        emitted=tuple(begin.emitted),
        waited_s=begin.waited_s,
        resumed=begin.resumed,
        client=begin.client,
        prediction=token_array(begin.prediction),
        request_id=begin.request_id,
    )


def _end_of(handle: int, error: DisaggError) -> pb.End:
    return pb.End(
        handle=handle, error=kv.Error(reason=error.reason, message=str(error))
    )
