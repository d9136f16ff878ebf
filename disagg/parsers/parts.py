"""The parts of an answer, in the order in which the model wrote them.

    <think>Rain?</think>I look it up.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}

    Thought("Rain?")  Content("I look it up.")  CallBegin(0, "weather")
    CallArguments(0, '{"city": "Oslo"}')  CallEnd(0)

Consecutive thoughts, contents and arguments of one call are pieces of one text. A call without
`CallEnd` was cut off.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Thought:
    """Text of the model's reasoning; OpenAI clients get it as `reasoning_content`."""

    text: str


@dataclass(frozen=True)
class Content:
    """Text of the answer proper."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins. index: of the call within the answer, from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of the arguments of a call, which together are the text of a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A call is complete: the braces of its arguments are closed.

    A model without a grammar may still have written text between them that is no JSON.
    """

    index: int


Part = Thought | Content | CallBegin | CallArguments | CallEnd


def joined_parts(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Parts of which pieces of one text that follow each other are one."""
    joined: list[Part] = []
    for part in parts:
        longer = _continued(joined[-1], part) if joined else None
        if longer is None:
            joined.append(part)
        else:
            joined[-1] = longer
    return tuple(joined)


def _continued(before: Part, part: Part) -> Part | None:
    """Two pieces of one text as one; None for parts of two texts."""
    match before, part:
        case Thought(text), Thought(more):
            return Thought(text + more)
        case Content(text), Content(more):
            return Content(text + more)
        case CallArguments(index, text), CallArguments(other, more) if index == other:
            return CallArguments(index, text + more)
    return None
