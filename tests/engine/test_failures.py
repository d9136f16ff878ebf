"""One request breaks: it ends, its pages are free, and whoever computes beside it goes on."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from disagg.engine import engine as engine_module
from disagg.engine import prompts as prompts_module
from disagg.engine import steps as steps_module
from disagg.engine.engine import Engine
from disagg.engine.messages import Abort, Admit, Prefill
from disagg.engine.sequence import Request, SamplingParams
from disagg.errors import CapacityError, DisaggError, RequestError
from disagg.kv.state import allocate_group
from disagg.model import attention as attention_module
from disagg.model.cache import Workspace
from disagg.model.runner import Runner
from tests.engine.serving import (
    Nowhere,
    StandIn,
    make_engine,
    request,
    run_until_idle,
    serve,
)
from tests.model.tiny import VOCAB, random_prompt

KIVI = "kivi:bits=2,group=64,residual=64"
BROKEN = 90  # tokens of the prompt that breaks


class Breaking(Nowhere):
    def __init__(self, at: int):
        self.left = at

    def begin(self, *_: object) -> None:
        self.offer()

    def offer(self, *_: object) -> None:
        self.left -= 1
        if self.left < 0:
            raise OverflowError("int too big to convert")


def serve_beside(
    runner: Runner, break_one: Callable[[Engine], None], **config: Any
) -> DisaggError:
    """Serve good prompts beside one that breaks: the error of that; the others are answered."""
    engine, good = make_engine(runner, **config), random_prompt(70)
    engine.submit(Prefill(request("good", good, KIVI, 12)))
    break_one(engine)
    engine.submit(Prefill(request("late", good, KIVI, 12)))
    output = run_until_idle(engine)
    for name in ("good", "late"):
        assert [x.index for x in output.tokens if x.rid == name] == list(range(12))
    (failed,) = output.failed
    assert failed.rid == "bad"
    return failed.error


@pytest.mark.parametrize("at", [0, 1, 2], ids=["begin", "first layer", "second layer"])
@pytest.mark.parametrize("budget", [512, 40], ids=["whole", "in chunks"])
def test_a_hand_off_that_breaks_ends_its_request_alone(runner, at, budget):
    def submit(engine: Engine) -> None:
        engine.submit(
            Prefill(request("bad", random_prompt(BROKEN), KIVI, 4), Breaking(at))
        )

    error = serve_beside(runner, submit, max_batch_tokens=budget)
    assert "OverflowError" in str(error)
    assert error.reason == "internal"


def test_an_encoder_that_breaks_ends_its_request_alone(runner, monkeypatch):
    encode = prompts_module.write_prompt

    def write_prompt(codec: Any, records: Any, at: Any, chunk: Any) -> Any:
        if BROKEN in (chunk.before, chunk.total):
            raise torch.OutOfMemoryError("out of memory")
        return encode(codec, records, at, chunk)

    monkeypatch.setattr(prompts_module, "write_prompt", write_prompt)
    prompt = random_prompt(BROKEN)
    error = serve_beside(
        runner, lambda x: x.submit(Prefill(request("bad", prompt, KIVI, 4)))
    )
    assert isinstance(error, CapacityError)


@pytest.mark.parametrize("what", [MemoryError, torch.OutOfMemoryError, RuntimeError])
def test_a_prompt_whose_exact_kv_finds_no_memory_fails_alone(runner, monkeypatch, what):
    reserve = Workspace.reserve

    def fail(self: Workspace, *args: Any) -> None:
        if self.total == BROKEN:
            raise what("can't allocate memory")
        reserve(self, *args)

    monkeypatch.setattr(Workspace, "reserve", fail)
    bad = Prefill(request("bad", random_prompt(BROKEN), KIVI, 4))
    error = serve_beside(runner, lambda engine: engine.submit(bad), max_batch_tokens=40)
    assert isinstance(error, CapacityError)
    assert "exact KV of a prompt of 90 tokens" in str(error)


def test_parameters_that_cannot_be_followed_end_their_request_alone(runner):
    """They are refused where they are made; the engine does not depend on it."""
    params = SamplingParams(max_tokens=4)
    object.__setattr__(params, "temperature", 10**400)
    bad = Request("bad", tuple(random_prompt(BROKEN)), params, KIVI)
    error = serve_beside(runner, lambda engine: engine.submit(Prefill(bad)))
    assert error.reason == "internal"


@pytest.mark.parametrize("emitted", [(), (VOCAB,), (1, -1)], ids=str)
def test_a_hand_off_with_tokens_that_cannot_be_fed_is_refused_and_freed(
    runner, emitted
):
    engine = make_engine(runner)
    groups = tuple(allocate_group(x, 90, engine.pool) for x in engine.plan(KIVI).groups)
    engine.submit(
        Admit(request("bad", random_prompt(90), KIVI, 4), groups, tuple(emitted))
    )
    (failed,) = run_until_idle(engine).failed
    assert isinstance(failed.error, RequestError)


class Fuse:
    """Breaks the n-th call of what it stands for: before, or after the work was done."""

    def __init__(self, call: Callable[..., Any], at: int, done: bool):
        self.call, self.left, self.done = call, at, done

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self.done:
            raise RuntimeError("nobody knows whose fault")
        result = self.call(*args, **kwargs)
        if self.left == 0:
            raise RuntimeError("nobody knows whose fault")
        return result


@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", ["forward", "plan_step", "choose", "_advance"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_a_broken_step_frees_all_in_it_and_the_engine_lives(
    runner, monkeypatch, what, at, done
):
    """The third step seals a page of the first and the second prompt."""
    engine = make_engine(stand_in := StandIn(runner))
    owners = {"forward": stand_in, "plan_step": steps_module, "choose": engine_module}
    owner = owners.get(what, engine)
    monkeypatch.setattr(owner, what, Fuse(getattr(owner, what), at, done))
    for rid in ("a", "b"):
        engine.submit(Prefill(request(rid, random_prompt(126), KIVI, 9)))
    assert {x.rid for x in run_until_idle(engine).failed} == {"a", "b"}
    assert not engine.pool.used_bytes
    assert len(serve(engine, [random_prompt(70)], KIVI, 5)[0]) == 5


def test_pages_are_given_back_only_when_the_kernels_that_read_them_have_ended(
    runner, monkeypatch
):
    """On a device kernels run on behind their calls, and another thread may refill free pages."""
    engine, running = make_engine(runner, max_batch_tokens=60), False
    early, late, release = set[int](), set[int](), engine.pool.release

    def forward(*args: Any) -> torch.Tensor:
        nonlocal running
        running = True
        return runner.forward(*args)

    def wait(_: torch.device) -> None:
        nonlocal running
        running = False

    def give_back(pages: Sequence[int]) -> None:
        (early if running else late).update(pages)
        release(pages)

    engine._runner = StandIn(runner, forward)  # type: ignore[assignment]
    monkeypatch.setattr(engine_module, "wait_for_kernels", wait)
    monkeypatch.setattr(engine.pool, "release", give_back)
    for rid, n in (("seals", 126), ("ends", 20), ("leaves", 200)):
        engine.submit(Prefill(request(rid, random_prompt(n), KIVI, 9)))
    engine.step()
    engine.submit(Abort("leaves"))
    run_until_idle(engine)
    assert len(late) >= 10
    assert not early


OF_DRIVER = torch.AcceleratorError("CUDA error: out of memory")
FULL = torch.OutOfMemoryError("full"), MemoryError(), OF_DRIVER


@pytest.mark.parametrize("error", FULL, ids=repr)
def test_a_step_without_memory_ends_its_longest_prompt_and_no_other(
    runner, error, monkeypatch
):
    good, bad = random_prompt(70), random_prompt(BROKEN)
    (expected,) = serve(make_engine(runner), [good], KIVI, 12)
    attend = attention_module.attend_exact

    def short_of_memory(q: Any, k: Any, *rest: Any) -> Any:
        if k.shape[1] == BROKEN:
            raise error
        return attend(q, k, *rest)

    monkeypatch.setattr(attention_module, "attend_exact", short_of_memory)
    engine = make_engine(runner)
    engine.submit(Prefill(request("decoding", good, KIVI, 12)))
    engine.step()
    engine.step()
    for name, prompt in (("beside", good), ("bad", bad)):
        engine.submit(Prefill(request(name, prompt, KIVI, 12)))
    output = run_until_idle(engine)
    (failed,) = output.failed
    assert (failed.rid, type(failed.error)) == ("bad", CapacityError)
    tokens = {"decoding": {}, "beside": {}}
    for token in output.tokens:
        tokens[token.rid][token.index] = token.token
    assert list(tokens["beside"].values()) == expected
    assert [tokens["decoding"][i] for i in range(2, 12)] == expected[2:]


def test_an_interrupt_in_the_middle_of_a_step_leaves_nothing_behind(runner):
    engine, forward = make_engine(stand_in := StandIn(runner)), runner.forward

    def interrupted(batch: Any) -> Any:
        stand_in.forward = forward
        forward(batch)
        raise KeyboardInterrupt

    stand_in.forward = interrupted
    engine.submit(Prefill(request("first", random_prompt(70), KIVI, 4)))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.submit(Abort("first"))
    assert len(serve(engine, [random_prompt(70)], KIVI, 4)[0]) == 4
