"""`disagg bench transfer`: what compression is worth on a link; with `--plane`, what a plane is.

    disagg bench transfer --gbps 0.1 --gbps 1 --gbps 10 --plot transfer.png
    disagg bench transfer --plane --netns         loopback and links of 1, 5 and 10 Gb/s, as root

KV shaped as in Llama 3.1 8B goes from one process to another through what serves. A link's rate is
kept by a token bucket in the sender, or with `--netns` by the kernel.

Codecs: every prompt, realistic and made up, goes twice, with its pages encoded beforehand, and
encoded layer by layer while it is sent. `seconds` end when the decode worker has the prompt.

Plane: one hand-off of arbitrary bytes over one stream, reserved and attached: frames of 2 MiB,
credit, digests checked at the other end, records in the pool, commit. Beside it a socket (cubic)
brings as many bytes from the same memory to as much. Rounds are interleaved; figures are medians,
and a ratio is the median of the rounds' ratios, since machines have moods.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from disagg.bench import link
from disagg.bench.child import Child
from disagg.bench.ends import Sent, Sink, Source, Way
from disagg.bench.inputs import SLAB_BYTES, fp16_bytes, shape_of, slabs_for
from disagg.bench.result import result_of, table, tell
from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import DEFAULT_CODEC
from disagg.plan import Plan
from disagg.transfer.records import Checklist
from disagg.wire import FRAME_BYTES
from disagg.workers.dispatch import Started

RAW = "raw:dtype=fp16"
CODECS = (RAW, "fp8", DEFAULT_CODEC, "kivi:bits=2,group=64,residual=64")
LINKS_GBPS, PLANE_GBPS = (0.1, 1.0, 10.0), (1.0, 5.0, 10.0)
ADDRESSES, TLS = (link.LOOPBACK, *link.HOSTS), " TLS"
LEAST_FRAME = 64 << 10
FRAME_S = 0.01  # of the link, that one frame takes
LONG_S = 4.0  # a cell that takes longer on its link is measured once
NOTES = "seconds until the decode worker has the prompt; no model is computed; medians of `rounds`"
PLANE_NOTES = "gbps: 1e9 bits of records per second; cpu: seconds per 1e9 bytes of records"
COLUMNS = "codec tokens gbps pages wire_bytes seconds encode_s byte_ratio time_ratio bottleneck"


@dataclass(frozen=True)
class TransferOptions:
    """What is sent and over what; `threads` are torch's, where prompts are encoded."""

    codecs: tuple[str, ...] = CODECS
    tokens: tuple[int, ...] = (8192,)
    gbps: tuple[float, ...] = LINKS_GBPS
    rounds: int = 3
    netns: bool = False
    threads: int = 1
    channel: str = "grpc"
    shape: KVShape = field(default_factory=shape_of)


@dataclass(frozen=True)
class PlaneOptions:
    """What is sent, and how often; `gbps` are the links between namespaces, with `netns`."""

    codec: str = DEFAULT_CODEC
    tokens: int = 16384
    gbps: tuple[float, ...] = PLANE_GBPS
    rounds: int = 5
    netns: bool = False
    shape: KVShape = field(default_factory=shape_of)


@dataclass(frozen=True)
class TransferRow:
    """One codec, prompt length, link and way of encoding. Sizes in bytes, times in seconds.

    pages:          "ready" before the clock starts, or encoded "inline", in `encode_s`
    payload_bytes:  records; `wire_bytes` is all that crossed, both ways
    link_s:         wire_bytes at the link's rate: no transfer is faster
    byte_ratio:     raw payload / payload; `time_ratio` is the same of the seconds
    bottleneck:     "link"; "encode", if that alone takes longer; "plane", if the rest of the
                    machine takes a fifth of the time or more
    crossover_gbps: on links faster than this, encode takes longer than the link; inline rows only
    """

    codec: str
    tokens: int
    link: str
    channel: str
    gbps: float
    pages: str
    rounds: int
    fp16_bytes: int
    payload_bytes: int
    wire_bytes: int
    seconds: float
    encode_s: float
    link_s: float
    byte_ratio: float
    time_ratio: float
    bottleneck: str
    crossover_gbps: float | None


@dataclass(frozen=True)
class Cost:
    """Processor seconds per 1e9 bytes of records, of the two processes."""

    sender: float
    receiver: float


@dataclass(frozen=True)
class PlaneRow:
    """One link and one channel, "grpc" or "direct", beside the socket in the same rounds; medians.

    plane_gbps, tcp_gbps: 1e9 bits of records per second · ratio: of them, round by round
    """

    link: str
    channel: str
    tls: bool
    rounds: int
    nbytes: int
    plane_gbps: float
    tcp_gbps: float
    ratio: float
    plane_cpu: Cost
    tcp_cpu: Cost


