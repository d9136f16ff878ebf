"""The router: tells workers what to do and gives clients their tokens. Rules are in `dispatch.py`.

    stream open ──► steps ──► broken: open again, saying what is known ──► ...
                                 │ silent for too long: down ──► reached again: fence, up

A plain asyncio object inside the process that serves clients, with one event stream per worker. A
broken stream only means that something is wrong; after a silence the work of the worker is given to
others, so it has to drop everything before it takes part again. Knows no Ray, no HTTP, no text.
"""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

from disagg.config import RouterConfig
from disagg.errors import (
    ConfigError,
    DisaggError,
    QueueFullError,
    StoppingError,
    WireError,
)
from disagg.router.actions import AbortAttempt, Action, EmitToken, Reserve, Start
from disagg.router.requests import Phase, RequestState, RequestTable
from disagg.transfer.control import WorkerHandler
from disagg.transfer.messages import (
    Job,
    StepEvents,
    Submit,
    TokenEvent,
    WorkerInfo,
    WorkerStatus,
)

TICK_S = 0.05
REOPEN_S = 0.1  # pause before a broken event stream is opened again
RECEIPT_S = 1.0  # how long a finished request waits for the figures of its hand-off
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenOutput:
    """Something a client gets: a token, or the end.

    kv:       figures of the hand-off, once known
    logprobs: of the token, where they are wanted; before them, with the first, those of the prompt
    waited_s: until the attempt began that said it
    """

    token: int | None = None
    finish_reason: str | None = None
    kv: Mapping[str, Any] = field(default_factory=dict)
    logprobs: Sequence[Any] = ()
    waited_s: float = 0.0


@dataclass(eq=False)
class WorkerConnection:
    """A worker as a router sees it. `client`: a `WorkerClient`, or the worker itself.

    heard: when it last said something · fallen: it was silent for too long, and has what is ours
    unheard: what it could not be told to forget, by rid · trouble: why it cannot be followed
    """

    started: WorkerInfo
    client: WorkerHandler
    heard: float = 0.0
    fallen: bool = False
    unheard: dict[str, AbortAttempt] = field(default_factory=dict)
    trouble: str = ""
    task: asyncio.Task[None] = field(init=False)

    @property
    def name(self) -> str:
        return self.started.name


@dataclass
class PendingStream:
    """Whoever waits for a request. `receipt` is set when the figures of its hand-off, `kv`, have
    come."""

    request: RequestState = field(init=False)
    inbox: asyncio.Queue[TokenOutput | DisaggError] = field(
        default_factory=asyncio.Queue
    )
    kv: Mapping[str, Any] = field(default_factory=dict)
    receipt: asyncio.Event = field(default_factory=asyncio.Event)


