"""What an engine refuses, by name, and that the rest goes on."""

import math

import pytest

from disagg import errors
from disagg.codecs.planning import KVShape, parse_plan
from disagg.codecs.registry import codec_names
from disagg.engine.limits import check_range
from disagg.engine.messages import Drain, Prefill, StepOutput
from disagg.model.capacity import exact_bytes
from disagg.model.outliers import KeyOutliers
from disagg.model.runner import Runner
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


def serve_short_and_long(runner, codec: str) -> tuple[StepOutput, int]:
    """Serve prompts of up to 192 tokens, and others of 201, with exact KV for 200.

    Returns the outputs, and the most tokens that had exact KV at a time.
    """
    engine = make_engine(
        runner,
        max_batch_tokens=64,
        workspace_bytes=exact_bytes(runner.shape, [200] * 3),
        arena_bytes=4 << 20,
        watermark=0.0,
    )
    for i in range(12):
        short = random_prompt(60 + 12 * i)
        engine.submit(Prefill(request(f"{i}", short, codec, 8)))
        engine.submit(Prefill(request(f"long {i}", random_prompt(201), codec, 8)))
    outputs = []
    most_tokens = 0
    while not engine.idle:
        outputs.append(engine.step())
        active = engine._scheduler.active
        prefilling = [x.prompt_len for x in active if x.workspace is not None]
        most_tokens = max(most_tokens, sum(prefilling))
    return joined(outputs), most_tokens


@pytest.mark.parametrize("codec", [KIVI, "raw"])
def test_prompts_beyond_the_workspace_are_refused_under_load(runner, codec):
    output, _ = serve_short_and_long(runner, codec)

    needed = exact_bytes(runner.shape, [201] * 3)
    room = exact_bytes(runner.shape, [200] * 3)
    assert {x.rid for x in output.failed} == {f"long {i}" for i in range(12)}
    for failed in output.failed:
        assert isinstance(failed.error, errors.PromptTooLongError)
        assert f"needs {needed} bytes of exact KV" in str(failed.error)
        assert f"room for {room}" in str(failed.error)


@pytest.mark.parametrize("codec", [KIVI, "raw"])
def test_prompts_within_the_workspace_are_served_under_load(runner, codec):
    output, most_tokens = serve_short_and_long(runner, codec)

    assert 100 < most_tokens <= 200
    expected = {(f"{i}", index) for i in range(12) for index in range(8)}
    assert {(x.rid, x.index) for x in output.tokens} == expected


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

    output = joined(outputs)
    (failed,) = output.failed
    assert (failed.rid, type(failed.error)) == ("new", errors.PeerLostError)
    assert len(output.tokens) == 4
    assert not engine.pool.used_bytes


def outcome(runner: Runner, codec: str, prompt_len: int = 300) -> StepOutput:
    """Of one prompt, in chunks."""
    engine = make_engine(runner, max_batch_tokens=128)
    engine.submit(Prefill(request("a", random_prompt(prompt_len), codec, 8)))
    return run_until_idle(engine)


@pytest.mark.parametrize(
    "codec", ["raw:dtype=fp16", *sorted(set(codec_names()) - {"raw"})]
)
def test_keys_beyond_the_range_of_a_codec_are_refused(codec, runner, monkeypatch):
    monkeypatch.setattr(runner, "key_outliers", KeyOutliers(2**17))

    (failed,) = outcome(runner, codec).failed

    assert type(failed.error) is errors.RequestError
    assert "layer 0 goes up to" in str(failed.error)
    assert "holds numbers up to 65504" in str(failed.error)


def test_pages_in_the_dtype_of_the_model_hold_such_keys(runner, monkeypatch):
    expected = outcome(runner, "raw").tokens
    monkeypatch.setattr(runner, "key_outliers", KeyOutliers(2**17))

    assert outcome(runner, "raw").tokens == expected


@pytest.mark.parametrize("codec", ["raw", "int8", "kivi"])
def test_keys_that_overflow_the_dtype_of_the_model_are_refused(codec, tiny):
    runner = Runner.load(str(tiny), dtype="float16")
    assert outcome(runner, codec).tokens
    runner.key_outliers = KeyOutliers(4096 * 8)

    (failed,) = outcome(runner, codec).failed

    assert "is infinite" in str(failed.error)


def test_such_keys_are_noticed_behind_a_cached_prefix_too(runner, monkeypatch):
    engine = make_engine(runner, max_batch_tokens=128)
    for row, codec in enumerate(("raw", "int8")):
        monkeypatch.setattr(runner, "key_outliers", KeyOutliers(2 ** (17 - 17 * row)))
        engine.submit(Prefill(request(str(row), random_prompt(300), codec, 2)))
        output = run_until_idle(engine)

    assert "goes up to" in str(output.failed[0].error)


@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_keys_that_are_no_numbers_are_refused(codec):
    plan = parse_plan(codec, KVShape.uniform(2, 1, 64, "bfloat16"))

    check_range(plan, [1.0, 2.0])

    with pytest.raises(errors.RequestError, match="layer 1 is no number"):
        check_range(plan, [1.0, math.nan])
