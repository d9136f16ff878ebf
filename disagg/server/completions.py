"""From a completion request to pieces of text: checks, tokens, stop strings, figures. No HTTP."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from prometheus_client import Gauge

from disagg.errors import DisaggError, ModelError, RequestError
from disagg.metrics import Metrics, RequestTimes
from disagg.server.counts import WorkerCounts
from disagg.server.limits import check_prompt
from disagg.server.schema import CompletionRequest
from disagg.transfer.messages import WorkerStatus
from disagg.workers.router import RECEIPT_S, Output, Router
from disagg.workers.text import Decoder, TextStream

MAX_SEED = 2**63


class TextTokenizer(Protocol):
    """Text to tokens and back; `disagg.model.tokenizer.Tokenizer` is one."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""

    def detokenizer(self) -> Decoder:
        """A new decoder for one stream of tokens."""


@dataclass(frozen=True)
class Served:
    """What is served: the name clients use, the limits of the model, the usual codec."""

    name: str
    context_length: int
    vocab_size: int
    codec: str


@dataclass(frozen=True)
class Piece:
    """Some more text; the last piece says why it ended and what the hand-off cost."""

    text: str
    num_tokens: int
    finish_reason: str | None = None
    kv: Mapping[str, Any] = field(default_factory=dict)


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
        self.metrics = Metrics(served.name, "router")
        self._tokenizer = tokenizer
        self._clock = clock
        self._worker_counts = WorkerCounts(self.metrics)
        self._gauges = Gauge(
            "disagg_worker",
            "What a worker holds, by the name of the thing",
            ["worker", "role", "what"],
            registry=self.metrics.registry,
        )

    def tokens_of(self, request: CompletionRequest) -> tuple[int, ...]:
        """The prompt as token ids; RequestError or ModelError if it cannot be served."""
        request.check_extras()
        served = self.served
        if request.model not in (None, served.name):
            raise ModelError(f"model {request.model!r} is not served here; {served.name!r} is")
        if isinstance(request.prompt, str):
            tokens = tuple(self._tokenizer.encode(request.prompt)) if request.prompt else ()
        else:
            tokens = tuple(request.prompt)
        check_prompt(len(tokens), served.context_length)
        if max(tokens) >= served.vocab_size:
            raise RequestError(f"token id {max(tokens)} is not below {served.vocab_size}")
        if request.max_tokens < 1:
            raise RequestError(f"max_tokens is {request.max_tokens}; at least 1 is wanted")
        return tokens

    async def stream(
        self, request: CompletionRequest, tokens: tuple[int, ...]
    ) -> AsyncGenerator[Piece]:
        """The answer, piece by piece. Leaving the iteration cancels the request on every worker."""
        arrived = self._clock()
        seed = secrets.randbelow(MAX_SEED) if request.seed is None else request.seed
        params = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "seed": seed,
            "ignore_eos": request.ignore_eos,
        }
        text, times = TextStream(self._tokenizer.detokenizer(), request.stops), [arrived]
        outputs = self.router.generate(tokens, params, request.codec or self.served.codec)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    piece = self._piece(text, output, times)
                    if piece.finish_reason is not None and not piece.kv:
                        piece = replace(piece, kv=await _figures(outputs))
                    yield piece
                    if piece.finish_reason is not None:
                        self._note(times, piece)
                        return
        except DisaggError as error:
            self.metrics.add(self.metrics.success, finished_reason=error.reason)
            raise

    async def status(self) -> dict[str, Any]:
        """What is served, and what every worker says of itself."""
        answers = await self.router.status()
        workers: list[dict[str, Any]] = []
        for name, peer in self.router.peers.items():
            answer = answers.get(name)
            started = peer.started
            worker = {"name": name, "role": started.role.value, "address": started.address}
            if isinstance(answer, WorkerStatus):
                said = {"epoch": answer.epoch, "gauges": dict(answer.gauges), **answer.info}
                workers.append(worker | said)
            else:
                workers.append(worker | {"error": str(answer)})
        served = {"model": self.served.name, "codec": self.served.codec}
        return served | {"requests": self.router.running, "workers": workers}

    async def scrape(self) -> bytes:
        """What Prometheus reads: figures of the requests, and the gauges of every worker."""
        self._gauges.clear()
        workers = (await self.status())["workers"]
        self._worker_counts.load(workers)
        for worker in workers:
            for name, value in worker.get("gauges", {}).items():
                self._gauges.labels(worker["name"], worker["role"], name).set(value)
            self._worker_counts.take(worker)
        return self.metrics.render()

    def _piece(self, text: TextStream, output: Output, times: list[float]) -> Piece:
        """The text of one output; `times` collects when each token came."""
        if output.token is not None:
            times.append(self._clock())
            shown = text.add(output.token)
            reason = "stop" if text.stopped else None
            return Piece(shown, len(times) - 1, reason, output.kv)
        return Piece(text.finish(), len(times) - 1, output.finish_reason, output.kv)

    def _note(self, times: list[float], piece: Piece) -> None:
        metrics, kv = self.metrics, piece.kv
        ends = RequestTimes(times[0], times[min(1, len(times) - 1)], times[-1], piece.num_tokens)
        metrics.finished(ends, piece.finish_reason or "")
        metrics.add(metrics.generation_tokens, piece.num_tokens)
        if not kv:
            return
        metrics.add(metrics.prompt_tokens, kv["tokens"])
        for kind in ("fp16", "wire", "cached", "resident"):
            amount = kv.get(f"{kind}_bytes", 0)
            metrics.add(metrics.transfer_bytes, amount, kind=kind, codec=kv["codec"])
        for phase in ("encode", "queue", "wire", "verify", "admit"):
            seconds = kv.get(f"{phase}_ms", 0.0) / 1e3
            metrics.observe(metrics.transfer_seconds, seconds, phase=phase)
        metrics.observe(metrics.exposed_seconds, kv["exposed_ms"] / 1e3)


async def _figures(outputs: AsyncGenerator[Output]) -> Mapping[str, Any]:
    """What the hand-off cost, for an answer that a stop string ended before the figures came."""
    with suppress(TimeoutError, DisaggError):
        async with asyncio.timeout(RECEIPT_S):
            async for output in outputs:
                if output.kv:
                    return output.kv
    return {}
