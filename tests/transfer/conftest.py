"""What several tests of the transfer room begin with."""

from collections.abc import Iterator

import pytest

from tests.papers import make_papers
from tests.transfer.desk import Desk
from tests.transfer.prompts import Prompt, make_prompt


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.pool.check_integrity()


@pytest.fixture(scope="module")
def prompt(request: pytest.FixtureRequest) -> Prompt:
    """Of as many tokens as its file says."""
    return make_prompt(getattr(request.module, "TOKENS", 300))


@pytest.fixture(scope="session")
def papers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Certificates and keys by their names in `make_papers`."""
    folder = make_papers(tmp_path_factory.mktemp("papers"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}
