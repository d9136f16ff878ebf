"""Both ends of a hand-off between two processes, without a model.

One end has the receiver, pool and server of a decode worker, the other the channel and sender of a
prefill worker; it also plays the router. The rate of a link is limited by a token bucket in the
sender, or by the kernel (`link.py`).
"""

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.bench import link
from disagg.bench.child import Child
from disagg.bench.inputs import SLAB_BYTES, make_prompt, slabs_for
from disagg.codecs.planning import codec_of
from disagg.engine.arena import make_pool
from disagg.errors import CapacityError
from disagg.kv.arena import Arena
from disagg.kv.page import Item
from disagg.kv.plan import Plan
from disagg.kv.state import GroupState, allocate_group
from disagg.paged.append import RecordIds
from disagg.paged.layer import LayerRecords, PromptChunk, write_prompt
from disagg.protos.v1 import worker_pb2 as pb
from disagg.transfer.channel import Channel, ChannelOptions
from disagg.transfer.control import WORKER_SERVICE, WorkerClient
from disagg.transfer.direct import DirectServer
from disagg.transfer.link import RateLimiter
from disagg.transfer.messages import Attach, Job, Role, WorkerInfo, parse
from disagg.transfer.receiver import Receiver
from disagg.transfer.records import ArenaSource, Manifest
from disagg.transfer.reservations import Admission, ReceiverPolicy, Reservations
from disagg.transfer.rpc import rpc_handlers, start_server
from disagg.transfer.security import Security
from disagg.transfer.sender import Sender
from disagg.transfer.stats import HandoffStats
from disagg.wire import FRAME_BYTES, Ticket

MODEL = "synthetic"
EPOCH = 1
DEADLINE_S = 3600.0
POLL_S = 1e-3
CPU = torch.device("cpu")
FILL_BYTE = 7  # of prompts of arbitrary bytes


class HandoffEnd:
    """Figures of the process of either end."""

    async def cpu_seconds(self) -> float:
        """Its processor time so far, user and system, all threads."""
        return time.process_time()

    async def congestion(self) -> str:
        """See `link.congestion`."""
        return link.congestion()


class ReceivingEnd(HandoffEnd):
    """The decode worker."""

    def __init__(self) -> None:
        self._admitted: list[tuple[Reservations, Admission]] = []
        self._tasks: list[asyncio.Task[object]] = []

    async def open(self, plans: Mapping[str, Plan], nbytes: int) -> None:
        """A pool, for prompts under any of these plans."""
        self._pool, arena = make_pool(nbytes, SLAB_BYTES, CPU)
        arena.fill_(0)  # no page faults later
        # nothing is kept: every prompt is sent whole, and no page is read beside
        self._policy = ReceiverPolicy(MODEL, plans.__getitem__, EPOCH, share=False)

    async def listen(self, host: str, security: Security | None = None) -> WorkerInfo:
        """A new receiver before the pool: where it is reached."""
        reservations = Reservations(
            self._policy,
            self._pool,
            lambda admission: self._admitted.append((reservations, admission)),
            lambda rid, attempt, reason: None,
        )
        receiver = Receiver(reservations)
        direct = DirectServer(receiver, security)
        direct.listen(host)

        async def reserve(data: bytes) -> bytes:
            message = parse(pb.ReserveRequest, data)
            grant = reservations.reserve(Job.from_proto(message.job), message.epoch)
            return grant.to_proto().SerializeToString()

        handlers = [
            receiver.handlers(),
            rpc_handlers(WORKER_SERVICE, {"Reserve": reserve}),
        ]
        server, address = await start_server(handlers, host, security)
        for run in (receiver.run(), direct.run(), server.wait_for_termination()):
            self._tasks.append(asyncio.ensure_future(run))
        return WorkerInfo("sink", Role.DECODE, address, EPOCH, MODEL)

    async def listen_raw(self, host: str, nbytes: int) -> int:
        """The port of a socket that reads this many bytes into memory."""
        return link.serve_raw(host, nbytes)

    async def settle(self) -> int:
        """Free the prompts that were admitted since the last call, and count them."""
        admitted, self._admitted = self._admitted, []
        for reservations, admission in admitted:
            for state in admission.groups:
                self._pool.release(list(state.ids()))
            reservations.finished(admission.job.rid, admission.job.attempt)
        self._pool.check_integrity()
        assert not self._pool.referenced_pages
        return len(admitted)


