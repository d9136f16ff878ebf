"""The least latency of a hand-off, and how much arriving prompts slow down a running answer.

    python -m benchmarks.latency --json --out FILE

A tiny prompt goes over loopback to an idle decode worker with the packaged model. Times are from
the offer of the last layer until the engine runs the prompt, and until the acknowledgement is back.
Pages are ready and all layers are offered at once, after reserve and attach, so nothing is sent
early. Then one answer is decoded alone, and while prompts arrive one after another, at 1 Gb/s and
without a limit.
"""

import time
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from typer import Option

from benchmarks import command
from disagg.bench.child import Child
from disagg.bench.result import Row, p99, progress, result_of
from disagg.bench.tables import table
from disagg.cli.bench import Out, Rounds, show, without_none
from disagg.cli.checks import check_codecs
from disagg.cli.options import Json
from disagg.config import DEFAULT_CODEC, Config
from disagg.transfer.messages import Role

if TYPE_CHECKING:  # imports torch: the arguments are checked before
    from disagg.bench.handoff import Sent, Way

NOTES = "milliseconds; the model is the packaged one, on the CPU with one thread"


@dataclass(frozen=True)
class LatencyOptions:
    """The tiny prompt, the number of rounds, and the answer decoded while prompts arrive.

    arriving: tokens of the prompts that arrive meanwhile, for `seconds`
    """

    codec: str = DEFAULT_CODEC
    tokens: int = 100
    rounds: int = 200
    answer: int = 600
    arriving: int = 1900
    seconds: float = 5.0


def measure_latency(options: LatencyOptions) -> Row:
    """Send prompts one at a time; then decode an answer while prompts arrive. Milliseconds.

    running_ms:      from the last layer offered until the engine runs the prompt
    acknowledged_ms: until the sender has the acknowledgement
    admit_ms:        part of it: from the commit at the decode worker to the inbox of its engine
    decoding:        gaps between tokens of an answer, alone and while `received_gbps` arrive
    """
    from benchmarks.recorded_worker import RecordedEnd
    from disagg.bench.handoff import SendingEnd, Way
    from disagg.bench.workers import started_workers

    with (
        started_workers(Config(), Role.BOTH, process=RecordedEnd) as (workers, infos),
        Child(SendingEnd) as source,
    ):
        (worker,), (info,) = workers, infos
        plan = worker.ask("plan", options.codec)
        source.ask("encode", options.codec, plan, options.tokens)
        sent, running_ms = _send_alone(options, worker, source, Way(info))
        source.ask("encode", options.codec, plan, options.arriving)
        ways = {
            "an answer alone": None,
            "an answer while prompts arrive": Way(info),
            "an answer while prompts arrive at 1 Gb/s": Way(info, bytes_per_s=1e9 / 8),
        }
        decoding = [
            _decode(options, worker, source, rid=name, way=ways[name])
            for name in progress(ways, str)
        ]
    acknowledged_ms = [x.stats.exposed_ms for x in sent]
    row = {
        "codec": options.codec,
        "tokens": options.tokens,
        "rounds": options.rounds,
        "wire_bytes": sent[0].stats.wire_bytes,
        "running_ms": median(running_ms),
        "running_p99_ms": p99(running_ms),
        "acknowledged_ms": median(acknowledged_ms),
        "acknowledged_p99_ms": p99(acknowledged_ms),
        "admit_ms": median(x.stats.admit_ms for x in sent),
        "decoding": decoding,
    }
    return result_of([row], NOTES)


def _send_alone(
    options: LatencyOptions, worker: Child, source: Child, way: "Way"
) -> "tuple[list[Sent], list[float]]":
    """Every hand-off, and the milliseconds until its prompt ran."""
    all_sent: list[Sent] = []
    running_ms: list[float] = []
    for _ in progress(range(options.rounds + 1), "hand-off {}".format):
        sent = source.ask("send", options.codec, way)
        (ran_at,) = worker.ask("token_times", sent.rid, 1)
        all_sent.append(sent)
        running_ms.append(1e3 * (ran_at - sent.began_at))
    return all_sent[1:], running_ms[1:]  # the first opened the connection


def _decode(
    options: LatencyOptions, worker: Child, source: Child, rid: str, way: "Way | None"
) -> Row:
    """Decode one answer, while prompts arrive if there is a way for them."""
    worker.ask("answer", rid, options.answer)
    began, ended = 0.0, float("inf")
    nbytes = 0
    if way is not None:
        began = time.monotonic()
        ended = began
        while ended < began + options.seconds:
            nbytes += source.ask("send", options.codec, way).stats.payload_bytes
            ended = time.monotonic()
    times = worker.ask("token_times", rid, options.answer)
    times = [at for at in times if began <= at <= ended]
    gaps_ms = [1e3 * (after - before) for before, after in pairwise(times)]
    return {
        "received_gbps": 8e-9 * nbytes / (ended - began),
        "tokens": len(gaps_ms),
        "p50_ms": median(gaps_ms),
        "p99_ms": p99(gaps_ms),
    }


def draw_latency(result: Row) -> str:
    """The result as tables."""
    (row,) = result["rows"]
    columns = [name for name in row if name != "decoding"]
    return f"{table([row], columns)}\n\n{table(row['decoding'])}"


def latency(
    codec: str | None = Option(None, help="Codec spec."),
    tokens: int | None = Option(None, min=1, help="Length of the tiny prompt."),
    rounds: Rounds = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Latency of a hand-off, and the cost of arriving prompts for a running answer."""
    check_codecs(None, [] if codec is None else [codec], tokens=(tokens or 0) + 1)
    fields = without_none(codec=codec, tokens=tokens, rounds=rounds)
    show(measure_latency(LatencyOptions(**fields)), out, as_json, draw_latency)


if __name__ == "__main__":
    command.main(latency, "latency")
