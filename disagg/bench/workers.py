"""Real workers for benchmarks: each in a process of its own, without Ray, and a router of them."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import replace

import torch

from disagg.bench.child import Child
from disagg.bench.result import Row
from disagg.bench.serving import RequestTimes
from disagg.config import Config, RouterConfig
from disagg.model.tokenizer import Tokenizer
from disagg.router.router import Router, WorkerConnection
from disagg.transfer.control import WorkerClient
from disagg.transfer.messages import Role, WorkerInfo
from disagg.transfer.rpc import connect
from disagg.worker.worker import Worker, settle_memory

ORPHAN_S = 3600.0  # a worker without a router ends itself after this
TEXT = "The old house by the river had stood empty for years, and nobody asked who had built it. "
Prompt = tuple[int, ...]
Answer = tuple[RequestTimes, Row]  # what a client saw of a request, and its KV figures


class WorkerEnd:
    """A worker in a process of its own, as the object of a `Child`."""

    worker_type: type[Worker] = Worker

    async def start(self, config: Config, role: Role, name: str) -> WorkerInfo:
        """Where it can be reached; it also runs without a router that follows it."""
        torch.set_num_threads(1)
        cluster = replace(config.cluster, orphan_s=ORPHAN_S)
        config = replace(config, cluster=cluster)
        self._worker = self.worker_type(config, role, name)
        settle_memory()
        return await asyncio.to_thread(self._worker.start)

    async def assume(self, role: Role) -> WorkerInfo:
        """Change its role."""
        self._worker.assume(role)
        return replace(self._worker.info, role=role)

    async def pace(self, bytes_per_s: float) -> None:
        """Change the rate of its paced link."""
        pace = self._worker.service.prefill.context.peers.options.pace
        assert pace is not None, "the config of the worker paces no link"
        pace.bytes_per_s = bytes_per_s

    async def leave(self, grace_s: float) -> None:
        """Returns when all its sequences have moved."""
        self._worker.stop(grace_s)
        await asyncio.to_thread(self._worker.wait)


@contextmanager
def started_workers(
    config: Config, *roles: Role, process: type[WorkerEnd] = WorkerEnd
) -> Iterator[tuple[list[Child], list[WorkerInfo]]]:
    """Workers of these roles, and the address of each."""
    with ExitStack() as stack:
        children = [stack.enter_context(Child(process)) for _ in roles]
        infos = []
        for number, (child, role) in enumerate(zip(children, roles, strict=True)):
            infos.append(child.ask("start", config, role, f"worker-{number}"))
        yield children, infos


@asynccontextmanager
async def routed(
    workers: Sequence[WorkerInfo], config: RouterConfig | None = None
) -> AsyncIterator[Router]:
    """A router of these workers."""
    router = Router(config)
    links = [connect(worker.address) for worker in workers]
    for worker, link in zip(workers, links, strict=True):
        router.add(WorkerConnection(worker, WorkerClient(link)))
    try:
        yield router
    finally:
        await router.close()
        for link in links:
            await link.close()


async def visit(
    router: Router, prompt: Prompt, codec: str, answer: int = 3, at_s: float = 0.0
) -> Answer:
    """What a client sees of a request of `answer` tokens that leaves in `at_s` seconds."""
    await asyncio.sleep(at_s)
    times = RequestTimes(len(prompt), start_s=time.perf_counter())
    kv = Row()
    params = {"max_tokens": answer, "ignore_eos": True}
    async with aclosing(router.generate(prompt, params, codec)) as outputs:
        async for output in outputs:
            if output.token is not None:
                times.tokens += 1
                times.note()
            kv = dict(output.kv) or kv
    return times, kv


def prompt_of(tokens: int, number: int, model: str | None = None) -> Prompt:
    """A prompt of this length; prompts with different numbers share no page."""
    tokenizer = Tokenizer.load(model)
    return tuple(tokenizer.encode(f"{number}. " + TEXT * tokens)[:tokens])
