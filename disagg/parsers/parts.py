"""The parts of an answer, in the order in which the model wrote them.

    <think>Rain?</think>I look it up.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}

    Thought("Rain?")  Content("I look it up.")  CallBegin(0, "weather")
    CallArguments(0, '{"city": "Oslo"}')  CallEnd(0)

Consecutive thoughts, contents and arguments of one call are pieces of one text. A call without
`CallEnd` was cut off.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby


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
    """Parts in which consecutive pieces of one text are one part."""
    return tuple(_joined([*run]) for _, run in groupby(parts, key=_text_key))


def _text_key(part: Part) -> tuple[type[Part], int]:
    """Equal for pieces of one text that follow each other."""
    index = 0 if isinstance(part, Thought | Content) else part.index
    return type(part), index


def _joined(run: Sequence[Part]) -> Part:
    """Pieces of one text as one."""
    first = run[0]
    if isinstance(first, CallBegin | CallEnd) or len(run) == 1:
        return first
    pieces = [part.text for part in run if not isinstance(part, CallBegin | CallEnd)]
    return replace(first, text="".join(pieces))
