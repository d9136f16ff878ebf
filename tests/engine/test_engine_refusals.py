"""What an engine refuses, by name, and that the rest goes on."""

import pytest

from disagg import errors
from disagg.engine.messages import Drain, Prefill, StepOutput
from disagg.model.capacity import exact_bytes
from tests.engine.serving import joined, make_engine, request, run_until_idle
from tests.model.tiny import CONTEXT, VOCAB, random_prompt

KIVI = "kivi:bits=2,group=64,residual=64"


@pytest.mark.parametrize(
    ("prompt", "codec", "error"),
    [
        (random_prompt(CONTEXT), KIVI, errors.PromptTooLongError),
        (random_prompt(CONTEXT - 1), "raw", errors.PromptTooLongError),  # for the pool
        ([0, VOCAB], KIVI, errors.RequestError),
        ([1], "gzip", errors.UnknownNameError),
        ([1], "kivi:bits=3", errors.ConfigError),
    ],
)
def test_requests_that_can_never_be_served_fail_at_once(runner, prompt, codec, error):
    engine = make_engine(runner, arena_bytes=1 << 20)
    engine.submit(Prefill(request("a", prompt, codec, 4)))
    (failed,) = engine.step().failed
    assert isinstance(failed.error, error)
    assert engine.idle


@pytest.mark.parametrize("codec", [KIVI, "raw"])
def test_with_little_memory_what_fits_is_served_under_load_and_the_rest_is_refused(
    runner, codec
):
    room, wanted = (exact_bytes(runner.shape, tokens) for tokens in (200, 201))
    config = {"workspace_bytes": room, "arena_bytes": 4 << 20, "watermark": 0.0}
    engine = make_engine(runner, max_batch_tokens=64, **config)
    for i in range(12):
        engine.submit(Prefill(request(f"{i}", random_prompt(60 + 12 * i), codec, 8)))
        engine.submit(Prefill(request(f"long {i}", random_prompt(201), codec, 8)))
    outputs, most = [], 0
    while not engine.idle:
        outputs.append(engine.step())
        begun = [
            x.prompt_len for x in engine._scheduler.active if x.workspace is not None
        ]
        most = max(most, sum(begun))
    said = joined(outputs)
    failed = {x.rid: x.error for x in said.failed}
    assert failed.keys() == {f"long {i}" for i in range(12)}
    assert all(
        isinstance(error, errors.PromptTooLongError) for error in failed.values()
    )
    for told in (f"needs {wanted} bytes of exact KV", f"room for {room}"):
        assert all(told in str(error) for error in failed.values())
    assert 100 < most <= 200
    whole = {(f"{i}", j) for i in range(12) for j in range(8)}
    assert {(x.rid, x.index) for x in said.tokens} == whole


def test_a_request_id_in_use_is_refused_and_the_first_one_lives(runner):
    engine = make_engine(runner)
    for _ in range(2):
        engine.submit(Prefill(request("a", [1, 2, 3], KIVI, 4)))
    output = run_until_idle(engine)
    assert [failed.error.reason for failed in output.failed] == ["request"]
    assert len(output.tokens) == 4


def test_an_engine_that_drains_finishes_its_work_and_refuses_more(runner):
    engine = make_engine(runner)
    engine.submit(Prefill(request("old", [1, 2, 3], KIVI, 4)))
    engine.submit(Drain())
    engine.submit(Prefill(request("new", [1, 2, 3], KIVI, 4)))
    outputs: list[StepOutput] = []
    engine.run(outputs.append)
    said = joined(outputs)
    (failed,) = said.failed
    assert (failed.rid, type(failed.error)) == ("new", errors.PeerLostError)
    assert len(said.tokens) == 4
    assert not engine.pool.used_bytes
