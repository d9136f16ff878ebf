"""From the body of a request to prompts as token ids: checks, chat template, tokenizer. No HTTP."""

import asyncio
import logging
from array import array
from collections.abc import AsyncIterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from disagg.errors import ModelError, RequestError
from disagg.model.chat import ChatTemplate
from disagg.model.tokenizer import Tokenizer
from disagg.server import limits
from disagg.server.answer_format import AnswerReading, ModelFormats
from disagg.server.client import ANYONE, Client
from disagg.server.pd_ports import ANY_WORKERS
from disagg.server.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    Conversation,
    GenerationRequest,
)

MAX_UNKNOWN_FIELDS = 100  # names that are remembered, so that each is warned of once
MAX_FIELD_CHARS = 64  # of such a name

BodyT = TypeVar("BodyT", bound=Body)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """What is served: the name that clients use, the limits of the model, the default codec.

    longest_token:  characters of the longest token
    alias:          another name that clients may use: where the model was loaded from
    eos_ids:        tokens that end an answer; they have no text
    defaults:       sampling parameters of requests that do not set them
    max_body_bytes: of a request
    """

    name: str
    context_length: int
    vocab_size: int
    codec: str
    longest_token: int
    alias: str | None = None
    eos_ids: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_body_bytes: int = 8 << 20


@dataclass(frozen=True)
class TokenizedPrompt:
    """Token ids of a prompt.

    text:    its text, if the response echoes it
    reading: how its answers are read; None: as plain text
    grammar: what its answers must follow, as in `SamplingParams`
    """

    tokens: tuple[int, ...]
    text: str = ""
    reading: AnswerReading | None = None
    grammar: str = ""


@dataclass(frozen=True)
class Generation:
    """What one request generates: `request.n` answers to each prompt.

    prediction: tokens that its answers may repeat; None: the request has no prediction
    workers: the prefill and the decode worker that must serve it; "": any
    client:  who sent the request
    """

    request: GenerationRequest
    prompts: Sequence[TokenizedPrompt]
    prediction: Sequence[int] | None = None
    workers: tuple[str, str] = ANY_WORKERS
    client: Client = ANYONE

    @property
    def has_thoughts(self) -> bool:
        """Whether the thoughts of its answers are counted."""
        return any(
            prompt.reading is not None and prompt.reading.has_thoughts
            for prompt in self.prompts
        )


