"""How a model wants a conversation written: the template of its tokenizer. Knows no tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from disagg.errors import ModelError, RequestError
from disagg.model.describe import locate_model, read_object

DEFAULT = "default"  # of several named templates


class ChatTemplate:
    """Turns messages into the text of a prompt, special tokens included."""

    def __init__(self, source: str, words: Mapping[str, str]):
        """words: the special tokens that the template may name, such as "bos_token"."""
        # slow, seconds: who asks for no chat does not pay for it
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render = render_jinja_template
        self._source = source
        self._words = words

    @classmethod
    def load(cls, ref: str | None = None) -> "ChatTemplate | None":
        """The template of a model, found as `locate_model` does; None if it has none."""
        found = read_template(ref)
        return None if found is None else cls(*found)

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """The prompt of a conversation; RequestError for one that the template refuses.

        options: add_generation_prompt, continue_final_message, and what only this template knows
        """
        try:
            arguments: dict[str, Any] = {**self._words, **options}
            texts, _ = self._render(
                [list(messages)], chat_template=self._source, **arguments
            )
        except (
            Exception
        ) as error:  # templates are programs, and raise whatever they like
            told = f"the model's chat template refuses this conversation: {error}"
            raise RequestError(told, "messages") from error
        return texts[0]


def read_template(ref: str | None = None) -> tuple[str, dict[str, str]] | None:
    """The source of a model's template and the words that it may name, as ChatTemplate takes them.

    None if it has none, ModelError for one that is no text.
    """
    folder = locate_model(ref)
    config = read_object(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    try:
        source = (
            file.read_text("utf-8") if file.is_file() else config.get("chat_template")
        )
    except UnicodeDecodeError as error:
        raise ModelError(f"{file} is no text: {error}") from error
    if isinstance(source, list):
        source = {each["name"]: each["template"] for each in source}.get(DEFAULT)
    if not source:
        return None
    if not isinstance(source, str):
        raise ModelError(
            f"the chat template in {folder / 'tokenizer_config.json'} is no text"
        )
    named = {k: v for k, v in config.items() if k.endswith("_token")}
    words = {k: v["content"] if isinstance(v, dict) else v for k, v in named.items()}
    return source, {k: v for k, v in words.items() if isinstance(v, str)}
