"""The router: performs what a `RequestTable` decides, and follows the events of the workers.

    stream open ──► steps ──► broken: open again from the tokens delivered ──► ...
                                 │ silent or stuck: down ──► reached again: fence, up

A plain asyncio object in the process that serves clients, with one event stream per worker. A
broken stream is opened again, and nothing else changes. The requests of a worker that is silent for
too long, or whose engine hangs, go to others, so it must drop them (fence) before it gets work
again. Knows no Ray, no HTTP, no text.
"""

import asyncio
import logging
import math
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

from disagg.config import RouterConfig, TransferConfig
from disagg.errors import (
    ConfigError,
    DisaggError,
    QueueFullError,
    RequestError,
    StoppingError,
    WireError,
)
from disagg.router.actions import (
    AbortAttempt,
    Action,
    FailRequest,
    Reserve,
    Start,
    TokenOutput,
)
from disagg.router.contract import ANY_WORKERS, RouterReport, Submission
from disagg.router.failures import as_error
from disagg.router.fair_share import may_wait
from disagg.router.inbox import Deliver, outputs_of
from disagg.router.liveness import Liveness, Pulse, liveness_of
from disagg.router.request_state import RequestState, token_array
from disagg.router.requests import RequestTable
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
MAX_LISTED = 100  # requests that a report describes
REOPEN_S = 0.1  # pause before a broken event stream is opened again
ACKNOWLEDGE_S = 1.0  # how often a worker is told which tokens were delivered
RECEIPT_S = 1.0  # how long a finished request waits for the figures of its hand-off
log = logging.getLogger(__name__)


@dataclass(eq=False)
class WorkerConnection:
    """A worker that the router follows. `client`: a `WorkerClient`, or the worker itself.

    pulse:     its signs of life
    opened_at: when its stream of events was last opened because of a silence
    fallen:    whether it was silent or stuck: it has to be fenced before it gets work again
    unaborted: aborts that did not reach it, by rid; sent again with its next step
    unacknowledged: rids with tokens that it does not know to be delivered
    acknowledged_at: when it was last told
    trouble:   why it refuses to be followed, as last logged
    """

    info: WorkerInfo
    client: WorkerHandler
    pulse: Pulse = field(default_factory=lambda: Pulse(0.0))
    opened_at: float = -math.inf
    fallen: bool = False
    unaborted: dict[str, AbortAttempt] = field(default_factory=dict)
    unacknowledged: set[str] = field(default_factory=set)
    acknowledged_at: float = -math.inf
    trouble: str = ""
    task: asyncio.Task[None] = field(init=False)

    @property
    def name(self) -> str:
        return self.info.name


@dataclass
class PendingStream:
    """The tokens on their way to a client.

    kv:      figures of the hand-off
    receipt: set when these have arrived
    """

    deliver: Deliver
    request: RequestState
    kv: Mapping[str, Any] = field(default_factory=dict)
    receipt: asyncio.Event = field(default_factory=asyncio.Event)


