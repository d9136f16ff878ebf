"""Who may hold how much of a prefill worker's arena, in which order."""

import asyncio
from contextlib import AsyncExitStack

from disagg.workers.holding import Holding


class Prompt:
    """A hand-off that holds its records until it is told to end."""

    def __init__(self, holding: Holding, address: str, nbytes: int):
        self.holds = False
        self._end = asyncio.Event()
        self._task = asyncio.create_task(self._run(holding, address, nbytes))

    async def _run(self, holding: Holding, address: str, nbytes: int) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(holding.hold(address, nbytes))
            self.holds = True
            await self._end.wait()
        self.holds = False

    async def end(self) -> None:
        self._end.set()
        await self._task

    async def cancel(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


async def settled(*prompts: Prompt) -> list[bool]:
    """Who holds, once everybody had every chance."""
    for _ in range(20):
        await asyncio.sleep(0)
    return [prompt.holds for prompt in prompts]


def test_prompts_for_a_stalled_decode_worker_leave_room_for_those_of_others():
    async def scene() -> None:
        holding = Holding(100)
        stalled = [Prompt(holding, "a", 20) for _ in range(4)]
        other = [Prompt(holding, "b", 25) for _ in range(3)]
        assert await settled(*stalled) == [True, True, False, False]
        assert await settled(*other) == [True, True, False]
        await stalled[1].end()
        assert await settled(*stalled) == [True, False, True, False]

    asyncio.run(scene())


def test_a_prompt_larger_than_the_share_goes_alone_and_is_not_overtaken():
    async def scene() -> None:
        holding = Holding(100)
        first, large, small = (Prompt(holding, "a", nbytes) for nbytes in (10, 70, 10))
        assert await settled(first, large, small) == [True, False, False]
        await first.end()
        assert await settled(large, small) == [True, False]
        await large.end()
        assert await settled(small) == [True]

    asyncio.run(scene())


def test_one_that_gives_up_waiting_or_holding_makes_room():
    async def scene() -> None:
        holding = Holding(100)
        first, waiting, last = (Prompt(holding, "a", nbytes) for nbytes in (50, 50, 50))
        assert await settled(first, waiting, last) == [True, False, False]
        await waiting.cancel()
        assert await settled(first, last) == [True, False]
        await first.cancel()
        assert await settled(last) == [True]

    asyncio.run(scene())
