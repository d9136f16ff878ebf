"""The packaged model three times: an engine has a model of its own."""

from collections.abc import AsyncIterator

import pytest

from disagg.model.runner import Runner
from disagg.model.tokenizer import Tokenizer
from tests.worker.pairs import House, paired

STORY = "The old house by the river had stood empty for years. Nobody in the village remembered "
STORY += "who had built it, and nobody cared to ask. On winter evenings the children dared each "
STORY += "other to touch its door, and ran home before the echo of their own steps could follow "
STORY += "them. "


@pytest.fixture(scope="session")
def runners() -> list[Runner]:
    return [Runner.load() for _ in range(3)]


@pytest.fixture
async def home(runners: list[Runner]) -> AsyncIterator[House]:
    """Two workers and their router, on the loop of the test."""
    async with paired(runners) as house:
        yield house


@pytest.fixture(scope="session")
def story() -> tuple[int, ...]:
    """About 230 tokens: two or three pages and a tail."""
    return tuple(Tokenizer.load().encode(STORY * 3))
