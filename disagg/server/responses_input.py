"""From the items of POST /v1/responses to the messages of a chat.

instructions             ┐
message developer        ┘  {"role": "system", "content": both}
message user                {"role": "user", "content": ...}
reasoning                ┐
message assistant        │  {"role": "assistant", "reasoning_content": ..., "content": ...,
function_call            │   "tool_calls": [both]}
function_call            ┘
function_call_output        {"role": "tool", "tool_call_id": ..., "content": ...}
"""

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any

from disagg.errors import RequestError
from disagg.server import limits
from disagg.server.messages import TEXT_FIELDS

Message = dict[str, Any]
Item = Mapping[str, Any]

INSTRUCTING_ROLES = ("system", "developer")
ROLES = (*INSTRUCTING_ROLES, "user", "assistant")
BETWEEN_TEXTS = "\n\n"
THOUGHT_FIELDS = {
    "reasoning_text": "text",
    "summary_text": "text",
    "text": "text",
}
# items that say nothing to a model: what tools did that it is not shown here
UNUSED_ITEMS = ("web_search_call", "image_generation_call")
# parts of a result in whose place the model gets their type: a refusal would end a conversation
UNREADABLE_PARTS = ("input_image", "input_file")
# items that are known and refused, and what to send instead
INSTEAD = {
    "item_reference": "send the item itself: nothing is stored here",
    "compaction": "send the items that it stands for",
    "local_shell_call": "declare a function tool",
    "shell_call": "declare a function tool",
    "apply_patch_call": "declare a function tool",
    "custom_tool_call": "declare a function tool",
}
SEAL = "disagg:"  # before a thought in `encrypted_content`


def sealed(thought: str) -> str:
    """A thought as `encrypted_content`: encoded, not encrypted, for its client has it anyway."""
    return SEAL + base64.b64encode(thought.encode(errors="replace")).decode()


def unsealed(content: Any) -> str:
    """The thought of an `encrypted_content`; "" for one that another service wrote."""
    if not isinstance(content, str) or not content.startswith(SEAL):
        return ""
    try:
        thought = base64.b64decode(content.removeprefix(SEAL), validate=True)
        return thought.decode()
    except (binascii.Error, ValueError):
        return ""


def function_name(namespace: Any, name: str) -> str:
    """The name that the model knows of a function: with its namespace, if it has one."""
    return f"{namespace}__{name}" if namespace else name


def messages_of(content: str | list[Any], instructions: str | None) -> list[Message]:
    """The messages of an input, behind the instructions; RequestError names the wrong item.

    Instructions are one message with the system and developer messages that follow them, because
    many chat templates write only the first of several.
    """
    conversation = ConversationWriter()
    if instructions:
        conversation.instruct(instructions)
    if isinstance(content, str):
        conversation.add_message("user", content)
    else:
        for index, item in enumerate(content):
            _add_item(conversation, item, f"input[{index}]")
    return conversation.messages


