"""What several tests of the transfer room begin with."""

from collections.abc import Iterator

import pytest

from tests.transfer.desk import Desk
from tests.transfer.prompts import Prompt, make_prompt


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.pool.check_integrity()


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return make_prompt(300)
