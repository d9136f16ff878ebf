"""A worker that records the steps and tokens of its engine, for `latency` and `load`."""

import asyncio
import time
from collections.abc import Callable, Sequence

from disagg.bench.workers import Prompt, WorkerEnd
from disagg.config import Config
from disagg.engine.messages import StepOutput
from disagg.engine.scheduler import ScheduledTokens
from disagg.engine.steps import StepAllocation
from disagg.kv.plan import Plan
from disagg.transfer.control import WorkerClient
from disagg.transfer.messages import Job, Role, Submit, Work
from disagg.transfer.rpc import connect
from disagg.worker.worker import Worker

POLL_S = 0.02
# when a step began and ended, and how many tokens of which prompts it computed
StepRecord = tuple[float, float, dict[Prompt, int]]


class RecordedWorker(Worker):
    """A worker with a record of its engine.

    steps:       the steps that computed prompts
    token_times: (request, time) of every token
    """

    def __init__(self, config: Config, role: Role, name: str):
        super().__init__(config, role, name)
        self.steps: list[StepRecord] = []
        self.token_times: list[tuple[str, float]] = []
        self._compute = self.engine._compute
        self.engine._compute = self._timed_compute  # type: ignore[method-assign]

    def _timed_compute(
        self, scheduled: Sequence[ScheduledTokens], allocation: StepAllocation
    ) -> None:
        began = time.monotonic()
        self._compute(scheduled, allocation)
        ended = time.monotonic()
        prompts = {}
        for share in scheduled:
            if not share.decodes:
                prompts[share.sequence.request.tokens] = share.count
        if prompts:
            self.steps.append((began, ended, prompts))

    def _on_loop(self, call: Callable[..., object], *args: object) -> None:
        """Called on the engine's thread with the output of a step."""
        now = time.monotonic()
        for output in args:
            if isinstance(output, StepOutput):
                self.token_times += [(token.rid, now) for token in output.tokens]
        super()._on_loop(call, *args)


class RecordedEnd(WorkerEnd):
    """A recorded worker in a process of its own."""

    worker_type = RecordedWorker
    _worker: RecordedWorker

    async def steps(self) -> list[StepRecord]:
        """Steps that computed prompts since the last call."""
        steps, self._worker.steps = self._worker.steps, []
        return steps

    async def plan(self, codec: str) -> Plan:
        """The plan of its model under a codec."""
        return self._worker.engine.plan(codec)

    async def answer(self, rid: str, tokens: int) -> None:
        """Begin to decode an answer."""
        worker = self._worker.info
        sampling = {"max_tokens": tokens, "ignore_eos": True}
        job = Job(rid, 0, (1,) * 64, sampling=sampling)
        link = connect(worker.address)
        await WorkerClient(link).submit(Submit(job, Work.LOCAL, worker.epoch))
        await link.close()

    async def token_times(self, rid: str, count: int) -> list[float]:
        """When it emitted the tokens of a request, once there are `count`; then all are forgotten.

        On the monotonic clock of the host.
        """
        records = self._worker.token_times

        def request_times() -> list[float]:
            return [at for name, at in records if name.startswith(f"{rid}#0/")]

        while len(request_times()) < count:
            await asyncio.sleep(POLL_S)
        times = request_times()
        records.clear()
        return times
