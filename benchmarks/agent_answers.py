"""Bodies and events of OpenAI's dialects as answers, for `chaos --agents`."""

import json
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.agent_mix import COMPLETIONS, CUT, RESPONSES, AgentAnswer
from disagg.bench.result import Row
from disagg.errors import DisaggError, WireError

EVENT = "data: "
DONE = "[DONE]"
LAST_EVENTS = ("response.completed", "response.incomplete")


def events_of(lines: Iterable[str]) -> Iterator[Row]:
    """The events of a stream; DisaggError for one that is an error."""
    for line in lines:
        data = line.removeprefix(EVENT)
        if data in (line, DONE):
            continue
        event: Row = json.loads(data)
        if event.get("error") or event.get("type") in ("error", "response.failed"):
            raise DisaggError(data)
        yield event


def streamed_answer(path: str, events: Sequence[Row]) -> AgentAnswer:
    """The answer that events are together; WireError if its end is missing."""
    if path == RESPONSES:
        last = events[-1] if events else {}
        if last.get("type") not in LAST_EVENTS:
            raise WireError("a stream ended before its last event")
        return whole_answer(path, last["response"])
    choices = [choice for event in events for choice in event["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    if len(reasons) != 1:
        raise WireError(f"a stream ended with the finish reasons {reasons}")
    if path == COMPLETIONS:
        text = "".join(choice["text"] for choice in choices)
        return AgentAnswer(text, (), *reasons)
    deltas = [choice["delta"] for choice in choices]
    return AgentAnswer(_streamed_text(deltas), _streamed_calls(deltas), *reasons)


def _streamed_text(deltas: Sequence[Row]) -> str:
    return "".join(delta.get("content") or "" for delta in deltas)


def _streamed_calls(deltas: Sequence[Row]) -> tuple[tuple[str, str], ...]:
    names = dict[int, str]()
    arguments = dict[int, str]()
    for delta in deltas:
        for call in delta.get("tool_calls") or ():
            index, function = call["index"], call["function"]
            names.setdefault(index, function.get("name") or "")
            piece = function.get("arguments") or ""
            arguments[index] = arguments.get(index, "") + piece
    return tuple((names[index], arguments[index]) for index in sorted(names))


def whole_answer(path: str, body: Row) -> AgentAnswer:
    """The answer in the body of a response."""
    if path == RESPONSES:
        return _response(body)
    (choice,) = body["choices"]
    reason = choice["finish_reason"]
    if path == COMPLETIONS:
        return AgentAnswer(choice["text"], (), reason)
    message = choice["message"]
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = tuple((each["name"], each["arguments"]) for each in functions)
    return AgentAnswer(message["content"] or "", calls, reason)


def _response(body: Row) -> AgentAnswer:
    parts = [
        part
        for item in body["output"]
        if item["type"] == "message"
        for part in item["content"]
    ]
    calls = tuple(
        (item["name"], item["arguments"])
        for item in body["output"]
        if item["type"] == "function_call"
    )
    reason = CUT if body["status"] == "incomplete" else "stop"
    return AgentAnswer("".join(part["text"] for part in parts), calls, reason)
