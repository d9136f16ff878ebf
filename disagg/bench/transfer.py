"""`disagg bench transfer`: how much time compression saves on a link.

    disagg bench transfer                               the column of the README, in a minute
    disagg bench transfer --gbps 0.1 --gbps 1 --gbps 10 --plot transfer.png

KV of the shape of Llama 3.1 8B goes from one process to another: a prefill worker and a decode
worker without a model (`handoff.py`). The rate of the link is limited by a token bucket in the
sender, or with `--netns` by the kernel.

Every prompt is synthetic, and sent twice: with its pages encoded before the clock starts, and
encoded layer by layer while it is sent. The clock stops at the acknowledgement.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from disagg.bench.handoff import Pair, Sent, Way, start_pair
from disagg.bench.inputs import SLAB_BYTES, shape_of, slabs_for
from disagg.bench.result import Row, announce, progress, result_of
from disagg.bench.tables import table
from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import DEFAULT_CODEC
from disagg.kv.plan import Plan
from disagg.transfer.records import Manifest
from disagg.wire import FRAME_BYTES

RAW = "raw:dtype=fp16"
CODECS = (RAW, "fp8", DEFAULT_CODEC, "kivi:bits=2,group=64,residual=64")
LEAST_FRAME = 64 << 10
FRAME_S = 0.01  # of the link, that one frame takes
LONG_S = 4.0  # a cell that takes longer on its link is measured once
LINK_SHARE = 0.8  # of the time: with less, the rest of the machine is the bottleneck
# for the estimate of how long it will take: fp16 bytes generated and encoded a second, and
# the start of both processes
ENCODE_BYTES_PER_S = 2e8
START_S = 5.0
NOTES = "seconds until the decode worker has the prompt; no model is computed; medians of `rounds`"
LEGEND = (
    "pages: ready before the clock starts, or encoded inline, while they are sent; "
    "bound by: the link, encode, or plane: everything else"
)


@dataclass(frozen=True)
class TransferOptions:
    """The prompts, links and rounds; `threads`: of torch, in the sender."""

    codecs: tuple[str, ...] = CODECS
    tokens: tuple[int, ...] = (2048,)
    gbps: tuple[float, ...] = (1.0,)
    rounds: int = 3
    netns: bool = False
    threads: int = 1
    channel: str = "grpc"
    shape: KVShape = field(default_factory=shape_of)


@dataclass(frozen=True)
class EncodeStep:
    """Generate and encode a prompt, which the next steps send."""

    tokens: int
    codec: str

    def __str__(self) -> str:
        return f"{self.tokens} tokens, encode {self.codec}"


@dataclass(frozen=True)
class SendStep:
    """Send a prompt once; `pages`: "ready" beforehand, or encoded "inline"."""

    tokens: int
    gbps: float
    codec: str
    pages: str

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.gbps:g} Gb/s, {self.codec}, {self.pages}"


def measure(options: TransferOptions) -> Row:
    """A row for every codec, prompt length, link and way of encoding; raw is always among them.

    Sizes in bytes, times in seconds.
    pages:          "ready" before the clock starts, or encoded "inline", in `encode_s`
    payload_bytes:  of records; `wire_bytes`: all traffic, both ways
    link_s:         wire_bytes at the link's rate: no transfer is faster
    byte_ratio:     raw payload / payload; `time_ratio` is the same of the seconds
    bottleneck:     "link"; "encode", if encoding alone takes longer; "plane", if everything else
                    takes a fifth of the time or more
    crossover_gbps: on links faster than this, encode takes longer than the link; inline rows only
    """
    codecs = dict.fromkeys([RAW, *options.codecs])
    plans = {spec: parse_plan(spec, options.shape) for spec in codecs}
    slabs = 0
    for plan in plans.values():
        for tokens in options.tokens:
            slabs = max(slabs, slabs_for(plan, tokens))
    steps = [*make_steps(options, plans)]
    seconds = {step: expected_seconds(step, plans) for step in steps}
    total_s = START_S + sum(seconds[step] for step in steps)
    with start_pair(options.netns, plans, slabs * SLAB_BYTES) as pair:
        announce(f"this takes about {total_s:.0f} s; {LEGEND}")
        sent = _run(options, plans, pair, progress(steps, str, seconds.__getitem__))
    return result_of(_rows(options, sent), NOTES)


def make_steps(
    options: TransferOptions, plans: Mapping[str, Plan]
) -> Iterator[EncodeStep | SendStep]:
    """All steps in order: rounds over all codecs and both ways of encoding are interleaved."""
    for tokens in options.tokens:
        for codec in plans:
            yield EncodeStep(tokens, codec)
        for gbps in options.gbps:
            for number in range(options.rounds):
                for codec, plan in plans.items():
                    if number and _link_seconds(plan, tokens, gbps) > LONG_S:
                        continue
                    yield SendStep(tokens, gbps, codec, "ready")
                    yield SendStep(tokens, gbps, codec, "inline")


def expected_seconds(step: EncodeStep | SendStep, plans: Mapping[str, Plan]) -> float:
    """Roughly the time of a step."""
    encode_s = Manifest(plans[RAW], step.tokens).total_bytes / ENCODE_BYTES_PER_S
    if isinstance(step, EncodeStep):
        return encode_s
    link_s = _link_seconds(plans[step.codec], step.tokens, step.gbps)
    return max(link_s, encode_s / 2) if step.pages == "inline" else link_s


def _link_seconds(plan: Plan, tokens: int, gbps: float) -> float:
    return 8e-9 * Manifest(plan, tokens).total_bytes / gbps


def _run(
    options: TransferOptions,
    plans: Mapping[str, Plan],
    pair: Pair,
    steps: Iterator[EncodeStep | SendStep],
) -> dict[SendStep, list[Sent]]:
    """The results by step; a step of several rounds has several."""
    target = pair.receiver.ask("listen", pair.host)
    sent: dict[SendStep, list[Sent]] = {}
    way = Way(target, direct=options.channel == "direct")
    link_gbps = 0.0  # as it is now
    for step in steps:
        if isinstance(step, EncodeStep):
            plan = plans[step.codec]
            pair.sender.ask("encode", step.codec, plan, step.tokens, options.threads)
            continue
        if step.gbps != link_gbps:
            link_gbps = step.gbps
            pair.limit(link_gbps)
            way = _paced(way, link_gbps, options.netns)
        inline = step.pages == "inline"
        sent.setdefault(step, []).append(pair.send(step.codec, way, inline))
    return sent


def _paced(way: Way, gbps: float, netns: bool) -> Way:
    """The way for a link of this rate; the sender paces itself unless the kernel does."""
    bytes_per_s = 1e9 * gbps / 8
    frame_bytes = round(min(max(bytes_per_s * FRAME_S, LEAST_FRAME), FRAME_BYTES))
    return replace(
        way, frame_bytes=frame_bytes, bytes_per_s=None if netns else bytes_per_s
    )


def _rows(
    options: TransferOptions, all_sent: Mapping[SendStep, Sequence[Sent]]
) -> Iterator[Row]:
    for step, sent in all_sent.items():
        raw_sent = all_sent[replace(step, codec=RAW)]
        stats = sent[0].stats
        seconds = median(x.seconds for x in sent)
        raw_seconds = median(x.seconds for x in raw_sent)
        link_s = 8e-9 * stats.wire_bytes / step.gbps
        encode_s, crossover_gbps = 0.0, None
        if step.pages == "inline":
            encode_s = median(x.offered_s for x in sent)
            crossover_gbps = 8e-9 * stats.wire_bytes / encode_s
        if max(encode_s, link_s) <= LINK_SHARE * seconds:
            bottleneck = "plane"
        else:
            bottleneck = "encode" if encode_s > link_s else "link"
        yield {
            "codec": step.codec,
            "tokens": step.tokens,
            "link": "netns" if options.netns else "paced",
            "channel": options.channel,
            "gbps": step.gbps,
            "pages": step.pages,
            "rounds": len(sent),
            "fp16_bytes": 2 * parse_plan(RAW, options.shape).numbers(step.tokens),
            "payload_bytes": stats.payload_bytes,
            "wire_bytes": stats.wire_bytes,
            "seconds": seconds,
            "encode_s": encode_s,
            "link_s": link_s,
            "byte_ratio": raw_sent[0].stats.payload_bytes / stats.payload_bytes,
            "time_ratio": raw_seconds / seconds,
            "bottleneck": bottleneck,
            "crossover_gbps": crossover_gbps,
        }


def draw(result: Row) -> str:
    """The result as a table."""
    rows = []
    for row in result["rows"]:
        rows.append(
            {
                "codec": row["codec"],
                "tokens": row["tokens"],
                "gbps": row["gbps"],
                "pages": row["pages"],
                "wire_mb": row["wire_bytes"] / 1e6,
                "seconds": row["seconds"],
                "encode_s": row["encode_s"],
                "byte_ratio": row["byte_ratio"],
                "time_ratio": row["time_ratio"],
                "bound_by": row["bottleneck"],
            }
        )
    return table(rows)
