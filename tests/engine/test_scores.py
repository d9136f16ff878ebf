"""Log-probabilities of prompts and answers, as the model of transformers has them."""

import pytest

from disagg.engine.messages import Admit, Prefill
from disagg.kv.state import allocate_group
from tests.engine.serving import Nowhere, make_engine, request, run_until_idle
from tests.model.reference import ReferenceModel
from tests.model.tiny import random_prompt

PROMPT = random_prompt(70)
SCORED = {"logprobs": 2, "ignore_eos": True}


@pytest.mark.parametrize("batch", [16, 512], ids=["chunks", "whole"])
def test_every_token_of_a_prompt_is_scored_once(batch, runner):
    engine = make_engine(runner, max_batch_tokens=batch)
    engine.submit(
        Prefill(request("scored", PROMPT, "raw", 3, prompt_logprobs=True, **SCORED))
    )
    engine.submit(Prefill(request("plain", PROMPT[:20], "raw", 3, ignore_eos=True)))
    tokens = run_until_idle(engine).tokens
    assert not any(token.logprobs for token in tokens if token.rid == "plain")
    first, *rest = [token for token in tokens if token.rid == "scored"]
    assert len(first.logprobs) == len(
        PROMPT
    )  # all but its first, and the first of the answer
    assert [len(token.logprobs) for token in rest] == [1, 1]
    text = [*PROMPT, *(token.token for token in (first, *rest))]
    known = ReferenceModel(str(runner.info.path)).logprobs(text)
    told = [x for token in (first, *rest) for x in token.logprobs]
    expected = [float(known[i, token]) for i, token in enumerate(text[1:])]
    assert [own for own, _ in told] == pytest.approx(expected, abs=1e-3)
    for (_, likeliest), row in zip(told, known, strict=False):
        assert [x for _, x in likeliest] == pytest.approx(
            row.topk(2).values.tolist(), abs=1e-3
        )


def test_a_prompt_that_starts_again_is_scored_once(runner):
    """It loses its room while it prefills, to one that came before it."""
    asked = {"prompt_logprobs": True, **SCORED}
    roomy, tight = (
        make_engine(runner),
        make_engine(runner, arena_bytes=1 << 20, watermark=0.0),
    )
    found = []
    for engine in (roomy, tight):
        for index in range(4):
            engine.submit(Prefill(request(str(index), PROMPT, "raw", 60, **asked)))
        tokens = run_until_idle(engine).tokens
        found.append({(x.rid, x.index): len(x.logprobs) for x in tokens if x.logprobs})
    assert tight.counts["preempted"]
    assert found[0] == found[1]


def test_what_prefill_says_of_the_first_token_is_said_again_by_who_goes_on(runner):
    prefill, decode = make_engine(runner), make_engine(runner)
    asked = request("r", PROMPT, "raw", 2, **SCORED)
    prefill.submit(Prefill(asked, Nowhere()))
    (done,) = [x for _ in range(3) for x in prefill.step().prefilled]
    assert len(done.logprobs) == 1
    groups = decode.plan("raw").groups
    states = tuple(allocate_group(group, len(PROMPT), decode.pool) for group in groups)
    decode.submit(Admit(asked, states, (done.first_token,), logprobs=done.logprobs))
    first, second = run_until_idle(decode).tokens
    assert (first.index, first.logprobs) == (0, done.logprobs)
    assert (second.index, len(second.logprobs)) == (1, 1)
