"""How a model wants a conversation written: the template of its tokenizer. Knows no tokens."""

from collections.abc import Mapping, Sequence
from typing import Any

from disagg.errors import RequestError
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
        folder = locate_model(ref)
        config = read_object(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        source = file.read_text() if file.is_file() else config.get("chat_template")
        if isinstance(source, list):
            source = {each["name"]: each["template"] for each in source}.get(DEFAULT)
        if not source:
            return None
        named = {k: v for k, v in config.items() if k.endswith("_token")}
        words = {k: v["content"] if isinstance(v, dict) else v for k, v in named.items()}
        return cls(source, {k: v for k, v in words.items() if isinstance(v, str)})

    def render(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """The prompt of a conversation; RequestError for one that the template refuses.

        options: add_generation_prompt, continue_final_message, and what only this template knows
        """
        try:
            arguments: dict[str, Any] = {**self._words, **options}
            texts, _ = self._render([list(messages)], chat_template=self._source, **arguments)
        except Exception as error:  # templates are programs, and raise whatever they like
            told = f"the model's chat template refuses this conversation: {error}"
            raise RequestError(told, "messages") from error
        return texts[0]
