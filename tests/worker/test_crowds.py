"""Many requests at once: some of their clients leave, and what they had is free."""

import asyncio
import random
from contextlib import aclosing

import pytest

from disagg.config import Config
from tests.worker.pairs import GREEDY, KIVI, House, Prompt, house, paired


async def ask(
    home: House, prompt: Prompt, tokens: int, leaves_at: int | None
) -> list[int]:
    """An answer, as far as its client stays."""
    emitted: list[int] = []
    params = GREEDY | {"max_tokens": tokens}
    async with aclosing(home.router.generate(prompt, params, "")) as outputs:
        async for output in outputs:
            if leaves_at is not None and len(emitted) == leaves_at:
                return emitted
            emitted += [] if output.token is None else [output.token]
    assert output.finish_reason == "length"
    return emitted


async def crowd(
    home: House, prompts: list[Prompt], tokens: int, seed: int, within_s: float = 30
) -> None:
    """Half of the clients leave at any time; nothing cut off is told to be whole."""
    pick = random.Random(seed)
    leaving = set(pick.sample(range(len(prompts)), len(prompts) // 2))
    ends = [
        pick.randrange(tokens) if x in leaving else None for x in range(len(prompts))
    ]
    calls = [
        ask(home, prompt, tokens, end)
        for prompt, end in zip(prompts, ends, strict=True)
    ]
    answers = await asyncio.gather(*calls)
    expected = [tokens if end is None else end for end in ends]
    assert [len(answer) for answer in answers] == expected
    await home.empty(within_s)


@pytest.mark.parametrize("min_tokens", [0, None], ids=["handed-off", "whole"])
async def test_what_clients_that_leave_had_is_free(runners, story, min_tokens):
    async with paired(runners, Config(codec=KIVI), min_tokens) as home:
        await crowd(home, [story[x : x + 70] for x in range(16)], 24, seed=5)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_four_crowds_of_150_long_prompts_come_and_go(runners, story):
    async with house(Config(codec=KIVI), limit_s=900) as home:
        home.pair(runners)
        long = (story * 20)[:1200]
        for seed in range(4):
            await crowd(
                home, [long[x : x + 1000] for x in range(150)], 4, seed, within_s=1
            )
