"""The router of another process, for a door: every request survives a router that dies.

generate ──► begins ─┐                         ┌─► router
leave ────► cancels ─┴─ one message a turn ────┤
tokens, ends ◄───────── one message a turn ────┘ lost: connect again, resubmit all with their
                                                 tokens so far
"""

import asyncio
import json
import logging
import math
import time
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from google.protobuf.message import Message

from disagg.config import AUTO, RouterConfig
from disagg.errors import (
    CapacityError,
    DeadlineError,
    DisaggError,
    PeerLostError,
    QueueFullError,
    StoppingError,
    error_from,
)
from disagg.protos.v1 import router_pb2 as pb
from disagg.router.actions import TokenOutput
from disagg.router.contract import ANY_WORKERS, RouterReport, Submission
from disagg.router.door_service import ROUTER_SERVICE, TURN_BYTES
from disagg.router.fair_share import may_wait
from disagg.router.inbox import Deliver, outputs_of
from disagg.transfer.messages import Parsed, parse, parse_json
from disagg.transfer.rpc import Link, failures_of

REOPEN_S = 0.1  # pause before a lost router is tried again
CHECK_S = 0.25  # between two looks at deadlines while there is none
COUNTS_S = 1.0  # between two messages with the door's own series
CALL_S = 10.0  # every call but Generate
MAX_HANDLE = 1 << 32

# Returns a link to the current router. PeerLostError while there is none; StoppingError if none
# will come, which ends the requests that wait for one
Dial = Callable[[], Awaitable[Link]]

log = logging.getLogger(__name__)


def fixed(link: Link) -> Dial:
    """For a router whose address never changes."""

    async def dial() -> Link:
        return link

    return dial


@dataclass(eq=False)
class DoorPrompt:
    """A request that a client waits for.

    begin:    how a router gets it, but for what changes
    deliver:  called with each output, and with the error that ends it
    emitted:  tokens that the client has
    token_at: when the last one came; at first, when the request arrived
    accepted: a router had it
    kv:       the figures of its hand-off, once they are there
    """

    begin: pb.Begin
    deliver: Deliver
    arrived: float
    token_at: float
    emitted: "array[int]" = field(default_factory=lambda: array("I"))
    accepted: bool = False
    waited_s: float = 0.0
    kv: Mapping[str, Any] = field(default_factory=dict)

    def message(self, now: float) -> pb.Begin:
        """What begins it at a router, or goes on with it at another one."""
        if self.accepted:
            begin = pb.Begin()
            begin.CopyFrom(self.begin)
            begin.emitted.extend(self.emitted)
            begin.resumed = True
        else:
            begin = self.begin
        begin.waited_s = now - self.arrived
        self.accepted = True
        return begin


