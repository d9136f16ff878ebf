"""The output items of a response, and their events, from the parts of an answer.

    Thought           {"type": "reasoning", "content": [{"type": "reasoning_text"}]}
    Content           {"type": "message", "content": [{"type": "output_text"}]}
    CallBegin         {"type": "function_call", "arguments": "{...}"}

    output_item.added   content_part.added   output_text.delta ...
    output_text.done    content_part.done    output_item.done

Knows no response, no tokens, no HTTP.
"""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from disagg.parsers.parts import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Thought,
)
from disagg.server.responses_input import sealed

COMPLETED, INCOMPLETE, IN_PROGRESS = "completed", "incomplete", "in_progress"
MAX_BLANK = 64  # characters of white space that wait for the text of a message


@dataclass(frozen=True)
class Event:
    """A server-sent event, except its number. raw: a field whose value is JSON already."""

    type: str
    fields: Mapping[str, Any]
    raw: tuple[str, str] | None = None

    def text(self, number: int) -> str:
        """As it is sent. number: of the event within its stream, from 0."""
        fields = {"type": self.type, "sequence_number": number, **self.fields}
        body = json.dumps(fields)
        if self.raw is not None:
            body = with_field(body, *self.raw)
        return f"event: {self.type}\ndata: {body}\n\n"


def with_field(body: str, name: str, value: str) -> str:
    """The JSON of an object with one more field, whose value is JSON."""
    return f"{body[:-1]}, {json.dumps(name)}: {value}}}"


class OutputItem(ABC):
    """An item while it is written. index: of the item within the output."""

    id_prefix: ClassVar[str]

    def __init__(self, index: int):
        self.index = index
        self.id = f"{self.id_prefix}_{uuid.uuid4().hex}"
        self.status = IN_PROGRESS
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @abstractmethod
    def body(self) -> str:
        """The JSON of the item."""

    def opening(self) -> Iterator[Event]:
        """The events before all text."""
        yield self._item_event("response.output_item.added")

    @abstractmethod
    def add(self, text: str, logprobs: Sequence[str] = ()) -> Event:
        """The next piece of the text, with the JSON of its tokens' log-probabilities."""

    def closing(self, status: str) -> Iterator[Event]:
        """The events behind all text."""
        self.status = status
        yield self._item_event("response.output_item.done")

    def _item_event(self, kind: str) -> Event:
        return Event(kind, {"output_index": self.index}, ("item", self.body()))

    def _event(
        self, kind: str, raw: tuple[str, str] | None = None, **fields: Any
    ) -> Event:
        place = {"item_id": self.id, "output_index": self.index}
        return Event(kind, {**place, **fields}, raw)


class TextItem(OutputItem):
    """An item with one part of content, which is a text."""

    part_type: ClassVar[str]

    def __init__(self, index: int):
        super().__init__(index)
        self._has_part = False

    @abstractmethod
    def part(self) -> str:
        """The JSON of the part."""

    def content(self) -> str:
        """The JSON of the list of parts."""
        return f"[{self.part()}]" if self._has_part else "[]"

    def opening(self) -> Iterator[Event]:
        yield from super().opening()
        self._has_part = True
        yield self._part_event("response.content_part.added")

    def add(self, text: str, logprobs: Sequence[str] = ()) -> Event:
        self._texts.append(text)
        kind = f"response.{self.part_type}.delta"
        raw = self._raw_logprobs(logprobs)
        return self._event(kind, raw, content_index=0, delta=text)

    def closing(self, status: str) -> Iterator[Event]:
        kind = f"response.{self.part_type}.done"
        yield self._event(kind, self._all_logprobs(), content_index=0, text=self.text)
        yield self._part_event("response.content_part.done")
        yield from super().closing(status)

    def _part_event(self, kind: str) -> Event:
        return self._event(kind, ("part", self.part()), content_index=0)

    def _raw_logprobs(self, logprobs: Sequence[str]) -> tuple[str, str] | None:
        """The log-probabilities of a piece of the text, if such parts have them."""
        return None

    def _all_logprobs(self) -> tuple[str, str] | None:
        """Those of the text so far."""
        return None


class ReasoningItem(TextItem):
    """Thoughts. seals: their text is repeated as `encrypted_content`."""

    id_prefix = "rs"
    part_type = "reasoning_text"

    def __init__(self, index: int, seals: bool = False):
        super().__init__(index)
        self._seals = seals

    def body(self) -> str:
        head = {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": [],
        }
        if self._seals:
            head["encrypted_content"] = sealed(self.text)
        return with_field(json.dumps(head), "content", self.content())

    def part(self) -> str:
        return json.dumps({"type": self.part_type, "text": self.text})


