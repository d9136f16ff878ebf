"""The limit of open files, and the garbage collector of the process that serves clients."""

import gc
import resource

import pytest

from disagg.config import ServerConfig
from disagg.server.process import (
    COLLECTOR_THRESHOLDS,
    MAX_FILES,
    RESERVED_FILES,
    max_connections,
    raise_file_limit,
    settled_collector,
)


@pytest.fixture
def file_limits(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """The limit of open files of a process that is not this one: soft and hard, "now"."""
    limits = {"now": (1024, 4096)}

    def setrlimit(_: int, limit: tuple[int, int]) -> None:
        limits["now"] = limit

    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    return limits


@pytest.mark.parametrize(
    ("hard", "soft"),
    [(4096, 4096), (1024, 1024), (resource.RLIM_INFINITY, MAX_FILES)],
    ids=["raised", "as-it-was", "no-limit"],
)
def test_the_limit_of_open_files_is_raised(hard, soft, file_limits):
    file_limits["now"] = (1024, hard)

    raise_file_limit(ServerConfig())

    assert file_limits["now"] == (soft, hard)


def test_few_open_files_are_a_warning(file_limits, caplog):
    file_limits["now"] = (256, 256)

    raise_file_limit(ServerConfig())

    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [(None, 4096 - RESERVED_FILES), (10, 10), (9999, 4096 - RESERVED_FILES)],
    ids=["files", "setting", "setting-beyond-files"],
)
def test_connections_are_bounded_by_open_files(setting, expected, file_limits):
    file_limits["now"] = (4096, 4096)

    connections = max_connections(ServerConfig(max_connections=setting))

    assert connections == expected


def test_the_collector_leaves_old_objects_alone_while_serving():
    before = gc.get_threshold()

    with settled_collector():
        assert gc.get_threshold() == COLLECTOR_THRESHOLDS
        assert gc.get_freeze_count() > 0

    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
