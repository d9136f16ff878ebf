"""From the body of a request to text deltas: checks, tokens, stop strings, metrics. No HTTP."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

from disagg.config import Config
from disagg.errors import (
    CancelledError,
    ConfigError,
    DisaggError,
    ModelError,
    RequestError,
    reason_of,
)
from disagg.model.chat import ChatTemplate
from disagg.model.describe import describe_model
from disagg.model.tokenizer import Tokenizer
from disagg.router.actions import TokenOutput
from disagg.router.router import Router
from disagg.server import limits
from disagg.server.metrics import ServerMetrics
from disagg.server.output_text import Score, TextDelta, TextStream
from disagg.server.pd_ports import ANY_WORKERS, PdPorts
from disagg.server.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    Conversation,
    GenerationRequest,
)

KV_TIMEOUT_S = (
    1.0  # an answer that a stop string ended waits this long for its hand-off figures
)
MAX_UNKNOWN_FIELDS = 100  # names that are remembered, so that each is warned of once
MAX_FIELD_CHARS = 64  # of such a name

BodyT = TypeVar("BodyT", bound=Body)
RequestT = TypeVar("RequestT", bound=GenerationRequest)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServedModel:
    """What is served: the name that clients use, the limits of the model, the default codec.

    longest_token:  characters of the longest token
    alias:          another name that clients may use: where the model was loaded from
    eos_ids:        tokens that end an answer; they have no text
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
    """Token ids of a prompt.

    text:    its text, if the response echoes it
    workers: the prefill and the decode worker that shall serve it; "": any
    """

    tokens: tuple[int, ...]
    text: str = ""
    workers: tuple[str, str] = ANY_WORKERS


@dataclass
class _Answer:
    """One answer while it is generated.

    times: of its arrival, then of each token; seconds of a monotonic clock
    """

    request: GenerationRequest
    prompt: TokenizedPrompt
    codec: str
    text: TextStream
    times: list[float]

    @property
    def num_tokens(self) -> int:
        return len(self.times) - 1

    def add(self, output: TokenOutput) -> TextDelta:
        """The text that one output adds, including the prompt's if the request wants an echo."""
        token = output.token
        delta = self._end(output) if token is None else self._token(token, output)
        if isinstance(self.request, CompletionRequest) and self.request.echo:
            return _with_echo(self.request, self.prompt, output, delta)
        return delta

    def _token(self, token: int, output: TokenOutput) -> TextDelta:
        self.times.append(time.monotonic())
        text = self.text.add(token)
        scores: tuple[Score, ...] = ()
        if output.logprobs:
            scores = ((token, output.logprobs[-1]),)
        return TextDelta(
            text,
            num_tokens=self.num_tokens,
            finish_reason="stop" if self.text.stopped else None,
            kv=output.kv,
            scores=scores,
        )

    def _end(self, output: TokenOutput) -> TextDelta:
        # the answer may end in half a character, whose replacement may complete a stop string
        text = self.text.finish()
        return TextDelta(
            text,
            num_tokens=self.num_tokens,
            finish_reason="stop" if self.text.stopped else output.finish_reason,
            kv=output.kv,
        )


