"""What compression is worth on a link: codecs x prompt lengths x link rates.

    disagg bench transfer --gbps 0.1 --gbps 1 --gbps 10 --plot transfer.png
    disagg bench transfer --netns --json          links between namespaces, as root

KV shaped as in Llama 3.1 8B, realistic and made up, goes from one process to another through the
sender, receiver, ledger and pool that serve. A link's rate is kept by a token bucket in the sender,
or with `--netns` by the kernel. Every prompt goes twice: with its pages encoded beforehand, and
encoded layer by layer while it is sent. `seconds` end when the decode worker has the prompt and
could compute its next token.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from disagg.bench.child import Child
from disagg.bench.encoder import Encoder
from disagg.bench.netns import HOSTS, Namespaces
from disagg.bench.shape import SLAB_BYTES, Shape, slabs_for
from disagg.bench.sink import Sink
from disagg.bench.source import Sent
from disagg.config import DEFAULT_CODEC
from disagg.plan import Plan
from disagg.transfer.items import Checklist
from disagg.transfer.pace import Pace

RAW = "raw:dtype=fp16"
CODECS = (RAW, "fp8", DEFAULT_CODEC, "kivi:bits=2,group=64,residual=64")
LINKS_GBPS = (0.1, 1.0, 10.0)
LOOPBACK = "127.0.0.1"
LEAST_FRAME, MOST_FRAME = 64 << 10, 2 << 20
FRAME_S = 0.01  # of the link, that one frame takes
LONG_S = 4.0  # a cell that takes longer on its link is measured once
NOTES = "seconds until the decode worker has the prompt; no model is computed; medians of `rounds`"


@dataclass(frozen=True)
class TransferOptions:
    """What is sent and over what; `threads` are torch's, in the encoder."""

    codecs: tuple[str, ...] = CODECS
    tokens: tuple[int, ...] = (8192,)
    gbps: tuple[float, ...] = LINKS_GBPS
    rounds: int = 3
    netns: bool = False
    threads: int = 1
    shape: Shape = field(default_factory=Shape)


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
class _Bench:
    """Two processes that are linked, and the link, if it can be shaped."""

    options: TransferOptions
    sink: Child
    source: Child
    namespaces: Namespaces | None


def run(options: TransferOptions) -> list[TransferRow]:
    """All rows; raw is always among the codecs, since the others are compared with it."""
    if RAW not in options.codecs:
        options = replace(options, codecs=(RAW, *options.codecs))
    rows: list[TransferRow] = []
    with _bench(options) as bench:
        for tokens in options.tokens:
            plans = _prepare(bench, tokens)
            for gbps in options.gbps:
                rows += _measure(bench, plans, tokens, gbps)
    return rows


@contextmanager
def _bench(options: TransferOptions) -> Iterator[_Bench]:
    with ExitStack() as stack:
        namespaces = stack.enter_context(Namespaces()) if options.netns else None
        ends = [namespaces.prefix(0), namespaces.prefix(1)] if namespaces else [[], []]
        sink = stack.enter_context(Child(Sink, ends[1]))
        source = stack.enter_context(Child(Encoder, ends[0]))
        yield _Bench(options, sink, source, namespaces)


def _prepare(bench: _Bench, tokens: int) -> dict[str, Plan]:
    """Make a prompt up, encode it under every codec, and open a receiver for all of them."""
    shape = bench.options.shape
    plans = {spec: shape.plan(spec) for spec in bench.options.codecs}
    slabs = {spec: slabs_for(plan, tokens) for spec, plan in plans.items()}
    bench.source.ask("generate", shape.heads, tokens, shape.head_dim, bench.options.threads)
    for spec, plan in plans.items():
        bench.source.ask("encode", spec, plan, tokens, slabs[spec], SLAB_BYTES)
    bench.sink.ask("open", plans, max(slabs.values()), SLAB_BYTES)
    address = bench.sink.ask("listen", HOSTS[1] if bench.namespaces else LOOPBACK, None)
    bench.source.ask("connect", "link", address, None)
    return plans


