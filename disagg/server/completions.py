"""From the body of a request to pieces of text: checks, tokens, stop strings, figures. No HTTP."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from disagg.config import Config
from disagg.engine.sequence import SamplingParams
from disagg.errors import (
    CancelledError,
    ConfigError,
    DisaggError,
    ModelError,
    RequestError,
)
from disagg.model.chat import ChatTemplate
from disagg.model.describe import describe_model
from disagg.model.tokenizer import Tokenizer
from disagg.router.actions import TokenOutput
from disagg.router.router import Router
from disagg.server import limits
from disagg.server.metrics import ServerMetrics
from disagg.server.output_text import TextDelta, TextStream
from disagg.server.pd_ports import ANYWHERE, PdPorts
from disagg.server.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    Conversation,
    GenerationRequest,
)

FIGURES_S = 1.0  # how long an answer that a stop string ended waits for its figures
MAX_UNKNOWN = (
    100  # names of unknown fields that are remembered, so that each is told once
)
MAX_SHOWN = 64  # characters of such a name

Form = TypeVar("Form", bound=Body)
Asked = TypeVar("Asked", bound=GenerationRequest)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """What is served: the name clients use, the limits of the model, the usual codec.

    longest_token:  characters of the longest token
    alias:          another name that is taken for the model: where it was loaded from
    eos_ids:        tokens that end an answer, and have no text
    max_body_bytes: of a request
    """

    name: str
    context_length: int
    vocab_size: int
    codec: str
    longest_token: int
    alias: str | None = None
    eos_ids: tuple[int, ...] = ()
    max_body_bytes: int = 8 << 20


@dataclass(frozen=True)
class TokenizedPrompt:
    """Token ids, and the text that they stand for where it is to be echoed.

    at: the prefill and the decode worker that are wanted for it; "": any
    """

    tokens: tuple[int, ...]
    text: str = ""
    at: tuple[str, str] = ANYWHERE


class Completions:
    """Answers completion requests through a router. `chat`: None for a model without a template."""

    def __init__(
        self,
        served: ServedModel,
        tokenizer: Tokenizer,
        router: Router,
        chat: ChatTemplate | None = None,
        doors: PdPorts | None = None,
    ):
        self.served = served
        self.router = router
        self.counts = ServerMetrics(served.name)
        self.doors = doors or PdPorts(router, {}, 0.0)
        self.tokenizer = tokenizer
        self._chat = chat
        self._one_long_text = (
            asyncio.Lock()
        )  # each takes memory of many times its length
        self._unknown: set[str] = set()

    @classmethod
    def load(
        cls, config: Config, name: str, router: Router, ports: Mapping[int, str]
    ) -> Self:
        """For the model of a config, by the name that clients use. ports: see `PdPorts`."""
        model, info = (
            config.model.name,
            describe_model(config.model.name, config.model.dtype),
        )
        tokenizer = Tokenizer.load(model)
        served = ServedModel(
            name,
            info.context_length,
            info.vocab_size,
            config.codec,
            tokenizer.longest_token,
            alias=model,
            eos_ids=info.eos_ids,
            max_body_bytes=config.server.max_body_bytes,
        )
        doors = PdPorts(router, ports, config.transfer.lease_s)
        return cls(served, tokenizer, router, ChatTemplate.load(model), doors)

    async def read(self, form: type[Form], body: AsyncIterable[bytes]) -> Form:
        """A request from the pieces of a body; RequestError and its kinds, or ModelError."""
        whole = await limits.read_body(body, self.served.max_body_bytes)
        request = form.read(whole)
        self._warn(request.unknown)
        self.check_model(
            request.model or None
        )  # some clients write "", which vLLM takes too
        return request

    def check_model(self, name: str | None) -> None:
        """ModelError unless this is the model that is served, or nobody said."""
        if name not in (None, self.served.name, self.served.alias):
            other = f"model {name!r} is not served here; {self.served.name!r} is"
            raise ModelError(other, "model")

    async def prepare(
        self, form: type[Asked], body: AsyncIterable[bytes], port: int = 0
    ) -> tuple[Asked, list[TokenizedPrompt]]:
        """A request and its prompts as token ids, from the pieces of a body that came by a port.

        Raises RequestError and its kinds, or ModelError, for what cannot be served.
        """
        try:
            request, field = await self.read(form, body), "prompt"
            if isinstance(request, ChatRequest):
                field = "messages"
                prompts = [TokenizedPrompt(tuple(await self.chat_tokens(request)))]
            else:
                assert isinstance(request, CompletionRequest)
                prompts = [
                    await self._prompt(request, prompt) for prompt in request.prompt
                ]
            limits.check_choices(len(prompts) * request.n)
            for prompt in prompts:
                limits.check_prompt(
                    len(prompt.tokens), self.served.context_length, field
                )
                limits.check_ids(prompt.tokens, self.served.vocab_size, field)
                limits.check_scores(len(prompt.tokens), request.sampling(1))
            limits.check_ids(
                request.stop_token_ids, self.served.vocab_size, "stop_token_ids"
            )
            limits.check_ids(request.logit_bias, self.served.vocab_size, "logit_bias")
            at = self.doors.enter(port, request, [prompt.tokens for prompt in prompts])
            return request, [replace(prompt, at=at) for prompt in prompts]
        except DisaggError as error:
            self.counts.failed(error.reason)
            raise

    async def stream(
        self, request: GenerationRequest, prompt: TokenizedPrompt, sibling: int = 0
    ) -> AsyncGenerator[TextDelta]:
        """An answer, piece by piece. Leaving the iteration cancels the request on every worker.

        It ends with the model's context, wherever `max_tokens` is.
        sibling: which of `n` answers to the same prompt it is
        """
        times = [time.monotonic()]
        failure: str | None = (
            CancelledError.reason
        )  # unless it ends in one of the ways below
        params = self._params(request, len(prompt.tokens), sibling)
        hidden = SamplingParams(**params).ends(self.served.eos_ids)
        decoder = self.tokenizer.detokenizer(prompt.tokens)
        text = TextStream(decoder, request.stop, request.min_tokens, hidden)
        codec = request.codec or self.served.codec
        outputs = self.router.generate(prompt.tokens, params, codec, prompt.at)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    piece = _shown(
                        request, prompt, output, self._piece(text, output, times)
                    )
                    if output.token is not None:
                        if len(times) == 2:
                            self.counts.began(len(prompt.tokens), output.waited_s)
                        if piece.num_tokens:
                            self.counts.said()
                    if piece.finish_reason is not None:
                        piece = replace(piece, kv=piece.kv or await _figures(outputs))
                        own = codec != self.served.codec
                        self.counts.finished(times, piece, len(prompt.tokens), own)
                        failure = None
                    yield piece
                    if piece.finish_reason is not None:
                        return
        except asyncio.CancelledError as error:
            failure = failure and (
                str(error) or failure
            )  # of another answer to this request
            raise
        except Exception as error:
            failure = reason_of(error)
            if request.codec and isinstance(error, ConfigError):
                error.param = "codec"  # all that a request configures
            raise
        finally:
            if failure is not None:
                self.counts.failed(failure)

    async def text_of(self, tokens: list[Any], field: str = "tokens") -> str:
        """The text of the token ids of a field; RequestError where there are other things in it.

        PromptTooLongError for too many: decoding holds Python's lock, on whatever thread it runs.
        """
        limits.check_length(len(tokens), self.served.context_length, field)
        limits.check_ids(tokens, self.served.vocab_size, field)
        return await asyncio.to_thread(self.tokenizer.decode, tokens, True)

    async def tokens_of(
        self, text: str, special: bool, field: str = "prompt"
    ) -> list[int]:
        """Token ids of the text of a field.

        special: with the special tokens that the model wants around it
        """
        served, encode = self.served, self.tokenizer.encode
        limits.check_text(len(text), served.context_length, served.longest_token, field)
        async with (
            self._one_long_text if len(text) > limits.LONG_TEXT_CHARS else nullcontext()
        ):
            return await asyncio.to_thread(encode, text, special) if text else []

    async def chat_tokens(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation, as the template of the model writes it."""
        if self._chat is None:
            none = f"{self.served.name!r} has no chat template; /v1/completions takes prompts"
            raise RequestError(none, "messages")
        if not conversation.messages:
            raise RequestError("messages: at least one is wanted", "messages")
        options = conversation.template_options
        text = await asyncio.to_thread(self._chat.render, conversation.turns, **options)
        return await self.tokens_of(
            text, bool(conversation.add_special_tokens), "messages"
        )

    async def status(self) -> dict[str, Any]:
        """What is served, and what every worker says of itself."""
        answers = await self.router.status()
        workers: list[dict[str, Any]] = []
        for name, peer in self.router.peers.items():
            answer = answers.get(name)
            started = peer.info
            worker = {
                "name": name,
                "role": started.role.value,
                "address": started.address,
            }
            if answer is None or isinstance(answer, DisaggError):
                workers.append(worker | {"error": str(answer)})
            else:
                said = {
                    "epoch": answer.epoch,
                    "gauges": dict(answer.gauges),
                    **answer.info,
                }
                workers.append(worker | said)
        served = {"model": self.served.name, "codec": self.served.codec}
        return served | self.router.summary() | {"workers": workers}

    async def scrape(self) -> bytes:
        """What Prometheus reads: figures of the requests, and the gauges of every worker."""
        return self.counts.scrape((await self.status())["workers"], self.router)

    async def _prompt(
        self, request: CompletionRequest, prompt: str | list[Any]
    ) -> TokenizedPrompt:
        """The tokens of a prompt, its text where it is wanted."""
        if isinstance(prompt, str):
            tokens = await self.tokens_of(prompt, request.add_special_tokens)
            return TokenizedPrompt(tuple(tokens), prompt)
        text = await self.text_of(prompt, "prompt") if request.echo else ""
        return TokenizedPrompt(tuple(prompt), text)

    def _params(
        self, request: GenerationRequest, tokens: int, sibling: int
    ) -> dict[str, Any]:
        """What the engine is told. Siblings differ by their seeds."""
        seed = (
            secrets.randbelow(limits.MAX_SEED) if request.seed is None else request.seed
        )
        told = request.sampling(self.served.context_length - tokens)
        return told | {"seed": (seed + sibling) % limits.MAX_SEED}

    def _piece(
        self, text: TextStream, output: TokenOutput, times: list[float]
    ) -> TextDelta:
        """The text of one output; `times` collects when each token came."""
        if output.token is not None:
            times.append(time.monotonic())
            shown = text.add(output.token)
            reason = "stop" if text.stopped else None
            scores = ((output.token, output.logprobs[-1]),) if output.logprobs else ()
            return TextDelta(shown, len(times) - 1, reason, output.kv, scores)
        shown = (
            text.finish()
        )  # where it ends in half a character, a stop string may come of that
        reason = "stop" if text.stopped else output.finish_reason
        return TextDelta(shown, len(times) - 1, reason, output.kv)

    def _warn(self, names: list[str]) -> None:
        """Tell of fields that nobody knows: of each once, and not of endlessly many."""
        for name in names:
            shown = name[:MAX_SHOWN]
            if shown not in self._unknown and len(self._unknown) < MAX_UNKNOWN:
                self._unknown.add(shown)
                log.warning("field %r of a request is unknown and ignored", shown)


