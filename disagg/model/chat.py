"""From a conversation to the text of a prompt: the chat template of a model. Knows no tokens."""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import Thread
from typing import Any

from jinja2.meta import find_undeclared_variables

from disagg.errors import ModelError, RequestError
from disagg.model.chat_files import TemplateSource, parse, read_template
from disagg.model.chat_forms import MessageForms, Turn

# how a template names the role; without quotes the word may be part of its text
DEVELOPER = re.compile("""["']developer["']""")
BETWEEN_INSTRUCTIONS = "\n\n"
TRIAL_S = 30.0  # templates take milliseconds; one that never ends would hang the start

log = logging.getLogger(__name__)


class ChatTemplate:
    """Turns messages into the text of a prompt, special tokens included.

    A message reaches the template as the client sent it, or in the form that the template takes
    (`MessageForms`). If the template does not know the role, `developer` messages are joined to the
    first system message.
    """

    def __init__(self, source: str, words: Mapping[str, str]):
        """words: the special tokens that the template may name, such as "bos_token".

        ModelError for a template that does not end.
        """
        # slow, seconds: only chats need it
        from transformers.utils.chat_template_utils import render_jinja_template

        self._render = render_jinja_template
        self._source = source
        self._words = words
        self._forms = self._try_forms()
        names_developer = DEVELOPER.search(source) is not None
        self._knows_developer = names_developer and self._forms.developer

    @classmethod
    def load(
        cls, ref: str | None = None, file: str | None = None
    ) -> "ChatTemplate | None":
        """The template of a model, or of a file, as `read_template` finds it; None if it has none.

        Warns of variables that the template uses but nothing defines.
        """
        source = read_template(ref, file)
        if source is None:
            return None
        _warn_undefined(source)
        return cls(source.text, source.words)

    @property
    def source(self) -> str:
        """Its text, which tells the formats of the model's calls and thoughts."""
        return self._source

    @property
    def writes_tools(self) -> bool:
        """Whether it shows tools to the model."""
        return self._forms.tools

    @property
    def short_call_ids(self) -> bool:
        """Whether it takes only ids of calls that have nine letters and digits."""
        return self._forms.short_call_ids

    def reads(self, option: str) -> bool:
        """Whether it uses an option, such as "enable_thinking"."""
        return option in self._options

    @cached_property
    def _options(self) -> set[str]:
        return find_undeclared_variables(parse(self._source))

    def render(self, messages: Sequence[Turn], /, **options: Any) -> str:
        """The prompt of a conversation; RequestError for one that the template refuses.

        options: tools, add_generation_prompt, continue_final_message, and options of this template
                 alone
        """
        if not self._knows_developer:
            messages = with_developer_as_system(messages)
        return self._write([self._forms.turn(each) for each in messages], options)

    def _try_forms(self) -> MessageForms:
        """The forms that the template takes. The thread of an endless one ends with the process."""
        forms: list[MessageForms] = []
        trial = Thread(
            target=lambda: forms.append(MessageForms.of(self._try)), daemon=True
        )
        trial.start()
        trial.join(TRIAL_S)
        if not forms:
            raise ModelError(
                f"the chat template does not write short conversations within {TRIAL_S:g} s"
            )
        return forms[0]

    def _try(self, turns: list[Turn], tools: Sequence[Turn] = ()) -> str:
        options: dict[str, Any] = {"add_generation_prompt": True}
        if tools:
            options["tools"] = tools
        return self._write(turns, options)

    def _write(self, turns: list[Turn], options: Mapping[str, Any]) -> str:
        arguments: dict[str, Any] = {**self._words, **options}
        try:
            texts, _ = self._render([turns], chat_template=self._source, **arguments)
        except Exception as error:  # templates are programs and raise anything
            message = f"the model's chat template refuses this conversation: {error}"
            raise RequestError(message, "messages") from error
        return texts[0]


def with_developer_as_system(messages: Sequence[Turn]) -> list[Turn]:
    """A conversation whose `developer` messages are joined to its first system message.

    Their texts follow each other in the order of the conversation, with an empty line between
    them. Without a system message they become one, at the beginning.
    """
    others = [each for each in messages if each["role"] != "developer"]
    if len(others) == len(messages):
        return others
    system = next((each for each in others if each["role"] == "system"), None)
    joined = _joined_instructions(messages, system)
    if system is None:
        return [joined, *others]
    return [joined if each is system else each for each in others]


def _joined_instructions(messages: Sequence[Turn], system: Turn | None) -> Turn:
    texts = [
        message["content"]
        for message in messages
        if message is system or message["role"] == "developer"
    ]
    content = BETWEEN_INSTRUCTIONS.join(texts)
    return {**(system or {"role": "system"}), "content": content}


def _warn_undefined(source: TemplateSource) -> None:
    words = ", ".join(source.undefined_words)
    if words:
        log.warning(
            "the chat template uses undefined variables, which are empty: %s",
            words,
        )
