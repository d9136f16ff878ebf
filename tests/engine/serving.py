"""Serve prompts with an engine, and look at what happened."""

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor

from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.messages import Prefill, StepOutput
from disagg.engine.sequence import Request, SamplingParams
from disagg.kv.page import EXACT
from disagg.model.attention import Batch
from disagg.model.runner import Runner

MAX_STEPS = 5000


class StandIn:
    """Stands for a runner; a subclass, or `forward`, replaces parts of it."""

    def __init__(
        self, runner: Runner, forward: Callable[[Batch], Tensor] | None = None
    ):
        self._runner = runner
        if forward is not None:
            self.forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


class Nowhere:
    """A hand-off without a receiver."""

    def begin(self, plan: Any, groups: Any) -> None:
        self.plan = plan
        self.groups = groups

    def offer(self, items: Any) -> None:
        pass

    def has(self, item: Any) -> bool:
        return False


def make_engine(runner: Runner | StandIn, state: str = EXACT, **config: Any) -> Engine:
    config.setdefault("arena_bytes", 32 << 20)
    # with tests of their own
    config.setdefault("speculative_tokens", 0)
    config.setdefault("chunk_s", None)
    return Engine(cast(Runner, runner), EngineConfig(**config), state=state)


def request(
    rid: str,
    prompt: Sequence[int],
    codec: str,
    max_tokens: int,
    prediction: Sequence[int] = (),
    **sampling: Any,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **sampling)
    return Request(rid, tuple(prompt), params, codec, tuple(prediction))


def run_until_idle(engine: Engine) -> StepOutput:
    """The outputs of all steps until the engine is idle; the pool must then be whole and empty."""
    outputs: list[StepOutput] = []
    while not engine.idle:
        assert len(outputs) < MAX_STEPS
        outputs.append(engine.step())
    engine.pool.check_integrity()
    assert not engine.pool.referenced_pages
    return joined(outputs)


def joined(outputs: Sequence[StepOutput]) -> StepOutput:
    """The outputs of several steps, as one."""
    total = StepOutput()
    for output in outputs:
        total.tokens += output.tokens
        total.prefilled += output.prefilled
        total.moved += output.moved
        total.failed += output.failed
    return total


def answers(output: StepOutput) -> dict[str, list[int]]:
    """Tokens by request; every index must come once and in order."""
    tokens: dict[str, list[int]] = {}
    assert not output.failed, output.failed
    for token in output.tokens:
        answer = tokens.setdefault(token.rid, [])
        assert token.index == len(answer)
        answer.append(token.token)
    return tokens


def serve(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    codec: str,
    max_tokens: int,
    **sampling: Any,
) -> list[list[int]]:
    """Greedy continuations of prompts that arrive together."""
    for index, prompt in enumerate(prompts):
        work = request(str(index), prompt, codec, max_tokens, **sampling)
        engine.submit(Prefill(work))
    tokens = answers(run_until_idle(engine))
    return [tokens[str(index)] for index in range(len(prompts))]