class MessageItem(TextItem):
    """The answer proper. Log-probabilities are kept as JSON, for objects take more memory."""

    id_prefix = "msg"
    part_type = "output_text"

    def __init__(self, index: int):
        super().__init__(index)
        self._logprobs: list[str] = []

    def body(self) -> str:
        head = {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "role": "assistant",
        }
        return with_field(json.dumps(head), "content", self.content())

    def part(self) -> str:
        head = {"type": self.part_type, "text": self.text, "annotations": []}
        return with_field(json.dumps(head), *self._all_logprobs())

    def add(self, text: str, logprobs: Sequence[str] = ()) -> Event:
        self._logprobs += logprobs
        return super().add(text, logprobs)

    def _raw_logprobs(self, logprobs: Sequence[str]) -> tuple[str, str]:
        return "logprobs", f"[{', '.join(logprobs)}]"

    def _all_logprobs(self) -> tuple[str, str]:
        return self._raw_logprobs(self._logprobs)


class CallItem(OutputItem):
    """A call. namespace: of the function; "": it has none."""

    id_prefix = "fc"

    def __init__(self, index: int, call_id: str, namespace: str, name: str):
        super().__init__(index)
        self._call_id = call_id
        self._namespace = namespace
        self._name = name

    def body(self) -> str:
        fields = {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
        }
        if self._namespace:
            fields["namespace"] = self._namespace
        return json.dumps(fields)

    def add(self, text: str, logprobs: Sequence[str] = ()) -> Event:
        self._texts.append(text)
        return self._event("response.function_call_arguments.delta", delta=text)

    def closing(self, status: str) -> Iterator[Event]:
        kind = "response.function_call_arguments.done"
        yield self._event(kind, arguments=self.text)
        yield from super().closing(status)


class OutputWriter:
    """Writes the items of one answer.

    new_call_id:    names a call
    namespaces:     namespace and name of a function, by the name that the model knows
    seals_thoughts: thoughts come as `encrypted_content` too
    """

    def __init__(
        self,
        new_call_id: Callable[[], str],
        namespaces: Mapping[str, tuple[str, str]],
        seals_thoughts: bool = False,
    ):
        self._new_call_id = new_call_id
        self._namespaces = namespaces
        self._seals_thoughts = seals_thoughts
        self._closed: list[str] = []  # JSON
        self._item: OutputItem | None = None
        # white space before an item begins: only a message with other text has it
        self._blank = ""
        self._blank_logprobs: list[str] = []

    @property
    def items(self) -> str:
        """The JSON of the list of complete items."""
        return f"[{', '.join(self._closed)}]"

    def add(self, part: Part, logprobs: Sequence[str] = ()) -> Iterator[Event]:
        """The next part of the answer. logprobs: the JSON of those of its tokens"""
        match part:
            case Thought(text):
                if not isinstance(self._item, ReasoningItem):
                    yield from self._open(
                        ReasoningItem(self._index, self._seals_thoughts)
                    )
                yield self._add_text(text)
            case Content(text):
                yield from self._add_content(text, logprobs)
            case CallBegin(_, name):
                namespace, own_name = self._namespaces.get(name, ("", name))
                call_id = self._new_call_id()
                call = CallItem(self._index, call_id, namespace, own_name)
                yield from self._open(call)
            case CallArguments(_, text):
                yield self._add_text(text)
            case CallEnd():
                yield from self._close(COMPLETED)

    def add_logprobs(self, logprobs: Sequence[str]) -> Iterator[Event]:
        """The log-probabilities of tokens without text; only a message has them."""
        if isinstance(self._item, MessageItem):
            yield self._item.add("", logprobs)

    def finish(self, is_cut: bool) -> Iterator[Event]:
        """The end of the answer, which has an empty message if it has no item.

        is_cut: it ends because it may not be longer
        """
        if not self._closed and self._item is None:
            yield from self._open_message(self._blank, self._blank_logprobs)
        is_call = isinstance(self._item, CallItem)  # one that does not end
        yield from self._close(INCOMPLETE if is_cut or is_call else COMPLETED)

    @property
    def _index(self) -> int:
        """Of the next item, once the open one is closed."""
        return len(self._closed) + (self._item is not None)

    def _add_content(self, text: str, logprobs: Sequence[str]) -> Iterator[Event]:
        if isinstance(self._item, MessageItem):
            yield self._item.add(text, logprobs)
            return
        text = self._blank + text
        logprobs = [*self._blank_logprobs, *logprobs]
        if text.strip() or len(text) > MAX_BLANK:
            yield from self._open_message(text, logprobs)
        else:
            self._blank, self._blank_logprobs = text, logprobs

    def _open_message(self, text: str, logprobs: Sequence[str]) -> Iterator[Event]:
        yield from self._open(MessageItem(self._index))
        yield self._add_text(text, logprobs)

    def _add_text(self, text: str, logprobs: Sequence[str] = ()) -> Event:
        assert self._item is not None
        return self._item.add(text, logprobs)

    def _open(self, item: OutputItem) -> Iterator[Event]:
        is_call = isinstance(self._item, CallItem)
        yield from self._close(INCOMPLETE if is_call else COMPLETED)
        self._item = item
        self._blank, self._blank_logprobs = "", []
        yield from item.opening()

    def _close(self, status: str) -> Iterator[Event]:
        if self._item is not None:
            yield from self._item.closing(status)
            self._closed.append(self._item.body())
            self._item = None