class Router:
    """Keeps requests alive across workers and delivers every token once. Lives on one loop.

    lease_s: how long workers keep their work for a router that they cannot reach
    """

    def __init__(
        self,
        config: RouterConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        lease_s: float = TransferConfig.lease_s,
    ):
        self.config = config or RouterConfig()
        self.lease_s = lease_s
        self.id = uuid.uuid4().hex  # a worker follows one router at a time
        self.table = RequestTable(self.config)
        self.peers: dict[str, WorkerConnection] = {}
        self._clock = clock
        self._ready_at = clock()  # when it was last ready; at first, when it began
        self._streams: dict[str, PendingStream] = {}
        # (worker, rid) -> the call that begins the request there, until it returns
        self._calls = WeakValueDictionary[tuple[str, str], asyncio.Task[None]]()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        # of all hand-offs; states of hybrid models are a part of what is sent
        self._bytes = Counter(fp16_bytes=0, wire_bytes=0, wire_state_bytes=0)
        self._closing = False
        self._is_placing = False  # `_place` will run in the next turn of the loop

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
        """The tokens of one request, then its end. Closing the generator cancels the request.

        at, client, prediction, request_id: as in `Submission`

        Use it with `contextlib.aclosing`, so that it is closed at once when the client leaves.
        """
        submission = Submission(
            prompt,
            params,
            codec,
            at,
            client=client,
            prediction=prediction,
            request_id=request_id,
        )
        return outputs_of(partial(self.submit, submission), self.cancel)

    def submit(self, submission: Submission, deliver: Deliver) -> str:
        """Begin a request, and call `deliver` with each token and its end; the router's name of it.

        StoppingError and QueueFullError if it is refused, RequestError for wrong token ids.
        `cancel` has to follow, also at its end.
        """
        if self._closing:
            raise StoppingError("the service is shutting down")
        client = submission.client
        limit = self.config.max_queue
        waiting = self.table.waiting
        if not (submission.resumed or may_wait(waiting, client, limit)):
            raise QueueFullError(
                f"{self.waiting} requests wait, {limit} may; try again later"
            )
        prompt = token_array(submission.prompt)
        rid = f"{self.id}-{uuid.uuid4().hex}"
        self._ensure_ticker()
        job = Job(
            rid,
            0,
            prompt,
            emitted=submission.emitted,
            sampling=dict(submission.params),
            codec=submission.codec,
            waited_s=submission.waited_s,
            prediction=token_array(submission.prediction),
            request_id=submission.request_id,
        )
        actions = self.table.submit(job, self._clock(), submission.at, client)
        self._streams[rid] = PendingStream(deliver, self.table.requests[rid])
        self._perform(actions)
        return rid

    def codec_of(self, rid: str) -> str:
        """The codec of a request since an attempt began, which a resumed one has to keep."""
        return self._streams[rid].request.job.codec

    def cancel(self, rid: str) -> None:
        """The client of a request is gone, or has enough, or its end."""
        del self._streams[rid]
        self._perform(self.table.cancel(rid, self._clock()))

    @property
    def running(self) -> int:
        """Number of requests that have not ended."""
        return len(self.table.requests)

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return self.table.num_queued

    @property
    def ready(self) -> bool:
        """Whether new requests are taken, and there are workers that get to them."""
        return not self._closing and self.table.ready(self._clock())

    def lacks(self, expected: Mapping[str, int]) -> str:
        """Why the router is not ready, in words. expected: number of workers by role."""
        now = self._clock()
        available = Counter[str](
            worker.info.role
            for worker in self.table.workers.values()
            if now >= worker.open_until
        )
        parts = [
            f"{role} {available[role]} of {number}" for role, number in expected.items()
        ]
        if self.waiting:
            parts.append(f"{self.waiting} queued")
        return f"{', '.join(parts)}; for {now - self._ready_at:.0f} s"

    # -- for the owner of the workers

    def configure(self, config: RouterConfig) -> None:
        """Use these limits from now on; the deadlines of running requests stay."""
        self.config = config
        self.table.configure(config)

    def add(self, peer: WorkerConnection) -> None:
        """Follow a new worker and give it work."""
        self._ensure_ticker()
        self.peers[peer.name] = peer
        peer.pulse = Pulse(self._clock())
        peer.task = asyncio.create_task(self._follow(peer))

    def silent_s(self) -> dict[str, float]:
        """By worker, seconds since it was last heard, or since its hung engine last made a step.

        0 for workers that are alive, and for those that answer but refuse this router.
        """
        now = self._clock()
        return {name: self._silent_s(peer, now) for name, peer in self.peers.items()}

    def _silent_s(self, peer: WorkerConnection, now: float) -> float:
        silent_s = now - peer.pulse.heard_at
        if peer.trouble:
            return 0.0
        if silent_s >= self.config.silence_s:
            return silent_s
        stuck_since = peer.pulse.stuck_since
        return 0.0 if stuck_since is None else now - stuck_since

    def died(self, name: str) -> None:
        """A worker is dead and never comes back."""
        peer = self.peers.pop(name, None)
        if peer is not None:
            peer.task.cancel()
            self._leave(peer, fenced=False)

    def summary(self) -> dict[str, int]:
        """Requests that run and wait, moves, retries, and bytes of all hand-offs."""
        return {
            "requests": self.running,
            "queued": self.waiting,
            "moved": self.table.moves,
            "retried": self.table.retries,
            **self._bytes,
        }

    async def status(self) -> dict[str, WorkerStatus | DisaggError]:
        """The status of every worker, or why it does not answer."""

        async def ask(peer: WorkerConnection) -> WorkerStatus | DisaggError:
            try:
                return await peer.client.status()
            except DisaggError as error:
                return error

        peers = dict(self.peers)
        answers = await asyncio.gather(*map(ask, peers.values()))
        return dict(zip(peers, answers, strict=True))

    async def report(self) -> RouterReport:
        """The state of the router and of every worker."""
        answers = await self.status()
        workers = [
            _described(peer, answers.get(name)) for name, peer in self.peers.items()
        ]
        oldest = islice(self.table.requests.values(), MAX_LISTED)
        now = self._clock()
        running = [request.describe(now) for request in oldest]
        return RouterReport(self.summary(), workers, running)

    async def close(self, grace_s: float = 0.0) -> None:
        """Refuse new requests, wait for running ones up to `grace_s`, then cancel them.

        Another call meanwhile may cancel them earlier.
        """
        self._closing = True
        until = self._clock() + grace_s
        while self.running and self._clock() < until:
            await asyncio.sleep(TICK_S)
        for rid, stream in list(self._streams.items()):
            if rid not in self.table.requests:
                continue  # it has ended, and only waits for its figures
            self._perform(self.table.cancel(rid, self._clock()))
            error = StoppingError("the service is shutting down")
            self._deliver_error(stream, error)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.config.silence_s)
        tasks = [peer.task for peer in self.peers.values()]
        if self._ticker is not None:
            tasks.append(self._ticker)
        tasks.extend(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- following workers

    async def _follow(self, peer: WorkerConnection) -> None:
        """Read the event stream of one worker; open it again when it breaks."""
        while True:
            try:
                await self._meet(peer)
                num_emitted = self.table.num_emitted(peer.name)
                steps = peer.client.events(num_emitted, self.id)
                async with aclosing(steps):  # type: ignore[type-var]
                    async for step in steps:
                        self._on_step(peer, step)
            except (ConfigError, RequestError, WireError) as error:
                if peer.trouble != str(error):
                    peer.trouble = str(error)
                    log.warning("%s cannot be followed: %s", peer.name, error)
            except DisaggError as error:
                peer.trouble = ""
                log.debug("the events of %s broke: %s", peer.name, error)
            except Exception:
                log.exception("following %s broke", peer.name)
            await asyncio.sleep(REOPEN_S)

    async def _meet(self, peer: WorkerConnection) -> None:
        """Ask a worker for its epoch; fence one that was silent or stuck."""
        epoch = (await peer.client.status()).epoch
        if peer.fallen:
            epoch += 1
            await peer.client.fence(epoch, self.id)
            peer.fallen = False
            peer.unaborted.clear()
        if epoch != peer.info.epoch:
            # some router has fenced it, so it holds none of our requests
            peer.info = replace(peer.info, epoch=epoch)
            self._leave(peer)

    def _on_step(self, peer: WorkerConnection, step: StepEvents) -> None:
        """Handle the events of a step. After the first step the worker gets work."""
        now = self._clock()
        peer.trouble = ""
        peer.pulse.hear(step.load, now)
        if peer.name not in self.table.workers:
            if peer.pulse.is_in_stuck_step:
                return
            peer.pulse.rest(now)
            times_stuck = peer.pulse.times_stuck
            self._perform(self.table.worker_up(peer.info, now, times_stuck))
        if step.load.role:
            peer.info = replace(peer.info, role=step.load.role)
        unaborted = list(peer.unaborted.values())
        peer.unaborted = {}
        self._perform(unaborted)
        for event in step.events:
            try:
                self._on_event(peer, event, now)
            except Exception as failure:
                self._fail(event.rid, failure)
        self.table.update_load(peer.name, step.load)
        self._place_soon()
        if peer.unacknowledged and now >= peer.acknowledged_at + ACKNOWLEDGE_S:
            self._spawn(self._acknowledge(peer, now))

    def _on_event(self, peer: WorkerConnection, event: TokenEvent, now: float) -> None:
        if event.stats is not None:
            self._take_figures(event.rid, event.stats)
        if event.token is not None:
            peer.unacknowledged.add(event.rid)
        self._perform(self.table.on_event(peer.name, event, now))

    async def _acknowledge(self, peer: WorkerConnection, now: float) -> None:
        """Tell a worker which tokens were delivered, so that it need not keep them."""
        rids = peer.unacknowledged
        peer.unacknowledged = set()
        peer.acknowledged_at = now
        num_emitted = self.table.num_emitted(peer.name, rids)
        with suppress(DisaggError):  # the next one says so too
            if num_emitted:
                await peer.client.acknowledge(num_emitted, self.id)

    def _take_figures(self, rid: str, stats: Mapping[str, Any]) -> None:
        """Keep the figures of a hand-off for the client, and add them to the totals."""
        stream = self._streams.get(rid)
        if stream is None:
            return
        if stats.get("wire_bytes"):
            for name in self._bytes:
                self._bytes[name] += stats.get(name, 0)
        stream.kv = dict(stats)
        if stream.request.codec_reason:
            stream.kv["choice"] = stream.request.codec_reason
        stream.receipt.set()

    def _leave(self, peer: WorkerConnection, fenced: bool = True) -> None:
        """Take a worker out: its requests go to others."""
        self._perform(self.table.worker_down(peer.name, self._clock(), fenced))

    def _ensure_ticker(self) -> None:
        if self._ticker is None:
            self._ticker = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        """Drop silent workers, and give the table its ticks.

        Time by which this loop was late does not count as a silence of workers.
        """
        last = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            late_s = now - last - TICK_S
            last = now
            if late_s > TICK_S:
                for peer in self.peers.values():
                    peer.pulse.delay(late_s)
            # deadlines of requests are kept even if checking workers fails
            for part in (self._check_peers, self._tick_table):
                try:
                    part(now)
                except Exception:
                    log.exception("a tick of the router broke")

    def _tick_table(self, now: float) -> None:
        self._perform(self.table.tick(now))
        if self.ready:
            self._ready_at = now

    def _check_peers(self, now: float) -> None:
        """Drop the workers that are silent or stuck, and open streams again."""
        decoding = self.table.decoding_workers()
        members = [x for x in self.peers.values() if x.name in self.table.workers]
        pulses = [peer.pulse for peer in members]
        for peer in members:
            if peer.name not in decoding:
                peer.pulse.rest(now)
            liveness = liveness_of(peer.pulse, pulses, self.config, self.lease_s, now)
            if liveness in (Liveness.SILENT, Liveness.STUCK):
                self._drop(peer, liveness, now)
        for peer in self.peers.values():
            last_sign_at = max(peer.pulse.heard_at, peer.opened_at)
            if now - last_sign_at >= self.config.silence_s:
                self._reopen(peer, now)

    def _drop(self, peer: WorkerConnection, liveness: Liveness, now: float) -> None:
        """Take a silent or stuck worker out; it is fenced when it can be reached."""
        if liveness is Liveness.STUCK:
            peer.pulse.note_stuck()
        silent_s = self._silent_s(peer, now)
        log.warning("%s is %s since %.1f s", peer.name, liveness, silent_s)
        peer.fallen = True
        self._leave(peer)
        self._reopen(peer, now)

    def _reopen(self, peer: WorkerConnection, now: float) -> None:
        """Open the stream of a worker again: this one may never break."""
        peer.opened_at = now
        peer.task.cancel()
        peer.task = asyncio.create_task(self._follow(peer))

    # -- performing actions

    def _perform(self, actions: Sequence[Action]) -> None:
        """Perform actions; a request whose action raises fails, and the others go on."""
        for action in actions:
            try:
                self._perform_one(action)
            except Exception as failure:
                self._fail(action.rid, failure)
        self._place_soon()

    def _perform_one(self, action: Action) -> None:
        match action:
            case TokenOutput():
                self._send_output(action)
            case Reserve(worker, job):
                self._call(worker, job, self._reserve(self.peers[worker], job))
            case Start(worker, job):
                submit = self._submit_of(action)
                call = self.peers[worker].client.submit(submit)
                self._call(worker, job, call)
            case AbortAttempt():
                self._spawn(self._abort(action))
            case FailRequest(rid, error):
                if rid in self._streams:
                    self._deliver_error(self._streams[rid], error)

    def _fail(self, rid: str, failure: Exception) -> None:
        """End a request after an exception, whether or not its answer is complete."""
        error = as_error(failure, f"request {rid}")
        actions = self.table.fail(rid, error, self._clock())
        self._perform(actions or [FailRequest(rid, error)])

    def _deliver_error(self, stream: PendingStream, error: DisaggError) -> None:
        """Deliver the error that ends a request; never raises."""
        try:
            stream.deliver(error)
        except Exception:
            log.exception("request %s cannot be failed", stream.request.rid)

    def _place_soon(self) -> None:
        """Place requests once for all events of this turn of the loop."""
        if self.table.needs_placing and not self._is_placing:
            self._is_placing = True
            asyncio.get_running_loop().call_soon(self._place)

    def _place(self) -> None:
        self._is_placing = False
        try:
            self._perform(self.table.place(self._clock()))
        except Exception:
            log.exception("placing requests broke")

    def _send_output(self, output: TokenOutput) -> None:
        """Send a token to its client at once, the end after the figures of the hand-off."""
        if output.finish_reason is not None:
            self._spawn(self._send_end(output))
            return
        stream = self._streams.get(output.rid)
        if stream is not None:
            output.kv = stream.kv
            output.waited_s = stream.request.job.waited_s
            stream.deliver(output)

    async def _send_end(self, end: TokenOutput) -> None:
        """Wait for the figures: another worker sends them than the one that ends the answer."""
        stream = self._streams.get(end.rid)
        if stream is None:
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(stream.receipt.wait(), RECEIPT_S)
        end.kv = stream.kv
        try:
            stream.deliver(end)
        except Exception as failure:
            self._fail(end.rid, failure)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _call(self, worker: str, job: Job, call: Coroutine[Any, Any, None]) -> None:
        """Begin a job at a worker; an error counts as an event of that worker."""

        async def run() -> None:
            try:
                await call
            except Exception as failure:
                error = as_error(failure, f"starting {job.name} at {worker}")
                event = TokenEvent(job.rid, job.attempt, 0, error=error)
                self._perform(self.table.on_event(worker, event, self._clock()))

        self._calls[worker, job.rid] = self._spawn(run())

    async def _reserve(self, peer: WorkerConnection, job: Job) -> None:
        grant = await peer.client.reserve(job, peer.info.epoch, self.id)
        self._perform(self.table.on_grant(peer.name, job.rid, job.attempt, grant))

    def _submit_of(self, start: Start) -> Submit:
        epoch = self.peers[start.worker].info.epoch
        if start.decode is None or start.grant is None:
            return Submit(start.job, start.work, epoch, router=self.id)
        return Submit(
            start.job,
            start.work,
            epoch,
            decode_address=self.peers[start.decode].info.address,
            decode_epoch=start.grant.epoch,
            nonce=start.grant.nonce,
            router=self.id,
        )

    async def _abort(self, action: AbortAttempt) -> None:
        """Abort an attempt; if the worker cannot be reached, again with its next step."""
        call = self._calls.get((action.worker, action.rid))
        if call is not None:
            await asyncio.wait([call])  # an abort must not overtake what it aborts
        peer = self.peers.get(action.worker)
        if peer is not None:
            reason = "the router is done with it"
            try:
                await peer.client.abort(action.rid, action.attempt, reason)
            except DisaggError:
                peer.unaborted[action.rid] = action


def _described(
    peer: WorkerConnection, answer: WorkerStatus | DisaggError | None
) -> dict[str, Any]:
    """A worker, as `RouterReport` has it."""
    worker: dict[str, Any] = {
        "name": peer.name,
        "role": peer.info.role.value,
        "address": peer.info.address,
    }
    if answer is None or isinstance(answer, DisaggError):
        worker["error"] = str(answer)
    else:
        worker["epoch"] = answer.epoch
        worker["gauges"] = dict(answer.gauges)
        worker.update(answer.info)
    return worker