class Completions:
    """Answers completion requests through a router. `chat`: None for a model without a template."""

    def __init__(
        self,
        served: ServedModel,
        tokenizer: Tokenizer,
        router: Router,
        chat: ChatTemplate | None = None,
        pd_ports: PdPorts | None = None,
    ):
        self.served = served
        self.router = router
        self.metrics = ServerMetrics(served.name)
        self.pd_ports = pd_ports or PdPorts(router, {}, 0.0)
        self.tokenizer = tokenizer
        self._chat = chat
        # tokenising a long text takes memory of many times its length
        self._long_text_lock = asyncio.Lock()
        self._unknown_fields: set[str] = set()

    @classmethod
    def load(
        cls, config: Config, name: str, router: Router, ports: Mapping[int, str]
    ) -> Self:
        """For the model of a config, by the name that clients use. ports: see `PdPorts`."""
        model = config.model.name
        info = describe_model(model, config.model.dtype)
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
        pd_ports = PdPorts(router, ports, config.transfer.lease_s)
        return cls(served, tokenizer, router, ChatTemplate.load(model), pd_ports)

    async def read(self, body_type: type[BodyT], chunks: AsyncIterable[bytes]) -> BodyT:
        """A request from the chunks of its body; RequestError and its kinds, or ModelError."""
        body = await limits.read_body(chunks, self.served.max_body_bytes)
        request = body_type.read(body)
        self._warn_unknown(request.unknown)
        # some clients send "", which vLLM accepts too
        self.check_model(request.model or None)
        return request

    def check_model(self, name: str | None) -> None:
        """ModelError unless the name is that of the served model, or None."""
        if name not in (None, self.served.name, self.served.alias):
            raise ModelError(
                f"model {name!r} is not served here; {self.served.name!r} is", "model"
            )

    async def prepare(
        self,
        body_type: type[RequestT],
        chunks: AsyncIterable[bytes],
        port: int = 0,
    ) -> tuple[RequestT, list[TokenizedPrompt]]:
        """A request and its prompts as token ids, from the chunks of a body received at a port.

        Raises RequestError and its kinds, or ModelError, for what cannot be served.
        """
        try:
            request = await self.read(body_type, chunks)
            prompts = await self._tokenized(request)
            self._check(request, prompts)
            workers = self.pd_ports.enter(
                port, request, [prompt.tokens for prompt in prompts]
            )
        except DisaggError as error:
            self.metrics.failed(error.reason)
            raise
        return request, [replace(prompt, workers=workers) for prompt in prompts]

    async def _tokenized(self, request: GenerationRequest) -> list[TokenizedPrompt]:
        if isinstance(request, ChatRequest):
            return [TokenizedPrompt(tuple(await self.chat_tokens(request)))]
        assert isinstance(request, CompletionRequest)
        return [await self._prompt(request, prompt) for prompt in request.prompt]

    def _check(
        self, request: GenerationRequest, prompts: list[TokenizedPrompt]
    ) -> None:
        """RequestError for prompts, token ids and counts beyond the limits."""
        served = self.served
        field_name = "messages" if isinstance(request, ChatRequest) else "prompt"
        limits.check_choices(len(prompts) * request.n)
        for prompt in prompts:
            num_tokens = len(prompt.tokens)
            limits.check_prompt(num_tokens, served.context_length, field_name)
            limits.check_ids(prompt.tokens, served.vocab_size, field_name)
            limits.check_scores(num_tokens, request.sampling(1))
        limits.check_ids(request.stop_token_ids, served.vocab_size, "stop_token_ids")
        limits.check_ids(request.logit_bias, served.vocab_size, "logit_bias")

    async def stream(
        self, request: GenerationRequest, prompt: TokenizedPrompt, sibling: int = 0
    ) -> AsyncGenerator[TextDelta]:
        """One answer as text deltas. Leaving the iteration cancels the request on every worker.

        It ends with the model's context, whatever `max_tokens` is.
        sibling: which of the `n` answers to the same prompt it is
        """
        failure: str | None = CancelledError.reason  # unless it ends in another way
        answer = self._begin(request, prompt)
        params = self._params(request, len(prompt.tokens), sibling)
        outputs = self.router.generate(
            prompt.tokens, params, answer.codec, prompt.workers
        )
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    delta = answer.add(output)
                    if output.token is not None:
                        self._count_token(answer, output, delta)
                    if delta.finish_reason is None:
                        yield delta
                        continue
                    if not delta.kv:
                        delta = replace(delta, kv=await _late_kv(outputs))
                    self._count_end(answer, delta)
                    failure = None
                    yield delta
                    return
        except asyncio.CancelledError as error:
            if failure is not None and str(error):
                failure = str(error)  # the reason of another answer to this request
            raise
        except Exception as error:
            failure = reason_of(error)
            if request.codec and isinstance(error, ConfigError):
                error.param = "codec"  # all that a request configures
            raise
        finally:
            if failure is not None:
                self.metrics.failed(failure)

    def _begin(self, request: GenerationRequest, prompt: TokenizedPrompt) -> _Answer:
        arrived = time.monotonic()
        text = TextStream(
            self.tokenizer.detokenizer(prompt.tokens),
            stops=request.stop,
            min_tokens=request.min_tokens,
            hidden=request.end_tokens(self.served.eos_ids),
        )
        codec = request.codec or self.served.codec
        return _Answer(request, prompt, codec, text, times=[arrived])

    def _count_token(
        self, answer: _Answer, output: TokenOutput, delta: TextDelta
    ) -> None:
        if answer.num_tokens == 1:
            self.metrics.began(len(answer.prompt.tokens), output.waited_s)
        if delta.num_tokens:  # none where the client only wants the prompt's scores
            self.metrics.token()

    def _count_end(self, answer: _Answer, last: TextDelta) -> None:
        self.metrics.finished(
            answer.times,
            last,
            prompt_tokens=len(answer.prompt.tokens),
            client_codec=answer.codec != self.served.codec,
        )

    async def text_of(self, tokens: list[Any], field: str = "tokens") -> str:
        """The text of the token ids of a field; RequestError where it holds anything else.

        PromptTooLongError for too many: decoding holds Python's lock, on whatever thread it runs.
        """
        limits.check_length(len(tokens), self.served.context_length, field)
        limits.check_ids(tokens, self.served.vocab_size, field)
        return await asyncio.to_thread(self.tokenizer.decode, tokens, True)

    async def tokens_of(
        self, text: str, special: bool, field: str = "prompt"
    ) -> list[int]:
        """Token ids of the text of a field.

        special: with the special tokens that the model expects around a text
        """
        served = self.served
        limits.check_text(len(text), served.context_length, served.longest_token, field)
        if not text:
            return []
        is_long = len(text) > limits.LONG_TEXT_CHARS
        async with self._long_text_lock if is_long else nullcontext():
            return await asyncio.to_thread(self.tokenizer.encode, text, special)

    async def chat_tokens(self, conversation: Conversation) -> list[int]:
        """Token ids of a conversation, written by the model's chat template."""
        if self._chat is None:
            raise RequestError(
                f"{self.served.name!r} has no chat template; /v1/completions takes prompts",
                "messages",
            )
        if not conversation.messages:
            raise RequestError("messages: expected at least one", "messages")
        options = conversation.template_options
        text = await asyncio.to_thread(self._chat.render, conversation.turns, **options)
        special = bool(conversation.add_special_tokens)
        return await self.tokens_of(text, special, "messages")

    async def status(self) -> dict[str, Any]:
        """What is served, the router's summary, and the state of every worker."""
        answers = await self.router.status()
        workers = []
        for name, peer in self.router.peers.items():
            worker: dict[str, Any] = {
                "name": name,
                "role": peer.info.role.value,
                "address": peer.info.address,
            }
            answer = answers.get(name)
            if answer is None or isinstance(answer, DisaggError):
                worker["error"] = str(answer)
            else:
                worker["epoch"] = answer.epoch
                worker["gauges"] = dict(answer.gauges)
                worker.update(answer.info)
            workers.append(worker)
        return {
            "model": self.served.name,
            "codec": self.served.codec,
            **self.router.summary(),
            "workers": workers,
        }

    async def scrape(self) -> bytes:
        """What Prometheus reads: the requests' counts, and the gauges of every worker."""
        status = await self.status()
        return self.metrics.scrape(status["workers"], self.router)

    async def _prompt(
        self, request: CompletionRequest, prompt: str | list[Any]
    ) -> TokenizedPrompt:
        if isinstance(prompt, str):
            tokens = await self.tokens_of(prompt, request.add_special_tokens)
            return TokenizedPrompt(tuple(tokens), prompt)
        text = await self.text_of(prompt, "prompt") if request.echo else ""
        return TokenizedPrompt(tuple(prompt), text)

    def _params(
        self, request: GenerationRequest, prompt_tokens: int, sibling: int
    ) -> dict[str, Any]:
        """What the engine needs to sample. Siblings differ by their seeds."""
        params = request.sampling(self.served.context_length - prompt_tokens)
        seed = request.seed
        if seed is None:
            seed = secrets.randbelow(limits.MAX_SEED)
        params["seed"] = (seed + sibling) % limits.MAX_SEED
        return params

    def _warn_unknown(self, names: list[str]) -> None:
        """Warn of unknown fields, of each once and of a bounded number."""
        for name in names:
            short = name[:MAX_FIELD_CHARS]
            is_new = short not in self._unknown_fields
            if is_new and len(self._unknown_fields) < MAX_UNKNOWN_FIELDS:
                self._unknown_fields.add(short)
                log.warning("field %r of a request is unknown and ignored", short)


