"""A whole service in this process, but for Ray: HTTP on a port, a router, workers, a model."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import Mock, patch

from disagg.config import Config, ModelConfig, ServerConfig
from disagg.launch import ray_cluster as launch
from disagg.server.service import Service
from disagg.transfer.messages import Role
from disagg.transfer.security import Security
from disagg.worker.worker import Worker
from tests.worker.pairs import TOKEN, House


@dataclass(frozen=True)
class Running:
    """A service, where it is, and where each of its workers is for foreign routers: "p" and "d"."""

    service: Service
    url: str
    doors: dict[str, str]

    def empty(self) -> None:
        """Wait until every gauge of every worker is zero, and the pools are whole."""
        loop, _ = self.service._serving.result()
        house = House(
            self.service.config, self.service._router, self.service._workers.workers
        )
        asyncio.run_coroutine_threadsafe(house.empty(), loop).result()


@contextmanager
def running(
    model: str | None, http: ServerConfig = ServerConfig(port=0)
) -> Iterator[Running]:
    """Serve a model as "tiny" while inside; each of two workers loads it."""
    http = replace(http, pd_ports=0, served_model_name="tiny")
    with serving(Config("raw", model=ModelConfig(model), server=http)) as service:
        host, _, _ = service.url.rpartition(":")
        doors = {name[0]: f"{host}:{port}" for port, name in service._ports.items()}
        yield Running(service, service.url, doors)


@contextmanager
def serving(config: Config) -> Iterator[Service]:
    """A service whose workers, one of each role, live in this process; its secret is "owner"."""
    cluster = replace(config.cluster, address="none but this process")
    with (
        patch.object(launch, "Cluster", cluster_of),
        Service(replace(config, cluster=cluster), secret="owner") as service,
    ):
        yield service


def cluster_of(config: Config, session: None) -> Mock:
    """In place of a `Cluster`."""
    security, workers = Security(token=TOKEN), dict[str, Worker]()
    for role in config.cluster.roles:
        name = f"{role}-0"
        workers[name] = Worker(config, Role(role), name, security=security)
    cluster = Mock(
        security=security,
        links=(),
        workers=workers,
        target_counts=config.cluster.roles,
        lacks_room={},
    )
    cluster.start.side_effect = lambda tell: [x.start() for x in workers.values()]
    cluster.close.side_effect = lambda: [
        (x.stop(0.0), x.wait()) for x in workers.values()
    ]
    return cluster
