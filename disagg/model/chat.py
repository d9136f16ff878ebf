"""From a conversation to the text of a prompt: the chat template of a model. Knows no tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from disagg.errors import ModelError, RequestError
from disagg.model.describe import locate_model
from disagg.model.json_file import read_object

DEFAULT = "default"  # the name of the one to use, of several templates


class ChatTemplate:
    """Turns messages into the text of a prompt, special tokens included."""

    def __init__(self, source: str, words: Mapping[str, str]):
        """words: the special tokens that the template may name, such as "bos_token"."""
        # slow, seconds: only chats need it
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render = render_jinja_template
        self._source = source
        self._words = words

    @classmethod
    def load(cls, ref: str | None = None) -> "ChatTemplate | None":
        """The template of a model, found as `locate_model` does; None if it has none."""
        template = read_template(ref)
        if template is None:
            return None
        source, words = template
        return cls(source, words)

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """The prompt of a conversation; RequestError for one that the template refuses.

        options: add_generation_prompt, continue_final_message, and options of this template alone
        """
        arguments: dict[str, Any] = {**self._words, **options}
        try:
            texts, _ = self._render(
                [list(messages)], chat_template=self._source, **arguments
            )
        except Exception as error:  # templates are programs and raise anything
            message = f"the model's chat template refuses this conversation: {error}"
            raise RequestError(message, "messages") from error
        return texts[0]


def read_template(ref: str | None = None) -> tuple[str, dict[str, str]] | None:
    """The source of a model's template and the words that it may name, as ChatTemplate takes them.

    None if it has none, ModelError for one that is no text.
    """
    folder = locate_model(ref)
    config = read_object(folder / "tokenizer_config.json")
    source = _read_source(folder, config)
    if not source:
        return None
    if not isinstance(source, str):
        raise ModelError(
            f"the chat template in {folder / 'tokenizer_config.json'} is no text"
        )
    return source, _special_words(config)


def _read_source(folder: Path, config: Mapping[str, Any]) -> Any:
    """The template in a file of its own, else in the tokenizer's config; None: there is none."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{file} is no text: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):
        by_name = {each["name"]: each["template"] for each in source}
        return by_name.get(DEFAULT)
    return source


def _special_words(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a tokenizer's config, by their names there."""
    words = {}
    for name, value in config.items():
        if name.endswith("_token"):
            word = value["content"] if isinstance(value, dict) else value
            if isinstance(word, str):
                words[name] = word
    return words
