"""`disagg bench transfer`: what compression is worth on a link; with `--plane`, what channels are.

    disagg bench transfer --gbps 0.1 --gbps 1 --gbps 10 --plot transfer.png
    disagg bench transfer --plane --netns         loopback and links of 1, 5 and 10 Gb/s, as root

KV shaped as in Llama 3.1 8B goes from one process to another: a prefill worker and a decode worker
without a model. Receiver, pool and server of the one are those that serve, and so are channel and
sender of the other, which is the router too. A link's rate is kept by a token bucket in the sender,
or with `--netns` by the kernel.

Codecs: every prompt, realistic and made up, goes twice, with its pages ready before the clock
starts, and encoded layer by layer while it is sent. The clock ends at the acknowledgement.

Plane: one hand-off of arbitrary bytes over one stream, reserved and attached: frames of 2 MiB,
credit, digests checked at the other end, records in the pool, commit. Beside it a socket brings as
many bytes from the same memory to as much. Rounds are interleaved; figures are medians, and a ratio
is the median of the rounds' ratios, since machines have moods.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from disagg.bench import child
from disagg.bench.child import Child
from disagg.bench.inputs import SLAB_BYTES, make_prompt, shape_of, slabs_for
from disagg.bench.result import Row, result_of, table, tell
from disagg.codecs.planning import KVShape, codec_of, parse_plan
from disagg.config import DEFAULT_CODEC, SecurityConfig
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
from disagg.transfer.security import Authority, Security, protected
from disagg.transfer.sender import Sender
from disagg.transfer.stats import HandoffStats
from disagg.wire import FRAME_BYTES, Ticket

MODEL, EPOCH = "synthetic", 1
DEADLINE_S = 3600.0
CPU = torch.device("cpu")
RAW = "raw:dtype=fp16"
CODECS = (RAW, "fp8", DEFAULT_CODEC, "kivi:bits=2,group=64,residual=64")
LEAST_FRAME = 64 << 10
FRAME_S = 0.01  # of the link, that one frame takes
LONG_S = 4.0  # a cell that takes longer on its link is measured once
NOTES = "seconds until the decode worker has the prompt; no model is computed; medians of `rounds`"
PLANE_NOTES = (
    "gbps: 1e9 bits of records per second; cpu: seconds per 1e9 bytes of records"
)
COLUMNS = "codec tokens gbps pages wire_bytes seconds encode_s byte_ratio time_ratio bottleneck"


@dataclass(frozen=True)
class TransferOptions:
    """What is sent, over what and how often; `threads` are torch's, where prompts are encoded."""

    codecs: tuple[str, ...] = CODECS
    tokens: tuple[int, ...] = (8192,)
    gbps: tuple[float, ...] = (0.1, 1.0, 10.0)
    rounds: int = 3
    netns: bool = False
    threads: int = 1
    channel: str = "grpc"
    shape: KVShape = field(default_factory=shape_of)


PLANE = TransferOptions((DEFAULT_CODEC,), (16384,), (1.0, 5.0, 10.0), rounds=5)


# -- the ends


class End:
    """What both ends tell of their process."""

    async def cpu_seconds(self) -> float:
        """Its processor time so far, user and system, all threads."""
        return time.process_time()

    async def congestion(self) -> str:
        """See `child.congestion`."""
        return child.congestion()


