"""`disagg bench overlap`: does computing hide the wire?

Time to the first decode token over a paced link. Two workers in two processes; the prefill worker
sends through a token bucket of 50 Mb/s in bursts of at most 64 KiB. A prompt cannot decode before
it is computed, nor before its KV has crossed the link, so the bound is max(compute, wire). Beside
it: what it takes when pages may leave only after the whole prompt is computed.
"""

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from disagg.bench.result import result_of, tell
from disagg.config import Config, TransferConfig
from disagg.model.tokenizer import Tokenizer
from disagg.transfer.channel import connect
from disagg.transfer.control import WorkerClient
from disagg.workers.members import Peer, Role, Started
from disagg.workers.router import Router
from disagg.workers.worker import Worker

LINK_MBPS = 50.0
BURST_BYTES = 64 << 10
PROMPT_TOKENS = 1500
CODECS = ("raw", "raw:dtype=fp16", "kivi:bits=2,group=64,residual=64")
TEXT = "The old house by the river had stood empty for years, and nobody asked who had built it. "
NOTES = "milliseconds; ratios are to the slower of computing and sending"


@dataclass(frozen=True)
class Times:
    """One prompt: milliseconds from asking to its first token and to the first decoded one."""

    first_ms: float
    decoded_ms: float
    wire_bytes: int


@dataclass(frozen=True)
class OverlapRow:
    """One codec, medians. Milliseconds; ratios are to `bound_ms` = max(compute, wire).

    compute_ms: until the first token, which prefill says as soon as it has it
    wire_ms:    all bytes of the hand-off at the pace of the link
    overlapped_ms, after_ms: until the first decoded token, with pages leaving early or afterwards
    """

    codec: str
    wire_bytes: int
    compute_ms: float
    wire_ms: float
    bound_ms: float
    overlapped_ms: float
    overlapped_ratio: float
    after_ms: float
    after_ratio: float


def run(runs: int = 5) -> dict[str, Any]:
    """Rows for every codec, with what they were measured with."""
    prompts = [prompt_of(PROMPT_TOKENS, number) for number in range(runs + 1)]
    ways = tell([True, False], lambda way: "sent early" if way else "sent afterwards")
    early, late = (measure_side(way, prompts) for way in ways)
    rows = [summarise(codec, early[codec], late[codec]) for codec in CODECS]
    link = {"link_mbps": LINK_MBPS, "burst_bytes": BURST_BYTES}
    return result_of(rows, NOTES, **link, prompt_tokens=PROMPT_TOKENS, runs=runs)


def summarise(codec: str, early: list[Times], late: list[Times]) -> OverlapRow:
    """The medians of two sides."""
    wire_bytes = int(statistics.median(run.wire_bytes for run in early))
    wire_ms = wire_bytes * 8 / (LINK_MBPS * 1e3)
    compute_ms = statistics.median(run.first_ms for run in early)
    bound_ms = max(compute_ms, wire_ms)
    overlapped_ms = statistics.median(run.decoded_ms for run in early)
    after_ms = statistics.median(run.decoded_ms for run in late)
    return OverlapRow(
        codec=codec,
        wire_bytes=wire_bytes,
        compute_ms=compute_ms,
        wire_ms=wire_ms,
        bound_ms=bound_ms,
        overlapped_ms=overlapped_ms,
        overlapped_ratio=overlapped_ms / bound_ms,
        after_ms=after_ms,
        after_ratio=after_ms / bound_ms,
    )


def measure_side(overlap: bool, prompts: list[tuple[int, ...]]) -> dict[str, list[Times]]:
    """Runs of every codec with a fresh pair of workers; the first prompt is to warm up."""
    transfer = replace(
        TransferConfig(), link_mbps=LINK_MBPS, burst_bytes=BURST_BYTES, overlap=overlap
    )
    with ExitStack() as stack:
        pair = [
            stack.enter_context(worker_process(Config(transfer=transfer), role))
            for role in (Role.DECODE, Role.PREFILL)  # the last one to start is the first to end
        ]
        return asyncio.run(_ask_all(pair, prompts))


async def _ask_all(pair: list[Started], prompts: list[tuple[int, ...]]) -> dict[str, list[Times]]:
    router = Router()
    links = [connect(started.address) for started in pair]
    for started, link in zip(pair, links, strict=True):
        router.add(Peer(started, WorkerClient(link)))
    found: dict[str, list[Times]] = {codec: [] for codec in CODECS}
    cases = [(prompt, codec) for prompt in prompts for codec in CODECS]
    for prompt, codec in tell(cases, lambda case: case[1]):
        found[codec].append(await ask(router, prompt, codec))
    await router.close()
    for link in links:
        await link.close()
    return {codec: runs[1:] for codec, runs in found.items()}


async def ask(router: Router, prompt: tuple[int, ...], codec: str) -> Times:
    """Times of one prompt and three tokens."""
    times = []
    params = {"max_tokens": 3, "ignore_eos": True}
    start = time.monotonic()
    async with aclosing(router.generate(prompt, params, codec)) as outputs:
        async for output in outputs:
            times.append(1e3 * (time.monotonic() - start))
            wire_bytes = output.kv.get("wire_bytes", 0)
    return Times(times[0], times[1], wire_bytes)


@contextmanager
def worker_process(config: Config, role: Role) -> Iterator[Started]:
    """A worker in a process of its own, without Ray; it ends when its pipe does."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(config, role, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


def _work(config: Config, role: Role, pipe: Connection) -> None:
    torch.set_num_threads(1)
    worker = Worker(config, role, role.value)
    pipe.send(worker.start())
    pipe.poll(None)  # returns at the end of the pipe
    worker.stop(0.0)
    worker.wait()


def prompt_of(tokens: int, number: int) -> tuple[int, ...]:
    """A prompt of so many tokens; another number begins another one, so that no page is known."""
    tokenizer = Tokenizer.load()
    return tuple(tokenizer.encode(f"{number}. " + TEXT * tokens)[:tokens])


def draw(result: dict[str, Any]) -> str:
    """For people: one line a codec."""
    lines = [f"{'codec':36} {'compute':>8} {'wire':>8} {'overlapped':>16} {'afterwards':>16}  ms"]
    lines += [
        f"{row['codec']:36} {row['compute_ms']:8.0f} {row['wire_ms']:8.0f} "
        f"{row['overlapped_ms']:8.0f} ({row['overlapped_ratio']:.2f}x) "
        f"{row['after_ms']:8.0f} ({row['after_ratio']:.2f}x)"
        for row in result["rows"]
    ]
    return "\n".join(lines)
