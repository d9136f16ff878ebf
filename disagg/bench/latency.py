"""How long does a hand-off itself take? A tiny prompt, an idle decode worker, loopback.

    python -m disagg.bench.latency --json

From the last layer of a prompt offered to the acknowledgement, which leaves the decode worker
after its engine has been given the prompt: one way more than the prompt waits. The reservation is
made before the prompt is computed, as workers do.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from disagg.bench.child import Child
from disagg.bench.provenance import result_of
from disagg.bench.shape import SLAB_BYTES, Shape, slabs_for
from disagg.bench.sink import Sink
from disagg.bench.source import Sent, Source
from disagg.bench.stream import FRAME_BYTES
from disagg.config import DEFAULT_CODEC

LOOPBACK = "127.0.0.1"
NOTES = "from the last layer offered to the acknowledgement at the sender, in milliseconds"


@dataclass(frozen=True)
class LatencyOptions:
    """The prompt; a small model's shape unless told otherwise."""

    codec: str = DEFAULT_CODEC
    tokens: int = 100
    rounds: int = 200
    shape: Shape = field(default_factory=lambda: Shape(layers=8, heads=4, head_dim=64))


@dataclass(frozen=True)
class LatencyRow:
    """Milliseconds; `admit_ms` of them are the decode worker's, from the commit to its engine."""

    codec: str
    tokens: int
    rounds: int
    wire_bytes: int
    median_ms: float
    p99_ms: float
    admit_ms: float


def run(options: LatencyOptions) -> list[LatencyRow]:
    """Send a prompt again and again, one at a time."""
    spec, tokens = options.codec, options.tokens
    plan = options.shape.plan(spec)
    slabs = slabs_for(plan, tokens)
    sent: list[Sent] = []
    with Child(Sink) as sink, Child(Source) as source:
        sink.ask("open", {spec: plan}, slabs, SLAB_BYTES)
        source.ask("connect", "link", sink.ask("listen", LOOPBACK, None), None)
        source.ask("fill", spec, plan, tokens, slabs, SLAB_BYTES)
        for _ in range(options.rounds + 1):
            sent.append(source.ask("send", "link", spec, None, FRAME_BYTES))
            assert sink.ask("settle") == 1
    del sent[0]  # it opened the connection
    exposed = sorted(x.receipt.exposed_ms for x in sent)
    row = LatencyRow(
        codec=spec,
        tokens=tokens,
        rounds=options.rounds,
        wire_bytes=sent[0].receipt.wire_bytes,
        median_ms=statistics.median(exposed),
        p99_ms=exposed[min(len(exposed) - 1, round(0.99 * len(exposed)))],
        admit_ms=statistics.median(x.receipt.admit_ms for x in sent),
    )
    return [row]


def table(rows: Sequence[LatencyRow]) -> str:
    """What people read."""
    return "\n".join(
        f"{row.codec}, {row.tokens} tokens, {row.wire_bytes} bytes: median {row.median_ms:.2f} ms, "
        f"p99 {row.p99_ms:.2f} ms, of {row.rounds}"
        for row in rows
    )


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