@dataclass(frozen=True)
class Spent:
    """What one round took: seconds on the clock, and of two processors."""

    seconds: float
    sender_cpu: float
    receiver_cpu: float


@dataclass(frozen=True)
class Pair:
    """Two processes that are linked: the kernel limits the link if it is one of `netns`."""

    sink: Child
    source: Child
    netns: bool

    @property
    def host(self) -> str:
        return link.HOSTS[1] if self.netns else link.LOOPBACK

    def limit(self, gbps: float) -> None:
        """Let at most so much pass, if it is the kernel that does it."""
        if self.netns:
            link.limit([self.source.pid, self.sink.pid], gbps)


@contextmanager
def start_pair(netns: bool, plans: Mapping[str, Plan], nbytes: int) -> Iterator[Pair]:
    """A source, and a sink with a pool of so many bytes for prompts under these plans."""
    with ExitStack() as stack:
        if netns:
            link.require()
        prefix = link.ISOLATED if netns else ()
        sink, source = (stack.enter_context(Child(role, prefix)) for role in (Sink, Source))
        for child in (sink, source):
            child.ask("cpu_seconds")  # it runs, so it is where it shall be
        if netns:
            link.join([source.pid, sink.pid])
        sink.ask("open", plans, nbytes)
        yield Pair(sink, source, netns)


# -- codecs


def run(options: TransferOptions) -> dict[str, Any]:
    """The result of `measure` as a JSON object."""
    return result_of(measure(options), NOTES)


def measure(options: TransferOptions) -> list[TransferRow]:
    """All rows; raw is always among the codecs, since the others are compared with it."""
    if RAW not in options.codecs:
        options = replace(options, codecs=(RAW, *options.codecs))
    shape, rows = options.shape, list[TransferRow]()
    plans = {spec: parse_plan(spec, shape) for spec in options.codecs}
    slabs = max(slabs_for(plan, tokens) for plan in plans.values() for tokens in options.tokens)
    with start_pair(options.netns, plans, slabs * SLAB_BYTES) as pair:
        target = pair.sink.ask("listen", pair.host)
        for tokens in options.tokens:
            pair.source.ask("generate", shape.heads, tokens, shape.head_dim, options.threads)
            for spec in tell(plans, f"{tokens} tokens, encode {{}}".format):
                pair.source.ask("encode", spec, plans[spec], tokens)
            for gbps in options.gbps:
                rows += _measure_link(options, pair, target, plans, tokens, gbps)
    return rows


def _measure_link(
    options: TransferOptions,
    pair: Pair,
    target: Started,
    plans: Mapping[str, Plan],
    tokens: int,
    gbps: float,
) -> list[TransferRow]:
    """Rounds over all codecs and both ways, interleaved, over one link."""
    pair.limit(gbps)
    bytes_per_s = 1e9 * gbps / 8
    frame = round(min(max(bytes_per_s * FRAME_S, LEAST_FRAME), FRAME_BYTES))
    pace = None if pair.netns else bytes_per_s
    way = Way(target, None, options.channel == "direct", frame, pace)
    seen: dict[tuple[str, bool], list[Sent]] = {}
    cases = [
        (spec, inline)
        for number in range(options.rounds)
        for spec, plan in plans.items()
        if not number or Checklist(plan, tokens).total_bytes / bytes_per_s <= LONG_S
        for inline in (False, True)
    ]
    place = f"{tokens} tokens, {gbps:g} Gb/s"
    for spec, inline in tell(cases, lambda case: f"{place}, {case[0]}, {_pages(case[1])}"):
        seen.setdefault((spec, inline), []).append(pair.source.ask("send", spec, way, inline))
        assert pair.sink.ask("settle") == 1
    rows = [_row(options, tokens, gbps, *case, sent) for case, sent in seen.items()]
    raw = {row.pages: row for row in rows if row.codec == RAW}
    return [
        replace(
            row,
            byte_ratio=raw[row.pages].payload_bytes / row.payload_bytes,
            time_ratio=raw[row.pages].seconds / row.seconds,
        )
        for row in rows
    ]


