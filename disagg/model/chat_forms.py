"""The form in which a chat template takes a message. Templates differ, and none declares its form.

So each template is tried with short conversations when it is loaded. The forms are tried in order,
the client's own first, then those closest to it; the first that the template writes whole is used.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from disagg.errors import RequestError

Turn = Mapping[str, Any]
Render = Callable[[list[Turn]], str]

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
    """

    developer: bool
    as_parts: bool
    calls: Mapping[str | None, CallForm]
    wraps_text: bool

    @classmethod
    def of(cls, render: Render) -> "MessageForms":
        """Try a template."""
        as_parts = _takes_parts(render)
        calls = {sent: _best_call_form(render, sent) for sent in CALL_FORMS}
        return cls(
            developer=_writes_developer(render),
            as_parts=as_parts,
            calls=calls,
            wraps_text=_wraps_text(render, calls[""]),
        )

    def turn(self, message: Turn) -> Turn:
        """A message in the form that the template takes."""
        turn = dict(message)
        calls = message.get("tool_calls")
        if calls:
            content = message.get("content")
            form = self.calls[None if content is None else ""]
            if not content:
                turn["content"] = form.content
            turn["tool_calls"] = [self._call(call, form) for call in calls]
        if self.as_parts:
            text = turn.get("content") or ""
            turn["content"] = [{"type": "text", "text": text}]
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
    arguments: Any = {"city": CITY}
    if form.as_text:
        arguments = json.dumps(arguments)
    return _grade_arguments(render, form, arguments)


def _grade_arguments(render: Render, form: CallForm, arguments: Any) -> int:
    function = {"name": "get_weather", "arguments": arguments}
    call = {"id": "call00001", "type": "function", "function": function}
    assistant = {"role": "assistant", "content": form.content, "tool_calls": [call]}
    return _grade(render, [USER, assistant, RESULT], *CALL_WORDS)


def _wraps_text(render: Render, form: CallForm) -> bool:
    broken = f'{{"city": "{CITY}'  # cut off by max_tokens
    text_grade = _grade_arguments(render, form, broken)
    object_grade = _grade_arguments(render, form, {"arguments": broken})
    return not form.as_text and text_grade < object_grade


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
