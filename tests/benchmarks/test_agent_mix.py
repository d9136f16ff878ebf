"""The requests of `chaos --agents`, and how their answers are read and judged."""

import json
import pickle
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.agent_answers import events_of, streamed_answer, whole_answer
from benchmarks.agent_doors import AgentDoorEnd
from benchmarks.agent_mix import (
    CALL,
    CHATS,
    COMPLETIONS,
    CUT,
    PLAIN,
    RESPONSES,
    ROUND,
    SCHEMA,
    AgentAnswer,
    AgentRequest,
    agent_requests,
)
from benchmarks.front_group import Answers
from disagg.errors import DisaggError, WireError

REQUESTS = agent_requests()
TEXT = AgentAnswer("ab", (), "stop")
CALLS = AgentAnswer("", (("now", "{}"), ("book", '{"days": 2}')), "tool_calls")


def request_of(kind: str, seed: int) -> AgentRequest:
    """The request of a kind with a seed."""
    return next(x for x in REQUESTS if (x.kind, x.body.get("seed")) == (kind, seed))


def test_half_are_bound_to_forms_and_a_quarter_calls_tools() -> None:
    rounds = [REQUESTS[i : i + ROUND] for i in range(0, len(REQUESTS), ROUND)]

    kinds = {tuple(request.kind for request in one) for one in rounds}

    assert kinds == {(*[SCHEMA] * 4, *[CALL] * 2, *[PLAIN] * 2)}


def test_the_mix_has_every_route_whole_and_streamed() -> None:
    routes = {(request.path, request.is_streamed) for request in REQUESTS}

    assert len(routes) == 6


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda x: x.path)
def test_an_undisturbed_answer_can_be_repeated(request_: AgentRequest) -> None:
    assert request_.body.get("temperature") == 0 or "seed" in request_.body


def test_requests_travel_to_the_process_of_a_door() -> None:
    bodies = [request.body for request in pickle.loads(pickle.dumps(REQUESTS))]

    assert bodies == [request.body for request in REQUESTS]


@pytest.mark.parametrize("request_", REQUESTS[:ROUND], ids=lambda x: x.kind)
def test_an_answer_of_another_form_is_invalid(request_: AgentRequest) -> None:
    answer = AgentAnswer("{}", (("now", '{"at": 1}'),), "stop")

    assert request_.mistake(answer)


def test_an_answer_that_matches_its_form_is_valid() -> None:
    texts = {
        8: "ABC-1234-de-fg",
        4: "ab=1;cd=22;ef=333;",
        5: "it depends",
        6: '{"number": 0.5}',
    }
    requests = [request_of(SCHEMA, seed) for seed in texts]
    answers = [AgentAnswer(text, (), "stop") for text in texts.values()]

    mistakes = list(map(AgentRequest.mistake, requests, answers))

    assert mistakes == [""] * 4


def test_another_function_than_the_named_one_is_invalid() -> None:
    named = request_of(CALL, seed=14)
    answer = AgentAnswer("", (("now", "{}"),), "stop")

    mistakes = [named.mistake(x) for x in (answer, replace(answer, calls=()))]

    assert mistakes == ["", "calls [] and text ''"]


def test_a_cut_answer_is_not_validated() -> None:
    assert REQUESTS[0].mistake(AgentAnswer('{"fl', (), CUT)) == ""


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        (COMPLETIONS, {"choices": [{"text": "ab", "finish_reason": "stop"}]}, TEXT),
        (
            RESPONSES,
            {
                "status": "completed",
                "output": [
                    {"type": "reasoning", "summary": []},
                    {"type": "message", "content": [{"text": "a"}, {"text": "b"}]},
                ],
            },
            TEXT,
        ),
        (
            CHATS,
            {
                "choices": [
                    {
                        "finish_reason": "tool_calls",
                        "message": {
                            "content": None,
                            "tool_calls": [
                                {"function": {"name": name, "arguments": arguments}}
                                for name, arguments in CALLS.calls
                            ],
                        },
                    }
                ]
            },
            CALLS,
        ),
    ],
    ids=["completion", "response", "chat"],
)
def test_a_body_is_read(path: str, body: dict, answer: AgentAnswer) -> None:
    assert whole_answer(path, body) == answer


def piece(index: int, **function: str) -> dict:
    """A chunk of a chat with a piece of a call."""
    call = {"index": index, "function": function}
    return {"choices": [{"delta": {"tool_calls": [call]}, "finish_reason": None}]}


def test_pieces_of_calls_are_joined_by_their_index() -> None:
    pieces = [
        piece(0, name="now", arguments=""),
        piece(0, arguments="{}"),
        piece(1, name="book", arguments='{"days"'),
        piece(1, arguments=": 2}"),
        {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
    ]

    assert streamed_answer(CHATS, pieces) == CALLS


@pytest.mark.parametrize("path", [COMPLETIONS, RESPONSES])
def test_a_stream_without_its_end_is_an_error(path: str) -> None:
    events = [{"type": "x", "choices": [{"text": "a", "finish_reason": None}]}]

    with pytest.raises(WireError, match="ended"):
        streamed_answer(path, events)


def test_an_error_in_a_stream_is_raised() -> None:
    lines = ['data: {"choices": []}', "", 'data: {"error": {"message": "gone"}}']

    with pytest.raises(DisaggError, match="gone"):
        list(events_of(lines))


def test_wrong_and_invalid_answers_are_counted_by_kind() -> None:
    request, answers = REQUESTS[0], Answers()
    right = AgentAnswer(json.dumps({"flag": True}), (), "stop")
    cut = replace(right, text="{", finish_reason=CUT)
    expected_of = {right: right, replace(right, text="{}"): right, cut: cut}

    for answer, expected in expected_of.items():
        AgentDoorEnd().count(answers, request, answer, expected)

    outcomes = Counter({"whole": 2, "at token limit": 1, "wrong": 1, "invalid": 1})
    assert answers.outcomes == {(SCHEMA, name): n for name, n in outcomes.items()}
    assert answers.wrong == len(answers.mistakes) == 1
