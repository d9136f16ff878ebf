"""`disagg bench moves`: what a client notices when its sequence goes on at another decode worker.

One answer at a time; in its middle its decode worker becomes a prefill worker, so that the sequence
moves to the other one. The gap is the longest between two tokens from then until five tokens after
the move. Beside it: prompt and answer prefilled again, as after a death.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from unittest.mock import patch

from disagg.bench.crew import Crew, hired, until
from disagg.bench.handoff import WorkerEnd, prompt_of, visit
from disagg.bench.result import Row, result_of, tell
from disagg.config import DEFAULT_CODEC, Config, EngineConfig, TransferConfig
from disagg.errors import TransferError
from disagg.plan import Plan
from disagg.pool import Arena
from disagg.state import GroupState
from disagg.transfer.messages import Role, WorkerStatus
from disagg.transfer.records import ArenaSource, Checklist
from disagg.transfer.reservations import Admission
from disagg.wire import digest
from disagg.workers.decode import DecodeSide, Departure
from disagg.workers.dispatch import Started

CODECS = (DEFAULT_CODEC, "raw")
LENGTHS = (300, 1500)
BEFORE, AFTER, ANSWER = 40, 5, 120  # tokens: until it is told to move, after it moved, of all
NOTES = "milliseconds, medians; the model is the packaged one, on the CPU with one thread a worker"


Seen = Counter[tuple[int, ...]]  # the digests of all items of a sequence, each as often as it was


@contextmanager
def witnessed() -> Iterator[tuple[Seen, Seen]]:
    """What sequences that leave workers of this process consist of, and those that come.

    Read where it lies: when one has stopped, and before another engine has it.
    """
    left, came, begin, admit = Seen(), Seen(), Departure.begin, DecodeSide.admit

    def begins(self: Departure, plan: Plan, groups: Sequence[GroupState]) -> None:
        begin(self, plan, groups)
        if self.whole:
            left[_digests(self.arena, self.checklist, groups)] += 1

    def admits(self: DecodeSide, admission: Admission) -> None:
        if tokens := admission.job.moved:
            engine = self.way.engine
            checklist = Checklist(engine.plan(admission.job.codec), tokens)
            came[_digests(engine.pool.arena, checklist, admission.groups)] += 1
        admit(self, admission)

    with patch.object(Departure, "begin", begins), patch.object(DecodeSide, "admit", admits):
        yield left, came


def _digests(arena: Arena, checklist: Checklist, groups: Sequence[GroupState]) -> tuple[int, ...]:
    items = ArenaSource(arena, checklist, groups)
    return tuple(digest(items.read([item])[0]) for item in checklist.items)


class Witness(WorkerEnd):
    """A worker that looks at what leaves and what comes."""

    async def start(self, config: Config, role: Role, name: str) -> Started:
        self._stack = ExitStack()
        self._seen = self._stack.enter_context(witnessed())
        return await super().start(config, role, name)

    async def seen(self) -> tuple[Seen, Seen]:
        """What left and what came so far."""
        return self._seen


@dataclass(frozen=True)
class Sight:
    """One answer: its longest gap around the move, all other gaps, and a prefill instead of it."""

    gap_ms: float
    others_ms: tuple[float, ...]
    prefill_ms: float
    prefill_bytes: int


def measure_moves(rounds: int = 20) -> Row:
    """A row for every codec and length of a prompt.

    moves, equal:   how many there were; with equal digests of all records on both sides
    gap_ms, itl_ms: between tokens, at a move and else
    stopped_ms:     from the last token at one worker until the other one has acknowledged it all
    prefill_ms:     until the first decoded token, had prompt and answer been prefilled again
    """
    return result_of(asyncio.run(_measure(rounds)), NOTES, rounds=rounds)


async def _measure(rounds: int) -> list[Row]:
    config = Config(engine=EngineConfig(prefix_cache=False), transfer=TransferConfig(dedup=False))
    rows = []
    async with hired(config, 1, 2, Witness) as crew:
        for codec, tokens in tell([(x, y) for x in CODECS for y in LENGTHS], str):
            await _look(crew, prompt_of(tokens, 0), codec)  # warms everything
            before, seen_before = await _counts(crew), await _seen(crew)
            prompts = [prompt_of(tokens, number + 1) for number in range(rounds)]
            seen = [await _look(crew, prompt, codec) for prompt in prompts]
            left, came = (x - y for x, y in zip(await _seen(crew), seen_before, strict=True))
            moved = {x: y - before[x] for x, y in (await _counts(crew)).items()}
            itl_ms = median(gap for sight in seen for gap in sight.others_ms)
            gap_ms = median(sight.gap_ms for sight in seen)
            rows.append(
                {
                    "codec": codec,
                    "prompt_tokens": tokens,
                    "moves": moved["moved"],
                    "equal": sum((left & came).values()),
                    "gap_ms": gap_ms,
                    "itl_ms": itl_ms,
                    "ratio": gap_ms / itl_ms,
                    "stopped_ms": moved["moved_ms"] / moved["moved"],
                    "moved_bytes": moved["moved_bytes"] // moved["moved"],
                    "prefill_ms": median(sight.prefill_ms for sight in seen),
                    "prefill_bytes": int(median(sight.prefill_bytes for sight in seen)),
                }
            )
    return rows


async def _look(crew: Crew, prompt: tuple[int, ...], codec: str) -> Sight:
    """One answer that moves; then its beginning again, as a prompt."""
    rules, tokens, times, told, ends = crew.router.dispatch, list[int](), [], 0, ANSWER
    moves, params = rules.moves, {"max_tokens": ANSWER, "ignore_eos": True}
    async with aclosing(crew.router.generate(prompt, params, codec)) as outputs:
        async for output in outputs:
            if output.token is not None:
                tokens.append(output.token)
                times.append(time.monotonic())
            if len(tokens) == BEFORE and not told:
                (entry,) = rules.entries.values()
                source, told = crew.hands[str(entry.decode)], len(times)
                await asyncio.to_thread(source.child.ask, "assume", Role.PREFILL)
            if rules.moves > moves and ends == ANSWER:
                ends = len(times) + AFTER
    await asyncio.to_thread(source.child.ask, "assume", Role.DECODE)
    peers = crew.router.peers
    await until(lambda: peers[source.name].started.role.decodes, f"{source.name} decodes again")
    if rules.moves == moves:
        raise TransferError(f"an answer of {len(tokens)} tokens ended before it had moved")
    gaps = [1e3 * (after - before) for before, after in pairwise(times)]
    others = (*gaps[1:told], *gaps[ends:])
    again, kv = await visit(crew.router, (*prompt, *tokens[: ends - AFTER]), codec)
    return Sight(max(gaps[told:ends]), others, 1e3 * again.decoded_s, kv["wire_bytes"])


async def _seen(crew: Crew) -> tuple[Seen, Seen]:
    """What left and what came, of all workers together."""
    found = Seen(), Seen()
    for hand in crew.hands.values():
        for total, some in zip(found, await asyncio.to_thread(hand.child.ask, "seen"), strict=True):
            total.update(some)
    return found


async def _counts(crew: Crew) -> dict[str, int]:
    """Of all workers together."""
    found = dict.fromkeys(("moved", "moved_bytes", "moved_ms"), 0)
    for said in (await crew.router.status()).values():
        assert isinstance(said, WorkerStatus)
        found = {x: y + said.info["counts"].get(x, 0) for x, y in found.items()}
    return found
