"""Requests of agents, for `chaos --agents`, and when an answer to one is valid.

    half       bound to a form: JSON schemas of 1 to 40 fields, regular expressions, a choice
    a quarter  tool calls, required or named
    a quarter  plain

whole and streamed, greedy and sampled with a seed, as completions, chats and responses. No HTTP.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import jsonschema

from disagg.bench.result import Row
from disagg.bench.workers import TEXT

SCHEMA, CALL, PLAIN = "schema", "tool call", "plain"
COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MAX_TOKENS = 400
PLAIN_TOKENS = 80
ROUND = 8  # requests, each kind by its share
CUT = "length"


@dataclass(frozen=True)
class AgentAnswer:
    """What a client got. calls: name and arguments of each."""

    text: str
    calls: tuple[tuple[str, str], ...]
    finish_reason: str


Check = Callable[
    [AgentAnswer], None
]  # ValueError or ValidationError if it is not valid


@dataclass(frozen=True)
class AgentRequest:
    """A request of a kind, and what its whole answers have to be like."""

    kind: str
    path: str
    body: Row
    check: Check

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.get("stream"))

    def mistake(self, answer: AgentAnswer) -> str:
        """Why an answer is not valid; empty: it is, or it was cut at its token limit."""
        if answer.finish_reason == CUT:
            return ""
        try:
            self.check(answer)
        except (ValueError, jsonschema.ValidationError) as error:
            return str(error)
        return ""


def agent_requests() -> list[AgentRequest]:
    """Rounds of ROUND requests. Those of one place in a round have the same kind."""
    kinds = zip(*[_forms()] * 4, *[_calls()] * 2, *[_plain()] * 2, strict=True)
    return list(chain.from_iterable(kinds))


# -- schemas

WORD = {"type": "string", "maxLength": 12}
ESCAPED = {"type": "string", "pattern": '^["\\\\\\n\\t/]{3,9}é?$'}
CHOICES = ["yes", "no", "it depends", "ask again later", "42"]
FLAG = {"type": "boolean"}
PERSON = {
    "name": WORD,
    "age": {"type": "integer", "minimum": 0, "maximum": 120},
    "id": {"type": "string", "format": "uuid"},
    "born": {"type": "string", "format": "date"},
}


def closed(properties: Mapping[str, Any], **keywords: Any) -> Row:
    """A schema of an object that has exactly these properties."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": [*properties],
        "additionalProperties": False,
        **keywords,
    }


FORTY = closed({f"field_{number}": {"enum": [number, None]} for number in range(40)})
PEOPLE = {
    "type": "array",
    "items": closed(PERSON),
    "minItems": 1,
    "maxItems": 2,
}
TREE = closed(
    {"root": {"$ref": "#/$defs/node"}},
    **{
        "$defs": {
            "node": closed(
                {
                    "label": WORD,
                    "children": {
                        "type": "array",
                        "items": {"$ref": "#/$defs/node"},
                        "maxItems": 1,
                    },
                }
            )
        }
    },
)
QUOTES = closed({"quote": ESCAPED, "same": {"const": 'tab\t "quote" \\ é 😀 \u0001'}})
EVENT = {"anyOf": [closed({"at": {"type": "string", "format": "date-time"}}), FLAG]}
NUMBER = closed({"number": {"type": "number", "minimum": -1, "maximum": 1}})
CODE, PAIRS = r"[A-Z]{3}-[0-9]{4}(-[a-z]{2}){2}", r"([a-z]{2,5}=[0-9]{1,3};){3,6}"


def _forms() -> Iterator[AgentRequest]:
    """Requests that bind their answers to a form."""
    yield _json_completion("A flag as JSON:", closed({"flag": FLAG}), temperature=0)
    yield _json_completion(TEXT * 2, closed(PERSON), stream=True, seed=1)
    yield _json_chat("Who lives there?", PEOPLE, stream=True, temperature=0)
    yield _json_chat("Say it in quotes.", QUOTES, seed=2)
    yield _json_chat(TEXT * 6, FORTY, stream=True, seed=3)
    yield _json_chat("Draw a tree.", TREE, temperature=0)
    yield _json_response("When?", EVENT, stream=True, temperature=1.0)
    yield _json_response(TEXT, QUOTES, temperature=0)
    code, pairs = partial(_check_regex, CODE), partial(_check_regex, PAIRS)
    yield _form(code, "The code is ", structured_outputs={"regex": CODE}, seed=8)
    yield _form(pairs, TEXT, guided_regex=PAIRS, stream=True, seed=4)
    yield _form(_check_choice, "Is it so? ", guided_choice=CHOICES, stream=True, seed=5)
    yield _json_completion(TEXT * 4, NUMBER, seed=6, logprobs=2)


