"""The process that decodes: a sink whose prompts go to an engine with the packaged model.

What it decodes is told by the clock of the host, so that the sending process can be compared.
"""

import asyncio
import time
from threading import Thread

import torch

from disagg.bench.sink import EPOCH, MODEL, Sink
from disagg.config import EngineConfig, ModelConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Admit, Drain, Replay, StepOutput
from disagg.engine.sequence import Request, SamplingParams, Status
from disagg.model.device import load_runner
from disagg.plan import Plan
from disagg.transfer.messages import Admission
from disagg.transfer.terms import Terms
from disagg.workers.memory import settle_memory

ANSWER = "answer"  # the request that decodes while others arrive
PROMPT_TOKENS = 64


class Decoder(Sink):
    """What a benchmark asks of it."""

    def __init__(self) -> None:
        super().__init__()
        self._spec = ""
        self._engine: Engine | None = None
        self._takes = True  # whether the engine decodes what arrives
        self._times: list[float] = []
        self._ended: dict[str, asyncio.Future[float]] = {}

    async def start(self, spec: str) -> tuple[Plan, int, int]:
        """An engine, to listen before; its plan, KV heads and head dim."""
        torch.set_num_threads(1)
        self._loop, self._spec = asyncio.get_running_loop(), spec
        runner = load_runner(ModelConfig())
        engine = self._engine = Engine(runner, EngineConfig())
        plan, self._pool = engine.plan(spec), engine.pool
        self._terms = Terms(MODEL, plan, EPOCH, engine.pool.arena.nbytes)
        settle_memory()
        thread = Thread(target=engine.run, args=(self._deliver,))
        thread.start()
        self._stack.callback(thread.join)
        self._stack.callback(engine.submit, Drain())
        return plan, runner.shape.heads, runner.shape.head_dim

    async def takes(self, takes: bool) -> None:
        """Whether the engine decodes what arrives from now on; else it is freed at once."""
        self._takes = takes

    async def running_at(self, rid: str) -> float:
        """When the engine began to decode a prompt, on the monotonic clock of the host."""
        running_at = await self._future(rid)
        del self._ended[rid]
        return running_at

    async def decode(self, tokens: int) -> list[float]:
        """The times of the tokens of one answer, on the monotonic clock of the host."""
        self._times.clear()
        assert self._engine is not None
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self._engine.submit(Replay(Request(ANSWER, (1,) * PROMPT_TOKENS, params, self._spec)))
        await self.running_at(ANSWER)
        return self._times

    def _future(self, rid: str) -> asyncio.Future[float]:
        return self._ended.setdefault(rid, self._loop.create_future())

    def _admit(self, admission: Admission) -> None:
        if not self._takes:
            self._free(admission)
            return
        assert self._engine is not None
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        request = Request(admission.rid, (1,) * admission.tokens, params, self._spec)
        emitted = (admission.commit.first_token,)
        self._engine.submit(Admit(request, admission.groups, emitted))

    def _deliver(self, output: StepOutput) -> None:
        """What a step brought, on the engine's thread."""
        now = time.monotonic()
        for token in output.tokens:
            if token.rid == ANSWER:
                self._times.append(now)
            if token.finish_reason:
                running_at = now - token.spent[Status.DECODE]
                self._loop.call_soon_threadsafe(self._end, token.rid, running_at)

    def _end(self, rid: str, running_at: float) -> None:
        for receiver in self._receivers:
            receiver.finished(rid, 0)
        self._future(rid).set_result(running_at)
