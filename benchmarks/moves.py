"""The cost of moving a running sequence.

    python -m benchmarks.moves --json --out FILE

One answer at a time: halfway through, its decode worker becomes a prefill worker, so the sequence
moves to the other decode worker. The gap is the longest time between two tokens from then until
five tokens after the move. For comparison, prompt and answer are prefilled again, as after a crash.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from itertools import chain, pairwise, product
from statistics import median
from typing import NamedTuple
from unittest.mock import patch

from typer import Option

from benchmarks import command
from benchmarks.worker_group import RoutedGroup, WorkerProcess, running, until
from disagg.bench.result import Row, progress, result_of
from disagg.bench.workers import Prompt, WorkerEnd, prompt_of, visit
from disagg.cli.bench import Out, show
from disagg.cli.options import Json
from disagg.config import DEFAULT_CODEC, Config, EngineConfig, TransferConfig
from disagg.errors import TransferError
from disagg.kv.arena import Arena
from disagg.kv.plan import Plan
from disagg.kv.state import GroupState
from disagg.transfer.messages import Role, WorkerInfo, WorkerStatus
from disagg.transfer.records import ArenaSource, Manifest
from disagg.transfer.reservations import Admission
from disagg.wire import digest
from disagg.worker.decode import DecodeSide
from disagg.worker.handoff import MigrationHandoff

CODECS = (DEFAULT_CODEC, "raw")
LENGTHS = (300, 1500)
TOKENS_BEFORE = 40  # of an answer, until its worker changes its role
TOKENS_AFTER = 5  # after the move, until gaps are ordinary ones again
ANSWER_TOKENS = 120
NOTES = "milliseconds, medians; packaged model, CPU, one thread a worker"

# digests of all items of a sequence, and how often there was such a sequence
Digests = Counter[tuple[int, ...]]


@contextmanager
def witnessed() -> Iterator[tuple[Digests, Digests]]:
    """The bytes of sequences that leave workers of this process, and of those that arrive.

    They are read after a sequence has stopped, and before the other engine runs it.
    """
    departed, arrived = Digests(), Digests()
    begin, admit = MigrationHandoff.begin, DecodeSide.admit

    def begin_and_record(
        self: MigrationHandoff, plan: Plan, groups: Sequence[GroupState]
    ) -> None:
        begin(self, plan, groups)
        if self.all_offered:
            departed[_digests_of(self.arena, self.manifest, groups)] += 1

    def admit_and_record(self: DecodeSide, admission: Admission) -> None:
        tokens = admission.job.moved
        if tokens:
            engine = self.context.engine
            plan = engine.plan(admission.job.codec).moving
            manifest = Manifest(plan, tokens)
            arrived[_digests_of(engine.pool.arena, manifest, admission.groups)] += 1
        admit(self, admission)

    with (
        patch.object(MigrationHandoff, "begin", begin_and_record),
        patch.object(DecodeSide, "admit", admit_and_record),
    ):
        yield departed, arrived


def _digests_of(
    arena: Arena, manifest: Manifest, groups: Sequence[GroupState]
) -> tuple[int, ...]:
    source = ArenaSource(arena, manifest, groups)
    return tuple(digest(source.read([item])[0]) for item in manifest.items)


class PageWitness(WorkerEnd):
    """A worker that records the bytes of sequences that leave and arrive."""

    async def start(self, config: Config, role: Role, name: str) -> WorkerInfo:
        self._stack = ExitStack()
        self._digests = self._stack.enter_context(witnessed())
        return await super().start(config, role, name)

    async def digests(self) -> tuple[Digests, Digests]:
        """Of sequences that departed and that arrived so far."""
        return self._digests


class MoveSample(NamedTuple):
    """One answer: its longest gap around the move, other gaps, and a prefill instead of it."""

    gap_ms: float
    others_ms: list[float]
    prefill_ms: float
    prefill_bytes: int


def measure_moves(rounds: int = 20) -> Row:
    """A row for every codec and length of a prompt.

    moves, equal:   number of moves, and of those with equal records on both sides
    gap_ms, itl_ms: between tokens, at the move and elsewhere
    stopped_ms:     from the last token at one worker to the acknowledgement of the other
    prefill_ms:     time to the first decoded token if prompt and answer are prefilled again
    """
    return result_of(asyncio.run(_measure(rounds)), NOTES, rounds=rounds)


async def _measure(rounds: int) -> list[Row]:
    config = Config(
        engine=EngineConfig(prefix_cache=False), transfer=TransferConfig(dedup=False)
    )
    rows = []
    group = RoutedGroup(config, PageWitness)
    async with running(group, prefill=1, decode=2):
        for codec, tokens in progress(product(CODECS, LENGTHS), str):
            rows.append(await _measure_prompts(group, rounds, codec, tokens))
    return rows


async def _measure_prompts(
    group: RoutedGroup, rounds: int, codec: str, tokens: int
) -> Row:
    """The row of one codec and length."""
    await _sample(group, prompt_of(tokens, 0), codec)  # warms everything
    counts_before = await _counts(group)
    departed_before, arrived_before = await _all_digests(group)
    prompts = [prompt_of(tokens, number + 1) for number in range(rounds)]
    samples = [await _sample(group, prompt, codec) for prompt in prompts]
    departed, arrived = await _all_digests(group)
    equal = (departed - departed_before) & (arrived - arrived_before)
    counts = await _counts(group) - counts_before
    moves = counts["moved"]
    gap_ms = median(sample.gap_ms for sample in samples)
    itl_ms = median(chain(*(sample.others_ms for sample in samples)))
    return {
        "codec": codec,
        "prompt_tokens": tokens,
        "moves": moves,
        "equal": equal.total(),
        "gap_ms": gap_ms,
        "itl_ms": itl_ms,
        "ratio": gap_ms / itl_ms,
        "stopped_ms": counts["moved_ms"] / moves,
        "moved_bytes": counts["moved_bytes"] // moves,
        "prefill_ms": median(sample.prefill_ms for sample in samples),
        "prefill_bytes": int(median(sample.prefill_bytes for sample in samples)),
    }


async def _sample(group: RoutedGroup, prompt: Prompt, codec: str) -> MoveSample:
    """One answer that moves; then prompt and answer up to the move again, as a prompt."""
    requests = group.router.table
    moves_before = requests.moves
    tokens = list[int]()
    times = list[float]()
    source: WorkerProcess | None = None
    asked_at = 0  # tokens that had arrived when the worker changed its role
    calm_from = ANSWER_TOKENS  # the token from which gaps are ordinary ones again
    params = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
    async with aclosing(group.router.generate(prompt, params, codec)) as outputs:
        async for output in outputs:
            if output.token is not None:
                tokens.append(output.token)
                times.append(time.monotonic())
            if len(tokens) == TOKENS_BEFORE and source is None:
                (entry,) = requests.requests.values()
                source = group.workers[str(entry.decode)]
                asked_at = len(times)
                await asyncio.to_thread(source.child.ask, "assume", Role.PREFILL)
            if requests.moves > moves_before and calm_from == ANSWER_TOKENS:
                calm_from = len(times) + TOKENS_AFTER
    assert source is not None, "the answer is shorter than TOKENS_BEFORE"
    await _restore(group, source)
    if requests.moves == moves_before:
        raise TransferError(
            f"an answer of {len(tokens)} tokens ended before it had moved"
        )
    gaps_ms = [1e3 * (after - before) for before, after in pairwise(times)]
    prefilled = (*prompt, *tokens[: calm_from - TOKENS_AFTER])
    request_times, kv = await visit(group.router, prefilled, codec)
    return MoveSample(
        gap_ms=max(gaps_ms[asked_at:calm_from]),
        others_ms=gaps_ms[1:asked_at] + gaps_ms[calm_from:],
        prefill_ms=1e3 * request_times.decoded_s,
        prefill_bytes=kv.get("wire_bytes", 0),
    )


async def _restore(group: RoutedGroup, worker: WorkerProcess) -> None:
    """Let a worker decode again, and wait until the router knows."""
    await asyncio.to_thread(worker.child.ask, "assume", Role.DECODE)
    peer = group.router.peers[worker.name]

    async def decodes() -> bool:
        return peer.info.role.decodes

    await until(decodes, f"{worker.name} decodes again")


async def _all_digests(group: RoutedGroup) -> tuple[Digests, Digests]:
    """Of sequences that departed and that arrived, of all workers together."""
    all_departed, all_arrived = Digests(), Digests()
    for worker in group.workers.values():
        departed, arrived = await asyncio.to_thread(worker.child.ask, "digests")
        all_departed.update(departed)
        all_arrived.update(arrived)
    return all_departed, all_arrived


async def _counts(group: RoutedGroup) -> Counter[str]:
    """Of all workers together."""
    counts = Counter[str]()
    for status in (await group.router.status()).values():
        assert isinstance(status, WorkerStatus)
        counts.update(status.info["counts"])
    return counts


def moves(
    runs: int = Option(20, min=1, help="Runs per median."),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Gaps in an answer that moves to another decode worker."""
    show(measure_moves(runs), out, as_json)


if __name__ == "__main__":
    command.main(moves, "moves")
