"""One random model, loaded once, and a row of tokens that it knows."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from disagg.model.runner import Runner
from tests.model.tiny import random_prompt, save_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"), head_dim=64)


@pytest.fixture(scope="session")
def runner(tiny: Path) -> Runner:
    return Runner.load(str(tiny))


@pytest.fixture(scope="session")
def row() -> Sequence[int]:
    return random_prompt(400)