def _measure(
    bench: _Bench, plans: Mapping[str, Plan], tokens: int, gbps: float
) -> list[TransferRow]:
    """Rounds over all codecs and both ways, interleaved, over one link."""
    if bench.namespaces:
        bench.namespaces.shape(gbps)
    seen: dict[tuple[str, str], list[Sent]] = {}
    for number in range(bench.options.rounds):
        for spec, plan in plans.items():
            long = 8e-9 * Checklist(plan, tokens).total_bytes / gbps > LONG_S
            for pages in () if long and number else ("ready", "inline"):
                sent = _send(bench, spec, gbps, pages)
                seen.setdefault((spec, pages), []).append(sent)
    rows = [
        _row(bench.options, plans[spec], spec, pages, tokens, gbps, sent)
        for (spec, pages), sent in seen.items()
    ]
    raw = {row.pages: row for row in rows if row.codec == RAW}
    return [_compare(row, raw[row.pages]) for row in rows]


def _send(bench: _Bench, spec: str, gbps: float, pages: str) -> Sent:
    bytes_per_s = 1e9 * gbps / 8
    frame = round(min(max(bytes_per_s * FRAME_S, LEAST_FRAME), MOST_FRAME))
    pace = None if bench.namespaces else Pace(bytes_per_s, frame)
    method = "send" if pages == "ready" else "send_inline"
    sent: Sent = bench.source.ask(method, "link", spec, pace, frame)
    admitted = bench.sink.ask("settle")
    assert admitted == 1
    return sent


def _row(
    options: TransferOptions,
    plan: Plan,
    spec: str,
    pages: str,
    tokens: int,
    gbps: float,
    sent: Sequence[Sent],
) -> TransferRow:
    seconds = statistics.median(x.seconds for x in sent)
    wire_bytes = sent[0].receipt.wire_bytes
    inline = pages == "inline"
    encode_s = statistics.median(x.offered_s for x in sent) if inline else 0.0
    link_s = 8e-9 * wire_bytes / gbps
    busy_s = max(encode_s, link_s)
    stage = "encode" if encode_s > link_s else "link"
    return TransferRow(
        codec=spec,
        tokens=tokens,
        link="netns" if options.netns else "paced",
        gbps=gbps,
        pages=pages,
        rounds=len(sent),
        fp16_bytes=options.shape.fp16_bytes(tokens),
        payload_bytes=Checklist(plan, tokens).total_bytes,
        wire_bytes=wire_bytes,
        seconds=seconds,
        encode_s=encode_s,
        link_s=link_s,
        byte_ratio=1.0,
        time_ratio=1.0,
        bottleneck=stage if busy_s > 0.8 * seconds else "plane",
        crossover_gbps=8e-9 * wire_bytes / encode_s if inline else None,
    )


def _compare(row: TransferRow, raw: TransferRow) -> TransferRow:
    return replace(
        row,
        byte_ratio=raw.payload_bytes / row.payload_bytes,
        time_ratio=raw.seconds / row.seconds,
    )


def table(rows: Sequence[TransferRow]) -> str:
    """What people read."""
    lines = [
        f"{'codec':<34} {'tokens':>6} {'Gb/s':>6} {'pages':<6} {'MB':>7} {'seconds':>8}"
        f" {'encode':>7} {'x bytes':>7} {'x time':>7}  bottleneck"
    ]
    for row in rows:
        crossover = f", encode above {row.crossover_gbps:.2g} Gb/s" if row.crossover_gbps else ""
        lines.append(
            f"{row.codec:<34} {row.tokens:6} {row.gbps:6g} {row.pages:<6}"
            f" {1e-6 * row.wire_bytes:7.1f} {row.seconds:8.3f} {row.encode_s:7.3f}"
            f" {row.byte_ratio:7.2f} {row.time_ratio:7.2f}  {row.bottleneck}{crossover}"
        )
    return "\n".join(lines)
