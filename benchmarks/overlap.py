"""How well transfers overlap with prefill.

    python -m benchmarks.overlap --json --out FILE

Time to the first decode token over a link of 50 Mb/s (a token bucket, bursts of at most 64 KiB). A
prompt cannot decode before it is computed and its KV has crossed the link, so the bound is
max(compute, wire). For comparison, pages are sent only after the whole prompt is computed.
"""

import asyncio
from collections.abc import Sequence
from statistics import median

from benchmarks import command
from disagg.bench.result import Row, progress, result_of
from disagg.bench.workers import Answer, prompt_of, routed, started_workers, visit
from disagg.cli.bench import Out, Runs, show
from disagg.cli.options import Json
from disagg.config import DEFAULT_CODEC, Config, TransferConfig
from disagg.transfer.messages import Role, WorkerInfo

LINK_MBPS = 50.0
BURST_BYTES = 64 << 10
PROMPT_TOKENS = 1500
CODECS = ("raw", "raw:dtype=fp16", DEFAULT_CODEC, "kivi:bits=2,group=64,residual=64")
NOTES = "milliseconds; ratios are to the slower of computing and sending"


def measure_overlap(runs: int = 5) -> Row:
    """Rows for every codec, with the link and the prompt."""
    sides = {}
    for overlap in progress(
        [True, False], lambda overlap: f"sent {'early' if overlap else 'afterwards'}"
    ):
        sides[overlap] = measure_side(overlap, runs)
    rows = [
        summarise(codec, sides[True][codec], sides[False][codec]) for codec in CODECS
    ]
    return result_of(
        rows,
        NOTES,
        link_mbps=LINK_MBPS,
        burst_bytes=BURST_BYTES,
        prompt_tokens=PROMPT_TOKENS,
        runs=runs,
    )


def summarise(codec: str, early: Sequence[Answer], late: Sequence[Answer]) -> Row:
    """The medians of two sides, in milliseconds; ratios are to `bound_ms` = max(compute, wire).

    compute_ms: time to the first token, which prefill emits
    wire_ms:    all bytes of the hand-off at the rate of the link
    overlapped_ms, after_ms: time to the first decoded token, with pages sent early or afterwards
    """
    wire_bytes = int(median(kv.get("wire_bytes", 0) for _, kv in early))
    wire_ms = wire_bytes * 8 / (LINK_MBPS * 1e3)
    compute_ms = 1e3 * median(times.ttft_s for times, _ in early)
    bound_ms = max(compute_ms, wire_ms)
    overlapped_ms = 1e3 * median(times.decoded_s for times, _ in early)
    after_ms = 1e3 * median(times.decoded_s for times, _ in late)
    return {
        "codec": codec,
        "wire_bytes": wire_bytes,
        "compute_ms": compute_ms,
        "wire_ms": wire_ms,
        "bound_ms": bound_ms,
        "overlapped_ms": overlapped_ms,
        "overlapped_ratio": overlapped_ms / bound_ms,
        "after_ms": after_ms,
        "after_ratio": after_ms / bound_ms,
    }


def measure_side(overlap: bool, runs: int) -> dict[str, list[Answer]]:
    """Runs of every codec with a fresh pair of workers, after one to warm up."""
    transfer = TransferConfig(
        link_mbps=LINK_MBPS,
        burst_bytes=BURST_BYTES,
        overlap=overlap,
        min_disagg_tokens=0,
    )
    config = Config(transfer=transfer)
    with started_workers(config, Role.DECODE, Role.PREFILL) as (_, pair):
        return asyncio.run(_visit_all(pair, runs))


async def _visit_all(pair: Sequence[WorkerInfo], runs: int) -> dict[str, list[Answer]]:
    """Every visit has a prompt of its own: prefill would know an old one under any codec."""
    answers: dict[str, list[Answer]] = {codec: [] for codec in CODECS}
    async with routed(pair) as router:
        for number, codec in enumerate(progress(CODECS * (runs + 1), str)):
            prompt = prompt_of(PROMPT_TOKENS, number)
            answers[codec].append(await visit(router, prompt, codec))
    return {codec: of_codec[1:] for codec, of_codec in answers.items()}


def overlap(runs: Runs = 5, out: Out = None, as_json: Json = False) -> None:
    """Time to the first decode token over a paced link, with and without overlap."""
    show(measure_overlap(runs), out, as_json)


if __name__ == "__main__":
    command.main(overlap, "overlap")
