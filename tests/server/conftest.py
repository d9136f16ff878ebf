"""A server over a router of one line: answers are the letters a, b, c ..."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

import pytest
from starlette.types import ASGIApp

from disagg.errors import DisaggError
from disagg.model.chat import ChatTemplate
from disagg.model.tokenizer import Tokenizer
from disagg.router.actions import TokenOutput
from disagg.router.router import Router, WorkerConnection
from disagg.server.app import create_app
from disagg.server.completions import Completions
from disagg.server.reader import ServedModel
from disagg.transfer.messages import Role, WorkerInfo, WorkerStatus
from tests.model.tiny import byte_tokenizer

KV = {"codec": "raw", "tokens": 3, "fp16_bytes": 40, "fp8_bytes": 20, "wire_bytes": 10}
KV |= {
    "resident_bytes": 8,
    "encode_ms": 1.0,
    "wire_ms": 2.0,
    "exposed_ms": 0.5,
    "admit_ms": 0.1,
}
SCORE = [-0.5, [[8, -0.25]]]
A = 64  # the token of "a"


# every message is a letter of its role and its content; an answer begins with "a"
LINES = "{% for x in messages %}{{ x.role[0] }}{{ x.content }}{% endfor %}"
LINES += "{% if add_generation_prompt %}a{% endif %}"


def completions_of(
    router: Any,
    clock: Callable[[], float] | None = None,
    special_tokens: Sequence[str] = (),
    **served: Any,
) -> Completions:
    """Of a model whose tokens are bytes, with a context of 20."""
    limits = {"context_length": 20, "vocab_size": 256, "longest_token": 2}
    about = ServedModel(
        **{"name": "tiny", "codec": "raw", "alias": "/models/tiny"} | limits | served
    )
    backend = byte_tokenizer()
    backend.add_special_tokens(list(special_tokens))
    seconds = count()  # each look at the clock takes one: nothing is kept for others
    return Completions(
        about,
        Tokenizer(backend),
        router,
        ChatTemplate(LINES, {}),
        clock=clock or (lambda: float(next(seconds))),
    )


class FakeRouter(Router):
    """Answers every prompt with the tokens of "a", "b", "c" ..., as many as may be.

    pause_at: an answer stops before this token and says so: `paused`; it ends with `breaks`
    refuses:  raised instead of the first token
    kv:       what every token and the end carry
    Where log-probabilities are wanted, that of token i is -i; prompts have -0.5 everywhere.
    """

    running, waiting, ready = 0, 0, True

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[tuple[int, ...], dict[str, Any], str]] = []
        self.clients: list[str] = []
        self.request_ids: list[str] = []
        self.predictions: list[tuple[int, ...]] = []
        self.pause_at = 10**9
        self.paused, self.go = threading.Event(), asyncio.Event()
        self.breaks: DisaggError | None = None
        self.refuses: Exception | None = None
        self.kv: Mapping[str, Any] = KV
        for name, role in (("p", Role.PREFILL), ("d", Role.DECODE)):
            self.peers[name] = WorkerConnection(
                WorkerInfo(name, role, f"{name}:1", 1), None
            )
        self.says: dict[str, Any] = {name: said({"jobs": 0.0}) for name in self.peers}

    def answer(self, prompt: tuple[int, ...]) -> Iterator[int]:
        """The tokens of the next answer."""
        return count(A)

    async def generate(
        self,
        prompt: tuple[int, ...],
        params: Mapping[str, Any],
        codec: str,
        at: Any = None,
        client: str = "",
        prediction: Sequence[int] = (),
        request_id: str = "",
    ) -> AsyncGenerator[TokenOutput]:
        self.asked.append((prompt, dict(params), codec))
        self.clients.append(client)
        self.request_ids.append(request_id)
        self.predictions.append(tuple(prediction))
        scores = [SCORE] * (len(prompt) - 1) if params.get("prompt_logprobs") else []
        self.running += 1
        try:
            if self.refuses is not None:
                raise self.refuses
            answer = self.answer(prompt)
            for index, token in enumerate(islice(answer, params["max_tokens"])):
                await asyncio.sleep(0)
                if index == self.pause_at:
                    self.paused.set()
                    await self.go.wait()
                    if self.breaks is not None:
                        raise self.breaks
                if "logprobs" in params:
                    likeliest = [[token, -index], [7, -9.0]][: params["logprobs"]]
                    scores.append([-float(index), likeliest])
                yield TokenOutput("r", token, logprobs=scores, kv=self.kv, waited_s=0.5)
                scores = []
            is_cut = next(answer, None) is not None
            reason = "length" if is_cut else "stop"
            yield TokenOutput("r", finish_reason=reason, kv=self.kv)
        finally:
            self.running -= 1

    def lacks(self, target: Mapping[str, int]) -> str:
        return "decode 0 of 1; for 3 s"

    async def status(self) -> dict[str, Any]:
        return self.says


def said(gauges: Mapping[str, float], epoch: int = 1, **info: Any) -> WorkerStatus:
    return WorkerStatus(epoch, gauges, info)


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def completions(router: FakeRouter) -> Completions:
    return completions_of(router)


@pytest.fixture
def app(completions: Completions) -> ASGIApp:
    return create_app(completions, token="secret")
