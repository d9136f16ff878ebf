"""Two plain workers in this process, real gRPC on the loopback, and a router on the test's loop."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.config import Config, RouterConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import StepOutput
from disagg.engine.sequence import SamplingParams
from disagg.llm import LLM
from disagg.model.runner import Runner
from disagg.router.actions import TokenOutput
from disagg.router.router import Router, WorkerConnection
from disagg.transfer.control import WorkerClient
from disagg.transfer.messages import Role
from disagg.transfer.rpc import connect
from disagg.transfer.security import Security
from disagg.worker.worker import Worker
from tests.transfer.peer import until

GREEDY = {"max_tokens": 12, "ignore_eos": True}
KIVI = "kivi:bits=2,group=64,residual=64"
TOKEN = "a shared secret"
FEW_MORE = 2  # tokens: the last that were heard are on their way
PACE_S = 0.005  # between the steps of an engine that is about to leave
LONGEST_PAUSE_S = 1.0
IDLE = {"arena_bytes", "cached_pages", "cached_bytes"}  # not zero when nothing goes on


Prompt = tuple[int, ...]


@dataclass
class House:
    """Workers by name, and their router."""

    config: Config
    router: Router
    workers: dict[str, Worker] = field(default_factory=dict)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def add(self, name: str, role: Role, runner: Runner | None = None) -> Worker:
        """Start a worker and tell the router."""
        worker = Worker(
            self.config, role, name, security=Security(token=TOKEN), runner=runner
        )
        self.workers[name] = worker
        started = worker.start()
        link = connect(started.address, Security(token=TOKEN))
        self.router.add(WorkerConnection(started, WorkerClient(link)))
        return worker

    def pair(self, runners: list[Runner]) -> None:
        """A prefill worker "p" and a decode worker "d"."""
        self.add("p", Role.PREFILL, runners[0])
        self.add("d", Role.DECODE, runners[1])

    async def kill(self, name: str) -> None:
        """End a worker at once, in the middle of whatever it does; its last words are not heard."""
        worker = self.workers.pop(name)
        self.router.peers[name].task.cancel()
        await asyncio.to_thread(worker.stop, 0.0)
        await until(lambda: worker.wait(0.0))
        self.router.died(name)

    async def relieve(self, runner: Runner | None = None) -> Worker:
        """A decode worker "d2" comes and "d" leaves; "d", once all its sequences are elsewhere."""
        self.add("d2", Role.DECODE, runner)
        leaving = self.workers.pop("d")
        leaving.stop(30.0)
        self.may_go_on.set()
        await until(lambda: leaving.wait(0.0))
        self.router.died("d")
        return leaving

    async def complete(
        self, prompt: Prompt, codec: str, **params: int | float | bool
    ) -> tuple[list[int], TokenOutput]:
        return await collect(self.router.generate(prompt, GREEDY | params, codec))

    async def begin(
        self, prompt: Prompt, codec: str, heard: int = 2, max_tokens: int = 2000
    ) -> asyncio.Task[tuple[list[int], TokenOutput]]:
        """An answer of which so many tokens have come: the second is of its decode worker."""
        tokens: list[int] = []
        outputs = self.router.generate(
            prompt, GREEDY | {"max_tokens": max_tokens}, codec
        )
        asking = asyncio.create_task(collect(outputs, tokens))
        await until(lambda: len(tokens) >= heard or asking.done())
        return asking

    def _pace(self, engine: Engine, most: int) -> None:
        """Let an engine pause after each step, and before answers of so many tokens."""
        self.may_go_on.clear()
        step = engine.step

        def paced_step() -> StepOutput:
            output = step()
            time.sleep(PACE_S)
            active = list(engine._scheduler.active)
            if any(len(sequence.emitted) >= most for sequence in active):
                self.may_go_on.wait(LONGEST_PAUSE_S)
            return output

        setattr(engine, "step", paced_step)  # noqa: B010

    async def begin_to_move(
        self, prompt: Prompt, codec: str, heard: int, max_tokens: int
    ) -> asyncio.Task[tuple[list[int], TokenOutput]]:
        """The same; however busy the machine is, "d" does not finish it before `relieve`."""
        self._pace(self.workers["d"].engine, heard + FEW_MORE)
        return await self.begin(prompt, codec, heard, max_tokens)

    async def gauges(self) -> dict[str, Mapping[str, float]]:
        return {
            name: (await worker.service.status()).gauges
            for name, worker in self.workers.items()
        }

    async def empty(self, within_s: float = 30) -> None:
        """Every gauge of every worker is zero, soon, and the pools are whole."""

        def nothing() -> bool:
            sightings = self.seen.values()
            return not any(
                x for each in sightings for name, x in each.items() if name not in IDLE
            )

        self.seen = await self.gauges()
        async with asyncio.timeout(within_s):
            while not nothing():
                await asyncio.sleep(0.01)
                self.seen = await self.gauges()
        for worker in self.workers.values():
            worker.engine.pool.check_integrity()


@asynccontextmanager
async def house(
    config: Config | None = None,
    min_tokens: int | None = 0,
    limit_s: float = 90,
    **router: float,
) -> AsyncIterator[House]:
    """Nobody home yet; everybody leaves at the end. Short prompts are handed off too."""
    config = config or Config()
    transfer = replace(config.transfer, min_disagg_tokens=min_tokens)
    home = House(replace(config, transfer=transfer), Router(RouterConfig(**router)))  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(limit_s):
            yield home
    finally:
        await home.router.close()
        for worker in home.workers.values():
            worker.stop(0.0)
        for worker in home.workers.values():
            await until(lambda worker=worker: worker.wait(0.0))  # type: ignore[misc]


@asynccontextmanager
async def paired(
    runners: list[Runner],
    config: Config | None = None,
    min_tokens: int | None = 0,
    **router: float,
) -> AsyncIterator[House]:
    """A prefill worker "p" and a decode worker "d"; at the end nobody holds anything."""
    async with house(config, min_tokens, **router) as home:
        home.pair(runners)
        yield home
        await home.empty()


async def on_loop(worker: Worker, call: Coroutine[Any, Any, Any]) -> Any:
    """What a call gives on the loop of a worker."""
    return await asyncio.wrap_future(
        asyncio.run_coroutine_threadsafe(call, worker._loop)
    )


def alone(prompt: Prompt, codec: str, max_tokens: int = 12) -> list[int]:
    """What one process says that shares nothing."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return list(LLM(codec=codec).generate([prompt], params)[0].tokens)


async def collect(
    outputs: AsyncGenerator[TokenOutput], tokens: list[int] | None = None
) -> tuple[list[int], TokenOutput]:
    """Tokens and end of an answer. said: where tokens are as soon as they come"""
    if tokens is None:
        tokens = []
    async with aclosing(outputs):
        async for output in outputs:
            if output.token is not None:
                tokens.append(output.token)
    return tokens, output


async def leave(asking: asyncio.Task) -> None:
    """The client of an answer goes away."""
    asking.cancel()
    await asyncio.wait([asking])
