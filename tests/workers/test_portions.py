"""Workers share what their hosts have, and all find a place."""

import os

import pytest

from disagg.config import load_config
from disagg.workers.portions import gpu_share, torch_threads


@pytest.mark.parametrize(
    ("gpus", "prefill", "decode", "share"),
    [
        (0, 1, 1, 0.0),
        (2, 1, 1, 1.0),
        (8, 1, 1, 1.0),
        (1, 1, 1, 0.5),
        (4, 2, 4, 0.5),
        (3, 3, 4, 1 / 3),
    ],
)
def test_every_worker_finds_a_place_on_the_gpus(
    gpus: int, prefill: int, decode: int, share: float
) -> None:
    flags = {"cluster.prefill": prefill, "cluster.decode": decode}
    assert gpu_share(gpus, load_config(None, flags)) == share
    assert not gpus or gpus * int(1 / share) >= prefill + decode
    assert gpu_share(gpus, load_config(None, flags | {"model.device": "cpu"})) == 0.0


def test_the_cores_are_shared_unless_a_number_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert torch_threads(load_config(None, {"cluster.decode": 2})) == 4
    assert torch_threads(load_config(None, {"cluster.decode": 20})) == 1
    assert torch_threads(load_config(None, {"engine.torch_threads": 7})) == 7
