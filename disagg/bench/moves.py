"""`disagg bench moves`: what a client notices when its sequence goes on at another decode worker.

One answer at a time; in its middle its decode worker becomes a prefill worker, so that the sequence
moves to the other one. The gap is the longest between two tokens from then until five tokens after
the move. Beside it: prompt and answer prefilled again, as after a death.
"""

import asyncio
import time
from contextlib import aclosing
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from disagg.bench.crew import POLL_S, Crew, hired
from disagg.bench.handoff import ask, prompt_of
from disagg.bench.result import Row, result_of, tell
from disagg.config import DEFAULT_CODEC, Config, EngineConfig, TransferConfig
from disagg.transfer.messages import Role, WorkerStatus

CODECS = (DEFAULT_CODEC, "raw")
LENGTHS = (300, 1500)
BEFORE, AFTER, ANSWER = 40, 5, 120  # tokens: until it is told to move, after it moved, of all
NOTES = "milliseconds, medians; the model is the packaged one, on the CPU with one thread a worker"


@dataclass(frozen=True)
class Sight:
    """One answer: its longest gap around the move, all other gaps, and a prefill instead of it."""

    gap_ms: float
    others_ms: tuple[float, ...]
    prefill_ms: float
    prefill_bytes: int


def measure_moves(rounds: int = 20) -> Row:
    """A row for every codec and length of a prompt.

    gap_ms, itl_ms: between tokens, at a move and else
    stopped_ms:     from the last token at one worker until the other one has acknowledged it all
    prefill_ms:     until the first decoded token, had prompt and answer been prefilled again
    """
    return result_of(asyncio.run(_measure(rounds)), NOTES, rounds=rounds)


async def _measure(rounds: int) -> list[Row]:
    config = Config(engine=EngineConfig(prefix_cache=False), transfer=TransferConfig(dedup=False))
    rows = []
    async with hired(config, prefill=1, decode=2) as crew:
        for codec, tokens in tell([(x, y) for x in CODECS for y in LENGTHS], str):
            await _look(crew, prompt_of(tokens, 0), codec)  # warms everything
            before = await _counts(crew)
            prompts = [prompt_of(tokens, number + 1) for number in range(rounds)]
            seen = [await _look(crew, prompt, codec) for prompt in prompts]
            moved = {x: y - before[x] for x, y in (await _counts(crew)).items()}
            itl_ms = median(gap for sight in seen for gap in sight.others_ms)
            gap_ms = median(sight.gap_ms for sight in seen)
            rows.append(
                {
                    "codec": codec,
                    "prompt_tokens": tokens,
                    "moves": moved["moved"],
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
    while sum(peer.started.role.decodes for peer in crew.router.peers.values()) < 2:
        await asyncio.sleep(POLL_S)
    gaps = [1e3 * (after - before) for before, after in pairwise(times)]
    others = (*gaps[1:told], *gaps[ends:])
    again = await ask(crew.router, (*prompt, *tokens[: ends - AFTER]), codec)
    return Sight(max(gaps[told:ends]), others, again.decoded_ms, again.wire_bytes)


async def _counts(crew: Crew) -> dict[str, int]:
    """Of all workers together."""
    found = dict.fromkeys(("moved", "moved_bytes", "moved_ms"), 0)
    for said in (await crew.router.status()).values():
        assert isinstance(said, WorkerStatus)
        found = {x: y + said.info["counts"].get(x, 0) for x, y in found.items()}
    return found
