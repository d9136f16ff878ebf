"""The share of a host that each worker gets. No Ray."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import mul

from disagg.config import MAX_WORKERS, Config
from disagg.errors import ConfigError
from disagg.transfer.messages import Role

LEAST_SHARE = 0.01  # of memory, as of the setting


def equal_share(units: int, config: Config) -> float:
    """Units per rank: one, or an equal fraction of one so that the ranks of all workers fit."""
    if not units:
        return 0.0
    ranks_per_unit = math.ceil(config.cluster.processes / units)
    return 1 / ranks_per_unit


def gpu_share(gpus: int, config: Config, role: str) -> float:
    """GPUs of a worker: the setting, else one for each rank of it, or an equal share."""
    if config.cluster.gpus is not None:
        return config.cluster.gpus
    if config.model.device == "cpu":
        return 0.0
    if gpus and config.cluster.ranks > 1:
        return float(config.cluster.ranks_of(role))
    return equal_share(gpus, config)


def rank_resources(
    config: Config, role: str, hosts: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """What Ray reserves for each rank of a worker: CPUs, GPUs, and a unit of its pool.

    hosts: Ray's resources of each host

    ConfigError where ranks would share a GPU.
    """
    cluster = config.cluster
    ranks = cluster.ranks_of(role)
    gpus = gpu_share(int(total(hosts, "GPU")), config, role) / ranks
    if ranks > 1 and gpus % 1:
        raise ConfigError(
            f"cluster.gpus is {cluster.gpus:g} for the {ranks} ranks of a {role} worker; "
            f"expected a multiple of {ranks}"
        )
    resources = {"CPU": _cpu_share(config, role, hosts), "GPU": gpus}
    if cluster.pools:
        resources[role] = 1.0
    return {name: units for name, units in resources.items() if units}


def _cpu_share(
    config: Config, role: str, hosts: Sequence[Mapping[str, float]]
) -> float:
    cluster = config.cluster
    share = equal_share(int(total(hosts, "CPU")), config)
    if cluster.rank_placement == "spread":
        return share
    eligible = [host for host in hosts if not cluster.pools or role in host]
    most = max((host.get("CPU", 0.0) for host in eligible), default=0.0)
    if not most:  # no host of the pool has joined
        return share
    return min(share, most / cluster.ranks_of(role))


def total(hosts: Sequence[Mapping[str, float]], resource: str) -> float:
    """The units of a resource that all hosts have."""
    return sum(host.get(resource, 0.0) for host in hosts)


def check_counts(counts: Mapping[Role, int], gpus: int | None, config: Config) -> None:
    """ConfigError for a number of workers that can never start.

    gpus: of the only host; None on a cluster, which may grow
    """
    for role, number in counts.items():
        if not 1 <= number <= MAX_WORKERS:
            raise ConfigError(f"{number} {role} workers; expected 1 to {MAX_WORKERS}")
    if gpus is not None:
        check_place(gpus, config, counts)


def check_place(gpus: int, config: Config, counts: Mapping[Role, int]) -> None:
    """ConfigError if the only host can never have room for these workers."""
    if config.cluster.pools:
        raise ConfigError(
            "cluster.pools is true on a private Ray, which has none; set cluster.address"
        )
    shares = [gpu_share(gpus, config, role) for role in counts]
    if config.cluster.ranks > 1 and config.cluster.gpus is None:
        needed = sum(map(mul, shares, counts.values()))
        if needed > gpus:
            raise ConfigError(
                f"this host has {gpus} GPUs; the ranks of all workers need {needed:g}"
            )
        return
    share = max(shares, default=0.0)
    if not share:
        return
    workers = sum(counts.values())
    room = _workers_that_fit(gpus, share)
    if room < workers:
        lack = f"this host has {gpus} GPUs, room for {room} of {workers} workers"
        if config.cluster.gpus is None:
            raise ConfigError(f"each worker has {share:g} GPUs since the start; {lack}")
        remedy = "fewer, or null, which shares what there is"
        raise ConfigError(f"cluster.gpus is {share:g}; {lack}: {remedy}")


def _workers_that_fit(gpus: int, share: float) -> int:
    """A fraction of a GPU is on one GPU: fractions do not add up across GPUs."""
    if share > 1:
        return int(gpus // share)
    return gpus * int(1 / share + 1e-9)


def worker_config(
    config: Config, gpus: float | None, host_resources: Mapping[str, float]
) -> Config:
    """The settings of one worker, with its share of the memory and its number of threads.

    gpus:           of this worker; None: it computes on the CPU
    host_resources: Ray's resources of this host; the units of a pool are room for ranks

    The ranks of the workers that fit on this host share its cores, unless the number of threads is
    set, and on CPUs its memory.
    """
    processes = processes_of_host(config, host_resources)
    part = 1 / processes if gpus is None else min(1, gpus)
    cores = int(host_resources.get("CPU", 0)) or os.cpu_count() or 1
    engine = replace(
        config.engine,
        memory_share=max(LEAST_SHARE, config.engine.memory_share * part),
        torch_threads=config.engine.torch_threads or max(1, cores // processes),
    )
    return replace(config, engine=engine)


def processes_of_host(config: Config, host_resources: Mapping[str, float]) -> int:
    """How many ranks the workers have that fit on this host, at least 1."""
    processes = 0
    for role, count in config.cluster.roles.items():
        ranks = count * config.cluster.ranks_of(role)
        if config.cluster.pools:
            ranks = min(ranks, int(host_resources.get(role, 0)))
        processes += ranks
    return max(1, processes)
