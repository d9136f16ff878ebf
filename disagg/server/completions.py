"""From a request to text deltas: the router's tokens, stop strings, metrics. No HTTP, no JSON.

`reader.py` reads requests, `responses.py` writes responses; neither knows this module.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from disagg.config import Config, ServerConfig
from disagg.engine.prediction import FollowedPrediction
from disagg.engine.sampling_defaults import read_sampling_defaults
from disagg.errors import CancelledError, ConfigError, DisaggError, reason_of
from disagg.model.chat import ChatTemplate
from disagg.model.describe import describe_model
from disagg.model.text_stream import TextStream
from disagg.model.tokenizer import Tokenizer
from disagg.router.actions import TokenOutput
from disagg.router.contract import RequestRouter
from disagg.router.router import Router
from disagg.server.answer_format import ModelFormats
from disagg.server.answer_parts import AnswerParts
from disagg.server.client import ANYONE, Client
from disagg.server.limits import MAX_SEED
from disagg.server.merge import merged
from disagg.server.metrics import AnswerTimes, ServerMetrics
from disagg.server.output_text import Score, TextDelta
from disagg.server.pd_ports import PdPorts
from disagg.server.reader import (
    BodyT,
    Generation,
    RequestReader,
    ServedModel,
    TokenizedPrompt,
)
from disagg.server.retry import RetryEstimate
from disagg.server.schema import CompletionRequest, GenerationRequest
from disagg.server.tools import new_call_id
from disagg.server.trace import AnswerTrace, SpanWriter, open_spans

# an answer that a stop string ended waits this long for its hand-off figures
KV_TIMEOUT_S = 1.0
METRICS_S = 1.0  # as long is an answer to GET /metrics good for others


@dataclass
class _Answer:
    """One answer while it is generated."""

    request: GenerationRequest
    prompt: TokenizedPrompt
    codec: str
    text: TextStream
    times: AnswerTimes
    prediction: FollowedPrediction
    waited_s: float = 0.0
    last: TextDelta | None = None
    parts: AnswerParts | None = None

    def add(self, output: TokenOutput) -> TextDelta:
        """What one output adds: parts, if the answer has them, or text."""
        delta = self._text(output)
        return delta if self.parts is None else self.parts.read(delta)

    def _text(self, output: TokenOutput) -> TextDelta:
        """The text that one output adds, after the prompt if the request has echo."""
        token = output.token
        delta = self._end(output) if token is None else self._token(token, output)
        if isinstance(self.request, CompletionRequest) and self.request.echo:
            return _with_echo(self.request, self.prompt, output, delta)
        return delta

    def _token(self, token: int, output: TokenOutput) -> TextDelta:
        text = self.text.add(token)
        self.prediction.follow([token])
        scores: tuple[Score, ...] = ()
        if output.logprobs:
            scores = ((token, output.logprobs[-1]),)
        return TextDelta(
            text,
            num_tokens=self.times.num_tokens,
            finish_reason="stop" if self.text.stopped else None,
            kv=output.kv,
            scores=scores,
            num_predicted=self.prediction.matched,
        )

    def trace(self, choice: int, failure: str | None) -> AnswerTrace:
        """What is traced of it. failure: the reason of the error that ended it, if one did"""
        end = self.last.finish_reason if self.last is not None else None
        return AnswerTrace(
            choice,
            self.times,
            self.waited_s,
            self.last.kv if self.last is not None else {},
            finish_reason="error" if failure else end or "",
        )

    def _end(self, output: TokenOutput) -> TextDelta:
        # the answer may end in half a character, whose replacement may complete a stop string
        text = self.text.finish()
        return TextDelta(
            text,
            num_tokens=self.times.num_tokens,
            finish_reason="stop" if self.text.stopped else output.finish_reason,
            kv=output.kv,
            num_predicted=self.prediction.matched,
        )


class Completions:
    """Answers completion requests through a router.

    chat:  None for a model without a template
    spans: where requests are traced; None: nowhere
    """

    def __init__(
        self,
        served: ServedModel,
        tokenizer: Tokenizer,
        router: RequestRouter,
        chat: ChatTemplate | None = None,
        pd_ports: PdPorts | None = None,
        spans: SpanWriter | None = None,
        clock: Callable[[], float] = time.monotonic,
        formats: ModelFormats = ModelFormats(),
    ):
        self.served = served
        self.tokenizer = tokenizer
        self.router = router
        self.metrics = ServerMetrics(served.name)
        # without ports its router is not used
        self.pd_ports = pd_ports or PdPorts(Router(), {}, 0.0)
        self.spans = spans
        self.reader = RequestReader(served, tokenizer, chat, formats)
        self._short_call_ids = chat is not None and chat.short_call_ids
        self._clock = clock
        self._retry = RetryEstimate(clock)
        self._scrape: asyncio.Task[bytes] | None = None
        self._scraped_at = 0.0

    @classmethod
    def load(
        cls, config: Config, name: str, router: RequestRouter, ports: Mapping[int, str]
    ) -> Self:
        """Load the tokenizer of a config's model. name: for clients; ports: see `PdPorts`."""
        model = config.model.name
        info = describe_model(model, config.model.dtype, context=config.model.context)
        tokenizer = Tokenizer.load(model)
        served = ServedModel(
            name,
            info.context_length,
            info.vocab_size,
            config.codec,
            tokenizer.longest_token,
            alias=model,
            eos_ids=info.eos_ids,
            defaults=read_sampling_defaults(model, config.model.generation_config),
            max_body_bytes=config.server.max_body_bytes,
        )
        chat = ChatTemplate.load(model, config.server.chat_template)
        formats = read_formats(chat, config.server, tokenizer)
        pd_ports = None
        if isinstance(router, Router):
            pd_ports = PdPorts(router, ports, config.transfer.lease_s)
        spans = open_spans(config.server)
        return cls(served, tokenizer, router, chat, pd_ports, spans, formats=formats)

    async def close(self) -> None:
        """Send the last spans."""
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)

    async def read(self, body_type: type[BodyT], chunks: AsyncIterable[bytes]) -> BodyT:
        """A request from the chunks of its body; RequestError and its kinds, or ModelError."""
        try:
            return await self.reader.read(body_type, chunks)
        except DisaggError as error:
            self.metrics.failed(error.reason)
            raise

    async def prepare(
        self, request: GenerationRequest, port: int = 0, client: Client = ANYONE
    ) -> Generation:
        """What to generate for the request of a client, which arrived at a port.

        RequestError and its kinds for what cannot be served.
        """
        try:
            request = request.with_stop_tokens(self.reader.special_tokens)
            prompts = await self.reader.prompts(request)
            prediction = await self.reader.prediction(request)
            workers = self.pd_ports.enter(
                port, request, [prompt.tokens for prompt in prompts]
            )
        except DisaggError as error:
            self.metrics.failed(error.reason)
            raise
        if client.trace is not None:
            lengths = [len(prompt.tokens) for prompt in prompts]
            client.trace.read(request, self.served.name, lengths)
        return Generation(
            request.without_prompts(), prompts, prediction, workers, client
        )

    def generate(
        self, generation: Generation
    ) -> AsyncGenerator[tuple[int, TextDelta] | None]:
        """The deltas of all answers as they arrive, each with the index of its choice.

        None: nothing has arrived for a while.

        Leaving the iteration cancels every answer on every worker.
        """
        prompts = [
            prompt for prompt in generation.prompts for _ in range(generation.request.n)
        ]
        answers = [
            self._answer(generation, prompt, choice)
            for choice, prompt in enumerate(prompts)
        ]
        return merged(answers)

    async def _answer(
        self, generation: Generation, prompt: TokenizedPrompt, choice: int
    ) -> AsyncGenerator[TextDelta]:
        """One answer. It ends with the model's context, whatever `max_tokens` is.

        choice: its index; `n` choices in a row answer the same prompt
        """
        request = generation.request
        failure: str | None = CancelledError.reason  # until the answer ends
        answer = self._begin(generation, prompt)
        params = self._params(request, prompt, sibling=choice % request.n)
        outputs = self.router.generate(
            prompt.tokens,
            params,
            answer.codec,
            at=generation.workers,
            client=generation.client.key_name,
            prediction=generation.prediction or (),
            request_id=generation.client.request_id,
        )
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    delta = self._add(answer, output)
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
                failure = str(error)  # another answer to this request failed
            raise
        except Exception as error:
            failure = reason_of(error)
            if request.codec and isinstance(error, ConfigError):
                error.param = "codec"  # the only setting of a request
            raise
        finally:
            if failure is not None:
                self.metrics.failed(failure)
            generation.client.note(answer.trace(choice, failure))

    def _begin(self, generation: Generation, prompt: TokenizedPrompt) -> _Answer:
        request = generation.request
        times = AnswerTimes(time.monotonic())
        reading = prompt.reading
        parser = None if reading is None else reading.parser()
        text = TextStream(
            self.tokenizer.detokenizer(prompt.tokens),
            stops=request.stop,
            min_tokens=request.min_tokens,
            hidden=request.end_tokens(self.served.eos_ids),
            marks={} if parser is None else parser.marks,
        )
        codec = request.codec or self.served.codec
        prediction = FollowedPrediction(generation.prediction or ())
        parts = None
        if reading is not None and parser is not None:
            parts = AnswerParts(parser, reading.parallel, reading.only_calls)
        return _Answer(request, prompt, codec, text, times, prediction, parts=parts)

    def _add(self, answer: _Answer, output: TokenOutput) -> TextDelta:
        """The text of one output, which is counted."""
        answer.waited_s = answer.waited_s or output.waited_s
        if output.token is None:
            return answer.add(output)
        gap_s = answer.times.add_token(time.monotonic())
        if gap_s is None:
            self.metrics.began(len(answer.prompt.tokens), output.waited_s)
        else:
            self.metrics.gap(gap_s)
        delta = answer.add(output)
        if delta.num_tokens:  # 0: the client only wants the prompt's log-probabilities
            self.metrics.token()
        return delta

    def _count_end(self, answer: _Answer, last: TextDelta) -> None:
        self._retry.ended()
        answer.last = last
        self.metrics.finished(
            answer.times,
            last,
            prompt_tokens=len(answer.prompt.tokens),
            client_codec=answer.codec != self.served.codec,
        )

    def new_call_id(self) -> str:
        """A name for a tool call, such as the model's template takes."""
        return new_call_id(self._short_call_ids)

    async def status(self) -> dict[str, Any]:
        """The body of GET /status: model, summary of the router, state of every worker."""
        report = await self.router.report()
        return {
            "model": self.served.name,
            "codec": self.served.codec,
            **report.summary,
            "running": report.running,
            "workers": report.workers,
        }

    def retry_after_s(self) -> int:
        """When a client that was refused should come again."""
        return self._retry.retry_after_s(self.router.waiting)

    async def scrape(self) -> bytes:
        """The body of GET /metrics: counts of requests, and gauges of every worker.

        It is collected once in METRICS_S, because it takes a call to every worker.
        """
        now = self._clock()
        is_running = self._scrape is not None and not self._scrape.done()
        is_old = self._scrape is None or now >= self._scraped_at + METRICS_S
        if self._scrape is None or (is_old and not is_running):
            self._scraped_at = now
            self._scrape = asyncio.create_task(self._collect())
        return await asyncio.shield(self._scrape)

    async def _collect(self) -> bytes:
        report = await self.router.report()
        assert isinstance(self.router, Router)
        return self.metrics.scrape(report.workers, self.router)

    def _params(
        self, request: GenerationRequest, prompt: TokenizedPrompt, sibling: int
    ) -> dict[str, Any]:
        """Sampling parameters for the engine; siblings have different seeds."""
        room = self.served.context_length - len(prompt.tokens)
        params = request.sampling(room, self.served.defaults)
        if prompt.grammar:
            params["grammar"] = prompt.grammar
        seed = request.seed
        if seed is None:
            seed = secrets.randbelow(MAX_SEED)
        params["seed"] = (seed + sibling) % MAX_SEED
        return params


def read_formats(
    chat: ChatTemplate | None, server: ServerConfig, tokenizer: Tokenizer
) -> ModelFormats:
    """The formats of a model's answers; UnknownNameError for a parser that does not exist."""
    return ModelFormats.choose(
        "" if chat is None else chat.source,
        server.tool_parser,
        server.reasoning_parser,
        tokenizer.special_tokens,
    )


def _with_echo(
    request: CompletionRequest,
    prompt: TokenizedPrompt,
    output: TokenOutput,
    delta: TextDelta,
) -> TextDelta:
    """Add the prompt to the first delta of an answer; max_tokens=0 hides the token itself."""
    if request.max_tokens == 0:
        delta = replace(
            delta,
            text="",
            num_tokens=0,
            num_predicted=0,
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
    """The figures of a hand-off that arrive after a stop string has ended the answer."""
    with suppress(TimeoutError, DisaggError):
        async with asyncio.timeout(KV_TIMEOUT_S):
            async for output in outputs:
                if output.kv:
                    return output.kv
    return {}
