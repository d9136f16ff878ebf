"""A server over a router of one line: answers are the letters a, b, c ..."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import ASGIApp

from disagg.errors import DisaggError, RequestError
from disagg.model.chat import ChatTemplate
from disagg.model.tokenizer import Tokenizer
from disagg.server.app import create_app
from disagg.server.completions import Completions, Served
from disagg.workers.choice import Choices
from disagg.workers.router import Output

KV = {"codec": "raw", "tokens": 3, "fp16_bytes": 40, "fp8_bytes": 20, "wire_bytes": 10}
KV |= {"resident_bytes": 8, "encode_ms": 1.0, "wire_ms": 2.0, "exposed_ms": 0.5, "admit_ms": 0.1}
SCORE = [-0.5, [[8, -0.25]]]


class Letters(Tokenizer):
    """Token 100 is "a". Encoding counts letters, and remembers on which threads."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def encode(self, text: str, special: bool = True) -> list[int]:
        self.threads.append(threading.current_thread())
        text.encode()
        return [ord(letter) % 100 for letter in text]

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        return "".join(chr(token if token < 100 else ord("a") + token - 100) for token in ids)

    def detokenizer(self) -> "Letters":
        return Letters()

    def add(self, ids: Iterable[int]) -> str:
        return "".join(chr(ord("a") + token - 100) for token in ids)

    def finish(self) -> str:
        return ""


class Lines(ChatTemplate):
    """Every message is a letter of its role and its content; an answer begins with "a"."""

    def __init__(self) -> None:
        pass

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        if options.get("fail"):
            raise RequestError("the model's chat template refuses this conversation", "messages")
        lines = [message["role"][0] + (message["content"] or "") for message in messages]
        return "".join(lines) + ("a" if options["add_generation_prompt"] else "")


class FakeRouter:
    """Answers every prompt with the tokens 100, 101 ...

    pause_at: an answer stops before this token and says so: `paused`; it ends with `breaks`
    refuses:  raised instead of the first token
    kv:       what every token and the end carry
    Where log-probabilities are wanted, that of token 100 + i is -i; prompts have -0.5 everywhere.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], dict[str, Any], str]] = []
        self.running = self.waiting = 0
        counted = Counter[tuple[str, str]]()
        self.dispatch = SimpleNamespace(routed=counted, choices=Choices())
        self.ready = True
        self.pause_at = 10**9
        self.paused, self.go = threading.Event(), asyncio.Event()
        self.breaks: DisaggError | None = None
        self.refuses: Exception | None = None
        self.kv: Mapping[str, Any] = KV
        self.peers = {name: _peer(role, name) for name, role in (("p", "prefill"), ("d", "decode"))}
        self.says: dict[str, Any] = {name: said({"jobs": 0.0}) for name in self.peers}

    async def generate(
        self, prompt: tuple[int, ...], params: Mapping[str, Any], codec: str, at: Any = None
    ) -> AsyncGenerator[Output]:
        self.asked.append((prompt, dict(params), codec))
        scores = [SCORE] * (len(prompt) - 1) if params.get("prompt_logprobs") else []
        self.running += 1
        try:
            if self.refuses is not None:
                raise self.refuses
            for index in range(params["max_tokens"]):
                await asyncio.sleep(0)
                if index == self.pause_at:
                    self.paused.set()
                    await self.go.wait()
                    if self.breaks is not None:
                        raise self.breaks
                if "logprobs" in params:
                    likeliest = [[100 + index, -index], [7, -9.0]][: params["logprobs"]]
                    scores.append([-float(index), likeliest])
                yield Output(100 + index, None, self.kv, scores, waited_s=0.5)
                scores = []
            yield Output(None, "length", self.kv)
        finally:
            self.running -= 1

    def lacks(self, wanted: Mapping[str, int]) -> str:
        return "decode 0 of 1; for 3 s"

    def summary(self) -> dict[str, int]:
        return {"requests": self.running, "queued": 0}

    async def status(self) -> dict[str, Any]:
        return self.says


def _peer(role: str, name: str) -> Any:
    return SimpleNamespace(
        started=SimpleNamespace(role=SimpleNamespace(value=role), address=f"{name}:1")
    )


def said(gauges: Mapping[str, float], epoch: int = 1, **info: Any) -> Any:
    """What a worker says of itself."""
    return SimpleNamespace(epoch=epoch, gauges=gauges, info=info)


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def letters() -> Letters:
    return Letters()


@pytest.fixture
def completions(router: FakeRouter, letters: Letters) -> Completions:
    served = Served("tiny", 20, 200, "raw", longest_token=2, alias="/models/tiny")
    return Completions(served, letters, router, Lines())  # type: ignore[arg-type]


@pytest.fixture
def app(completions: Completions) -> ASGIApp:
    return create_app(completions, token="secret")
