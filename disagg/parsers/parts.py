"""The parts of an answer, in the order in which the model wrote them.

    <think>Rain?</think>I look it up.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}..

    Thought("Rain?")  Content("I look it up.")  CallBegin(0, "weather")
    CallArguments(0, '{"city": "Oslo"}')  CallEnd(0)

Consecutive thoughts, contents and arguments of one call are pieces of one text. A call without
`CallEnd` was cut off.
"""

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
    """A call is complete: its arguments are a whole JSON object."""

    index: int


Part = Thought | Content | CallBegin | CallArguments | CallEnd