class ReceivingEnd(End):
    """What a benchmark asks of the decode worker."""

    def __init__(self) -> None:
        self._admitted: list[tuple[Reservations, Admission]] = []
        self._tasks: list[asyncio.Task[object]] = []

    async def open(self, plans: Mapping[str, Plan], nbytes: int) -> None:
        """A pool, for prompts under any of these plans."""
        self._pool, arena = make_pool(nbytes, SLAB_BYTES, CPU)
        arena.fill_(0)  # no page faults later
        # nothing is kept: every prompt is sent whole, and no page is read beside
        self._terms = ReceiverPolicy(MODEL, plans.__getitem__, EPOCH, share=False)

    async def listen(self, host: str, security: Security | None = None) -> WorkerInfo:
        """A new receiver before the pool: where it is reached."""
        reservations = Reservations(
            self._terms,
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
        runs = receiver.run(), direct.run(), server.wait_for_termination()
        self._tasks += map(asyncio.ensure_future, runs)
        return WorkerInfo("sink", Role.DECODE, address, EPOCH, MODEL)

    async def listen_raw(self, host: str, nbytes: int) -> int:
        """The port of a socket that reads so many bytes into memory."""
        return child.serve_raw(host, nbytes)

    async def settle(self) -> int:
        """How many prompts were admitted since the last time; they are freed."""
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
    """How a prompt is sent: to whom, in which frames, and how fast at most."""

    target: WorkerInfo
    security: Security | None = None
    direct: bool = False
    frame_bytes: int = FRAME_BYTES
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class PromptRecords:
    """A prompt's records in an arena of its own."""

    checklist: Manifest
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

    async def fill(self, spec: str, plan: Plan, tokens: int) -> None:
        """Make a prompt of arbitrary bytes."""
        pool, tensor = make_pool(slabs_for(plan, tokens) * SLAB_BYTES, SLAB_BYTES, CPU)
        tensor.fill_(7)
        states = [allocate_group(group, tokens, pool) for group in plan.groups]
        self._prompts[spec] = PromptRecords(
            Manifest(plan, tokens), pool.arena, tensor, states
        )

    async def encode(
        self, spec: str, plan: Plan, tokens: int, threads: int = 1
    ) -> None:
        """Make up a prompt whose layers are alike, and encode them all."""
        torch.set_num_threads(threads)
        await self.fill(spec, plan, tokens)
        await asyncio.to_thread(self._encode, self._prompts[spec], lambda items: None)

    async def send(self, spec: str, way: Way, inline: bool = False) -> Sent:
        """Send a prompt whose bytes are there; or encode it again, layer by layer, meanwhile."""
        prompt, channel = self._prompts[spec], self._channel(way)
        if channel.report is None:  # as workers do before the first prompt
            await channel.meet()
        plan, tokens = prompt.checklist.plan, prompt.checklist.tokens
        job = self._job(spec, tokens)
        grant = await WorkerClient(channel.link).reserve(job, way.target.epoch, "")
        ticket = Ticket(grant.nonce, grant.epoch, 0)
        attach = Attach(ticket, way.target.model, plan.fingerprint, tokens)
        source = ArenaSource(prompt.arena, prompt.checklist, prompt.states)
        sender = Sender(channel, attach, plan, DEADLINE_S)
        sender.queue.read_from(source)
        running = asyncio.create_task(sender.run())
        while not (sender.queue.credit or running.done()):
            await asyncio.sleep(1e-3)  # workers attach before they compute
        cpu, began = time.process_time(), time.monotonic()
        if inline:
            loop = asyncio.get_running_loop()
            await asyncio.to_thread(
                self._encode,
                prompt,
                lambda items: loop.call_soon_threadsafe(sender.offer, items),
            )
        else:
            sender.offer(prompt.checklist.items)
        offered = time.monotonic()
        sender.finish(first_token=1)
        stats = await running
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
        return Sent(job.rid, began, seconds, offered - began, cpu_s, stats)

    async def send_raw(self, spec: str, host: str, port: int) -> Sent:
        """Send as many bytes of the arena over a socket."""
        prompt = self._prompts[spec]
        data = prompt.arena.read(0, prompt.checklist.total_bytes)
        cpu, began = time.process_time(), time.monotonic()
        assert await asyncio.to_thread(child.send_raw, host, port, data) == len(data)
        seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
        return Sent("", began, seconds, 0.0, cpu_s, HandoffStats("", 0, 0, 0))

    def _channel(self, way: Way) -> Channel:
        if way not in self._channels:
            pace = (
                RateLimiter(way.bytes_per_s, way.frame_bytes)
                if way.bytes_per_s
                else None
            )
            options = ChannelOptions(way.frame_bytes, pace=pace, direct=way.direct)
            self._channels[way] = Channel(way.target.address, way.security, options)
        return self._channels[way]

    def _job(self, spec: str, tokens: int) -> Job:
        """One that is over when it is admitted, and begins as no other does: no page is known."""
        number = next(self._numbers)
        prompt = (number % 100, number // 100 % 100, number // 10000, *[1] * tokens)[
            :tokens
        ]
        return Job(str(number), 0, prompt, sampling={"max_tokens": 1}, codec=spec)

    def _encode(
        self, prompt: PromptRecords, ready: Callable[[Sequence[Item]], object]
    ) -> None:
        checklist, arena = prompt.checklist, prompt.tensor
        for layer, index in enumerate(checklist.plan.group_of):
            group, at = checklist.plan.groups[index], RecordIds.of(prompt.states[index])
            made = make_prompt(
                checklist.tokens, group.heads, group.head_dim
            )  # once for all
            records = LayerRecords(group, layer, arena)
            chunk = PromptChunk(made.k, made.v, total=checklist.tokens)
            for x in write_prompt(codec_of(group), records, at, chunk):
                ready([Item(x.kind, index, layer, i) for i in x.indices])


@dataclass(frozen=True)
class Pair:
    """Two processes that are linked: by the kernel, or by loopback."""

    sender: Child
    receiver: Child
    netns: bool

    @property
    def host(self) -> str:
        return child.HOSTS[1] if self.netns else child.LOOPBACK

    def limit(self, gbps: float) -> None:
        """Let at most so much pass, if it is the kernel that does it."""
        if self.netns:
            child.limit([self.sender.pid, self.receiver.pid], gbps)

    def send(self, *what: Any) -> Sent:
        """A prompt by `SendingEnd.send`, which must have arrived."""
        sent: Sent = self.sender.ask("send", *what)
        assert self.receiver.ask("settle") == 1
        return sent


@contextmanager
def start_pair(netns: bool, plans: Mapping[str, Plan], nbytes: int) -> Iterator[Pair]:
    """Both ends, the receiving one with a pool of so many bytes for prompts under these plans."""
    if netns:
        child.check_available()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > memory:
        raise CapacityError(
            f"prompts want a pool of {nbytes:,} bytes; this host has {memory:,}"
        )
    with ExitStack() as stack:
        sender = stack.enter_context(Child(SendingEnd, netns))
        receiver = stack.enter_context(Child(ReceivingEnd, netns))
        sender.ask("cpu_seconds")  # it runs, so it is where it shall be
        receiver.ask("open", plans, nbytes)
        if netns:
            child.join([sender.pid, receiver.pid])
        yield Pair(sender, receiver, netns)


# -- codecs


def measure(options: TransferOptions) -> Row:
    """A row for every codec, prompt length, link and way of encoding; raw is always among them.

    Sizes in bytes, times in seconds.
    pages:          "ready" before the clock starts, or encoded "inline", in `encode_s`
    payload_bytes:  records; `wire_bytes` is all that crossed, both ways
    link_s:         wire_bytes at the link's rate: no transfer is faster
    byte_ratio:     raw payload / payload; `time_ratio` is the same of the seconds
    bottleneck:     "link"; "encode", if that alone takes longer; "plane", if the rest of the
                    machine takes a fifth of the time or more
    crossover_gbps: on links faster than this, encode takes longer than the link; inline rows only
    """
    shape, rows = options.shape, list[Row]()
    plans = {
        spec: parse_plan(spec, shape) for spec in dict.fromkeys([RAW, *options.codecs])
    }
    slabs = max(
        slabs_for(plan, tokens) for plan in plans.values() for tokens in options.tokens
    )
    with start_pair(options.netns, plans, slabs * SLAB_BYTES) as pair:
        target = pair.receiver.ask("listen", pair.host)
        way = Way(target, direct=options.channel == "direct")
        for tokens in options.tokens:
            for spec in tell(plans, f"{tokens} tokens, encode {{}}".format):
                pair.sender.ask("encode", spec, plans[spec], tokens, options.threads)
            for gbps in options.gbps:
                sent = _send_all(options.rounds, pair, way, plans, tokens, gbps)
                rows += _rows(options, tokens, gbps, sent)
    return result_of(rows, NOTES)


def _send_all(
    rounds: int,
    pair: Pair,
    way: Way,
    plans: Mapping[str, Plan],
    tokens: int,
    gbps: float,
) -> dict[tuple[str, str], list[Sent]]:
    """Rounds over all codecs and both ways of encoding, interleaved, over one link."""
    pair.limit(gbps)
    bytes_per_s = 1e9 * gbps / 8
    frame = round(min(max(bytes_per_s * FRAME_S, LEAST_FRAME), FRAME_BYTES))
    way = replace(
        way, frame_bytes=frame, bytes_per_s=None if pair.netns else bytes_per_s
    )
    cases = [
        (spec, pages)
        for number in range(rounds)
        for spec, plan in plans.items()
        if not number or Manifest(plan, tokens).total_bytes / bytes_per_s <= LONG_S
        for pages in ("ready", "inline")
    ]
    found: dict[tuple[str, str], list[Sent]] = {case: [] for case in cases}
    name = f"{tokens} tokens, {gbps:g} Gb/s, {{0[0]}}, {{0[1]}}"
    for spec, pages in tell(cases, name.format):
        found[spec, pages].append(pair.send(spec, way, pages == "inline"))
    return found


def _rows(
    options: TransferOptions,
    tokens: int,
    gbps: float,
    found: Mapping[tuple[str, str], list[Sent]],
) -> Iterator[Row]:
    for (spec, pages), sent in found.items():
        stats, inline = sent[0].stats, pages == "inline"
        seconds, raw_seconds = (
            median(x.seconds for x in some) for some in (sent, found[RAW, pages])
        )
        encode_s = median(x.offered_s for x in sent) if inline else 0.0
        link_s = 8e-9 * stats.wire_bytes / gbps
        stage = "encode" if encode_s > link_s else "link"
        yield {
            "codec": spec,
            "tokens": tokens,
            "link": "netns" if options.netns else "paced",
            "channel": options.channel,
            "gbps": gbps,
            "pages": pages,
            "rounds": len(sent),
            "fp16_bytes": 2 * parse_plan(RAW, options.shape).numbers(tokens),
            "payload_bytes": stats.payload_bytes,
            "wire_bytes": stats.wire_bytes,
            "seconds": seconds,
            "encode_s": encode_s,
            "link_s": link_s,
            "byte_ratio": found[RAW, pages][0].stats.payload_bytes
            / stats.payload_bytes,
            "time_ratio": raw_seconds / seconds,
            "bottleneck": stage if max(encode_s, link_s) > 0.8 * seconds else "plane",
            "crossover_gbps": 8e-9 * stats.wire_bytes / encode_s if inline else None,
        }


def draw(result: Row) -> str:
    """What people read."""
    return table(result["rows"], COLUMNS.split())


# -- the plane


def measure_plane(options: TransferOptions) -> Row:
    """A row for every link, loopback and with `netns` the others, and every channel; medians.

    Of the first codec and prompt length; what is not in PLANE by default has no meaning here.

    channel:               "grpc" or "direct", over `tls` or not
    plane_gbps, tcp_gbps:  1e9 bits of records per second, of the channel and of the socket
    ratio:                 of them, round by round
    plane_cpu, tcp_cpu:    processor seconds per 1e9 bytes of records, of both processes
    congestion:            what the kernel does for gRPC; of the others: `child.CONGESTION`
    """
    rows: list[Row] = []
    codec, tokens = options.codecs[0], options.tokens[0]
    plan = parse_plan(codec, options.shape)
    slabs = slabs_for(plan, tokens)
    for netns in (False, True)[: 1 + options.netns]:
        with start_pair(netns, {codec: plan}, slabs * SLAB_BYTES) as pair:
            pair.sender.ask("fill", codec, plan, tokens)
            nbytes = Manifest(plan, tokens).total_bytes
            sends = _ways(pair, codec, nbytes)
            for gbps in options.gbps if netns else (0.0,):
                pair.limit(gbps)
                name = f"{gbps:g} Gb/s" if netns else "loopback"
                told = tell(range(options.rounds + 1), f"{name}, round {{}}".format)
                rounds = [
                    {way: _timed(pair, send) for way, send in sends.items()}
                    for _ in told
                ]
                common = {"link": name, "rounds": options.rounds, "nbytes": nbytes}
                common["congestion"] = pair.sender.ask("congestion")
                rows += _plane_rows(
                    common, rounds[1:]
                )  # the first one warms everything
    return result_of(rows, PLANE_NOTES)


def _ways(pair: Pair, codec: str, nbytes: int) -> dict[tuple[str, bool], partial[Sent]]:
    """How the bytes can be sent: by channel, and whether over TLS of both sides."""
    port = pair.receiver.ask("listen_raw", pair.host, nbytes)
    found = {
        ("tcp", False): partial(pair.sender.ask, "send_raw", codec, pair.host, port)
    }
    for security in (None, protected(SecurityConfig(), Authority.make(), pair.host)):
        target = pair.receiver.ask("listen", pair.host, security)
        for channel in ("grpc", "direct"):
            way = Way(target, security, channel == "direct")
            found[channel, security is not None] = partial(pair.send, codec, way)
    return found


def _timed(pair: Pair, send: Callable[[], Sent]) -> tuple[float, float, float]:
    """Seconds on the clock, and of the processors of both ends."""
    before = pair.receiver.ask("cpu_seconds")
    sent = send()
    return sent.seconds, sent.cpu_s, pair.receiver.ask("cpu_seconds") - before


def _plane_rows(
    common: Row, rounds: Sequence[Mapping[tuple[str, bool], tuple[float, float, float]]]
) -> Iterator[Row]:
    """A row for every way but the socket."""
    times = {
        way: list(zip(*(x[way] for x in rounds), strict=True)) for way in rounds[0]
    }
    nbytes, tcp = common["nbytes"], times.pop(("tcp", False))

    def cost(way: Sequence[Sequence[float]]) -> Row:
        sender, receiver = (1e9 / nbytes * median(cpu) for cpu in way[1:])
        return {"sender": sender, "receiver": receiver}

    for (channel, tls), way in times.items():
        yield common | {
            "channel": channel,
            "tls": tls,
            "plane_gbps": 8e-9 * nbytes / median(way[0]),
            "tcp_gbps": 8e-9 * nbytes / median(tcp[0]),
            "ratio": median(b / a for a, b in zip(way[0], tcp[0], strict=True)),
            "plane_cpu": cost(way),
            "tcp_cpu": cost(tcp),
        }


def draw_plane(result: Row) -> str:
    """What people read; processor seconds per GB are of sender + receiver."""
    cpu, rows = "{sender:.2f} + {receiver:.2f}".format_map, result["rows"]
    told = [{x: cpu(row[x]) for x in ("plane_cpu", "tcp_cpu")} for row in rows]
    return table(
        [
            row | {"tls": "TLS" * row["tls"]} | y
            for row, y in zip(rows, told, strict=True)
        ]
    )
