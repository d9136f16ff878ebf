"""The two ends of hand-offs as processes: a prefill worker and a decode worker without a model.

Receiver, pool and server of the sink are the ones that serve, and so are channel and sender of the
source, which is the router too. Its prompts are made up: arbitrary bytes, or one synthetic layer
encoded again for every layer of the model. What a layer's computation would take is left out.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from disagg.bench.inputs import SLAB_BYTES, make_prompt, slabs_for
from disagg.bench.link import congestion, send_raw, serve_raw
from disagg.codecs.layer import write_prompt
from disagg.codecs.planning import codec_of
from disagg.engine.arena import make_pool
from disagg.metrics import HandoffStats
from disagg.plan import Plan
from disagg.pool import Arena
from disagg.protos.v1 import worker_pb2 as pb
from disagg.state import GroupState, allocate_group
from disagg.transfer.channel import Channel, ChannelOptions
from disagg.transfer.control import WORKER_SERVICE, WorkerClient
from disagg.transfer.direct import DirectServer
from disagg.transfer.link import Pace
from disagg.transfer.messages import Attach, Job, Role, parse
from disagg.transfer.receiver import Receiver
from disagg.transfer.records import ArenaSource, Checklist
from disagg.transfer.reservations import Admission, Terms
from disagg.transfer.rpc import rpc_handlers, start_server
from disagg.transfer.security import Security
from disagg.transfer.sender import Sender
from disagg.wire import FRAME_BYTES, Item, Ticket
from disagg.workers.dispatch import Started

MODEL, EPOCH = "synthetic", 1
DEADLINE_S = 3600.0
CPU = torch.device("cpu")


class End:
    """What both ends tell of their process."""

    async def cpu_seconds(self) -> float:
        """Its processor time so far, user and system, all threads."""
        return time.process_time()

    async def congestion(self) -> str:
        """See `link.congestion`."""
        return congestion()


class ReceivingEnd(End):
    """What a benchmark asks of the decode worker; a prompt that is complete is freed at once."""

    def __init__(self) -> None:
        self._admitted = 0
        self._tasks: list[asyncio.Task[object]] = []

    async def open(self, plans: Mapping[str, Plan], nbytes: int) -> None:
        """A pool, for prompts under any of these plans."""
        self._pool, arena = make_pool(nbytes, SLAB_BYTES, CPU)
        arena.fill_(0)  # no page faults later
        # nothing is kept: every prompt is sent whole, and no page is read beside
        self._terms = Terms(MODEL, plans.__getitem__, EPOCH, share=False)

    async def listen(self, host: str, security: Security | None = None) -> Started:
        """A new receiver before the pool: where it is reached."""
        receiver = Receiver(
            self._terms,
            self._pool,
            lambda admission: self._admit(receiver, admission),
            lambda rid, attempt, reason: None,
        )
        direct = DirectServer(receiver, security)
        direct.listen(host)

        async def reserve(data: bytes) -> bytes:
            message = parse(pb.ReserveRequest, data)
            grant = receiver.reserve(Job.from_message(message.job), message.epoch)
            return grant.to_message().SerializeToString()

        handlers = [receiver.handlers(), rpc_handlers(WORKER_SERVICE, {"Reserve": reserve})]
        server, address = await start_server(handlers, host, security)
        runs = receiver.run(), direct.run(), server.wait_for_termination()
        self._tasks += map(asyncio.ensure_future, runs)
        return Started("sink", Role.DECODE, address, EPOCH, MODEL)

    async def listen_raw(self, host: str, nbytes: int) -> int:
        """The port of a socket that reads so many bytes into memory."""
        return serve_raw(host, nbytes)

    async def settle(self) -> int:
        """How many prompts were admitted since the last time; all are freed by then."""
        count, self._admitted = self._admitted, 0
        self._pool.check_integrity()
        assert not self._pool.referenced_pages
        return count

    def _admit(self, receiver: Receiver, admission: Admission) -> None:
        def free() -> None:
            for state in admission.groups:
                self._pool.release(list(state.ids()))
            receiver.finished(admission.job.rid, admission.job.attempt)

        self._admitted += 1
        asyncio.get_running_loop().call_soon(free)


@dataclass(frozen=True)
class Way:
    """How a prompt is sent: to whom, in which frames, and how fast at most."""

    target: Started
    security: Security | None = None
    direct: bool = False
    frame_bytes: int = FRAME_BYTES
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class PromptRecords:
    """A prompt's records in an arena of its own."""

    checklist: Checklist
    arena: Arena
    tensor: Tensor
    states: Sequence[GroupState]


@dataclass(frozen=True)
class Sent:
    """One prompt sent. Times on the monotonic clock of the host, in seconds.

    began_at:  when its first layer had its turn; it was reserved and attached by then
    seconds:   from then to the acknowledgement · offered_s: until the last layer was offered
    cpu_s:     processor time of the sending process
    """

    rid: str
    began_at: float
    seconds: float
    offered_s: float
    cpu_s: float
    stats: HandoffStats


