"""A server whose model says what a test wants, a byte a token; special tokens stand in ⟨⟩."""

import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from disagg.model.chat import ChatTemplate
from disagg.model.tokenizer import Tokenizer
from disagg.server.answer_format import ModelFormats
from disagg.server.app import create_app
from disagg.server.completions import Completions
from disagg.server.reader import ServedModel
from tests.cli.conftest import free_port
from tests.model.tiny import byte_tokenizer
from tests.server.conftest import FakeRouter

CONTEXT = 4000

# as Qwen3's: tools as JSON lines, calls as JSON between marks, and perhaps an open thought
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}
    {%- for call in m.tool_calls or [] %}<tool_call>
        {{- '{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}}</tool_call>
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
    {%- if enable_thinking is false %}<think></think>
    {%- elif reasoning_effort == 'high' %}<think>
    {%- endif %}
{%- endif %}"""
# the same, of a model without thoughts
PLAIN_TEMPLATE = re.sub("(?s)\n    {%- if enable_thinking.*?endif %}", "", TEMPLATE)


class SpeakingRouter(FakeRouter):
    """Says one text after the other; the last one again and again.

    num_taken: tokens of its answers that have been taken
    """

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer):
        super().__init__()
        self.texts = [tokens_of(text, tokenizer) for text in texts]
        self.prompts: list[str] = []
        self.num_taken = 0
        self._tokenizer = tokenizer

    @property
    def params(self) -> list[dict[str, Any]]:
        """The sampling parameters of each request."""
        return [params for _, params, _ in self.asked]

    def answer(self, prompt: tuple[int, ...]) -> Iterator[int]:
        self.prompts.append(self._tokenizer.decode(prompt, special=True))
        number = min(len(self.prompts), len(self.texts)) - 1
        for token in self.texts[number]:
            self.num_taken += 1
            yield token


def tokens_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text."""
    letters = Tokenizer(byte_tokenizer())  # special tokens written out are letters
    tokens: list[int] = []
    for piece in re.split("(⟨.*?⟩)", text):
        special = tokenizer.special_tokens.get(piece[1:-1])
        tokens += letters.encode(piece) if special is None else [special]
    return tokens


def speaking(
    text: str | Sequence[str],
    template: str = TEMPLATE,
    tool_parser: str = "auto",
    reasoning_parser: str = "auto",
    special_tokens: Sequence[str] = (),
    context_length: int = CONTEXT,
) -> tuple[ASGIApp, SpeakingRouter]:
    """The application of a model that says a text, or one after the other, and its router."""
    backend = byte_tokenizer()
    backend.add_special_tokens(list(special_tokens))
    tokenizer = Tokenizer(backend)
    texts = [text] if isinstance(text, str) else text
    router = SpeakingRouter(texts, tokenizer)
    chat = ChatTemplate(template, {})
    formats = ModelFormats.choose(
        template, tool_parser, reasoning_parser, tokenizer.special_tokens
    )
    about = ServedModel(
        name="tiny",
        context_length=context_length,
        vocab_size=300,
        codec="raw",
        longest_token=20,
    )
    completions = Completions(about, tokenizer, router, chat, formats=formats)
    return create_app(completions, token="secret"), router


@contextmanager
def on_a_port(app: ASGIApp) -> Iterator[str]:
    """The URL of an application."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
