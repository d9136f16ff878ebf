"""Answers follow their grammars, whatever happens to their sequences."""

import json
from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock, patch

import jsonschema
import numpy as np
import pytest
import torch

from disagg.engine import grammars
from disagg.engine.engine import Engine
from disagg.engine.grammars import NO_MASKS, TokenMasks
from disagg.engine.lookup import DraftHistory
from disagg.engine.messages import Abort, Move, Prefill, StepOutput
from disagg.engine.sampler import sample
from disagg.engine.sequence import Request, SamplingParams
from disagg.grammar import choice, compiler, lark, regex
from disagg.grammar.state import GrammarState
from disagg.model.tokenizer import Tokenizer
from tests.engine.serving import (
    Nowhere,
    StandIn,
    answers,
    make_engine,
    request,
    run_until_idle,
    serve,
)
from tests.model.tiny import random_prompt

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 4},
        "b": {"type": "integer", "minimum": 0, "maximum": 999},
        "c": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
# without spaces, so that answers are short
SHORT = {"x-guidance": {"whitespace_flexible": False}}
GRAMMAR = lark(f"start: %json {json.dumps(SCHEMA | SHORT)}")
ASKS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3, "top_p": 0.95, "top_k": 40},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "biased": {"logit_bias": ((7, 50.0), (9, -30.0))},
}
PROMPTS = [random_prompt(n) for n in (1, 70)]
LONGEST = 60


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return Tokenizer.load(tiny)


def ready(runner, *grammars: str, **config: Any) -> Engine:
    """An engine that has compiled these grammars."""
    engine = make_engine(runner, **config)
    for grammar in grammars or (GRAMMAR,):
        engine.grammar_compiler.prepare(grammar).result()
    return engine


def follow(engine: Engine, **sampling: Any) -> list[list[int]]:
    return serve(engine, PROMPTS, "raw", LONGEST, **{"grammar": GRAMMAR} | sampling)


@pytest.mark.parametrize("ask", ASKS)
def test_whatever_the_model_likes_answers_are_valid(ask, runner, tokenizer):
    engine = ready(runner)

    tokens = follow(engine, **ASKS[ask])

    for answer in tokens:
        jsonschema.validate(json.loads(tokenizer.decode(answer)), SCHEMA)


@pytest.fixture(scope="module")
def expected(runner) -> list[list[int]]:
    """The answers of an engine that nothing disturbs."""
    return follow(ready(runner))


@pytest.fixture
def guess(monkeypatch):
    """Makes drafts of known answers, in which every seventh token is wrong."""

    def guess(expected):
        def draft(_history, emitted, size):
            start = len(emitted)
            answer = next(x for x in expected if x[:start] == [*emitted])
            indices = range(start, min(start + size, len(answer)))
            return [answer[i] if i % 7 else answer[i] ^ 1 for i in indices]

        monkeypatch.setattr(DraftHistory, "draft", draft)

    return guess


@pytest.mark.parametrize("ask", ["greedy", "sampled"])
def test_drafts_change_no_token(ask, runner, guess):
    expected = follow(ready(runner), **ASKS[ask])
    guess(expected)
    engine = ready(runner, speculative_tokens=5)

    tokens = follow(engine, **ASKS[ask])

    assert tokens == expected
    assert engine.counts["accepted_tokens"] > 0


def test_drafts_are_cut_where_the_grammar_forbids_them(runner, monkeypatch):
    forbidden = [ord("~")] * 5
    monkeypatch.setattr(DraftHistory, "draft", lambda *_: forbidden)
    digits = regex("[0-9]{20}")
    engine = ready(runner, digits, speculative_tokens=5)

    serve(engine, PROMPTS, "raw", 30, grammar=digits)

    assert engine.counts["draft_tokens"] == 0


def test_tokens_that_a_grammar_forces_are_drafts_that_are_right(runner):
    grammar = lark('start: /[0-9]/ ", and then a long text" /[0-9]/')
    expected = serve(ready(runner, grammar), PROMPTS, "raw", 60, grammar=grammar)
    engine = ready(runner, grammar, speculative_tokens=5)

    tokens = serve(engine, PROMPTS, "raw", 60, grammar=grammar)

    assert tokens == expected
    assert engine.counts["accepted_tokens"] == engine.counts["draft_tokens"] > 30


def test_a_preempted_answer_goes_on_where_it_was(runner, expected):
    engine = ready(runner)
    for index, prompt in enumerate(PROMPTS):
        engine.submit(
            Prefill(request(str(index), prompt, "raw", LONGEST, grammar=GRAMMAR))
        )
    outputs = [engine.step() for _ in range(12)]

    victim = engine._scheduler.preempt()
    engine._on_preempted(victim)
    outputs.append(run_until_idle(engine))

    tokens = {str(index): [] for index in range(len(PROMPTS))}
    for token in (token for output in outputs for token in output.tokens):
        tokens[token.rid].append(token.token)
    assert [tokens["0"], tokens["1"]] == expected
    assert engine.counts["preempted"] == 1


