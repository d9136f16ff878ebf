"""How fast is the data plane? Frames as shipped, against a plain TCP socket in the same run.

    disagg bench transfer --plane --json        loopback, and as root links of 1, 5 and 10 Gb/s

One hand-off over one stream in frames of 2 MiB: reservation, credit, digests checked at the other
end, records copied into the pool, commit. Beside it the same over TLS. The socket (cubic) brings
as many bytes from the same memory to as much memory. Rounds are interleaved; figures are medians,
and a ratio is the median of the rounds' ratios, since machines have moods.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from disagg.bench.child import Child
from disagg.bench.inputs import SLAB_BYTES, shape_of, slabs_for
from disagg.bench.link import FRAME_BYTES, HOSTS, LOOPBACK, Namespaces, make_security
from disagg.bench.result import result_of, tell
from disagg.bench.sink import Sink
from disagg.bench.source import Source
from disagg.codecs.planning import KVShape, parse_plan
from disagg.config import DEFAULT_CODEC
from disagg.transfer.items import Checklist

LINKS_GBPS = (1.0, 5.0, 10.0)
NOTES = "gbps: 1e9 bits of records per second; cpu: seconds per 1e9 bytes of records"


@dataclass(frozen=True)
class PlaneOptions:
    """What is sent, and how often; `gbps` are the links between namespaces, with `netns`."""

    codec: str = DEFAULT_CODEC
    tokens: int = 16384
    rounds: int = 5
    netns: bool = False
    gbps: tuple[float, ...] = LINKS_GBPS
    shape: KVShape = field(default_factory=shape_of)


@dataclass(frozen=True)
class Cost:
    """Processor seconds per 1e9 bytes of records, of the two processes."""

    sender: float
    receiver: float


@dataclass(frozen=True)
class PlaneRow:
    """One link, medians.

    plane_gbps, tls_gbps, tcp_gbps: 1e9 bits of records per second
    ratio, tls_ratio:               of plane and TLS to TCP, round by round
    """

    link: str
    rounds: int
    nbytes: int
    plane_gbps: float
    tcp_gbps: float
    ratio: float
    tls_gbps: float
    tls_ratio: float
    plane_cpu: Cost
    tls_cpu: Cost
    tcp_cpu: Cost


@dataclass(frozen=True)
class Way:
    """One way of bringing the bytes over, in one round."""

    seconds: float
    sender_cpu: float
    receiver_cpu: float


def run(options: PlaneOptions) -> dict[str, Any]:
    """The result of `measure` as a JSON object."""
    return result_of(measure(options), NOTES)


def measure(options: PlaneOptions) -> list[PlaneRow]:
    """Loopback, and with `netns` every link."""
    rows = [_measure(options, "loopback", LOOPBACK, ((), ()))]
    if options.netns:
        with Namespaces() as namespaces:
            ends = namespaces.prefix(0), namespaces.prefix(1)
            for gbps in options.gbps:
                namespaces.shape(gbps)
                rows.append(_measure(options, f"{gbps:g} Gb/s", HOSTS[1], ends))
    return rows


def _measure(
    options: PlaneOptions,
    link: str,
    host: str,
    ends: tuple[Sequence[str], Sequence[str]],
) -> PlaneRow:
    with _processes(options, host, ends) as (sink, source, port):
        spec, rounds = options.codec, []
        for number in tell(range(options.rounds + 1), lambda number: f"{link}, round {number}"):
            once = {
                "tcp": _timed(sink, lambda: source.ask("send_raw", host, port, spec)),
                "plane": _timed(sink, lambda: _push(source, "plain", spec)),
                "tls": _timed(sink, lambda: _push(source, "tls", spec)),
            }
            assert sink.ask("settle") == 2
            if number:  # the first one warms caches and connections
                rounds.append(once)
    nbytes = Checklist(parse_plan(options.codec, options.shape), options.tokens).total_bytes
    return _row(link, nbytes, rounds)


@contextmanager
def _processes(
    options: PlaneOptions, host: str, ends: tuple[Sequence[str], Sequence[str]]
) -> Iterator[tuple[Child, Child, int]]:
    """A sink, a source that is linked to it and holds a prompt, and the port of the raw socket."""
    plan = parse_plan(options.codec, options.shape)
    slabs = slabs_for(plan, options.tokens)
    server, client = make_security([LOOPBACK, *HOSTS])
    with ExitStack() as stack:
        sink = stack.enter_context(Child(Sink, ends[1]))
        source = stack.enter_context(Child(Source, ends[0]))
        sink.ask("open", {options.codec: plan}, 2 * slabs, SLAB_BYTES)
        source.ask("connect", "plain", sink.ask("listen", host, None), None)
        source.ask("connect", "tls", sink.ask("listen", host, server), client)
        source.ask("fill", options.codec, plan, options.tokens, slabs, SLAB_BYTES)
        nbytes = Checklist(plan, options.tokens).total_bytes
        yield sink, source, sink.ask("listen_raw", host, nbytes)


def _push(source: Child, link: str, spec: str) -> tuple[float, float]:
    sent = source.ask("send", link, spec, None, FRAME_BYTES)
    return sent.seconds, sent.cpu_s


def _timed(sink: Child, send: Callable[[], tuple[float, float]]) -> Way:
    before = sink.ask("cpu_seconds")
    seconds, cpu = send()
    return Way(seconds, cpu, sink.ask("cpu_seconds") - before)


def _row(link: str, nbytes: int, rounds: Sequence[dict[str, Way]]) -> PlaneRow:
    def gbps(way: str) -> float:
        return statistics.median(8e-9 * nbytes / once[way].seconds for once in rounds)

    def ratio(way: str) -> float:
        return statistics.median(once["tcp"].seconds / once[way].seconds for once in rounds)

    def cost(way: str) -> Cost:
        return Cost(
            sender=1e9 / nbytes * statistics.median(once[way].sender_cpu for once in rounds),
            receiver=1e9 / nbytes * statistics.median(once[way].receiver_cpu for once in rounds),
        )

    return PlaneRow(
        link=link,
        rounds=len(rounds),
        nbytes=nbytes,
        plane_gbps=gbps("plane"),
        tcp_gbps=gbps("tcp"),
        ratio=ratio("plane"),
        tls_gbps=gbps("tls"),
        tls_ratio=ratio("tls"),
        plane_cpu=cost("plane"),
        tls_cpu=cost("tls"),
        tcp_cpu=cost("tcp"),
    )


def draw(result: dict[str, Any]) -> str:
    """What people read."""
    cost = "{sender:.2f} + {receiver:.2f}"
    line = (
        "{link:<10} {plane_gbps:7.2f} {tls_gbps:7.2f} {tcp_gbps:7.2f}"
        "    {ratio:7.3f} {tls_ratio:7.3f}     "
    )
    lines = [
        "               Gb/s                       ratio to TCP    CPU s/GB, sender + receiver",
        "link         plane     TLS     TCP      plane     TLS     plane          TCP",
    ]
    for row in result["rows"]:
        costs = (cost.format_map(row[way]) for way in ("plane_cpu", "tcp_cpu"))
        lines.append(line.format_map(row) + "    ".join(costs))
    return "\n".join(lines)