class Router:
    """Keeps requests alive across workers and delivers every token once. Lives on one loop."""

    def __init__(
        self,
        config: RouterConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = config or RouterConfig()
        self.id = uuid.uuid4().hex  # a worker follows one router at a time
        self.dispatch = RequestTable(self.config)
        self.peers: dict[str, WorkerConnection] = {}
        self._clock = clock
        self._ready_at = clock()  # or, until then, when this began
        self._clients: dict[str, PendingStream] = {}
        # (worker, rid): what begins it there, until that is done
        self._calls = WeakValueDictionary[tuple[str, str], asyncio.Task[None]]()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._bytes = Counter({"fp16_bytes": 0, "wire_bytes": 0})  # of all hand-offs
        self._closing = False

    # -- for clients

    async def generate(
        self,
        prompt: tuple[int, ...],
        params: Mapping[str, Any],
        codec: str,
        at: tuple[str, str] = ("", ""),
    ) -> AsyncGenerator[TokenOutput]:
        """The tokens of one request, then its end. Leaving the iteration cancels the request.

        at: the prefill and the decode worker it goes to while these take part; "": any

        Use it with `contextlib.aclosing`, so that leaving is noticed at once.
        """
        if self._closing:
            raise StoppingError("the service is shutting down")
        if self.waiting >= (most := self.config.max_queue):
            raise QueueFullError(
                f"{self.waiting} requests wait, {most} may; try again later"
            )
        rid = f"{self.id}-{uuid.uuid4().hex}"
        client = self._clients[rid] = PendingStream()
        self._ticker = self._ticker or asyncio.create_task(self._tick())
        try:
            job = Job(rid, 0, prompt, sampling=dict(params), codec=codec)
            actions = self.dispatch.submit(job, self._clock(), at)
            client.request = self.dispatch.entries[rid]
            self._act(actions)
            while True:
                output = await client.inbox.get()
                if isinstance(output, DisaggError):
                    raise output
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            del self._clients[rid]
            self._act(self.dispatch.cancel(rid, self._clock()))

    @property
    def running(self) -> int:
        """Requests that are not done."""
        return len(self.dispatch.entries)

    @property
    def waiting(self) -> int:
        """Requests that no worker has."""
        return sum(
            entry.phase is Phase.QUEUED for entry in self.dispatch.entries.values()
        )

    @property
    def ready(self) -> bool:
        """Whether there is a worker for each side of a hand-off, and requests get to them."""
        return self.dispatch.ready(self._clock())

    def lacks(self, wanted: Mapping[str, int]) -> str:
        """What `ready` waits for, in words; wanted: how many workers of each role."""
        now, members = self._clock(), self.dispatch.members.values()
        there = Counter[str](x.started.role for x in members if now >= x.open_until)
        told = [f"{role} {there[role]} of {number}" for role, number in wanted.items()]
        told += [f"{self.waiting} queued"] if self.waiting else []
        return f"{', '.join(told)}; for {now - self._ready_at:.0f} s"

    # -- for whoever runs the workers

    def add(self, peer: WorkerConnection) -> None:
        """A worker is there: follow its events, give it work."""
        self._ticker = self._ticker or asyncio.create_task(self._tick())
        self.peers[peer.name] = peer
        peer.heard = self._clock()
        peer.task = asyncio.create_task(self._follow(peer))

    def died(self, name: str) -> None:
        """A worker is known to be dead and never comes back."""
        if peer := self.peers.pop(name, None):
            peer.task.cancel()
            self._leave(peer, fenced=False)

    def summary(self) -> dict[str, int]:
        """Requests, those that wait for a worker, what became of others, and bytes handed over."""
        told = {"requests": self.running, "queued": self.waiting}
        told |= {"moved": self.dispatch.moves, "retried": self.dispatch.retries}
        return told | dict(self._bytes)

    async def status(self) -> dict[str, WorkerStatus | DisaggError]:
        """What every worker says of itself, or why it does not answer."""

        async def ask(peer: WorkerConnection) -> WorkerStatus | DisaggError:
            try:
                return await peer.client.status()
            except DisaggError as error:
                return error

        names, asked = list(self.peers), map(ask, self.peers.values())
        return dict(zip(names, await asyncio.gather(*asked), strict=True))

    async def close(self, grace_s: float = 0.0) -> None:
        """Take nothing new, let requests end within the grace; then cancel them by name."""
        self._closing = True
        until = self._clock() + grace_s
        while self.running and self._clock() < until:
            await asyncio.sleep(TICK_S)
        for rid, client in self._clients.items():
            if rid not in self.dispatch.entries:
                continue  # it has ended, and only waits for its figures
            self._act(self.dispatch.cancel(rid, self._clock()))
            client.inbox.put_nowait(StoppingError("the service is shutting down"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.config.silence_s)
        tasks = [
            *(peer.task for peer in self.peers.values()),
            self._ticker,
            *self._tasks,
        ]
        for task in filter(None, tasks):
            task.cancel()
        await asyncio.gather(*filter(None, tasks), return_exceptions=True)

    # -- following workers

    async def _follow(self, peer: WorkerConnection) -> None:
        """The event stream of one worker, again and again until this is cancelled."""
        while True:
            try:
                await self._meet(peer)
                steps = peer.client.events(self.dispatch.known(peer.name), self.id)
                async with aclosing(steps):  # type: ignore[type-var]
                    async for step in steps:
                        self._hear(peer, step)
            except (ConfigError, WireError) as error:
                if peer.trouble != str(error):
                    peer.trouble = str(error)
                    log.warning("%s cannot be followed: %s", peer.name, error)
            except DisaggError as error:
                log.debug("the events of %s broke: %s", peer.name, error)
            except Exception:
                log.exception("following %s broke", peer.name)
            await asyncio.sleep(REOPEN_S)

    async def _meet(self, peer: WorkerConnection) -> None:
        """Ask a worker for its epoch; one that was silent has to drop all that it had."""
        epoch = (await peer.client.status()).epoch
        if peer.fallen:
            epoch += 1
            await peer.client.fence(epoch, self.id)
            peer.fallen = False
            peer.unheard.clear()
        if (
            epoch != peer.started.epoch
        ):  # whoever fenced it, nothing of ours is left there
            peer.started = replace(peer.started, epoch=epoch)
            self._leave(peer)

    def _hear(self, peer: WorkerConnection, step: StepEvents) -> None:
        """What a worker did. The first that it says makes it take part."""
        peer.heard = now = self._clock()
        if peer.name not in self.dispatch.members:
            self._act(self.dispatch.worker_up(peer.started, now))
        peer.started = replace(peer.started, role=step.load.role or peer.started.role)
        unheard, peer.unheard = peer.unheard, {}
        self._act(list(unheard.values()))
        for event in step.events:
            if event.stats is not None and (client := self._clients.get(event.rid)):
                if event.stats.get("wire_bytes"):
                    self._bytes.update({x: event.stats.get(x, 0) for x in self._bytes})
                choice = client.request.choice
                client.kv = {**event.stats, **({"choice": choice} if choice else {})}
                client.receipt.set()
            self._act(self.dispatch.hear(peer.name, event, now))
        self._act(self.dispatch.load(peer.name, step.load, now))

    def _leave(self, peer: WorkerConnection, fenced: bool = True) -> None:
        """A worker does not take part: its work goes to others."""
        self._act(self.dispatch.worker_down(peer.name, self._clock(), fenced))

    async def _tick(self) -> None:
        """Time passes. What this loop was late is no silence of a worker."""
        last = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            last, late = self._clock(), self._clock() - last - TICK_S
            self._ready_at = last if self.ready else self._ready_at
            try:
                for peer in self.peers.values():
                    peer.heard += late if late > TICK_S else 0.0
                    if last - peer.heard >= self.config.silence_s:
                        self._silent(peer)
                self._act(self.dispatch.tick(last))
            except Exception:
                log.exception("a tick of the router broke")

    def _silent(self, peer: WorkerConnection) -> None:
        """A worker said nothing for too long: what it says from now on counts after a fence."""
        peer.task.cancel()
        peer.fallen |= peer.name in self.dispatch.members
        peer.heard = self._clock()
        self._leave(peer)
        peer.task = asyncio.create_task(self._follow(peer))

    # -- actions

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Reserve(worker, job):
                    self._call(worker, job, self._reserve(self.peers[worker], job))
                case Start(worker, job):
                    submit = self.peers[worker].client.submit(self._submit(action))
                    self._call(worker, job, submit)
                case AbortAttempt():
                    self._spawn(self._forget(action))
                case EmitToken(rid, str() as reason):
                    self._spawn(self._finish(rid, reason))
                case EmitToken(rid, int() as token, logprobs) if (
                    client := self._clients.get(rid)
                ):
                    waited_s = client.request.job.waited_s
                    client.inbox.put_nowait(
                        TokenOutput(token, None, client.kv, logprobs, waited_s)
                    )
                case EmitToken(rid, DisaggError() as error) if (
                    client := self._clients.get(rid)
                ):
                    client.inbox.put_nowait(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _call(self, worker: str, job: Job, call: Coroutine[Any, Any, None]) -> None:
        """Begin something at a worker; whatever goes wrong is told to the rules."""

        async def run() -> None:
            try:
                await call
            except Exception as failure:
                error = as_error(failure, f"starting {job.name} at {worker}")
                event = TokenEvent(job.rid, job.attempt, 0, error=error)
                self._act(self.dispatch.hear(worker, event, self._clock()))

        self._calls[worker, job.rid] = self._spawn(run())

    async def _reserve(self, peer: WorkerConnection, job: Job) -> None:
        grant = await peer.client.reserve(job, peer.started.epoch, self.id)
        self._act(self.dispatch.granted(peer.name, job.rid, job.attempt, grant))

    def _submit(self, start: Start) -> Submit:
        epoch = self.peers[start.worker].started.epoch
        submit = Submit(start.job, start.work, epoch, router=self.id)
        if start.decode is None or start.grant is None:
            return submit
        address, grant = self.peers[start.decode].started.address, start.grant
        return replace(
            submit, decode_address=address, decode_epoch=grant.epoch, nonce=grant.nonce
        )

    async def _finish(self, rid: str, reason: str) -> None:
        """The prefill worker's figures come by another way than the last token: wait for them."""
        if client := self._clients.get(rid):
            with suppress(TimeoutError):
                await asyncio.wait_for(client.receipt.wait(), RECEIPT_S)
            client.inbox.put_nowait(TokenOutput(None, reason, client.kv))

    async def _forget(self, action: AbortAttempt) -> None:
        """A worker that cannot be told to forget is told when it speaks again, or dies with it."""
        if call := self._calls.get((action.worker, action.rid)):
            await asyncio.wait([call])  # an abort must not overtake what it aborts
        if peer := self.peers.get(action.worker):
            try:
                await peer.client.abort(
                    action.rid, action.attempt, "the router is done with it"
                )
            except DisaggError:
                peer.unheard[action.rid] = action


def as_error(failure: Exception, what: str) -> DisaggError:
    """A DisaggError as it is; anything else is logged with its traceback and gets a name."""
    if isinstance(failure, DisaggError):
        return failure
    log.error("%s broke", what, exc_info=failure)
    return DisaggError(f"{what} broke: {type(failure).__name__}: {failure}")