def _row(
    options: TransferOptions, tokens: int, gbps: float, spec: str, inline: bool, sent: list[Sent]
) -> TransferRow:
    seconds = statistics.median(x.seconds for x in sent)
    stats = sent[0].stats
    encode_s = statistics.median(x.offered_s for x in sent) if inline else 0.0
    link_s = 8e-9 * stats.wire_bytes / gbps
    stage = "encode" if encode_s > link_s else "link"
    return TransferRow(
        codec=spec,
        tokens=tokens,
        link="netns" if options.netns else "paced",
        channel=options.channel,
        gbps=gbps,
        pages=_pages(inline),
        rounds=len(sent),
        fp16_bytes=fp16_bytes(options.shape, tokens),
        payload_bytes=stats.payload_bytes,
        wire_bytes=stats.wire_bytes,
        seconds=seconds,
        encode_s=encode_s,
        link_s=link_s,
        byte_ratio=1.0,
        time_ratio=1.0,
        bottleneck=stage if max(encode_s, link_s) > 0.8 * seconds else "plane",
        crossover_gbps=8e-9 * stats.wire_bytes / encode_s if inline else None,
    )


def _pages(inline: bool) -> str:
    return "inline" if inline else "ready"


def draw(result: dict[str, Any]) -> str:
    """What people read."""
    return table(result["rows"], [*COLUMNS.split(), "crossover_gbps"])


# -- the plane


def run_plane(options: PlaneOptions) -> dict[str, Any]:
    """The result of `measure_plane` as a JSON object."""
    return result_of(measure_plane(options), PLANE_NOTES, congestion=link.CONGESTION)


def measure_plane(options: PlaneOptions) -> list[PlaneRow]:
    """Loopback, and with `netns` every link."""
    rows: list[PlaneRow] = []
    plan, codec, tokens = parse_plan(options.codec, options.shape), options.codec, options.tokens
    nbytes, security = Checklist(plan, tokens).total_bytes, link.make_security(ADDRESSES)
    slabs = 2 * slabs_for(plan, tokens)  # of one prompt, and of one that is kept meanwhile
    for netns in (False, True)[: 1 + options.netns]:
        with start_pair(netns, {codec: plan}, slabs * SLAB_BYTES) as pair:
            pair.source.ask("fill", codec, plan, tokens)
            port = pair.sink.ask("listen_raw", pair.host, nbytes)
            sends = {"tcp": partial(pair.source.ask, "send_raw", codec, pair.host, port)}
            for tls, (server, client) in enumerate(((None, None), security)):
                target = pair.sink.ask("listen", pair.host, server)
                for channel in ("grpc", "direct"):
                    way = Way(target, client, channel == "direct")
                    sends[channel + tls * TLS] = partial(_send, pair, codec, way)
            for gbps in options.gbps if netns else (0.0,):
                pair.limit(gbps)
                name = f"{gbps:g} Gb/s" if netns else "loopback"
                cases = tell(range(options.rounds + 1), f"{name}, round {{}}".format)
                rounds = [{way: _timed(pair, send) for way, send in sends.items()} for _ in cases]
                rows += _plane_rows(name, nbytes, rounds[1:])  # the first one warms everything
    return rows


def _send(pair: Pair, codec: str, way: Way) -> tuple[float, float]:
    sent = pair.source.ask("send", codec, way)
    assert pair.sink.ask("settle") == 1
    return sent.seconds, sent.cpu_s


def _timed(pair: Pair, send: Callable[[], tuple[float, float]]) -> Spent:
    before = pair.sink.ask("cpu_seconds")
    seconds, cpu = send()
    return Spent(seconds, cpu, pair.sink.ask("cpu_seconds") - before)


def _plane_rows(name: str, nbytes: int, rounds: Sequence[dict[str, Spent]]) -> Iterator[PlaneRow]:
    """A row for every way but the socket."""

    def median(value: Callable[[dict[str, Spent]], float]) -> float:
        return statistics.median(map(value, rounds))

    def gbps(way: str) -> float:
        return median(lambda once: 8e-9 * nbytes / once[way].seconds)

    def ratio(way: str) -> float:
        return median(lambda once: once["tcp"].seconds / once[way].seconds)

    def cost(way: str) -> Cost:
        sender = median(lambda once: 1e9 / nbytes * once[way].sender_cpu)
        return Cost(sender, median(lambda once: 1e9 / nbytes * once[way].receiver_cpu))

    for way in list(rounds[0])[1:]:
        yield PlaneRow(
            link=name,
            channel=way.removesuffix(TLS),
            tls=way.endswith(TLS),
            rounds=len(rounds),
            nbytes=nbytes,
            plane_gbps=gbps(way),
            tcp_gbps=gbps("tcp"),
            ratio=ratio(way),
            plane_cpu=cost(way),
            tcp_cpu=cost("tcp"),
        )


def draw_plane(result: dict[str, Any]) -> str:
    """What people read; processor seconds per GB are of sender + receiver."""
    cpu = "{sender:.2f} + {receiver:.2f}"
    both = [
        {key: cpu.format_map(row[key]) for key in ("plane_cpu", "tcp_cpu")}
        for row in result["rows"]
    ]
    return table([row | more for row, more in zip(result["rows"], both, strict=True)])
