"""The messages of a chat: checks them, and prepares them for the chat template."""

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from disagg.errors import RequestError
from disagg.server import limits

# types of parts that are text, and the field with the text
TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
MAY_LACK_CONTENT = ("assistant", "tool", "function")
UNSUPPORTED = {
    "audio": "leave it out",
    "function_call": "write tool_calls",
}


def message_text(value: Any) -> Any:
    """The content of a message as one text; RequestError for parts that are not text."""
    if not isinstance(value, list):
        return value
    return "\n".join(_part_text(part) for part in value)


def _part_text(part: Any) -> str:
    if isinstance(part, dict):
        kind = part.get("type", "text")
        name = TEXT_FIELDS.get(kind) if isinstance(kind, str) else None
        text = part.get(name, 0) if name else 0
        if text is None or isinstance(text, str):
            return text or ""
    raise RequestError(f"messages: {limits.shown(part)} is not a text part", "messages")


class Part(BaseModel):
    """Part of a conversation; templates may use more fields."""

    model_config = ConfigDict(extra="allow")


class ToolCall(Part):
    """A tool call of an assistant. Its arguments may be anything: models may stop inside them."""

    function: Part


class ChatMessage(Part):
    """One message."""

    role: Annotated[str, Field(max_length=limits.MAX_NAME_CHARS)]
    content: Annotated[str | None, BeforeValidator(message_text)] = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    _sent: Mapping[str, Any] = PrivateAttr()

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        message = handler(value)
        message._sent = value
        return message

    def turn(self, place: str) -> dict[str, Any]:
        """The message for the template: the fields that were sent, in their order.

        Fields that are null, and empty `tool_calls`, count as not sent. The content is text; it may
        be null only in a message that calls tools.

        place: of the message in the body, for errors

        RequestError for a message without content, and for fields that are not supported.
        """
        self._check(place)
        turn = {
            name: value
            for name, value in self._sent.items()
            if value is not None or name == "content"
        }
        if not self.tool_calls:
            turn.pop("tool_calls", None)
        turn["content"] = self._text()
        return turn

    def _check(self, place: str) -> None:
        for name, instead in UNSUPPORTED.items():
            value = self._sent.get(name)
            if value is not None:
                raise RequestError(
                    f"{place}.{name}={limits.shown(value)} is not supported; {instead}",
                    "messages",
                )
        if self.content is None and self.role not in MAY_LACK_CONTENT:
            role = limits.shown(self.role)
            raise RequestError(
                f"{place}.content is required of role {role}", "messages"
            )

    def _text(self) -> str | None:
        text = self.content or self.refusal
        if text:
            return text
        return self.content if self.tool_calls else ""