class ConversationWriter:
    """Writes the messages of a chat, item by item."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._call_ids: set[str] = set()
        self._takes_instructions = False

    def instruct(self, text: str) -> None:
        """The instructions of the request, which precede all items."""
        self.messages.append({"role": "system", "content": text})
        self._takes_instructions = True

    def add_message(self, role: str, text: str) -> None:
        """A message of any role."""
        if role == "assistant":
            self._add_content(text)
            return
        if self._takes_instructions and role in INSTRUCTING_ROLES:
            self.messages[0]["content"] += BETWEEN_TEXTS + text
            return
        self._append({"role": role, "content": text})

    def add_thought(self, text: str) -> None:
        """What the assistant thought before it went on."""
        last = self._last_assistant()
        if last is None or last["content"] or "tool_calls" in last:
            last = self._append({"role": "assistant", "content": ""})
        before = last.get("reasoning_content")
        last["reasoning_content"] = f"{before}{BETWEEN_TEXTS}{text}" if before else text

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """A call of the assistant."""
        last = self._last_assistant()
        if last is None:
            last = self._append({"role": "assistant", "content": ""})
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
        self._call_ids.add(call_id)

    def add_result(self, call_id: str, text: str, place: str) -> None:
        """The result of a call; RequestError if no item before it is that call."""
        if call_id not in self._call_ids:
            raise _error(
                f"{place}.call_id is {limits.shown(call_id)}; expected that of a function_call "
                "before it: nothing is stored here"
            )
        self._append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _add_content(self, text: str) -> None:
        last = self._last_assistant()
        if last is None or last["content"]:
            last = self._append({"role": "assistant", "content": ""})
        last["content"] = text

    def _append(self, message: Message) -> Message:
        self._takes_instructions = False
        self.messages.append(message)
        return message

    def _last_assistant(self) -> Message | None:
        """The message that an item of the assistant may continue."""
        if self.messages and self.messages[-1]["role"] == "assistant":
            return self.messages[-1]
        return None


def _add_item(conversation: ConversationWriter, item: Any, place: str) -> None:
    if not isinstance(item, dict):
        raise _error(f"{place} is {limits.shown(item)}; expected an object")
    kind = item.get("type") or "message"
    if kind in UNUSED_ITEMS:
        return
    add = ITEMS.get(kind) if isinstance(kind, str) else None
    if add is None:
        names = ", ".join(ITEMS)
        instead = INSTEAD.get(str(kind), f"expected one of {names}")
        message = f"{place}.type={limits.shown(kind)} is not supported; {instead}"
        raise _error(message)
    add(conversation, item, place)


def _add_message(conversation: ConversationWriter, item: Item, place: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        roles = ", ".join(ROLES)
        raise _error(f"{place}.role is {limits.shown(role)}; expected one of {roles}")
    text = _content_text(item.get("content"), f"{place}.content")
    conversation.add_message(role, text)


def _add_call(conversation: ConversationWriter, item: Item, place: str) -> None:
    name = function_name(item.get("namespace"), _text(item, "name", place))
    call_id = _text(item, "call_id", place)
    conversation.add_call(call_id, name, _text(item, "arguments", place))


def _add_result(conversation: ConversationWriter, item: Item, place: str) -> None:
    output = item.get("output")
    if isinstance(output, list):
        output = [_readable(part) for part in output]
    text = _content_text(output, f"{place}.output")
    conversation.add_result(_text(item, "call_id", place), text, place)


def _readable(part: Any) -> Any:
    """A part of a result, or a text instead of one that is no text."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in UNREADABLE_PARTS:
        return {"type": "input_text", "text": f"[{kind}: this model reads text only]"}
    return part


def _add_reasoning(conversation: ConversationWriter, item: Item, place: str) -> None:
    thought = (
        _thought_text(item.get("content"), f"{place}.content")
        or unsealed(item.get("encrypted_content"))
        or _thought_text(item.get("summary"), f"{place}.summary")
    )
    if thought:
        conversation.add_thought(thought)


ITEMS: Mapping[str, Callable[[ConversationWriter, Item, str], None]] = {
    "message": _add_message,
    "function_call": _add_call,
    "function_call_output": _add_result,
    "reasoning": _add_reasoning,
}


def _content_text(content: Any, place: str) -> str:
    """A text, or text parts as one; RequestError for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _error(
            f"{place} is {limits.shown(content)}; expected a text or a list of parts"
        )
    return "\n".join(_part_texts(content, TEXT_FIELDS, place))


def _thought_text(parts: Any, place: str) -> str:
    """The text of a thought or of its summary; "" where there is none."""
    if parts is None:
        return ""
    if not isinstance(parts, list):
        raise _error(f"{place} is {limits.shown(parts)}; expected a list of parts")
    return BETWEEN_TEXTS.join(_part_texts(parts, THOUGHT_FIELDS, place))


def _part_texts(parts: list[Any], fields: Mapping[str, str], place: str) -> list[str]:
    """The texts of parts. fields: by the type of a part, where its text is."""
    texts = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        field = fields.get(kind) if isinstance(kind, str) else None
        text = part.get(field) if field else None
        if not isinstance(text, str):
            names = ", ".join(fields)
            raise _error(
                f"{place}[{index}] is {limits.shown(part)}; "
                f"expected a part with a text, of type {names}"
            )
        texts.append(text)
    return texts


def _text(item: Item, name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _error(f"{place}.{name} is {limits.shown(value)}; expected a text")
    return value


def _error(message: str) -> RequestError:
    return RequestError(message, "input")
