"""Where an answer stands in its grammar is a pure function of its tokens."""

import random
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.errors import RequestError
from disagg.grammar import choice, compiler, json_schema, regex
from disagg.grammar.compiler import GrammarCompiler
from disagg.grammar.state import GrammarState
from tests.grammar.following import tokens_of, vocabulary

WORDS = vocabulary()
PERSON = json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "tags": {"type": "array", "items": {"enum": ["a", "bc"]}},
            "born": {"type": "string", "format": "date"},
        },
        "required": ["name", "tags"],
    }
)
ANSWERS = {
    PERSON: '{"name": "Zoë \\" x", "tags": ["bc", "a"], "born": "2001-02-03"}',
    regex("(ab|a)*c{2,9}"): "abaabcccc",
    choice(["yes", "yes, sir", "no"]): "yes, sir",
}
STARTS = {text: GrammarState.compile(text, WORDS) for text in ANSWERS}


@pytest.mark.parametrize("constraint", ANSWERS, ids=ANSWERS.values())
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_any_way_to_a_token_leads_to_the_same_mask(constraint, seed):
    """Token by token, at once, in random pieces, or by a draft that is taken back."""
    draw = random.Random(seed)
    tokens = tokens_of(ANSWERS[constraint])
    size = draw.randrange(len(tokens))
    at_once = STARTS[constraint].copy()
    at_once.follow(tokens[:size])
    in_pieces = STARTS[constraint].copy()
    for cut in sorted(draw.choices(range(size + 1), k=4)):
        in_pieces.follow(tokens[:cut])
        in_pieces.bits(tokens[cut : cut + draw.randrange(5)])
    in_pieces.follow(tokens[:size])
    begin = draw.randrange(size + 1)
    before_draft = STARTS[constraint].copy()
    before_draft.follow(tokens[:begin])

    bits = at_once.bits()

    assert bits.tolist() == in_pieces.bits().tolist()
    assert bits.tolist() == before_draft.bits(tokens[begin:size]).tolist()
    assert at_once.is_complete == in_pieces.is_complete


def test_an_answer_is_complete_where_nothing_may_follow():
    state = GrammarState.compile(choice(["yes", "yes, sir"]), WORDS)
    complete = []
    for size in range(1, 1 + len("yes, sir")):
        state.follow(tokens_of("yes, sir"[:size]))
        complete.append(state.is_complete)

    assert complete == [False] * 7 + [True]


def test_a_draft_is_allowed_up_to_its_first_wrong_token():
    state = STARTS[PERSON].copy()
    state.follow(tokens_of('{"na'))

    assert state.num_allowed(tokens_of('me":x')) == 4
    assert state.num_allowed(tokens_of("x")) == 0


def test_tokens_that_a_grammar_does_not_allow_are_an_error():
    state = STARTS[PERSON].copy()

    with pytest.raises(RequestError, match="does not allow the tokens so far"):
        state.follow(tokens_of("[1"))


@pytest.mark.parametrize("constraint", ["start: <[999]>", 'start: ""', "start: <|no|>"])
def test_a_grammar_that_no_text_of_the_model_follows_is_refused(constraint):
    with pytest.raises(RequestError, match="the grammar"):
        GrammarState.compile(constraint, WORDS)


def test_a_compiler_compiles_a_constraint_once_and_reads_no_vocabulary_before():
    reads = []

    def read():
        reads.append(1)
        return WORDS

    compiler = GrammarCompiler(read)
    assert not reads

    futures = [compiler.prepare(PERSON) for _ in range(3)]

    assert len({id(future.result()) for future in futures}) == 1
    assert len(reads) == 1


@pytest.mark.parametrize(
    ("limit", "most"), [("MOST_UNUSED", 2), ("MOST_UNUSED_CHARS", 40)]
)
def test_few_grammars_stay_compiled_without_a_request(limit, most, monkeypatch):
    """One that a request holds stays too."""
    monkeypatch.setattr(compiler, limit, most)
    grammars = GrammarCompiler(lambda: WORDS)
    constraints = [
        f'start: "text {number}"' for number in range(4)
    ]  # 15 characters each
    held = grammars.prepare(constraints[0])
    before = [grammars.prepare(text).result() for text in constraints]

    after = [grammars.prepare(text).result() for text in constraints]

    assert after[0] is before[0] is held.result()
    assert after[1] is not before[1]


def test_forced_text_has_the_tokens_of_the_tokenizer():
    """Those that the model was trained on, where other tokens would spell the same."""
    state = GrammarState.compile('start: "hello" /[0-9]/', WORDS)

    allowed = [i for i in range(256) if state.bits()[i // 32] >> i % 32 & 1]

    assert allowed == [ord("h")]


def test_a_long_forced_text_is_split_into_tokens_once():
    state = GrammarState.compile('start: "a long text" /[0-9]/ "!"', WORDS)
    matcher = state._matcher = Mock(wraps=state._matcher)
    text = b"a long text"

    pieces = []
    for length in range(len(text)):
        state.follow([*text[:length]])
        pieces.append(bytes(state.forced(4)))

    assert pieces == [text[i : i + 4] for i in range(len(text))]
    assert matcher.compute_ff_tokens.call_count == 1


def test_forced_text_begins_anew_behind_a_choice():
    state = GrammarState.compile('start: "ab" /[0-9]/ "!?"', WORDS)
    assert state.forced(9) == [*b"ab"]

    state.follow([*b"ab"])
    behind_text = state.forced(9)
    state.follow([*b"ab7"])

    assert behind_text == []
    assert state.forced(9) == [*b"!?"]