class SendingEnd(End):
    """What a benchmark asks of the prefill worker."""

    def __init__(self) -> None:
        self._channels: dict[Way, Channel] = {}
        self._prompts: dict[str, PromptRecords] = {}
        self._numbers = itertools.count()

    async def generate(self, heads: int, tokens: int, head_dim: int, threads: int = 1) -> None:
        """Make up K and V of one layer, fp16; forget the prompts of before."""
        torch.set_num_threads(threads)
        made = await asyncio.to_thread(make_prompt, tokens, heads, head_dim)
        self._layer = made.k, made.v
        self._prompts.clear()

    async def fill(self, spec: str, plan: Plan, tokens: int) -> None:
        """Make a prompt of arbitrary bytes."""
        pool, tensor = make_pool(slabs_for(plan, tokens) * SLAB_BYTES, SLAB_BYTES, CPU)
        tensor.fill_(7)
        states = [allocate_group(group, tokens, pool) for group in plan.groups]
        self._prompts[spec] = PromptRecords(Checklist(plan, tokens), pool.arena, tensor, states)

    async def encode(self, spec: str, plan: Plan, tokens: int) -> None:
        """Make a prompt of all layers, encoded."""
        await self.fill(spec, plan, tokens)
        await asyncio.to_thread(self._encode, self._prompts[spec], lambda items: None)

    async def send(self, spec: str, way: Way, inline: bool = False) -> Sent:
        """Send a prompt whose bytes are there; or encode it again, layer by layer, meanwhile."""
        prompt, channel = self._prompts[spec], self._channel(way)
        plan, tokens = prompt.checklist.plan, prompt.checklist.tokens
        job = self._job(spec, tokens)
        grant = await WorkerClient(channel.link).reserve(job, way.target.epoch, "")
        ticket = Ticket(grant.nonce, grant.epoch, 0)
        attach = Attach(ticket, way.target.model, plan.fingerprint, tokens)
        source = ArenaSource(prompt.arena, prompt.checklist, prompt.states)
        sender = Sender(channel, attach, plan, source, DEADLINE_S)
        running = asyncio.create_task(sender.run())
        while not (sender.outbox.credit or running.done()):
            await asyncio.sleep(1e-3)  # workers attach before they compute
        cpu, began = time.process_time(), time.monotonic()
        if inline:
            loop = asyncio.get_running_loop()
            await asyncio.to_thread(
                self._encode, prompt, lambda items: loop.call_soon_threadsafe(sender.offer, items)
            )
        else:
            sender.offer(prompt.checklist.items)
        offered = time.monotonic()
        sender.finish(first_token=1)
        stats = await running
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
        return Sent(job.rid, began, seconds, offered - began, cpu_s, stats)

    async def send_for(self, seconds: float, spec: str, way: Way) -> tuple[float, float, int]:
        """Send a prompt again and again: when that began and ended, and the bytes of records."""
        began, nbytes = time.monotonic(), 0
        while time.monotonic() < began + seconds:
            nbytes += (await self.send(spec, way)).stats.payload_bytes
        return began, time.monotonic(), nbytes

    async def send_raw(self, spec: str, host: str, port: int) -> Sent:
        """Send as many bytes of the arena over a socket."""
        prompt = self._prompts[spec]
        data = prompt.arena.read(0, prompt.checklist.total_bytes)
        cpu, began = time.process_time(), time.monotonic()
        assert await asyncio.to_thread(send_raw, host, port, data) == len(data)
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
        return Sent("", began, seconds, 0.0, cpu_s, HandoffStats("", 0, 0, 0))

    def _channel(self, way: Way) -> Channel:
        if way not in self._channels:
            pace = Pace(way.bytes_per_s, way.frame_bytes) if way.bytes_per_s else None
            options = ChannelOptions(way.frame_bytes, pace=pace, direct=way.direct)
            self._channels[way] = Channel(way.target.address, way.security, options)
        return self._channels[way]

    def _job(self, spec: str, tokens: int) -> Job:
        """One that is over when it is admitted, and begins as no other does: no page is known."""
        number = next(self._numbers)
        prompt = (number % 100, number // 100 % 100, number // 10000, *[1] * tokens)[:tokens]
        return Job(str(number), 0, prompt, sampling={"max_tokens": 1}, codec=spec)

    def _encode(self, prompt: PromptRecords, ready: Callable[[Sequence[Item]], object]) -> None:
        checklist, arena, (k, v) = prompt.checklist, prompt.tensor, self._layer
        for layer, index in enumerate(checklist.plan.group_of):
            group, state = checklist.plan.groups[index], prompt.states[index]
            codec = codec_of(group)
            for x in write_prompt(codec, group, state, layer, arena, k, v, 0, checklist.tokens):
                ready(checklist.select(layer, x.kind, x.first, x.count))
