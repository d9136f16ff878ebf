"""The process of a router: it ends after its doors."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock, patch

import pytest

from disagg.config import ClusterConfig, Config
from disagg.launch import ray_cluster
from disagg.server.router_process import RouterProcess
from disagg.transfer.rpc import start_local_server
from disagg.transfer.security import Security
from tests.router.fakes import SECRET, door_at
from tests.transfer.peer import until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "router"


@pytest.fixture
def process(path: Path) -> Iterator[RouterProcess]:
    """A router without workers, and without Ray."""
    cluster = Mock(security=Security(), links=(), target_counts={}, lacks_room={})
    cluster.start.return_value = []
    config = Config(cluster=ClusterConfig(address="none"))
    listen = partial(start_local_server, path=path, security=SECRET)
    with (
        patch.object(ray_cluster, "Cluster", lambda *_: cluster),
        RouterProcess(config, listen) as process,
    ):
        yield process


async def test_a_router_knows_when_its_doors_are_gone(process, path):
    async with door_at(path) as client:
        await until(lambda: client._is_attached)
        waiting = asyncio.create_task(asyncio.to_thread(process.wait_for_doors, 60))
        await asyncio.sleep(0.2)
        assert not waiting.done()

    await waiting


async def test_a_router_waits_for_its_doors_up_to_a_limit(process, path):
    async with door_at(path) as client:
        await until(lambda: client._is_attached)

        process.wait_for_doors(0.0)

        assert client._is_attached


def test_a_router_says_where_it_listens(process, path):
    assert process.address == f"unix:{path}"