@pytest.mark.parametrize("cut", [1, 9, -1])
def test_an_answer_goes_on_in_another_engine(cut, runner, expected):
    """As after a death or a move: all that is left is the tokens so far."""
    answer = expected[0]
    emitted = tuple(answer[:cut])
    engine = ready(runner)
    engine.submit(
        Prefill(
            request("r", PROMPTS[0], "raw", LONGEST, grammar=GRAMMAR), emitted=emitted
        )
    )

    output = run_until_idle(engine)

    assert [token.token for token in output.tokens] == [emitted[-1], *answer[cut:]]
    assert output.tokens[-1].finish_reason == "stop"


def test_the_repeated_end_of_an_answer_is_its_end(runner, expected):
    answer = expected[0]
    engine = ready(runner)
    work = request("r", PROMPTS[0], "raw", LONGEST, grammar=GRAMMAR)

    engine.submit(Prefill(work, emitted=tuple(answer)))
    output = engine.step()

    (token,) = output.tokens
    assert (token.index, token.finish_reason) == (len(answer) - 1, "stop")
    assert engine.idle


def test_a_sequence_that_moves_stops_behind_the_same_tokens(runner, expected):
    answer = expected[0]
    engine = ready(runner)
    engine.submit(Prefill(request("r", PROMPTS[0], "raw", LONGEST, grammar=GRAMMAR)))
    while not any(token.index == 3 for token in engine.step().tokens):
        pass

    engine.submit(Move("r", len(PROMPTS[0]) + 10, Nowhere()))
    output = StepOutput()
    while not output.moved:
        output = engine.step()
    engine.submit(Abort("r"))
    engine.step()

    assert list(output.moved[0].emitted) == answer[: len(output.moved[0].emitted)]


def test_tokens_that_a_grammar_forbids_end_the_request_alone(runner):
    engine = ready(runner)
    bad = request("bad", PROMPTS[0], "raw", 9, grammar=GRAMMAR)
    engine.submit(Prefill(bad, emitted=(1, 2, 3)))
    engine.submit(Prefill(request("good", PROMPTS[1], "raw", LONGEST, grammar=GRAMMAR)))

    output = run_until_idle(engine)

    (failed,) = output.failed
    assert failed.rid == "bad"
    assert "does not allow" in str(failed.error)
    assert {token.rid for token in output.tokens} == {"good"}


def test_a_bad_grammar_ends_its_request_alone(runner):
    engine = ready(runner, GRAMMAR)
    bad = 'start: "a" <[99999]>'
    engine.grammar_compiler.prepare(bad).exception()
    engine.submit(Prefill(request("bad", PROMPTS[0], "raw", 9, grammar=bad)))
    engine.submit(Prefill(request("good", PROMPTS[1], "raw", LONGEST, grammar=GRAMMAR)))

    output = run_until_idle(engine)

    (failed,) = output.failed
    assert failed.rid == "bad"
    assert "not supported" in str(failed.error)
    assert output.tokens[-1].finish_reason == "stop"


def test_others_go_on_while_a_grammar_is_compiled(runner, monkeypatch):
    """The messages of its request wait for it, in their order."""
    engine = make_engine(runner)
    on_ready = []

    def is_ready(work: Request, call: Any) -> bool:
        if work.params.grammar and not on_ready:
            on_ready.append(call)
            return False
        return True

    monkeypatch.setattr(engine._grammars, "is_ready", is_ready)
    engine.submit(Prefill(request("late", PROMPTS[0], "raw", 9, grammar=GRAMMAR)))
    engine.submit(Prefill(request("plain", PROMPTS[1], "raw", 3)))

    before = [token.rid for _ in range(9) for token in engine.step().tokens]
    waits = engine.load.waiting
    on_ready[0](Future())
    after = run_until_idle(engine)

    assert before == ["plain"] * 3
    assert waits == 1
    assert {token.rid for token in after.tokens} == {"late"}


def test_many_grammars_at_once_are_compiled_once_each(runner, monkeypatch):
    """More than stay compiled without a request that waits: no request compiles its own again."""
    monkeypatch.setattr(compiler, "MOST_UNUSED", 1)
    constraints = [choice([f"the text of {number}"]) for number in range(4)]
    compiled = []
    compile_state = GrammarState.compile
    monkeypatch.setattr(
        GrammarState,
        "compile",
        lambda text, words: compiled.append(text) or compile_state(text, words),
    )
    engine = make_engine(runner)
    for number, constraint in enumerate(constraints):
        work = request(str(number), PROMPTS[0], "raw", 20, grammar=constraint)
        engine.submit(Prefill(work))

    engine.step()
    engine.grammar_compiler._thread.submit(int).result()  # behind all of them
    run_until_idle(engine)

    assert compiled == constraints


def test_a_request_can_be_left_while_its_grammar_is_compiled(runner, monkeypatch):
    engine = make_engine(runner)
    on_ready = []
    monkeypatch.setattr(
        engine._grammars, "is_ready", lambda _, call: bool(on_ready.append(call))
    )
    engine.submit(Prefill(request("r", PROMPTS[0], "raw", 9, grammar=GRAMMAR)))
    engine.submit(Abort("r"))
    engine.step()
    assert not engine.idle

    on_ready[0](Future())
    output = engine.step()

    assert engine.idle
    assert not output.tokens
    assert not engine.pool.referenced_pages


