"""`disagg bench transfer --plane`: the channels of the data plane compared with a TCP socket.

    disagg bench transfer --plane --netns         loopback and links of 1, 5 and 10 Gb/s, as root

One hand-off of arbitrary bytes over one stream, after reserve and attach: frames of 2 MiB, credit,
digests checked by the receiver, records in the pool, commit. A plain socket moves the same number
of bytes from the same memory. Rounds are interleaved. Figures are medians; a ratio is the median of
the ratios of single rounds, because the speed of a machine varies over time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

from disagg.bench.handoff import Pair, Sent, Way, start_pair
from disagg.bench.inputs import SLAB_BYTES, slabs_for
from disagg.bench.result import Row, progress, result_of
from disagg.bench.tables import table
from disagg.bench.transfer import TransferOptions
from disagg.codecs.planning import parse_plan
from disagg.config import DEFAULT_CODEC, SecurityConfig
from disagg.transfer.records import Manifest
from disagg.transfer.security import Authority, protected

PLANE = TransferOptions(
    codecs=(DEFAULT_CODEC,), tokens=(16384,), gbps=(1.0, 5.0, 10.0), rounds=5
)
NOTES = "gbps: 1e9 bits of records per second; cpu: seconds per 1e9 bytes of records"


class Route(NamedTuple):
    """A channel, "tcp", "grpc" or "direct", over TLS or not."""

    channel: str
    tls: bool


SOCKET = Route("tcp", tls=False)


class Timing(NamedTuple):
    """One transfer, in seconds: wall clock, and processor time of both ends."""

    seconds: float
    sender_cpu_s: float
    receiver_cpu_s: float


Round = Mapping[Route, Timing]


def measure_plane(options: TransferOptions) -> Row:
    """A row for every link and channel: loopback, and with `netns` the paced links; medians.

    Uses the first codec and prompt length, and those fields of TransferOptions that PLANE sets.

    channel:               "grpc" or "direct", over `tls` or not
    plane_gbps, tcp_gbps:  1e9 bits of records per second, through the channel and the socket
    ratio:                 of these, round by round
    plane_cpu, tcp_cpu:    processor seconds per 1e9 bytes of records, of both processes
    congestion:            control of the kernel, for gRPC; others use `link.CONGESTION`
    """
    rows: list[Row] = []
    codec, tokens = options.codecs[0], options.tokens[0]
    plan = parse_plan(codec, options.shape)
    nbytes = Manifest(plan, tokens).total_bytes
    pool_bytes = slabs_for(plan, tokens) * SLAB_BYTES
    for netns in (False, True) if options.netns else (False,):
        with start_pair(netns, {codec: plan}, pool_bytes) as pair:
            pair.sender.ask("fill", codec, plan, tokens)
            sends = _sends(pair, codec, nbytes)
            for gbps in options.gbps if netns else (0.0,):
                pair.limit(gbps)
                link = f"{gbps:g} Gb/s" if netns else "loopback"
                numbers = progress(
                    range(options.rounds + 1), f"{link}, round {{}}".format
                )
                rounds = [_measure_round(pair, sends) for _ in numbers]
                common = {
                    "link": link,
                    "rounds": options.rounds,
                    "nbytes": nbytes,
                    "congestion": pair.sender.ask("congestion"),
                }
                rows += _rows(common, rounds[1:])  # the first one warms everything
    return result_of(rows, NOTES)


def _sends(pair: Pair, codec: str, nbytes: int) -> dict[Route, Callable[[], Sent]]:
    """The function that sends the bytes, by route."""
    port = pair.receiver.ask("listen_raw", pair.host, nbytes)
    sends: dict[Route, Callable[[], Sent]] = {
        SOCKET: partial(pair.sender.ask, "send_raw", codec, pair.host, port)
    }
    for security in (None, protected(SecurityConfig(), Authority.make(), pair.host)):
        target = pair.receiver.ask("listen", pair.host, security)
        for channel in ("grpc", "direct"):
            way = Way(target, security, direct=channel == "direct")
            route = Route(channel, tls=security is not None)
            sends[route] = partial(pair.send, codec, way)
    return sends


def _measure_round(pair: Pair, sends: Mapping[Route, Callable[[], Sent]]) -> Round:
    """Every route once."""
    timings = {}
    for route, send in sends.items():
        before = pair.receiver.ask("cpu_seconds")
        sent = send()
        receiver_cpu_s = pair.receiver.ask("cpu_seconds") - before
        timings[route] = Timing(sent.seconds, sent.cpu_s, receiver_cpu_s)
    return timings


def _rows(common: Row, rounds: Sequence[Round]) -> Iterator[Row]:
    """A row for every route but the socket."""
    nbytes = common["nbytes"]
    timings = {route: [timing[route] for timing in rounds] for route in rounds[0]}
    tcp = timings.pop(SOCKET)

    def gbps(route: Sequence[Timing]) -> float:
        return 8e-9 * nbytes / median(x.seconds for x in route)

    def cpu(route: Sequence[Timing]) -> Row:
        return {
            "sender": 1e9 / nbytes * median(x.sender_cpu_s for x in route),
            "receiver": 1e9 / nbytes * median(x.receiver_cpu_s for x in route),
        }

    for route, plane in timings.items():
        ratios = [b.seconds / a.seconds for a, b in zip(plane, tcp, strict=True)]
        yield {
            **common,
            "channel": route.channel,
            "tls": route.tls,
            "plane_gbps": gbps(plane),
            "tcp_gbps": gbps(tcp),
            "ratio": median(ratios),
            "plane_cpu": cpu(plane),
            "tcp_cpu": cpu(tcp),
        }


def draw_plane(result: Row) -> str:
    """The result as a table; processor seconds per GB are sender + receiver."""
    rows = []
    for row in result["rows"]:
        cpu = {
            name: f"{row[name]['sender']:.2f} + {row[name]['receiver']:.2f}"
            for name in ("plane_cpu", "tcp_cpu")
        }
        rows.append({**row, **cpu, "tls": "TLS" if row["tls"] else ""})
    return table(rows)
