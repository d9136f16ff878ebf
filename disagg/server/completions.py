"""From the body of a request to pieces of text: checks, tokens, stop strings, figures. No HTTP."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

from disagg.errors import CancelledError, DisaggError, ModelError
from disagg.server import limits
from disagg.server.counts import Counts
from disagg.server.schema import CompletionRequest
from disagg.server.text import Piece, TextStream, TextTokenizer
from disagg.workers.router import Output, Router

FIGURES_S = 1.0  # how long an answer that a stop string ended waits for its figures
MAX_UNKNOWN = 100  # names of unknown fields that are remembered, so that each is told once
MAX_SHOWN = 64  # characters of such a name

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """What is served: the name clients use, the limits of the model, the usual codec.

    longest_token:  characters of the longest token
    alias:          another name that is taken for the model: where it was loaded from
    max_body_bytes: of a request
    """

    name: str
    context_length: int
    vocab_size: int
    codec: str
    longest_token: int
    alias: str | None = None
    max_body_bytes: int = 8 << 20


class Completions:
    """Answers completion requests through a router."""

    def __init__(
        self,
        served: Served,
        tokenizer: TextTokenizer,
        router: Router,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.served = served
        self.router = router
        self.counts = Counts(served.name)
        self._tokenizer = tokenizer
        self._clock = clock
        self._one_long_text = asyncio.Lock()  # each takes memory of many times its length
        self._unknown: set[str] = set()

    async def prepare(
        self, body: AsyncIterable[bytes]
    ) -> tuple[CompletionRequest, tuple[int, ...]]:
        """A request and its prompt as token ids, from the pieces of a body.

        Raises RequestError and its kinds, or ModelError, for what cannot be served.
        """
        try:
            whole = await limits.read_body(body, self.served.max_body_bytes)
            request = CompletionRequest.read(whole)
            self._warn(request.unknown)
            if request.model not in (None, self.served.name, self.served.alias):
                other = f"model {request.model!r} is not served here; {self.served.name!r} is"
                raise ModelError(other, "model")
            return request, await self._tokens_of(request.prompt)
        except DisaggError as error:
            self.counts.failed(error.reason)
            raise

    async def stream(
        self, request: CompletionRequest, tokens: tuple[int, ...]
    ) -> AsyncGenerator[Piece]:
        """The answer, piece by piece. Leaving the iteration cancels the request on every worker.

        It ends with the model's context, wherever `max_tokens` is.
        """
        times = [self._clock()]
        failure: str | None = CancelledError.reason  # unless it ends in one of the ways below
        text = TextStream(self._tokenizer.detokenizer(), request.stop)
        codec = request.codec or self.served.codec
        outputs = self.router.generate(tokens, self._params(request, len(tokens)), codec)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    piece = self._piece(text, output, times)
                    if piece.finish_reason is not None:
                        piece = replace(piece, kv=piece.kv or await _figures(outputs))
                        own = codec != self.served.codec
                        self.counts.finished(times, piece, len(tokens), own)
                        failure = None
                    yield piece
                    if piece.finish_reason is not None:
                        return
        except Exception as error:
            failure = error.reason if isinstance(error, DisaggError) else DisaggError.reason
            raise
        finally:
            if failure is not None:
                self.counts.failed(failure)

    async def status(self) -> dict[str, Any]:
        """What is served, and what every worker says of itself."""
        answers = await self.router.status()
        workers: list[dict[str, Any]] = []
        for name, peer in self.router.peers.items():
            answer = answers.get(name)
            started = peer.started
            worker = {"name": name, "role": started.role.value, "address": started.address}
            if answer is None or isinstance(answer, DisaggError):
                workers.append(worker | {"error": str(answer)})
            else:
                said = {"epoch": answer.epoch, "gauges": dict(answer.gauges), **answer.info}
                workers.append(worker | said)
        served = {"model": self.served.name, "codec": self.served.codec}
        return served | self.router.summary() | {"workers": workers}

    async def scrape(self) -> bytes:
        """What Prometheus reads: figures of the requests, and the gauges of every worker."""
        return self.counts.scrape((await self.status())["workers"])

    async def _tokens_of(self, prompt: str | list[Any]) -> tuple[int, ...]:
        served, ids = self.served, prompt
        if isinstance(ids, str):
            limits.check_text(len(ids), served.context_length, served.longest_token)
            async with self._one_long_text if len(ids) > limits.LONG_TEXT_CHARS else nullcontext():
                ids = await asyncio.to_thread(self._tokenizer.encode, ids) if ids else []
        limits.check_prompt(len(ids), served.context_length)
        limits.check_ids(ids, served.vocab_size)
        return tuple(ids)

    def _params(self, request: CompletionRequest, tokens: int) -> dict[str, int | float | bool]:
        seed = secrets.randbelow(limits.MAX_SEED) if request.seed is None else request.seed
        return {
            "max_tokens": min(request.max_tokens, self.served.context_length - tokens),
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": max(0, request.top_k),
            "seed": seed % limits.MAX_SEED,
            "ignore_eos": request.ignore_eos,
        }

    def _piece(self, text: TextStream, output: Output, times: list[float]) -> Piece:
        """The text of one output; `times` collects when each token came."""
        if output.token is not None:
            times.append(self._clock())
            shown = text.add(output.token)
            reason = "stop" if text.stopped else None
            return Piece(shown, len(times) - 1, reason, output.kv)
        return Piece(text.finish(), len(times) - 1, output.finish_reason, output.kv)

    def _warn(self, names: list[str]) -> None:
        """Tell of fields that nobody knows: of each once, and not of endlessly many."""
        for name in names:
            shown = name[:MAX_SHOWN]
            if shown not in self._unknown and len(self._unknown) < MAX_UNKNOWN:
                self._unknown.add(shown)
                log.warning("field %r of a completion request is unknown and ignored", shown)


async def _figures(outputs: AsyncGenerator[Output]) -> Mapping[str, Any]:
    """What the hand-off cost, for an answer that a stop string ended before the figures came."""
    with suppress(TimeoutError, DisaggError):
        async with asyncio.timeout(FIGURES_S):
            async for output in outputs:
                if output.kv:
                    return output.kv
    return {}