def test_sequences_without_a_grammar_pay_nothing(runner, monkeypatch):
    """No state, no mask, no thread, no vocabulary; and rows without one are not touched."""
    engine = make_engine(runner)
    applied = []
    monkeypatch.setattr(
        TokenMasks, "applied", lambda masks, logits: applied.append(masks) or logits
    )
    read = []
    monkeypatch.setattr(
        engine.grammar_compiler, "_read_vocabulary", lambda: read.append(1)
    )
    monkeypatch.setattr(GrammarState, "follow", lambda *_: read.append(2))

    serve(engine, PROMPTS, "raw", 5)

    assert {*map(id, applied)} == {id(NO_MASKS)}
    assert not read
    assert "_thread" not in vars(engine._grammars)


def test_only_rows_with_a_grammar_are_masked(runner, expected):
    plain = serve(make_engine(runner), PROMPTS, "raw", 20)
    engine = ready(runner)
    bound = request("bound", PROMPTS[0], "raw", LONGEST, grammar=GRAMMAR)
    engine.submit(Prefill(bound))
    engine.submit(Prefill(request("plain", PROMPTS[1], "raw", 20)))

    tokens = answers(run_until_idle(engine))

    assert tokens["plain"] == plain[1]
    assert tokens["bound"] == expected[0]


@pytest.mark.parametrize("sampling", [{}, {"ignore_eos": True}, {"min_tokens": 9}])
def test_an_answer_ends_where_nothing_may_follow(sampling, runner, tokenizer):
    grammar = choice(["yes", "no"])
    engine = ready(runner, grammar)

    (answer, _) = serve(engine, PROMPTS, "raw", 20, grammar=grammar, **sampling)

    assert tokenizer.decode(answer) in ("yes", "no")


def test_an_answer_that_is_cut_ends_with_length(runner):
    engine = ready(runner)
    engine.submit(Prefill(request("r", PROMPTS[0], "raw", 5, grammar=GRAMMAR)))

    output = run_until_idle(engine)

    assert output.tokens[-1].finish_reason == "length"


class Fond(StandIn):
    """A runner that likes some tokens more than all others."""

    def __init__(self, runner: Any, tokens: list[int]):
        super().__init__(runner)
        self.tokens = tokens

    def forward(self, batch: Any) -> Any:
        logits = self._runner.forward(batch).clone()
        logits[:, self.tokens] += 1e4
        return logits


STOP = 250  # a byte that no text of the grammars has


@pytest.mark.parametrize(("least", "length"), [(0, 2), (4, 5)])
def test_a_stop_token_ends_an_answer_where_its_text_may_end(least, length, runner):
    grammar = regex("ab*")
    engine = ready(Fond(runner, [STOP]), grammar)
    sampling = {"stop_token_ids": (STOP,), "min_tokens": least}

    (answer, _) = serve(engine, PROMPTS, "raw", 20, grammar=grammar, **sampling)

    assert len(answer) == length
    assert answer[-1] == STOP


def test_log_probabilities_are_those_of_the_model(runner):
    """Before the grammar, as before all edits."""
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25]]))
    masks = TokenMasks((0,), torch.tensor([[0b010]], dtype=torch.int32).numpy())
    asks = [Request("r", (1,), SamplingParams(logprobs=1), "raw")]

    (sampled,) = sample(logits, asks, [[]], (), masks)

    own, likeliest = sampled.logprobs
    assert sampled.token == 1
    assert own == pytest.approx(-1.3863, abs=1e-4)
    assert likeliest[0][0] == 0


def test_masks_reach_their_rows_alone():
    logits = torch.zeros(3, 40)
    words = torch.tensor([[1 << 3, 1 << 6]], dtype=torch.int32).numpy()

    masked = TokenMasks((1,), words).applied(logits)

    assert masked[1].isfinite().nonzero().flatten().tolist() == [3, 38]
    assert masked[[0, 2]].eq(0).all()
    assert logits.eq(0).all()


def test_a_row_that_is_sampled_alone_has_its_own_mask():
    words = torch.tensor([[1], [2]], dtype=torch.int32).numpy()
    masks = TokenMasks((0, 2), words)

    assert masks.of_row(1) is NO_MASKS
    assert masks.of_row(2).bits.tolist() == [[2]]


def test_masks_are_the_same_on_any_device():
    """No GPU here, so the two ways are asked for by the name of a device."""
    bits = np.random.default_rng(1).integers(0, 2**31, (3, 5), dtype=np.int32)
    elsewhere = Mock(shape=(3, 150), device=Mock(type="other"))
    words = torch.from_numpy(~bits)
    with patch.object(torch, "from_numpy", return_value=Mock(to=lambda _: words)):
        shifts = torch.arange(32, dtype=torch.int32)
        with patch.object(torch, "arange", return_value=shifts):
            other = grammars._forbidden(bits, elsewhere)

    assert other.equal(grammars._forbidden(bits, torch.zeros(3, 150)))