def _json_completion(prompt: str, schema: Row, **fields: Any) -> AgentRequest:
    return _form(
        partial(_check_json, schema), prompt, response_format=_format(schema), **fields
    )


def _form(check: Check, prompt: str, **fields: Any) -> AgentRequest:
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, **fields}
    return AgentRequest(SCHEMA, COMPLETIONS, body, check)


def _json_chat(question: str, schema: Row, **fields: Any) -> AgentRequest:
    body = _chat(question, response_format=_format(schema), **fields)
    return AgentRequest(SCHEMA, CHATS, body, partial(_check_json, schema))


def _json_response(question: str, schema: Row, **fields: Any) -> AgentRequest:
    answer_format = {"type": "json_schema", "name": "form", "schema": schema}
    body = {
        "input": question,
        "max_output_tokens": MAX_TOKENS,
        "text": {"format": answer_format},
        "seed": 7,
        **fields,
    }
    return AgentRequest(SCHEMA, RESPONSES, body, partial(_check_json, schema))


def _format(schema: Row) -> Row:
    json_schema = {"name": "form", "schema": schema}
    return {"type": "json_schema", "json_schema": json_schema}


def _chat(question: str, **fields: Any) -> Row:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": MAX_TOKENS, **fields}


def _check_json(schema: Row, answer: AgentAnswer) -> None:
    jsonschema.validate(json.loads(answer.text), schema)


def _check_regex(pattern: str, answer: AgentAnswer) -> None:
    if not re.fullmatch(pattern, answer.text):
        raise ValueError(f"{answer.text!r} is not of {pattern}")


def _check_choice(answer: AgentAnswer) -> None:
    if answer.text not in CHOICES:
        raise ValueError(f"{answer.text!r} is none of {CHOICES}")


# -- tools

TOOLS: Mapping[str, Row] = {
    "get_weather": closed(
        {"city": WORD, "unit": {"enum": ["C", "F"]}, "note": ESCAPED}
    ),
    "book": closed(
        {"days": {"type": "integer", "minimum": 1, "maximum": 3}, "people": PEOPLE}
    ),
    "now": closed({}),
}
TOOL_FIELDS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in TOOLS.items()
]


def _calls() -> Iterator[AgentRequest]:
    """Chats whose answers must call tools."""
    yield _call("Is it raining in Oslo?", temperature=0, parallel_tool_calls=False)
    yield _call("Rain?", "get_weather", stream=True, seed=11)
    yield _call(TEXT * 3, "book", seed=12)
    yield _call("Go there.", stream=True, seed=13)
    yield _call(TEXT, "book", stream=True, temperature=0)
    yield _call("What time is it?", "now", stream=True, seed=14)


def _call(question: str, named: str = "", **fields: Any) -> AgentRequest:
    choice = {"type": "function", "function": {"name": named}} if named else "required"
    body = _chat(question, tools=TOOL_FIELDS, tool_choice=choice, **fields)

    return AgentRequest(CALL, CHATS, body, partial(_check_calls, named))


def _check_calls(named: str, answer: AgentAnswer) -> None:
    names = [name for name, _ in answer.calls]
    is_named = not named or names == [named]
    if not names or not is_named or answer.text:
        raise ValueError(f"calls {names} and text {answer.text!r}")
    for name, arguments in answer.calls:
        jsonschema.validate(json.loads(arguments), TOOLS[name])


# -- no form


def _plain() -> Iterator[AgentRequest]:
    """Requests whose answers may be any text."""
    for number in range(6):
        fields: Row = {"stream": number % 2 == 0, "seed": number}
        question = f"{number}. " + TEXT * number
        if number % 3:
            body = {"prompt": question, "max_tokens": PLAIN_TOKENS, **fields}
            yield AgentRequest(PLAIN, COMPLETIONS, body, _check_text)
        else:
            body = _chat(question, **fields)
            body["max_tokens"] = PLAIN_TOKENS
            yield AgentRequest(PLAIN, CHATS, body, _check_text)


def _check_text(answer: AgentAnswer) -> None:
    if answer.calls:
        raise ValueError(f"calls {answer.calls} without tools")
