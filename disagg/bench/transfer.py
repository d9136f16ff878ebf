"""`disagg bench transfer`: what compression is worth on a link; with `--plane`, what channels are.

    disagg bench transfer --gbps 0.1 --gbps 1 --gbps 10 --plot transfer.png
    disagg bench transfer --plane --netns         loopback and links of 1, 5 and 10 Gb/s, as root

KV shaped as in Llama 3.1 8B goes from one process to another through what serves. A link's rate is
kept by a token bucket in the sender, or with `--netns` by the kernel.

Codecs: every prompt, realistic and made up, goes twice, with its pages ready before the clock
starts, and encoded layer by layer while it is sent. The clock ends at the acknowledgement.

Plane: one hand-off of arbitrary bytes over one stream, reserved and attached: frames of 2 MiB,
credit, digests checked at the other end, records in the pool, commit. Beside it a socket brings as
many bytes from the same memory to as much. Rounds are interleaved; figures are medians, and a ratio
is the median of the rounds' ratios, since machines have moods.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from disagg.bench import link
from disagg.bench.child import Child
from disagg.bench.ends import ReceivingEnd, SendingEnd, Sent, Way
from disagg.bench.inputs import SLAB_BYTES, fp16_bytes, shape_of, slabs_for
from disagg.bench.result import Row, result_of, table, tell
from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import DEFAULT_CODEC
from disagg.plan import Plan
from disagg.transfer.records import Checklist
from disagg.wire import FRAME_BYTES
from disagg.workers.dispatch import Started

RAW = "raw:dtype=fp16"
CODECS = (RAW, "fp8", DEFAULT_CODEC, "kivi:bits=2,group=64,residual=64")
ADDRESSES = (link.LOOPBACK, *link.HOSTS)
LEAST_FRAME = 64 << 10
FRAME_S = 0.01  # of the link, that one frame takes
LONG_S = 4.0  # a cell that takes longer on its link is measured once
NOTES = "seconds until the decode worker has the prompt; no model is computed; medians of `rounds`"
PLANE_NOTES = "gbps: 1e9 bits of records per second; cpu: seconds per 1e9 bytes of records"
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
        """Let at most so much pass, if it is the kernel that does it."""
        if self.netns:
            link.limit([self.sender.pid, self.receiver.pid], gbps)

    def send(self, *what: Any) -> Sent:
        """A prompt by `SendingEnd.send`, which must have arrived."""
        sent: Sent = self.sender.ask("send", *what)
        assert self.receiver.ask("settle") == 1
        return sent


@contextmanager
def start_pair(netns: bool, plans: Mapping[str, Plan], nbytes: int) -> Iterator[Pair]:
    """Both ends, the receiving one with a pool of so many bytes for prompts under these plans."""
    prefix = link.isolate() if netns else ()
    with ExitStack() as stack:
        sender = stack.enter_context(Child(SendingEnd, prefix))
        receiver = stack.enter_context(Child(ReceivingEnd, prefix))
        sender.ask("cpu_seconds")  # it runs, so it is where it shall be
        receiver.ask("open", plans, nbytes)
        if netns:
            link.join([sender.pid, receiver.pid])
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
    plans = {spec: parse_plan(spec, shape) for spec in dict.fromkeys([RAW, *options.codecs])}
    slabs = max(slabs_for(plan, tokens) for plan in plans.values() for tokens in options.tokens)
    with start_pair(options.netns, plans, slabs * SLAB_BYTES) as pair:
        target = pair.receiver.ask("listen", pair.host)
        for tokens in options.tokens:
            pair.sender.ask("generate", shape.heads, tokens, shape.head_dim, options.threads)
            for spec in tell(plans, f"{tokens} tokens, encode {{}}".format):
                pair.sender.ask("encode", spec, plans[spec], tokens)
            for gbps in options.gbps:
                sent = _send_all(options, pair, target, plans, tokens, gbps)
                rows += _rows(options, tokens, gbps, sent)
    return result_of(rows, NOTES)


def _send_all(
    options: TransferOptions,
    pair: Pair,
    target: Started,
    plans: Mapping[str, Plan],
    tokens: int,
    gbps: float,
) -> dict[tuple[str, str], list[Sent]]:
    """Rounds over all codecs and both ways of encoding, interleaved, over one link."""
    pair.limit(gbps)
    bytes_per_s = 1e9 * gbps / 8
    frame = round(min(max(bytes_per_s * FRAME_S, LEAST_FRAME), FRAME_BYTES))
    pace = None if pair.netns else bytes_per_s
    way = Way(target, None, options.channel == "direct", frame, pace)
    cases = [
        (spec, pages)
        for number in range(options.rounds)
        for spec, plan in plans.items()
        if not number or Checklist(plan, tokens).total_bytes / bytes_per_s <= LONG_S
        for pages in ("ready", "inline")
    ]
    found: dict[tuple[str, str], list[Sent]] = {case: [] for case in cases}
    name = f"{tokens} tokens, {gbps:g} Gb/s, {{0[0]}}, {{0[1]}}"
    for spec, pages in tell(cases, name.format):
        found[spec, pages].append(pair.send(spec, way, pages == "inline"))
    return found


def _rows(
    options: TransferOptions, tokens: int, gbps: float, found: Mapping[tuple[str, str], list[Sent]]
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
            "fp16_bytes": fp16_bytes(options.shape, tokens),
            "payload_bytes": stats.payload_bytes,
            "wire_bytes": stats.wire_bytes,
            "seconds": seconds,
            "encode_s": encode_s,
            "link_s": link_s,
            "byte_ratio": found[RAW, pages][0].stats.payload_bytes / stats.payload_bytes,
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
    congestion:            what the kernel does for gRPC; of the others: `link.CONGESTION`
    """
    rows: list[Row] = []
    codec, tokens = options.codecs[0], options.tokens[0]
    plan = parse_plan(codec, options.shape)
    nbytes, slabs = Checklist(plan, tokens).total_bytes, slabs_for(plan, tokens)
    for netns in (False, True)[: 1 + options.netns]:
        with start_pair(netns, {codec: plan}, slabs * SLAB_BYTES) as pair:
            pair.sender.ask("fill", codec, plan, tokens)
            sends = _ways(pair, codec, nbytes)
            for gbps in options.gbps if netns else (0.0,):
                pair.limit(gbps)
                name = f"{gbps:g} Gb/s" if netns else "loopback"
                told = tell(range(options.rounds + 1), f"{name}, round {{}}".format)
                rounds = [{way: _timed(pair, send) for way, send in sends.items()} for _ in told]
                common = {"link": name, "rounds": options.rounds, "nbytes": nbytes}
                common["congestion"] = pair.sender.ask("congestion")
                rows += _plane_rows(common, rounds[1:])  # the first one warms everything
    return result_of(rows, PLANE_NOTES)


def _ways(pair: Pair, codec: str, nbytes: int) -> dict[tuple[str, bool], partial[Sent]]:
    """How the bytes can be sent: by channel, and whether over TLS."""
    port = pair.receiver.ask("listen_raw", pair.host, nbytes)
    found = {("tcp", False): partial(pair.sender.ask, "send_raw", codec, pair.host, port)}
    for server, client in ((None, None), link.make_security(ADDRESSES)):
        target = pair.receiver.ask("listen", pair.host, server)
        for channel in ("grpc", "direct"):
            way = Way(target, client, channel == "direct")
            found[channel, client is not None] = partial(pair.send, codec, way)
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
    times = {way: list(zip(*(x[way] for x in rounds), strict=True)) for way in rounds[0]}
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
    cpu = "{sender:.2f} + {receiver:.2f}".format_map
    return table(
        [
            row | {"tls": "TLS" * row["tls"]} | {x: cpu(row[x]) for x in ("plane_cpu", "tcp_cpu")}
            for row in result["rows"]
        ]
    )
