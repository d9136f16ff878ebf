"""What each worker gets of the hosts that several share."""

import os

from disagg.config import Config


def gpu_share(gpus: int, config: Config) -> float:
    """GPUs of each worker: as set, else one, or an equal part of one so that all find a place."""
    if config.cluster.gpus is not None:
        return config.cluster.gpus
    workers = config.cluster.prefill + config.cluster.decode
    return 1 / -(-workers // gpus) if gpus and config.model.device != "cpu" else 0.0


def torch_threads(config: Config) -> int:
    """Threads of torch: the cores of this host, shared among its workers."""
    if config.engine.torch_threads is not None:
        return config.engine.torch_threads
    return max(1, (os.cpu_count() or 1) // (config.cluster.prefill + config.cluster.decode))
