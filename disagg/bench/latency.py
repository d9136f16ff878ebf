"""How long does a hand-off itself take, and what does it cost those who decode meanwhile?

    python -m disagg.bench.latency --json

A tiny prompt, loopback, an idle decode worker with the packaged model: from the last layer offered
until its engine runs the prompt, on the clock of the host; and to the acknowledgement, one way
more. All layers are offered at once, so none is on its way before the last. The reservation is made
before the prompt is computed, as workers do. Then one answer is decoded alone, and while prompts
arrive one after another, over a link of 1 Gb/s and as fast as they come.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from disagg.bench.child import Child
from disagg.bench.decoder import Decoder
from disagg.bench.encoder import Encoder
from disagg.bench.provenance import result_of
from disagg.bench.shape import SLAB_BYTES, slabs_for
from disagg.bench.source import Sent
from disagg.bench.stream import FRAME_BYTES
from disagg.config import DEFAULT_CODEC
from disagg.plan import Plan

LOOPBACK = "127.0.0.1"
LINKS_GBPS = (1.0, None)  # None: unpaced
NOTES = "milliseconds; the model is the packaged one, on the CPU with one thread"


@dataclass(frozen=True)
class LatencyOptions:
    """The tiny prompt, how often it is sent, and the answer that is decoded beside.

    arriving: tokens of the prompts that arrive meanwhile, for so many `seconds`
    """

    codec: str = DEFAULT_CODEC
    tokens: int = 100
    rounds: int = 200
    answer: int = 600
    arriving: int = 1900
    seconds: float = 5.0


@dataclass(frozen=True)
class Decoding:
    """Milliseconds between the tokens of an answer, while `received_gbps` of records arrived."""

    received_gbps: float
    tokens: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class LatencyRow:
    """Milliseconds from the last layer offered.

    running_ms: until the engine runs the prompt; `acknowledged_ms`: until its sender knows
    admit_ms:   of these, from the commit at the decode worker to the inbox of its engine
    decoding:   an answer decoded alone, and while prompts arrive
    """

    codec: str
    tokens: int
    rounds: int
    wire_bytes: int
    running_ms: float
    running_p99_ms: float
    acknowledged_ms: float
    acknowledged_p99_ms: float
    admit_ms: float
    decoding: tuple[Decoding, ...]


def run(options: LatencyOptions) -> list[LatencyRow]:
    """Send a prompt again and again, one at a time; then decode beside."""
    with Child(Decoder) as sink, Child(Encoder) as source:
        plan, heads, head_dim = sink.ask("start", options.codec)
        address = sink.ask("listen", LOOPBACK, None)
        sent, running = _hand_over(options, sink, source, (plan, heads, head_dim, address))
        sink.ask("takes", False)
        _prepare(source, plan, (heads, options.arriving, head_dim), options.codec, address)
        decoding = [_decode(options, sink)]
        decoding += [_decode(options, sink, source, gbps) for gbps in LINKS_GBPS]
    acknowledged = sorted(x.receipt.exposed_ms for x in sent)
    row = LatencyRow(
        codec=options.codec,
        tokens=options.tokens,
        rounds=options.rounds,
        wire_bytes=sent[0].receipt.wire_bytes,
        running_ms=statistics.median(running),
        running_p99_ms=_p99(running),
        acknowledged_ms=statistics.median(acknowledged),
        acknowledged_p99_ms=_p99(acknowledged),
        admit_ms=statistics.median(x.receipt.admit_ms for x in sent),
        decoding=tuple(decoding),
    )
    return [row]


def _prepare(
    source: Child, plan: Plan, size: tuple[int, int, int], spec: str, address: str
) -> None:
    """A prompt of size (heads, tokens, head dim), encoded, and a link."""
    heads, tokens, head_dim = size
    source.ask("generate", heads, tokens, head_dim, 1)
    source.ask("encode", spec, plan, tokens, slabs_for(plan, tokens), SLAB_BYTES)
    source.ask("connect", "link", address, None)


def _hand_over(
    options: LatencyOptions, sink: Child, source: Child, place: tuple[Plan, int, int, str]
) -> tuple[list[Sent], list[float]]:
    """The tiny prompts, and the milliseconds until each ran."""
    plan, heads, head_dim, address = place
    _prepare(source, plan, (heads, options.tokens, head_dim), options.codec, address)
    sent: list[Sent] = []
    running: list[float] = []
    for _ in range(options.rounds + 1):
        one: Sent = source.ask("send", "link", options.codec, None, FRAME_BYTES)
        sent.append(one)
        running.append(1e3 * (sink.ask("running_at", one.rid) - one.began_at))
    return sent[1:], running[1:]  # the first opened the connection


def _decode(
    options: LatencyOptions,
    sink: Child,
    source: Child | None = None,
    gbps: float | None = None,
) -> Decoding:
    """Decode one answer, while prompts arrive if there is a source of them."""
    sink.post("decode", options.answer)
    began, ended, nbytes = 0.0, float("inf"), 0
    if source is not None:
        bytes_per_s = gbps and 1e9 * gbps / 8
        sending = (options.seconds, "link", options.codec, bytes_per_s, FRAME_BYTES)
        began, ended, nbytes = source.ask("send_for", *sending)
    times = [at for at in sink.answer() if began <= at <= ended]
    gaps = [1e3 * (after - before) for before, after in pairwise(times)]
    return Decoding(
        received_gbps=8e-9 * nbytes / (ended - began),
        tokens=len(gaps),
        p50_ms=statistics.median(gaps),
        p99_ms=_p99(gaps),
    )


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, round(0.99 * len(values)))]


def table(rows: Sequence[LatencyRow]) -> str:
    """What people read."""
    lines = []
    for row in rows:
        lines += [
            f"{row.codec}, {row.tokens} tokens, {row.wire_bytes} bytes, of {row.rounds}:",
            f"  running      {row.running_ms:6.2f} ms, p99 {row.running_p99_ms:6.2f} ms",
            f"  acknowledged {row.acknowledged_ms:6.2f} ms, p99 {row.acknowledged_p99_ms:6.2f} ms",
        ]
        lines += [
            f"  a token while {x.received_gbps:5.2f} Gb/s arrive: {x.p50_ms:6.2f} ms, "
            f"p99 {x.p99_ms:6.2f} ms, of {x.tokens}"
            for x in row.decoding
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", default=DEFAULT_CODEC)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    given = parser.parse_args(arguments)
    rows = run(LatencyOptions(given.codec, given.tokens, given.rounds))
    result = result_of("disagg.bench.latency", rows, NOTES)
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result) if given.json else table(rows))


if __name__ == "__main__":
    main()
