"""What several tests of the transfer room begin with."""

import pytest

from tests.transfer.prompts import Prompt, make_prompt


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return make_prompt(300)
