"""Sequences that go on at another decode worker: no token lost or repeated, nothing left behind."""

import asyncio
from contextlib import aclosing

import pytest

from disagg.model.runner import Runner
from disagg.transfer.messages import Role
from tests.workers.fakes import until
from tests.workers.pairs import GREEDY, House, Prompt, house

KIVI = "kivi:bits=2,group=64,residual=64"
LONG = {"max_tokens": 150}


async def listen(home: House, prompt: Prompt, codec: str, heard: asyncio.Event) -> list[int]:
    """A long answer; `heard` is set in the middle of it."""
    tokens: list[int] = []
    async with aclosing(home.router.generate(prompt, GREEDY | LONG, codec)) as outputs:
        async for output in outputs:
            if output.token is not None:
                tokens.append(output.token)
            if len(tokens) == 20:
                heard.set()
    return tokens


def counts(home: House, name: str) -> dict[str, int]:
    return home.workers[name].decode.counts


@pytest.mark.parametrize("codec", [KIVI, "raw", "0-1:kivi:bits=4;2-:kivi:bits=2,residual=32"])
def test_a_worker_that_leaves_takes_no_token_along(
    codec: str, runners: list[Runner], story: Prompt
) -> None:
    async def scene() -> None:
        async with house() as home:
            home.pair(runners)
            expected, _ = await home.complete(story, codec, **LONG)
            heard = asyncio.Event()
            asking = asyncio.create_task(listen(home, story, codec, heard))
            await heard.wait()
            home.add("d2", Role.DECODE, runners[2])
            leaving = home.workers.pop("d")
            leaving.stop(30.0)
            await until(lambda: leaving.wait(0.0))
            home.router.died("d")
            assert await asking == expected
            assert leaving.decode.counts["moved"] == 1
            assert home.router.dispatch.retries == home.router.dispatch.unequal_tokens == 0
            await home.empty()
            assert not leaving.engine.pool.referenced_pages

    asyncio.run(scene())
