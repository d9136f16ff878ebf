"""Random requests have the same answers with drafts as without them."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from disagg.codecs import codec_names
from disagg.engine.engine import Engine
from disagg.engine.messages import Abort, Prefill, Token
from disagg.engine.sequence import Request
from tests.engine.forced import allowed
from tests.engine.scripted import RandomRequests, ScriptedRunner, StepEntries
from tests.engine.serving import MAX_STEPS, make_engine
from tests.synthetic import relative_error

SPECS = ["kivi:bits=2,group=64,residual=64", "kivi:bits=4,group=32,residual=0"]
SPECS += ["0:kivi:bits=4,group=32,residual=32;1-:raw"]
CODECS = [*codec_names(), *SPECS]
CONFIGS: Sequence[dict[str, Any]] = [
    {"max_sequences": 3},
    {"max_sequences": 6, "max_batch_tokens": 48},
    {"max_sequences": 6, "arena_bytes": 4 << 20, "prefix_cache": False},
    {"max_sequences": 2, "max_batch_tokens": 9},
]
Answer = list[Token]


def serve_all(
    engine: Engine, requests: Sequence[Request], may_abort: Callable[[Token], bool]
) -> dict[str, Answer]:
    """The outputs of requests that arrive a few at a time."""
    arrivals = iter(requests)
    answers: dict[str, Answer] = {request.rid: [] for request in requests}
    pending = True
    for step in range(MAX_STEPS):
        if step % 3 == 0:
            pending = submit(engine, arrivals)
        output = engine.step()
        assert not output.failed, output.failed
        for token in output.tokens:
            add(answers[token.rid], token)
            if may_abort(token):
                engine.submit(Abort(token.rid))
        if engine.idle and not pending:
            break
    assert engine.idle
    engine.pool.check_integrity()
    assert not engine.pool.referenced_pages
    return answers


def submit(engine: Engine, arrivals: Any) -> bool:
    request = next(arrivals, None)
    if request is not None:
        engine.submit(Prefill(request))
    return request is not None


def add(answer: Answer, token: Token) -> None:
    """Every index comes once, in order; where the pool is full, the last may be repeated."""
    if answer and token.index == len(answer) - 1:
        assert token.token == answer[-1].token
        answer[-1] = replace(token, logprobs=answer[-1].logprobs)
        return
    assert token.index == len(answer)
    answer.append(token)


def never(_: Token) -> bool:
    return False


def assert_same_scores(answer: Answer, expected: Answer) -> None:
    for token, other in zip(answer, expected, strict=True):
        assert [own for own, _ in token.logprobs] == pytest.approx(
            [own for own, _ in other.logprobs], abs=1e-4
        )


def check_seed(
    seed: int, count: int, runner: Any, entries: StepEntries
) -> Mapping[str, int]:
    """Serve `count` requests with drafts and without; the counts of the engine with drafts."""
    draw = RandomRequests(seed, CODECS)
    config = dict(CONFIGS[seed % len(CONFIGS)])
    requests = [draw.next(f"{seed}-{i}") for i in range(count)]
    plain = ScriptedRunner(runner, entries)
    expected = serve_all(make_engine(plain, **config), requests, never)
    predicting = [
        replace(x, prediction=draw.prediction([t.token for t in expected[x.rid]]))
        for x in requests
    ]
    drafting = ScriptedRunner(runner, entries)
    engine = make_engine(drafting, speculative_tokens=1 + seed % 8, **config)
    coin = random.Random(seed)
    aborted = set[str]()

    def may_abort(token: Token) -> bool:
        if coin.random() < 0.004 and not token.finish_reason:
            aborted.add(token.rid)
        return token.rid in aborted

    answers = serve_all(engine, predicting, may_abort)

    for request in requests:
        answer, full = answers[request.rid], expected[request.rid]
        if request.rid in aborted:
            full = full[: len(answer)]
        words = [(x.token, x.finish_reason) for x in answer]
        assert words == [(x.token, x.finish_reason) for x in full], request
        assert_same_scores(answer, full)
        assert_same_logits(request, answer, drafting, plain)
    return engine.counts


def assert_same_logits(
    request: Request, answer: Answer, drafting: ScriptedRunner, plain: ScriptedRunner
) -> None:
    """What the real model computed for the tokens of an answer, on the records of the codec."""
    first = len(request.tokens) - 1
    positions = range(first, first + len(answer))
    logits = torch.stack([drafting.logits[request.rid][x] for x in positions])
    others = torch.stack([plain.logits[request.rid][x] for x in positions])
    error = relative_error(logits, others)
    assert error <= allowed(request.codec), (error, request)


def test_random_requests_are_answered_as_without_drafts(runner, monkeypatch):
    counts = check_seed(1, 6, runner, StepEntries(monkeypatch))

    assert counts["accepted_tokens"] > 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_requests_are_answered_as_without_drafts(runner, monkeypatch):
    entries = StepEntries(monkeypatch)
    total = Counter[str]()

    for seed in range(2, 42):
        total.update(check_seed(seed, 25, runner, entries))

    assert total["accepted_tokens"] > 5000
    assert total["preempted"] > 10
