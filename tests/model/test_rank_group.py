"""Ranks that do not find each other. What groups compute: test_ranks.py, test_group_graphs.py."""

import pytest

from disagg.errors import RanksLostError
from disagg.model import rank_group
from disagg.model.rank_group import RankGroup, join_store, open_store
from disagg.worker.rank_link import listen

HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "JOIN_S", 0.3)


def test_a_rank_that_does_not_join_is_an_error_before_models_load():
    """It is frozen, or a firewall stands between: loading may take half an hour."""
    store = open_store(listen(HOST, None))

    with pytest.raises(RanksLostError, match="rank 0 lost the other ranks"):
        RankGroup(store, 0, 2, timeout_s=60.0)


def test_a_store_that_is_not_reached_is_an_error():
    with listen(HOST, None) as unused:
        port = unused.getsockname()[1]

    with pytest.raises(
        RanksLostError, match=rf"store of rank 0 at {HOST}:{port} is not"
    ):
        join_store(HOST, port)
