"""A server over a router of fakes: answers are the letters a, b, c ..."""

from collections.abc import Iterable

import pytest
from fastapi import FastAPI

from disagg.server.app import create_app
from disagg.server.completions import Completions, Served
from disagg.workers.router import Router
from tests.server.visits import STATS_OF_A_PROMPT
from tests.workers.fakes import Network


class Letters:
    """Token 100 is "a". Encoding counts letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 100 for letter in text]

    def detokenizer(self) -> "Letters":
        return Letters()

    def add(self, ids: Iterable[int]) -> str:
        return "".join(chr(ord("a") + token - 100) for token in ids)

    def finish(self) -> str:
        return ""


@pytest.fixture
def served() -> Served:
    return Served("tiny", context_length=20, vocab_size=200, codec="raw")


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def completions(served: Served) -> Completions:
    return Completions(served, Letters(), Router())


@pytest.fixture
def app(completions: Completions) -> FastAPI:
    return create_app(completions, token="secret")


@pytest.fixture(autouse=True)
def figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.workers.fakes.STATS", STATS_OF_A_PROMPT)
