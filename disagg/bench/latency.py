"""`disagg bench latency`: how long does a hand-off itself take, and what does it cost others?

A tiny prompt, loopback, an idle decode worker with the packaged model: from the last layer offered
until its engine runs the prompt, on the clock of the host; and to the acknowledgement, one way
more. All layers are offered at once, so none is on its way before the last. The reservation is made
before the prompt is computed, as workers do. Then one answer is decoded alone, and while prompts
arrive one after another, over a link of 1 Gb/s and as fast as they come.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from disagg.bench.child import Child
from disagg.bench.decoder import Decoder
from disagg.bench.encoder import Encoder
from disagg.bench.inputs import SLAB_BYTES, slabs_for
from disagg.bench.link import FRAME_BYTES, LOOPBACK
from disagg.bench.result import result_of, tell
from disagg.bench.source import Sent
from disagg.config import DEFAULT_CODEC
from disagg.plan import Plan

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
class AnswerGaps:
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
    decoding: tuple[AnswerGaps, ...]


def run(options: LatencyOptions) -> dict[str, Any]:
    """The result of `measure` as a JSON object."""
    return result_of(measure(options), NOTES)


def measure(options: LatencyOptions) -> list[LatencyRow]:
    """Send a prompt again and again, one at a time; then decode beside."""
    with Child(Decoder) as sink, Child(Encoder) as source:
        plan, heads, head_dim = sink.ask("start", options.codec)
        address = sink.ask("listen", LOOPBACK, None)
        sent, running = _hand_over(options, sink, source, (plan, heads, head_dim, address))
        sink.ask("takes", False)
        _prepare(source, plan, (heads, options.arriving, head_dim), options.codec, address)
        beside: list[tuple[Child | None, float | None]] = [(None, None)]
        beside += [(source, gbps) for gbps in LINKS_GBPS]
        cases = tell(beside, lambda case: "an answer alone" if case[0] is None else _name(case[1]))
        decoding = [_decode(options, sink, *case) for case in cases]
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
    for _ in tell(range(options.rounds + 1), lambda number: f"hand-off {number}"):
        one: Sent = source.ask("send", "link", options.codec, None, FRAME_BYTES)
        sent.append(one)
        running.append(1e3 * (sink.ask("running_at", one.rid) - one.began_at))
    return sent[1:], running[1:]  # the first opened the connection


def _decode(
    options: LatencyOptions,
    sink: Child,
    source: Child | None,
    gbps: float | None,
) -> AnswerGaps:
    """Decode one answer, while prompts arrive if there is a source of them."""
    sink.post("decode", options.answer)
    began, ended, nbytes = 0.0, float("inf"), 0
    if source is not None:
        bytes_per_s = gbps and 1e9 * gbps / 8
        sending = (options.seconds, "link", options.codec, bytes_per_s, FRAME_BYTES)
        began, ended, nbytes = source.ask("send_for", *sending)
    times = [at for at in sink.answer() if began <= at <= ended]
    gaps = [1e3 * (after - before) for before, after in pairwise(times)]
    return AnswerGaps(
        received_gbps=8e-9 * nbytes / (ended - began),
        tokens=len(gaps),
        p50_ms=statistics.median(gaps),
        p99_ms=_p99(gaps),
    )


def _name(gbps: float | None) -> str:
    return "an answer while prompts arrive" + ("" if gbps is None else f" at {gbps:g} Gb/s")


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, round(0.99 * len(values)))]


def draw(result: dict[str, Any]) -> str:
    """What people read."""
    whole = (
        "{codec}, {tokens} tokens, {wire_bytes} bytes, of {rounds}:\n"
        "  running      {running_ms:6.2f} ms, p99 {running_p99_ms:6.2f} ms\n"
        "  acknowledged {acknowledged_ms:6.2f} ms, p99 {acknowledged_p99_ms:6.2f} ms"
    )
    beside = (
        "  a token while {received_gbps:5.2f} Gb/s arrive: {p50_ms:6.2f} ms, "
        "p99 {p99_ms:6.2f} ms, of {tokens}"
    )
    lines = []
    for row in result["rows"]:
        lines.append(whole.format_map(row))
        lines += [beside.format_map(gaps) for gaps in row["decoding"]]
    return "\n".join(lines)
