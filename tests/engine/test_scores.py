"""Log-probabilities of prompts and answers, as the model of transformers has them."""

import pytest

from disagg.engine.engine import Engine
from disagg.engine.messages import Admit, Prefill, Token
from disagg.kv.state import allocate_group
from tests.engine.serving import (
    Nowhere,
    joined,
    make_engine,
    request,
    run_until_idle,
)
from tests.model.reference import ReferenceModel
from tests.model.tiny import random_prompt

PROMPT = random_prompt(70)
SCORED = {"logprobs": 2, "ignore_eos": True}


def serve_scored_and_plain(engine: Engine) -> dict[str, list[Token]]:
    """The tokens of a request with a scored prompt, and of one without scores."""
    scored = request("scored", PROMPT, "raw", 3, prompt_logprobs=True, **SCORED)
    plain = request("plain", PROMPT[:20], "raw", 3, ignore_eos=True)
    engine.submit(Prefill(scored))
    engine.submit(Prefill(plain))
    tokens = {"scored": [], "plain": []}
    for token in run_until_idle(engine).tokens:
        tokens[token.rid].append(token)
    return tokens


@pytest.mark.parametrize("batch", [16, 512], ids=["chunks", "whole"])
def test_only_the_scored_request_gets_scores(batch, runner):
    tokens = serve_scored_and_plain(make_engine(runner, max_batch_tokens=batch))

    assert not any(token.logprobs for token in tokens["plain"])
    first, *rest = tokens["scored"]
    # all of the prompt but its first token, and the first of the answer
    assert len(first.logprobs) == len(PROMPT)
    assert [len(token.logprobs) for token in rest] == [1, 1]


@pytest.mark.parametrize("batch", [16, 512], ids=["chunks", "whole"])
def test_every_token_of_a_prompt_is_scored_once(batch, runner):
    engine = make_engine(runner, max_batch_tokens=batch)
    tokens = serve_scored_and_plain(engine)["scored"]
    text = [*PROMPT, *(token.token for token in tokens)]
    reference = ReferenceModel(str(runner.info.path)).logprobs(text)

    scores = []
    for token in tokens:
        scores += token.logprobs

    own = [logprob for logprob, _ in scores]
    expected = [float(reference[i, token]) for i, token in enumerate(text[1:])]
    assert own == pytest.approx(expected, abs=1e-3)
    for (_, likeliest), row in zip(scores, reference, strict=False):
        values = [value for _, value in likeliest]
        best = row.topk(2).values.tolist()
        assert values == pytest.approx(best, abs=1e-3)


def test_a_prompt_that_starts_again_is_scored_once(runner):
    """It loses its room while it prefills, to one that came before it."""
    roomy = make_engine(runner)
    tight = make_engine(runner, arena_bytes=1 << 20, watermark=0.0)
    score_counts = []
    for engine in (roomy, tight):
        for index in range(4):
            scored = request(
                str(index), PROMPT, "raw", 60, prompt_logprobs=True, **SCORED
            )
            engine.submit(Prefill(scored))
        counts = {}
        for token in run_until_idle(engine).tokens:
            if token.logprobs:
                counts[token.rid, token.index] = len(token.logprobs)
        score_counts.append(counts)

    assert tight.counts["preempted"]
    assert score_counts[0] == score_counts[1]


def test_decode_repeats_the_scores_of_the_first_token(runner):
    prefill = make_engine(runner)
    decode = make_engine(runner)
    scored = request("r", PROMPT, "raw", 2, **SCORED)
    prefill.submit(Prefill(scored, Nowhere()))
    outputs = [prefill.step() for _ in range(3)]
    (prefilled,) = joined(outputs).prefilled
    assert len(prefilled.logprobs) == 1

    states = tuple(
        allocate_group(group, len(PROMPT), decode.pool)
        for group in decode.plan("raw").groups
    )
    first_token = (prefilled.first_token,)
    decode.submit(Admit(scored, states, first_token, logprobs=prefilled.logprobs))
    first, second = run_until_idle(decode).tokens

    assert (first.index, first.logprobs) == (0, prefilled.logprobs)
    assert (second.index, len(second.logprobs)) == (1, 1)
