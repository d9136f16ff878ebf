"""One tiny model for all engine tests."""

from collections.abc import Iterator

import pytest

from disagg.model.runner import Runner
from tests.model.tiny import save_tiny


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    return Runner.load(str(save_tiny("llama", tmp_path_factory.mktemp("tiny"), head_dim=64)))
