"""The router: tells workers what to do and gives clients their tokens. Rules are in `dispatch.py`.

A plain asyncio object inside the process that serves clients, with one event stream per worker
(`listener.py`). Knows no Ray, no HTTP, no text.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from disagg.config import RouterConfig
from disagg.errors import DisaggError, PeerLostError
from disagg.transfer.work import Submit, TokenEvent, WorkerStatus
from disagg.transfer.work import Work as Kind
from disagg.workers.clients import Client, Output
from disagg.workers.dispatch import Dispatch
from disagg.workers.lifecycle import (
    Abort,
    Action,
    Deliver,
    Fail,
    Finish,
    Member,
    Release,
    Start,
    Work,
)
from disagg.workers.listener import Listener
from disagg.workers.members import Peer
from disagg.workers.mishaps import as_error

TICK_S = 0.05
RECEIPT_S = 1.0  # how long a finished request waits for the receipt of its hand-off


class Router:
    """Keeps requests alive across workers and delivers every token once. Lives on one loop."""

    def __init__(
        self, config: RouterConfig | None = None, clock: Callable[[], float] = time.monotonic
    ):
        self.config = config or RouterConfig()
        self.dispatch = Dispatch(self.config.max_attempts)
        self.peers: dict[str, Peer] = {}
        self._clock = clock
        self._clients: dict[str, Client] = {}
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._closing = False

    # -- for clients

    async def generate(
        self, prompt: tuple[int, ...], params: Mapping[str, int | float | bool], codec: str
    ) -> AsyncGenerator[Output]:
        """The tokens of one request, then its end. Leaving the iteration cancels the request.

        Use it with `contextlib.aclosing`, so that leaving is noticed at once.
        """
        if self._closing:
            raise PeerLostError("the service is shutting down")
        deadline = self._clock() + self.config.deadline_s
        work = Work(uuid.uuid4().hex, prompt, params, codec, deadline)
        client = self._clients[work.rid] = Client()
        self._ticker = self._ticker or asyncio.create_task(self._tick())
        try:
            self._act(self.dispatch.submit(work, self._clock()))
            while True:
                output = await client.inbox.get()
                if isinstance(output, DisaggError):
                    raise output
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            del self._clients[work.rid]
            self._act(self.dispatch.cancel(work.rid))

    @property
    def running(self) -> int:
        """Requests that are not done."""
        return len(self.dispatch.entries)

    @property
    def ready(self) -> bool:
        """Whether there is a worker for each side of a hand-off."""
        members = self.dispatch.members.values()
        return any(m.prefills for m in members) and any(m.decodes for m in members)

    # -- for whoever runs the workers

    def add(self, peer: Peer) -> None:
        """A worker is there: follow its events, give it work."""
        listener = Listener(peer, self, self.config.silence_s, self._clock)
        self.up(peer)
        self._listeners[peer.name] = asyncio.create_task(listener.run())

    def died(self, name: str) -> None:
        """A worker is known to be dead and never comes back."""
        if listener := self._listeners.pop(name, None):
            listener.cancel()
        if self.peers.pop(name, None):
            self.down(name)

    async def status(self) -> dict[str, WorkerStatus | DisaggError]:
        """What every worker says of itself, or why it does not answer."""

        async def ask(peer: Peer) -> WorkerStatus | DisaggError:
            try:
                return await peer.client.status()
            except DisaggError as error:
                return error

        names = list(self.peers)
        answers = await asyncio.gather(*(ask(self.peers[name]) for name in names))
        return dict(zip(names, answers, strict=True))

    async def close(self, grace_s: float = 0.0) -> None:
        """Take nothing new, let requests end within the grace; then cancel them by name."""
        self._closing = True
        until = self._clock() + grace_s
        while self.running and self._clock() < until:
            await asyncio.sleep(TICK_S)
        for rid, client in self._clients.items():
            self._act(self.dispatch.cancel(rid))
            client.inbox.put_nowait(PeerLostError("the service is shutting down"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.config.silence_s)
        tasks = [*self._listeners.values(), *filter(None, [self._ticker]), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- what a listener hears

    def known(self, name: str) -> dict[str, int]:
        """rid -> tokens delivered, of what a worker may have to say."""
        return self.dispatch.known(name)

    def hear(self, name: str, events: Sequence[TokenEvent]) -> None:
        """What a worker did."""
        now = self._clock()
        for event in events:
            rid, attempt = event.rid, event.attempt
            if event.stats and (client := self._clients.get(rid)):
                client.kv = event.stats
                client.receipt.set()
            if event.error is not None:
                self._act(self.dispatch.refused(rid, attempt, event.error, now))
            if event.token is not None:
                said = self.dispatch.token(name, rid, attempt, event.index, event.token, now)
                self._act(said)
            if event.finish_reason:
                count, reason = event.index + 1, event.finish_reason
                self._act(self.dispatch.finished(rid, attempt, count, reason, now))

    def up(self, peer: Peer) -> None:
        """A worker takes part, for the first time or again."""
        self.peers[peer.name] = peer
        role = peer.started.role
        member = Member(peer.name, role.prefills, role.decodes)
        self._act(self.dispatch.worker_up(member, self._clock()))

    def down(self, name: str) -> None:
        """A worker does not answer: its work goes to others."""
        self._act(self.dispatch.worker_down(name, self._clock()))

    # -- actions

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Start):
                self._starts[action.work.rid] = self._spawn(self._start(action))
            elif isinstance(action, Deliver):
                self._tell(action.rid, token=action.token)
            elif isinstance(action, Finish):
                self._spawn(self._finish(action))
            elif isinstance(action, Fail):
                if client := self._clients.get(action.rid):
                    client.inbox.put_nowait(action.error)
            else:
                self._spawn(self._forget(action))

    def _tell(self, rid: str, token: int | None = None, finish_reason: str | None = None) -> None:
        if client := self._clients.get(rid):
            client.inbox.put_nowait(Output(token, finish_reason, client.kv))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _start(self, start: Start) -> None:
        work = start.work
        prefill, decode = self.peers[start.prefill], self.peers[start.decode]
        submit = Submit(
            rid=work.rid,
            attempt=start.attempt,
            work=Kind.REPLAY if start.emitted else Kind.PREFILL,
            epoch=prefill.started.epoch,
            prompt=work.prompt,
            emitted=start.emitted,
            codec=work.codec,
            sampling=dict(work.params),
            decode_address=decode.started.address,
            decode_epoch=decode.started.epoch,
            deadline_s=work.deadline - self._clock(),
        )
        try:
            await prefill.client.submit(submit)
        except Exception as failure:
            error = as_error(failure, f"starting attempt {start.attempt} of {work.rid}")
            self._act(self.dispatch.refused(work.rid, start.attempt, error, self._clock()))
        finally:
            if self._starts.get(work.rid) is asyncio.current_task():
                del self._starts[work.rid]

    async def _finish(self, finish: Finish) -> None:
        """The prefill worker's receipt comes by another way than the last token: wait for it."""
        if client := self._clients.get(finish.rid):
            with suppress(TimeoutError):
                async with asyncio.timeout(RECEIPT_S):
                    await client.receipt.wait()
        self._tell(finish.rid, finish_reason=finish.reason)

    async def _forget(self, action: Abort | Release) -> None:
        """Abort or release. A worker that cannot be told frees by its own deadlines."""
        if start := self._starts.get(action.rid):
            await asyncio.wait([start])  # an abort must not overtake what it aborts
        peer = self.peers.get(action.worker)
        if peer is None:
            return
        with suppress(DisaggError):
            if isinstance(action, Abort):
                await peer.client.abort(action.rid, action.attempt, "the router gave it up")
            else:
                await peer.client.acknowledge({action.rid: action.count})

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._act(self.dispatch.tick(self._clock()))
