"""A row of tokens that the small model knows."""

from collections.abc import Sequence

import pytest

from tests.model.tiny import random_prompt


@pytest.fixture(scope="session")
def row() -> Sequence[int]:
    return random_prompt(400)
