"""Serve prompts with an engine, and look at what happened."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill, StepOutput
from disagg.engine.sequence import Request, SamplingParams
from disagg.model.attention import Batch
from disagg.model.runner import Runner

MAX_STEPS = 5000


class StandIn:
    """In place of a runner: as that one, but for what a subclass, or `forward`, does otherwise."""

    def __init__(
        self, runner: Runner, forward: Callable[[Batch], Tensor] | None = None
    ):
        self._runner = runner
        if forward is not None:
            self.forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class Nowhere:
    """A hand-off that nobody takes."""

    def begin(self, plan: Any, groups: Any) -> None:
        self.plan, self.groups = plan, groups

    def offer(self, items: Any) -> None:
        pass

    def has(self, item: Any) -> bool:
        return False


def make_engine(runner: Runner | StandIn, **config: Any) -> Engine:
    return Engine(
        cast(Runner, runner), EngineConfig(**({"arena_bytes": 32 << 20} | config))
    )


def request(
    rid: str, prompt: Sequence[int], codec: str, max_tokens: int, **how: Any
) -> Request:
    return Request(
        rid, tuple(prompt), SamplingParams(max_tokens=max_tokens, **how), codec
    )


def run_until_idle(engine: Engine) -> StepOutput:
    """What all steps bring until nothing is left; the pool must be whole and empty then."""
    outputs = list[StepOutput]()
    while not engine.idle:
        assert len(outputs) < MAX_STEPS
        outputs.append(engine.step())
    engine.pool.check_integrity()
    assert not engine.pool.referenced_pages
    return joined(outputs)


def joined(outputs: Sequence[StepOutput]) -> StepOutput:
    """What several steps brought, as one."""
    found = StepOutput()
    for output in outputs:
        for name, some in vars(found).items():
            some += getattr(output, name)
    return found


def answers(output: StepOutput) -> dict[str, list[int]]:
    """Tokens by request; every index must come once and in order."""
    found: dict[str, list[int]] = {}
    assert not output.failed, output.failed
    for token in output.tokens:
        answer = found.setdefault(token.rid, [])
        assert token.index == len(answer)
        answer.append(token.token)
    return found


def serve(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    codec: str,
    max_tokens: int,
    **how: Any,
) -> list[list[int]]:
    """Greedy continuations of prompts that arrive together."""
    for index, prompt in enumerate(prompts):
        engine.submit(Prefill(request(str(index), prompt, codec, max_tokens, **how)))
    found = answers(run_until_idle(engine))
    return [found[str(index)] for index in range(len(prompts))]
