"""Ray's functions and its key-value store, without Ray."""

import pytest
import ray
from ray.experimental import internal_kv

from disagg.launch import rank_bundles
from tests.launch.fakes import FakeCluster, get, wait


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of fake actors in place of Ray's."""
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(rank_bundles, "placement_group_table", dict)


@pytest.fixture
def cluster(no_ray: None) -> FakeCluster:
    """A prefill and a decode worker that serve."""
    serving = FakeCluster()
    serving.start()
    return serving


@pytest.fixture
def key_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's key-value store, as a dictionary."""
    stored: dict[tuple[str, bytes], bytes] = {}

    def load(key: bytes, namespace: str) -> bytes | None:
        return stored.get((namespace, key))

    def store(key: bytes, value: str, overwrite: bool, namespace: str) -> None:
        if overwrite or (namespace, key) not in stored:
            stored[namespace, key] = value.encode()

    monkeypatch.setattr(internal_kv, "_internal_kv_get", load)
    monkeypatch.setattr(internal_kv, "_internal_kv_put", store)
