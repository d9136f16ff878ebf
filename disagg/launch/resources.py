"""What part of a host each worker gets. Knows no Ray."""

import os
from collections.abc import Mapping
from dataclasses import replace

from disagg.config import MAX_WORKERS, Config
from disagg.errors import ConfigError
from disagg.transfer.messages import Role


def equal_share(units: int, config: Config) -> float:
    """Of each worker: one, or an equal part of one so that all find a place; none of none."""
    workers = sum(config.cluster.roles.values())
    return 1 / -(-workers // units) if units else 0.0


def gpu_share(gpus: int, config: Config) -> float:
    """GPUs of each worker: as set, else an equal share."""
    if config.cluster.gpus is not None:
        return config.cluster.gpus
    return equal_share(gpus if config.model.device != "cpu" else 0, config)


def check_counts(wanted: Mapping[Role, int], gpus: int | None, config: Config) -> None:
    """ConfigError where so many workers cannot be; gpus: of the only host, where there is one."""
    for role, number in wanted.items():
        if not 1 <= number <= MAX_WORKERS:
            raise ConfigError(f"{number} {role} workers; 1 to {MAX_WORKERS} are wanted")
    if gpus is not None:
        check_place(gpus, config, sum(wanted.values()))


def check_place(gpus: int, config: Config, workers: int) -> None:
    """ConfigError where workers would wait for ever for a place on the only host there is."""
    each = gpu_share(gpus, config)
    if config.cluster.pools:
        raise ConfigError(
            "cluster.pools is true on a private Ray, which has none; set cluster.address"
        )
    room = (
        workers
        if not each
        else int(gpus // each)
        if each > 1
        else gpus * int(1 / each + 1e-9)
    )
    if room < workers:
        there = f"this host has {gpus} GPUs, room for {room} of {workers} workers"
        if config.cluster.gpus is None:
            raise ConfigError(f"each worker has {each:g} GPUs since the start; {there}")
        wanted = "fewer, or null, which shares what there is"
        raise ConfigError(f"cluster.gpus is {each:g}; {there}: {wanted}")


def of_a_share(config: Config, gpus: float, here: Mapping[str, float]) -> Config:
    """Of one worker: its part of a GPU's memory, and its threads.

    Unless a number is given, threads are the cores of this host, shared among the workers that may
    be on it. here: Ray's resources of this host; of pools among them, units are room for workers
    """
    cores, counts = int(here.get("CPU", 0)) or os.cpu_count() or 1, config.cluster.roles
    if config.cluster.pools:
        counts = {
            role: min(count, int(here.get(role, 0))) for role, count in counts.items()
        }
    threads = config.engine.torch_threads or max(
        1, cores // max(1, sum(counts.values()))
    )
    share = config.engine.memory_share * min(1, gpus)
    return replace(
        config, engine=replace(config.engine, memory_share=share, torch_threads=threads)
    )