class RequestReader:
    """Reads the requests for one model.

    chat:    None for a model without a template
    formats: of its calls and thoughts
    """

    def __init__(
        self,
        served: ServedModel,
        tokenizer: Tokenizer,
        chat: ChatTemplate | None,
        formats: ModelFormats,
    ):
        self.formats = formats
        self.max_body_bytes = served.max_body_bytes  # may change while the service runs
        self._served = served
        self._tokenizer = tokenizer
        self._chat = chat
        # those that the model can generate
        self.special_tokens = {
            text: token
            for text, token in tokenizer.special_tokens.items()
            if token < served.vocab_size
        }
        # reading a long body or text takes memory of many times its length
        self._long_body_lock = asyncio.Lock()
        self._long_text_lock = asyncio.Lock()
        self._unknown_fields: set[str] = set()

    async def read(self, body_type: type[BodyT], chunks: AsyncIterable[bytes]) -> BodyT:
        """A request from the chunks of its body; RequestError and its kinds, or ModelError."""
        body = await limits.read_body(chunks, self.max_body_bytes)
        if len(body) <= limits.LONG_BODY_BYTES:
            request = body_type.read(body)
        else:
            async with self._long_body_lock:
                request = await asyncio.to_thread(body_type.read, body)
        self._warn_unknown(request.unknown)
        # some clients send "", which vLLM accepts too
        self.check_model(request.model or None)
        return request

    def check_model(self, name: str | None) -> None:
        """ModelError unless the name is that of the served model, or None."""
        if name not in (None, self._served.name, self._served.alias):
            raise ModelError(
                f"model {name!r} is not served here; {self._served.name!r} is", "model"
            )

    async def prompts(self, request: GenerationRequest) -> list[TokenizedPrompt]:
        """The prompts of a request as token ids; RequestError for what cannot be served."""
        if isinstance(request, ChatRequest):
            prompts = [await self._chat_prompt(request)]
        else:
            assert isinstance(request, CompletionRequest)
            grammar = ""
            if request.structured_field:
                grammar = await asyncio.to_thread(request.constraint)
            prompts = [
                replace(await self._prompt(request, prompt), grammar=grammar)
                for prompt in request.prompt
            ]
        if sum(len(prompt.tokens) for prompt in prompts) <= limits.LONG_PROMPTS:
            self._check(request, prompts)
        else:
            await asyncio.to_thread(self._check, request, prompts)
        return prompts

    async def prediction(self, request: GenerationRequest) -> "array[int] | None":
        """The prediction of a request as token ids; its length is bounded as that of a prompt."""
        if request.prediction is None:
            return None
        served = self._served
        tokens = await self.tokens_of(request.prediction.content, False, "prediction")
        limits.check_length(len(tokens), served.context_length, "prediction")
        limits.check_ids(tokens, served.vocab_size, "prediction")
        return array("I", tokens)

    def _check(
        self, request: GenerationRequest, prompts: list[TokenizedPrompt]
    ) -> None:
        """RequestError for prompts, token ids and counts beyond the limits."""
        served = self._served
        field_name = "messages" if isinstance(request, ChatRequest) else "prompt"
        limits.check_choices(len(prompts) * request.n)
        num_scores = 0
        for prompt in prompts:
            num_tokens = len(prompt.tokens)
            limits.check_prompt(num_tokens, served.context_length, field_name)
            limits.check_ids(prompt.tokens, served.vocab_size, field_name)
            limits.check_answer_length(
                request.max_answer_tokens,
                request.least_answer_tokens,
                num_tokens,
                served.context_length,
            )
            room = served.context_length - num_tokens
            sampling = request.sampling(room, served.defaults)
            num_scores += limits.count_scores(num_tokens, request.n, sampling)
        limits.check_scores(num_scores)
        limits.check_ids(request.stop_token_ids, served.vocab_size, "stop_token_ids")
        limits.check_ids(request.logit_bias, served.vocab_size, "logit_bias")

    async def text_of(self, tokens: list[Any], field: str = "tokens") -> str:
        """The text of the token ids of a field; RequestError where it holds anything else.

        PromptTooLongError for too many: decoding holds Python's lock, on whatever thread it runs.
        """
        limits.check_length(len(tokens), self._served.context_length, field)
        limits.check_ids(tokens, self._served.vocab_size, field)
        return await asyncio.to_thread(self._tokenizer.decode, tokens, True)

    async def tokens_of(
        self, text: str, special: bool, field: str = "prompt"
    ) -> list[int]:
        """Token ids of the text of a field.

        special: with the special tokens that the model expects around a text
        """
        served = self._served
        limits.check_text(len(text), served.context_length, served.longest_token, field)
        if not text:
            return []
        is_long = len(text) > limits.LONG_TEXT_CHARS
        async with self._long_text_lock if is_long else nullcontext():
            return await asyncio.to_thread(self._tokenizer.encode, text, special)

    async def _chat_prompt(self, request: ChatRequest) -> TokenizedPrompt:
        text = await self._chat_text(request)
        reading = self.formats.reading(request, text)
        special = bool(request.add_special_tokens)
        tokens = await self.tokens_of(text, special, "messages")
        grammar = await self._chat_grammar(request, text)
        return TokenizedPrompt(tuple(tokens), "", reading, grammar)

    async def _chat_grammar(self, request: ChatRequest, prompt: str) -> str:
        """What the answers to a prompt must follow; "": anything.

        RequestError for what no engine can follow.
        """
        if not request.structured_field and request.tool_choice.mode != "required":
            return ""
        return await asyncio.to_thread(self.formats.grammar, request, prompt)

    async def chat_tokens(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation, written by the model's chat template."""
        text = await self._chat_text(conversation)
        special = bool(conversation.add_special_tokens)
        return await self.tokens_of(text, special, "messages")

    async def _chat_text(self, conversation: Conversation) -> str:
        if self._chat is None:
            raise RequestError(
                f"{self._served.name!r} has no chat template; use /v1/completions",
                "messages",
            )
        if not conversation.messages:
            raise RequestError("messages: expected at least one", "messages")
        return await asyncio.to_thread(render, self._chat, conversation)

    async def _prompt(
        self, request: CompletionRequest, prompt: str | list[Any]
    ) -> TokenizedPrompt:
        if isinstance(prompt, str):
            tokens = await self.tokens_of(prompt, request.add_special_tokens)
            return TokenizedPrompt(tuple(tokens), prompt if request.echo else "")
        limits.check_prompt(len(prompt), self._served.context_length)
        text = await self.text_of(prompt, "prompt") if request.echo else ""
        return TokenizedPrompt(tuple(prompt), text)

    def _warn_unknown(self, names: list[str]) -> None:
        """Warn of unknown fields, of each once and of a bounded number."""
        for name in names:
            short = name[:MAX_FIELD_CHARS]
            is_new = short not in self._unknown_fields
            if is_new and len(self._unknown_fields) < MAX_UNKNOWN_FIELDS:
                self._unknown_fields.add(short)
                log.warning("field %r of a request is unknown and ignored", short)


def render(chat: ChatTemplate, conversation: Conversation) -> str:
    """The text of a conversation; RequestError for what the template cannot take."""
    effort = conversation.reasoning_effort
    if effort is not None and not chat.reads("reasoning_effort"):
        raise RequestError(
            f"reasoning_effort={limits.shown(effort)} is not supported: the model's chat template "
            "does not read it; leave it out",
            "reasoning_effort",
        )
    text = chat.render(conversation.turns, **conversation.template_options)
    tools = conversation.callable_tools
    # some templates take tools by other names, which `chat_template_kwargs` may have
    if not chat.writes_tools and not all(tool.name in text for tool in tools):
        raise RequestError(
            "tools: the model's chat template does not show tools to the model; "
            "leave them out, or serve the model with a --chat-template that does",
            "tools",
        )
    return text
