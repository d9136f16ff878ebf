"""What an engine refuses, by name, and that the rest goes on."""

import pytest

from disagg.engine.messages import Drain, Replay, StepOutput
from disagg.errors import (
    ConfigError,
    PeerLostError,
    PromptTooLongError,
    RequestError,
    UnknownNameError,
)
from tests.engine.serving import make_engine, request, run_until_idle
from tests.model.tiny import CONTEXT, VOCAB, random_prompt

KIVI = "kivi:bits=2,group=64,residual=64"


@pytest.mark.parametrize(
    ("prompt", "codec", "error"),
    [
        (random_prompt(CONTEXT), KIVI, PromptTooLongError),
        (random_prompt(CONTEXT - 1), "raw", PromptTooLongError),  # the pool is too small for it
        ([0, VOCAB], KIVI, RequestError),
        ([1], "gzip", UnknownNameError),
        ([1], "kivi:bits=3", ConfigError),
    ],
)
def test_requests_that_can_never_be_served_fail_at_once(runner, prompt, codec, error):
    engine = make_engine(runner, arena_bytes=1 << 20)
    engine.submit(Replay(request("a", prompt, codec, 4)))
    (failed,) = engine.step().failed
    assert isinstance(failed.error, error)
    assert engine.idle


def test_a_request_id_in_use_is_refused_and_the_first_one_lives(runner):
    engine = make_engine(runner)
    for _ in range(2):
        engine.submit(Replay(request("a", [1, 2, 3], KIVI, 4)))
    outputs = run_until_idle(engine)
    assert [failed.error.reason for output in outputs for failed in output.failed] == ["request"]
    assert len([token for output in outputs for token in output.tokens]) == 4


def test_an_engine_that_drains_finishes_its_work_and_refuses_more(runner):
    engine = make_engine(runner)
    engine.submit(Replay(request("old", [1, 2, 3], KIVI, 4)))
    engine.submit(Drain())
    engine.submit(Replay(request("new", [1, 2, 3], KIVI, 4)))
    outputs: list[StepOutput] = []
    engine.run(outputs.append)
    (failed,) = [failed for output in outputs for failed in output.failed]
    assert (failed.rid, type(failed.error)) == ("new", PeerLostError)
    assert len([token for output in outputs for token in output.tokens]) == 4
    assert outputs[-1].load.used_bytes == 0