@dataclass(frozen=True)
class Way:
    """How a prompt is sent: the worker, the frames and the rate limit."""

    target: WorkerInfo
    security: Security | None = None
    direct: bool = False
    frame_bytes: int = FRAME_BYTES
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class PromptRecords:
    """A prompt's records in an arena of its own."""

    manifest: Manifest
    arena: Arena
    tensor: Tensor
    states: Sequence[GroupState]


@dataclass(frozen=True)
class Sent:
    """One prompt sent. Times on the monotonic clock of the host, in seconds.

    began_at:  start of the first layer, after reserve and attach
    seconds:   from then to the acknowledgement
    offered_s: from then to the offer of the last layer
    cpu_s:     processor time of the sending process
    """

    rid: str
    began_at: float
    seconds: float
    offered_s: float
    cpu_s: float
    stats: HandoffStats


class SendingEnd(HandoffEnd):
    """The prefill worker."""

    def __init__(self) -> None:
        self._channels: dict[Way, Channel] = {}
        self._prompts: dict[str, PromptRecords] = {}
        self._numbers = itertools.count()

    async def fill(self, spec: str, plan: Plan, tokens: int) -> None:
        """Make a prompt of arbitrary bytes."""
        pool, tensor = make_pool(slabs_for(plan, tokens) * SLAB_BYTES, SLAB_BYTES, CPU)
        tensor.fill_(FILL_BYTE)
        states = [allocate_group(group, tokens, pool) for group in plan.groups]
        manifest = Manifest(plan, tokens)
        self._prompts[spec] = PromptRecords(manifest, pool.arena, tensor, states)

    async def encode(
        self, spec: str, plan: Plan, tokens: int, threads: int = 1
    ) -> None:
        """Make up a prompt whose layers are alike, and encode them all."""
        torch.set_num_threads(threads)
        await self.fill(spec, plan, tokens)
        await asyncio.to_thread(self._encode, self._prompts[spec], lambda items: None)

    async def send(self, spec: str, way: Way, inline: bool = False) -> Sent:
        """Send a prompt that is encoded already; `inline`: encode it again, layer by layer,
        while it is sent."""
        prompt = self._prompts[spec]
        channel = self._channel(way)
        if channel.report is None:  # as workers do before the first prompt
            await channel.meet()
        job = self._job(spec, prompt.manifest.tokens)
        sender = await self._attach(prompt, channel, way.target, job)
        running = asyncio.create_task(sender.run())
        while not (sender.queue.credit or running.done()):
            await asyncio.sleep(POLL_S)  # workers attach before they compute
        cpu_began = time.process_time()
        began = time.monotonic()
        if inline:
            loop = asyncio.get_running_loop()

            def offer(items: Sequence[Item]) -> None:
                loop.call_soon_threadsafe(sender.offer, items)

            await asyncio.to_thread(self._encode, prompt, offer)
        else:
            sender.offer(prompt.manifest.items)
        offered = time.monotonic()
        sender.finish(first_token=1)
        stats = await running
        return Sent(
            rid=job.rid,
            began_at=began,
            seconds=time.monotonic() - began,
            offered_s=offered - began,
            cpu_s=time.process_time() - cpu_began,
            stats=stats,
        )

    async def send_raw(self, spec: str, host: str, port: int) -> Sent:
        """Send as many bytes of the arena over a socket."""
        prompt = self._prompts[spec]
        data = prompt.arena.read(0, prompt.manifest.total_bytes)
        cpu_began = time.process_time()
        began = time.monotonic()
        count = await asyncio.to_thread(link.send_raw, host, port, data)
        assert count == len(data)
        return Sent(
            rid="",
            began_at=began,
            seconds=time.monotonic() - began,
            offered_s=0.0,
            cpu_s=time.process_time() - cpu_began,
            stats=HandoffStats("", 0, 0, 0),
        )

    def _channel(self, way: Way) -> Channel:
        if way not in self._channels:
            pace = None
            if way.bytes_per_s:
                pace = RateLimiter(way.bytes_per_s, way.frame_bytes)
            options = ChannelOptions(way.frame_bytes, pace=pace, direct=way.direct)
            self._channels[way] = Channel(way.target.address, way.security, options)
        return self._channels[way]

    def _job(self, spec: str, tokens: int) -> Job:
        """A job that ends when it is admitted and shares no prefix with others."""
        number = next(self._numbers)
        beginning = (number % 100, number // 100 % 100, number // 10000)
        prompt = (*beginning, *[1] * tokens)[:tokens]
        return Job(str(number), 0, prompt, sampling={"max_tokens": 1}, codec=spec)

    async def _attach(
        self, prompt: PromptRecords, channel: Channel, target: WorkerInfo, job: Job
    ) -> Sender:
        """Reserve memory for a prompt; its sender."""
        plan, tokens = prompt.manifest.plan, prompt.manifest.tokens
        grant = await WorkerClient(channel.link).reserve(job, target.epoch, "")
        ticket = Ticket(grant.nonce, grant.epoch, 0)
        attach = Attach(ticket, target.model, plan.fingerprint, tokens)
        source = ArenaSource(prompt.arena, prompt.manifest, prompt.states)
        sender = Sender(channel, attach, plan, DEADLINE_S)
        sender.queue.read_from(source)
        return sender

    def _encode(
        self, prompt: PromptRecords, offer: Callable[[Sequence[Item]], object]
    ) -> None:
        tokens, plan = prompt.manifest.tokens, prompt.manifest.plan
        for layer, index in enumerate(plan.group_of):
            group = plan.groups[index]
            keys_values = make_prompt(tokens, group.heads, group.head_dim)  # cached
            written = write_prompt(
                codec_of(group),
                LayerRecords(group, layer, prompt.tensor),
                RecordIds.of(prompt.states[index]),
                PromptChunk(keys_values.k, keys_values.v, total=tokens),
            )
            for records in written:
                offer([Item(records.kind, index, layer, i) for i in records.indices])


@dataclass(frozen=True)
class Pair:
    """Two processes that are linked: by the kernel, or by loopback."""

    sender: Child
    receiver: Child
    netns: bool

    @property
    def host(self) -> str:
        return link.HOSTS[1] if self.netns else link.LOOPBACK

    def limit(self, gbps: float) -> None:
        """Set the rate of a link of the kernel."""
        if self.netns:
            link.limit([self.sender.pid, self.receiver.pid], gbps)

    def send(self, spec: str, way: Way, inline: bool = False) -> Sent:
        """A prompt by `SendingEnd.send`, which must have arrived."""
        sent: Sent = self.sender.ask("send", spec, way, inline)
        assert self.receiver.ask("settle") == 1
        return sent


@contextmanager
def start_pair(netns: bool, plans: Mapping[str, Plan], nbytes: int) -> Iterator[Pair]:
    """Both ends; the receiver's pool has this many bytes for prompts under these plans."""
    if netns:
        link.check_available()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > memory:
        raise CapacityError(
            f"prompts want a pool of {nbytes:,} bytes; this host has {memory:,}"
        )
    with ExitStack() as stack:
        sender = stack.enter_context(Child(SendingEnd, netns))
        receiver = stack.enter_context(Child(ReceivingEnd, netns))
        sender.ask("cpu_seconds")  # once it answers it has its namespace
        receiver.ask("open", plans, nbytes)
        if netns:
            link.join([sender.pid, receiver.pid])
        yield Pair(sender, receiver, netns)