class RouterClient:
    """The router of a service. `run` follows it from one process to the next.

    dial:   called before each attempt; `run` closes its links, the last one when it is cancelled
    name:   of this door, for the series of its counts
    counts: its own series, as `ScrapeRequest` has them
    """

    def __init__(
        self,
        dial: Dial,
        name: str = "",
        config: RouterConfig | None = None,
        counts: Callable[[], bytes] = bytes,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.name = name
        self._dial = dial
        self._link: Link | None = None
        self._config = config or RouterConfig()
        self._counts = counts
        self._last_counts = b""
        self._counted_at = -math.inf
        self._clock = clock
        self._prompts: dict[int, DoorPrompt] = {}
        self._handles = count(1)
        self._state = pb.RouterState(lacks="the router starts")
        self._is_attached = False
        # it refuses requests, and lets those that it has end
        self._router_leaves = False
        self._heard_at = clock()
        self._closing = False
        # what the router does not know yet
        self._begins: dict[int, DoorPrompt] = {}
        self._cancels: list[int] = []
        self._has_news = asyncio.Event()

    # -- for clients

    def generate(
        self,
        prompt: Sequence[int],
        params: Mapping[str, Any],
        codec: str,
        at: tuple[str, str] = ANY_WORKERS,
        client: str = "",
        prediction: Sequence[int] = (),
        request_id: str = "",
    ) -> AsyncGenerator[TokenOutput]:
        """As `Router.generate`; while there is no router the client waits for one."""
        submission = Submission(
            prompt,
            params,
            codec,
            at,
            client=client,
            prediction=prediction,
            request_id=request_id,
        )
        return outputs_of(partial(self._open, submission), self._leave)

    def _open(self, submission: Submission, deliver: Deliver) -> int:
        if self._closing:
            raise StoppingError("the service is shutting down")
        self._check_room(submission.client)
        handle = next(self._handles) % MAX_HANDLE
        prefill, decode = submission.at
        begin = pb.Begin(
            handle=handle,
            prompt=submission.prompt,
            sampling=json.dumps(submission.params),
            codec=submission.codec,
            prefill=prefill,
            decode=decode,
            client=submission.client,
            prediction=submission.prediction,
            request_id=submission.request_id,
        )
        now = self._clock()
        prompt = DoorPrompt(begin, deliver, arrived=now, token_at=now)
        self._prompts[handle] = prompt
        self._begins[handle] = prompt
        self._has_news.set()
        return handle

    def _check_room(self, client: str) -> None:
        """QueueFullError if too many requests wait for a router while there is none."""
        limit = self._config.max_queue
        if self._has_router or self.running < limit:
            return
        waiting = Counter(prompt.begin.client for prompt in self._prompts.values())
        if not may_wait(waiting, client, limit):
            raise QueueFullError(
                f"{self.running} requests wait for a router, {limit} may; try again later"
            )

    def _leave(self, handle: int) -> None:
        """The client is gone, or its request has ended."""
        is_with_router = handle not in self._begins
        self._begins.pop(handle, None)
        if self._prompts.pop(handle, None) is not None and is_with_router:
            self._cancels.append(handle)
            self._has_news.set()

    @property
    def running(self) -> int:
        """Requests that are not done."""
        return len(self._prompts)

    @property
    def waiting(self) -> int:
        """Requests of all doors that wait for a worker; of this door, that wait for a router."""
        return self._state.waiting if self._has_router else self.running

    @property
    def ready(self) -> bool:
        """Whether the router is there, and ready."""
        return self._has_router and self._state.ready

    @property
    def _has_router(self) -> bool:
        """Whether a router answers, which it does every half second, and takes requests."""
        is_silent = self._clock() >= self._heard_at + self._config.silence_s
        return self._is_attached and not is_silent and not self._router_leaves

    @property
    def target_counts(self) -> Mapping[str, int]:
        """The target number of workers of each role; none before a router was there."""
        return dict(self._state.targets)

    @property
    def lacks_room(self) -> Mapping[str, str]:
        """What room workers wait for, in words, by name."""
        return dict(self._state.lacks_room)

    def lacks(self, expected: Mapping[str, int]) -> str:
        """What `ready` waits for, in words of the router, which knows its expected workers."""
        if not self._has_router:
            return f"router 0 of 1, {self.running} requests wait"
        return self._state.lacks

    async def close(self, grace_s: float = 0.0) -> None:
        """Take nothing new, let requests end within the grace; then end them: StoppingError."""
        self._closing = True
        until = self._clock() + grace_s
        while self.running and self._clock() < until:
            await asyncio.sleep(CHECK_S)
        self._end_all(StoppingError("the service is shutting down"))

    def configure(self, config: RouterConfig) -> None:
        """Use these limits from now on; from any thread."""
        self._config = config

    # -- calls

    async def report(self) -> RouterReport:
        """The state of the router and of every worker; PeerLostError while there is none."""
        answer = await self._call("Report", pb.ReportRequest(), pb.ReportResponse)
        return RouterReport.from_json(answer.report)

    async def scrape(self) -> bytes:
        """The series of all doors, the router and the workers, in Prometheus's text format."""
        request = pb.ScrapeRequest(door=self.name, counts=self._counts())
        answer = await self._call("Scrape", request, pb.ScrapeResponse)
        return answer.text

    async def scale(self, prefill: int | None, decode: int | None) -> None:
        """Scale each role to this count, in the background; None keeps the current one."""
        request = pb.ScaleRequest(prefill=prefill, decode=decode)
        await self._call("Scale", request, pb.ScaleResponse)

    async def drain(self, worker: str) -> None:
        """Replace a worker; it leaves once another one has taken its place."""
        await self._call("Drain", pb.DrainRequest(worker=worker), pb.DrainResponse)

    async def _call(
        self, method: str, request: Message, response: type[Parsed]
    ) -> Parsed:
        if self._link is None:
            raise PeerLostError("the address of the router is not known yet")
        data = await self._link.call(
            f"/{ROUTER_SERVICE}/{method}", request.SerializeToString(), CALL_S
        )
        return parse(response, data)

    # -- following the router

    async def run(self) -> None:
        """Follow the router until cancelled."""
        checking = asyncio.create_task(self._tick())
        try:
            while True:
                try:
                    await self._follow()
                except CapacityError as error:
                    log.error("the router gave this door up: %s", error)
                    self._end_all(error)
                except DisaggError as error:
                    self._note_lost(error)
                self._is_attached = False
                await asyncio.sleep(REOPEN_S)
        finally:
            checking.cancel()
            if self._link is not None:
                await self._link.close()

    async def _follow(self) -> None:
        """Follow the current router; end all requests if none will come."""
        try:
            link = await self._dial()
        except StoppingError as error:
            self._end_all(error)
            return
        earlier = self._link
        self._link = link
        if earlier is not None and earlier is not link:
            await earlier.close()
        await self._attach(link)

    def _note_lost(self, error: DisaggError) -> None:
        if self._is_attached and not self._closing:
            log.warning(
                "the router is lost, %d requests wait for the next: %s",
                self.running,
                error,
            )

    async def _attach(self, link: Link) -> None:
        """One stream, from its begin to its end, which is an error or the leave of the router."""
        method = link.channel.stream_stream(f"/{ROUTER_SERVICE}/Generate")
        with failures_of(link.address):
            call = method(metadata=link.metadata)
            await call.wait_for_connection()
            self._router_leaves = False
            self._begins = dict(self._prompts)
            self._cancels.clear()
            self._last_counts = b""
            self._has_news.set()
            writing = asyncio.create_task(self._write(call, link.address))
            writing.add_done_callback(lambda _: call.cancel())
            try:
                async for data in call:
                    self._on_response(parse(pb.GenerateResponse, data))
            finally:
                call.cancel()
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
        raise PeerLostError("the router left")

    async def _write(self, call: Any, address: str) -> None:
        """Say what happened here, in one message for each turn of the loop."""
        with failures_of(address):
            request = pb.GenerateRequest(door=self.name)
            await call.write(request.SerializeToString())
            while True:
                await self._has_news.wait()
                if data := self._news().SerializeToString():
                    await call.write(data)

    def _news(self) -> pb.GenerateRequest:
        """What the router does not know, as much as one message holds."""
        now = self._clock()
        request = pb.GenerateRequest(
            cancels=self._cancels, counts=self._changed_counts(now)
        )
        self._cancels = []
        nbytes = 0
        while self._begins and nbytes < TURN_BYTES:
            handle = next(iter(self._begins))
            begin = self._begins.pop(handle).message(now)
            request.begins.append(begin)
            nbytes += begin.ByteSize()
        if not self._begins:
            self._has_news.clear()
        return request

    def _changed_counts(self, now: float) -> bytes:
        """The door's own series, if they have changed and some time has passed."""
        if now < self._counted_at + COUNTS_S:
            return b""
        self._counted_at = now
        counts = self._counts()
        if counts == self._last_counts:
            return b""
        self._last_counts = counts
        return counts

    def _on_response(self, response: pb.GenerateResponse) -> None:
        """Pass on what a turn of the router has for the clients of this door."""
        now = self._clock()
        self._heard_at = now
        if response.HasField("state"):
            self._state = response.state
            self._is_attached = True
        for figures in response.figures:
            try:
                self._on_figures(figures)
            except DisaggError as error:
                self._fail(figures.handle, error)
        scores = {each.position: each.logprobs for each in response.scores}
        prompts = self._prompts
        pairs = zip(response.handles, response.tokens, strict=True)
        for position, (handle, token) in enumerate(pairs):
            prompt = prompts.get(handle)
            if prompt is None:
                continue  # its client has left
            output = TokenOutput("", token, kv=prompt.kv, waited_s=prompt.waited_s)
            if position in scores:
                try:
                    output.logprobs = parse_json("logprobs", scores[position], list)
                except DisaggError as error:
                    self._fail(handle, error)
                    continue
            prompt.emitted.append(token)
            prompt.token_at = now
            prompt.deliver(output)
        for end in response.ends:
            self._on_end(end)

    def _on_figures(self, figures: pb.Figures) -> None:
        prompt = self._prompts.get(figures.handle)
        if prompt is None:
            return
        prompt.waited_s = figures.waited_s
        if figures.kv:
            prompt.kv = parse_json("kv", figures.kv, dict)
        if prompt.begin.codec == AUTO:
            prompt.begin.codec = figures.codec

    def _on_end(self, end: pb.End) -> None:
        prompt = self._prompts.get(end.handle)
        if prompt is None:
            return
        if not end.HasField("error"):
            del self._prompts[end.handle]
            output = TokenOutput("", finish_reason=end.finish_reason, kv=prompt.kv)
            prompt.deliver(output)
            return
        error = error_from(end.error.reason, end.error.message)
        if isinstance(error, StoppingError) and not self._closing:
            self._router_leaves = True  # and the next one takes the request
            return
        del self._prompts[end.handle]
        prompt.deliver(error)

    def _fail(self, handle: int, error: DisaggError) -> None:
        """End a request here, and cancel it at the router."""
        prompt = self._prompts.get(handle)
        if prompt is not None:
            self._leave(handle)
            prompt.deliver(error)

    def _end_all(self, error: DisaggError) -> None:
        for handle in list(self._prompts):
            self._fail(handle, error)

    async def _tick(self) -> None:
        """Say what changed in the door's series, or look at deadlines while there is no router."""
        while True:
            await asyncio.sleep(CHECK_S)
            if self._has_router:
                self._has_news.set()
            else:
                self._fail_late()

    def _fail_late(self) -> None:
        """Fail what got no token for too long, as the router would."""
        deadline_s = self._config.deadline_s
        late = self._clock() - deadline_s
        for handle, prompt in list(self._prompts.items()):
            if prompt.token_at <= late:
                error = DeadlineError(f"no token in {deadline_s:g} s; no router runs")
                self._fail(handle, error)
