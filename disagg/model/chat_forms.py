"""The form in which a chat template takes a message. Templates differ, and none declares its form.

So each template is tried with short conversations when it is loaded. The forms are tried in order,
the client's own first, then those closest to it; the first that the template writes whole is used.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from disagg.errors import RequestError

Turn = Mapping[str, Any]


class Render(Protocol):
    """Writes a conversation, with tools if there are any; RequestError if the template refuses."""

    def __call__(self, turns: list[Turn], tools: Sequence[Turn] = ()) -> str: ...


USER: Turn = {"role": "user", "content": "Is it raining?"}
RESULT: Turn = {
    "role": "tool",
    "tool_call_id": "call00001",  # Mistral's templates insist on nine letters and digits
    "name": "get_weather",
    "content": "rain",
}
CITY = "Trondheim"
# some templates know both roles, but write only one of the two messages
INSTRUCTIONS: list[Turn] = [
    {"role": "system", "content": "Be kind."},
    {"role": "developer", "content": "Be brief."},
]
CALL_WORDS = ("get_weather", CITY)
TOOL: Turn = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "What the weather is like.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
THOUGHT = "Perhaps a cloud."
# what clients call the thoughts of a message, and gpt-oss's template
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")
CALL_ID, SHORT_CALL_ID = "call_9b2f6c0d41e84a73", "call00001"
NO_ARGUMENTS = ("", "null")

# how well a template writes a conversation
REFUSED, WITH_NONE, PARTLY, WHOLE = range(4)


@dataclass(frozen=True)
class CallForm:
    """How a template takes a message that calls tools and has no text.

    content: null or ""
    as_text: arguments as JSON text; otherwise as an object
    """

    content: str | None
    as_text: bool


# by the content that the client sent; the first is what the client sent
CALL_FORMS: Mapping[str | None, list[CallForm]] = {
    sent: [
        CallForm(content, as_text)
        for content in (sent, other)
        for as_text in (False, True)
    ]
    for sent, other in ((None, ""), ("", None))
}


@dataclass(frozen=True)
class MessageForms:
    """The forms that one template takes.

    developer:  whether it writes a message with the role `developer` beside a system message
    as_parts:   content as a list of text parts; otherwise as a text
    calls:      by the content that the client sent, null or ""
    wraps_text: arguments that are not an object are put into one, because the template refuses or
                drops them
    thought:    the name of a message's thoughts; None: it writes none
    thinks_with_text: whether it takes thoughts in a message with text and calls
    short_call_ids: whether it refuses ids of calls that do not have nine letters and digits
    tools:      whether it writes the definitions of tools
    """

    developer: bool
    as_parts: bool
    calls: Mapping[str | None, CallForm]
    wraps_text: bool
    thought: str | None
    thinks_with_text: bool
    short_call_ids: bool
    tools: bool

    @classmethod
    def of(cls, render: Render) -> "MessageForms":
        """Try a template."""
        as_parts = _takes_parts(render)
        calls = {sent: _best_call_form(render, sent) for sent in CALL_FORMS}
        thought = _thought_name(render, calls[""])
        return cls(
            developer=_writes_developer(render),
            as_parts=as_parts,
            calls=calls,
            wraps_text=_wraps_text(render, calls[""]),
            thought=thought,
            thinks_with_text=_thinks_with_text(render, calls[""], thought),
            short_call_ids=_needs_short_ids(render, calls[""]),
            tools=_writes_tools(render, as_parts),
        )

    def turn(self, message: Turn) -> Turn:
        """A message in the form that the template takes."""
        turn = self._with_thought(message)
        calls = message.get("tool_calls")
        if calls:
            content = message.get("content")
            form = self.calls[None if content is None else ""]
            if not content:
                turn["content"] = form.content
            turn["tool_calls"] = [self._call(call, form) for call in calls]
        return _with_parts(turn) if self.as_parts else turn

    def _with_thought(self, message: Turn) -> dict[str, Any]:
        """A copy of a message whose thoughts have the name that the template reads."""
        turn = dict(message)
        thought = next((turn[name] for name in THOUGHT_NAMES if turn.get(name)), None)
        if thought is None or self.thought is None:
            return turn
        is_refused = turn.get("tool_calls") and turn.get("content")
        if is_refused and not self.thinks_with_text:
            for name in THOUGHT_NAMES:
                turn.pop(name, None)
        else:
            turn[self.thought] = thought
        return turn

    def _call(self, call: Turn, form: CallForm) -> Turn:
        function = call["function"]
        arguments = self._arguments(function.get("arguments"), form)
        return {**call, "function": {**function, "arguments": arguments}}

    def _arguments(self, sent: Any, form: CallForm) -> Any:
        is_text = isinstance(sent, str)
        text = sent if is_text else json.dumps(sent, ensure_ascii=False)
        if text.strip() in NO_ARGUMENTS:
            text = "{}"
        if form.as_text:
            return text
        value = _parsed(text)
        if isinstance(value, dict):
            return value
        return {"arguments": text} if self.wraps_text else text


def _with_parts(turn: Turn) -> Turn:
    """A message whose content is a list of one text part."""
    text = turn.get("content") or ""
    return {**turn, "content": [{"type": "text", "text": text}]}


def _writes_developer(render: Render) -> bool:
    words = [message["content"] for message in INSTRUCTIONS]
    return _grade(render, [*INSTRUCTIONS, USER], *words) == WHOLE


def _takes_parts(render: Render) -> bool:
    parts = [{"type": "text", "text": USER["content"]}]
    grades = [
        _grade(render, [{"role": "user", "content": content}], USER["content"])
        for content in (USER["content"], parts)
    ]
    return grades[0] < grades[1]


def _best_call_form(render: Render, sent: str | None) -> CallForm:
    """The first of those that the template writes best."""
    return max(CALL_FORMS[sent], key=lambda form: _grade_call(render, form))


def _grade_call(render: Render, form: CallForm) -> int:
    return _grade_arguments(render, form, _city(form))


def _city(form: CallForm) -> Any:
    """Arguments in the form that the template takes."""
    return json.dumps({"city": CITY}) if form.as_text else {"city": CITY}


def _grade_arguments(render: Render, form: CallForm, arguments: Any) -> int:
    assistant = _call_message(form, arguments)
    return _grade(render, [USER, assistant, RESULT], *CALL_WORDS)


def _call_message(
    form: CallForm, arguments: Any, call_id: str = SHORT_CALL_ID
) -> dict[str, Any]:
    """A message of an assistant that calls a tool."""
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": form.content, "tool_calls": [call]}


def _wraps_text(render: Render, form: CallForm) -> bool:
    broken = f'{{"city": "{CITY}'  # cut off by max_tokens
    text_grade = _grade_arguments(render, form, broken)
    object_grade = _grade_arguments(render, form, {"arguments": broken})
    return not form.as_text and text_grade < object_grade


def _thought_name(render: Render, form: CallForm) -> str | None:
    """The first name whose thoughts the template writes, in an answer or beside a call."""
    for name in THOUGHT_NAMES:
        answer = {"role": "assistant", "content": "It is.", name: THOUGHT}
        call = {**_call_message(form, _city(form)), name: THOUGHT}
        grades = (
            _grade(render, [USER, answer], THOUGHT),
            _grade(render, [USER, call, RESULT], THOUGHT),
        )
        if WHOLE in grades:
            return name
    return None


def _thinks_with_text(render: Render, form: CallForm, thought: str | None) -> bool:
    if thought is None:
        return False
    call = _call_message(form, _city(form))
    message = {**call, "content": "I look.", thought: THOUGHT}
    return _grade(render, [USER, message, RESULT]) != REFUSED


def _needs_short_ids(render: Render, form: CallForm) -> bool:
    arguments = _city(form)
    conversation = [USER, _call_message(form, arguments), RESULT]
    with_long_id = [USER, _call_message(form, arguments, CALL_ID), RESULT]
    if _grade(render, conversation) == REFUSED:
        return False
    return _grade(render, with_long_id) == REFUSED


def _writes_tools(render: Render, as_parts: bool) -> bool:
    name = TOOL["function"]["name"]
    for messages in ([USER], [INSTRUCTIONS[0], USER]):
        turns = [_with_parts(each) if as_parts else each for each in messages]
        with suppress(RequestError):
            if name in render(turns, [TOOL]):
                return True
    return False


def _grade(render: Render, turns: list[Turn], *words: str) -> int:
    """How well the template writes a conversation in which these words occur."""
    try:
        text = render(turns)
    except RequestError:
        return REFUSED
    if "None" in text:
        return WITH_NONE  # a null as text
    return WHOLE if all(word in text for word in words) else PARTLY


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