def _with_echo(
    request: CompletionRequest,
    prompt: TokenizedPrompt,
    output: TokenOutput,
    delta: TextDelta,
) -> TextDelta:
    """A delta of an echo: the prompt precedes the first token; max_tokens=0 hides that token."""
    if request.max_tokens == 0:
        delta = replace(
            delta,
            text="",
            num_tokens=0,
            scores=(),
            finish_reason="length" if delta.finish_reason else None,
        )
    if output.token is None or delta.num_tokens > 1:
        return delta
    prompt_scores: tuple[Score, ...] = ()
    if output.logprobs:
        # those of the prompt, then that of the first token, which `delta` has
        logprobs = [None, *output.logprobs[:-1]]
        prompt_scores = tuple(zip(prompt.tokens, logprobs, strict=True))
    return replace(
        delta,
        text=prompt.text + delta.text,
        scores=prompt_scores + delta.scores,
    )


async def _late_kv(outputs: AsyncGenerator[TokenOutput]) -> Mapping[str, Any]:
    """The hand-off's figures, for an answer that a stop string ended before they arrived."""
    with suppress(TimeoutError, DisaggError):
        async with asyncio.timeout(KV_TIMEOUT_S):
            async for output in outputs:
                if output.kv:
                    return output.kv
    return {}