def _shown(
    request: GenerationRequest,
    prompt: TokenizedPrompt,
    output: TokenOutput,
    piece: TextDelta,
) -> TextDelta:
    """A piece as `echo` wants it: before the first comes the prompt; 0 tokens are no answer."""
    if not isinstance(request, CompletionRequest) or not request.echo:
        return piece
    if request.max_tokens == 0:
        ends = (
            piece.finish_reason and "length"
        )  # whatever the token is that nobody sees
        piece = replace(piece, text="", num_tokens=0, scores=(), finish_reason=ends)
    if output.token is None or piece.num_tokens > 1:
        return piece
    told: list[Any] = [None, *output.logprobs][:-1]
    scores = tuple(zip(prompt.tokens, told, strict=True)) if told else ()
    return replace(piece, text=prompt.text + piece.text, scores=scores + piece.scores)


def reason_of(error: Exception) -> str:
    """The word by which a failure is counted."""
    return error.reason if isinstance(error, DisaggError) else DisaggError.reason


async def _figures(outputs: AsyncGenerator[TokenOutput]) -> Mapping[str, Any]:
    """What the hand-off cost, for an answer that a stop string ended before the figures came."""
    with suppress(TimeoutError, DisaggError):
        async with asyncio.timeout(FIGURES_S):
            async for output in outputs:
                if output.kv:
                    return output.kv
    return {}
