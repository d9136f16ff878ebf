"""The share of a host's GPUs and cores that each worker gets."""

import os

import pytest

from disagg.config import load_config
from disagg.errors import ConfigError
from disagg.launch.resources import (
    check_place,
    gpu_share,
    rank_resources,
    worker_config,
)
from disagg.transfer.messages import Role

GPU_SHARES = [
    (0, 1, 1, 0),
    (2, 1, 1, 1),
    (8, 1, 1, 1),
    (1, 1, 1, 1 / 2),
    (4, 2, 4, 1 / 2),
    (3, 3, 4, 1 / 3),
]


@pytest.mark.parametrize(("gpus", "prefill", "decode", "share"), GPU_SHARES)
def test_every_worker_has_a_place_on_the_gpus(gpus, prefill, decode, share):
    config = load_config(None, {"cluster.prefill": prefill, "cluster.decode": decode})

    assert gpu_share(gpus, config, Role.PREFILL) == share
    assert not gpus or gpus * int(1 / share) >= prefill + decode


def test_each_rank_has_a_gpu_of_its_own():
    flags = {"cluster.colocated": True, "cluster.prefill_ranks": 4}

    assert gpu_share(8, load_config(None, flags), Role.BOTH) == 4.0


def test_workers_of_each_role_have_the_gpus_of_their_ranks():
    config = load_config(None, {"cluster.decode_ranks": 2})

    assert gpu_share(4, config, Role.PREFILL) == 1.0
    assert gpu_share(4, config, Role.DECODE) == 2.0


TWO_RANKS = {"cluster.prefill_ranks": 2}
HOSTS = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0, "prefill": 4.0}]
RANK_RESOURCES = [
    (TWO_RANKS, {"CPU": 1.0, "GPU": 1.0}),
    (TWO_RANKS | {"cluster.prefill": 4}, {"CPU": 1 / 2, "GPU": 1.0}),
    (TWO_RANKS | {"model.device": "cpu"}, {"CPU": 1.0}),
    (TWO_RANKS | {"cluster.gpus": 4.0}, {"CPU": 1.0, "GPU": 2.0}),
    (
        TWO_RANKS | {"cluster.pools": True, "cluster.gpus": 0.0},
        {"CPU": 1.0, "prefill": 1.0},
    ),
]


@pytest.mark.parametrize(("flags", "expected"), RANK_RESOURCES)
def test_ray_reserves_the_resources_of_each_rank(flags, expected):
    assert rank_resources(load_config(None, flags), Role.PREFILL, HOSTS) == expected


@pytest.mark.parametrize(("placement", "cpus"), [("pack", 0.5), ("spread", 1.0)])
def test_ranks_on_one_host_ask_for_no_more_cores_than_it_has(placement, cpus):
    flags = TWO_RANKS | {"cluster.rank_placement": placement}
    hosts = [{"CPU": 1.0}] * 3

    resources = rank_resources(load_config(None, flags), Role.PREFILL, hosts)

    assert resources == {"CPU": cpus}


def test_ranks_that_would_share_a_gpu_are_refused():
    config = load_config(None, TWO_RANKS | {"cluster.gpus": 1.0})

    with pytest.raises(ConfigError, match="is 1 for the 2 ranks"):
        rank_resources(config, Role.PREFILL, HOSTS)


def test_more_ranks_than_gpus_are_refused():
    config = load_config(None, {"cluster.prefill_ranks": 4, "cluster.decode_ranks": 2})

    check_place(6, config, {Role.PREFILL: 1, Role.DECODE: 1})
    with pytest.raises(ConfigError, match="the ranks of all workers need 8"):
        check_place(6, config, {Role.PREFILL: 1, Role.DECODE: 2})


def test_workers_on_the_cpu_take_no_gpus():
    assert gpu_share(8, load_config(None, {"model.device": "cpu"}), Role.PREFILL) == 0.0


POOLS = {"cluster.prefill": 4, "cluster.decode": 4, "cluster.pools": True}
THREADS = [
    ({"cluster.decode": 2}, {}, 4),
    ({"cluster.decode": 2}, {"CPU": 6.0}, 2),
    ({"cluster.decode": 20}, {}, 1),
    ({"engine.torch_threads": 7}, {}, 7),
    (POOLS, {"prefill": 1}, 12),
    (POOLS, {"decode": 2, "CPU": 12.0}, 6),
    (POOLS, {"decode": 8}, 3),
    (POOLS, {"prefill": 1, "decode": 2}, 4),
    (POOLS, {}, 12),
    (POOLS | {"cluster.prefill_ranks": 4}, {"prefill": 8}, 1),
    (POOLS | {"cluster.prefill_ranks": 4}, {"prefill": 2}, 6),
    ({"cluster.colocated": True, "cluster.prefill_ranks": 4}, {}, 3),
    ({"cluster.prefill_ranks": 4, "cluster.decode": 2}, {}, 2),
]


@pytest.mark.parametrize(("flags", "resources", "threads"), THREADS)
def test_workers_that_fit_on_a_host_share_its_cores(
    flags, resources, threads, monkeypatch
):
    monkeypatch.setattr(os, "cpu_count", lambda: 12)

    config = worker_config(load_config(None, flags), 0.5, resources)

    assert config.engine.torch_threads == threads


def test_a_worker_with_half_a_gpu_uses_half_of_its_memory():
    config = load_config(None, {"engine.memory_share": 0.8})

    assert worker_config(config, 0.5, {}).engine.memory_share == 0.4


def test_the_workers_of_a_host_without_gpus_divide_its_memory():
    config = load_config(None, {"engine.memory_share": 0.8, "cluster.decode": 3})

    assert worker_config(config, None, {}).engine.memory_share == 0.2
