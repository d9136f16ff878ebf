"""Workers as Ray actors: started at once, watched, replaced. The only file that knows Ray.

Ray starts processes and tells when they die; nothing else goes through it. Private workers die
with the process that started them. Workers on a cluster are named and detached: they are found
again by name.
"""

import faulthandler
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from ray.exceptions import RayError

from disagg.config import Config
from disagg.errors import ConfigError, DisaggError, PeerLostError, error_from
from disagg.transfer.credentials import load_security
from disagg.workers.members import Role, Started
from disagg.workers.memory import settle_memory
from disagg.workers.portions import gpu_share, torch_threads

NAMESPACE = "disagg"
LOCAL = "local"
OBJECT_STORE_BYTES = 80 << 20  # nothing is put into it; Ray wants at least 75 MB
PRIVATE_ORPHAN_S = 5.0
CHECK_S = 0.5
RETRY_S = 5.0
MEET_S = 10.0

log = logging.getLogger(__name__)


class Shell:
    """A worker in a process of its own."""

    def __init__(self, config: Config, role: Role, name: str, token: str | None):
        faulthandler.enable()
        self._config, self._role, self._name, self._token = config, role, name, token
        self._started: Started | None = None
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self._worker.stop())

    def start(self, host: str | None, config: Config) -> Started | tuple[str, str]:
        """Load and serve; again: the same answer. An error comes as (reason, message)."""
        if config != self._config:
            until = f"until {self._config.cluster.orphan_s:g} s after its last router"
            return ConfigError.reason, f"{self._name} runs with other settings, {until}"
        # here, not above: torch and transformers, which the process that launches need not load
        import torch

        from disagg.workers.worker import Worker

        if self._started is None:
            torch.set_num_threads(torch_threads(self._config))
            try:
                security = load_security(self._config.security, self._token)
                address = host or ray.util.get_node_ip_address()
                self._worker = Worker(self._config, self._role, self._name, address, security)
                self._started = self._worker.start()
                settle_memory()
            except DisaggError as error:
                return error.reason, str(error)
            threading.Thread(target=self._end_with_worker, name="end", daemon=True).start()
        return self._started

    def meet(self, addresses: list[str]) -> list[str]:
        """Measure the links to decode workers; what each can do, in words."""
        return self._worker.meet(addresses)

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Ends with the worker, one way or the other."""
        self._worker.wait()

    def _end_with_worker(self) -> None:
        """A detached actor would stay, and be taken by its name for one that works."""
        try:
            self._worker.wait()
        finally:
            os._exit(0)  # what broke it, if something did, was printed by its own thread


@dataclass
class Starting:
    """An actor that loads, and the call that ends when it serves."""

    role: Role
    name: str
    handle: ray.actor.ActorHandle
    ready: ray.ObjectRef


@dataclass
class Watched:
    """An actor that serves, and the call that ends when it does."""

    started: Started
    handle: ray.actor.ActorHandle
    end: ray.ObjectRef


class Cluster:
    """The workers of one service."""

    def __init__(self, config: Config, token: str | None):
        self._private = config.cluster.address == LOCAL
        if self._private:
            orphan_s = min(config.cluster.orphan_s, PRIVATE_ORPHAN_S)
            config = replace(config, cluster=replace(config.cluster, orphan_s=orphan_s))
        self._config = config
        self._token = token
        self._starting: list[Starting] = []
        self._watched: list[Watched] = []
        self._replaced = 0
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self.links: list[str] = []  # what was measured at the start, in words

    def start(self) -> list[Started]:
        """All workers, loaded side by side. ModelError and others as the workers had them."""
        cluster = self._config.cluster
        names = [(Role.PREFILL, f"prefill-{i}") for i in range(cluster.prefill)]
        names += [(Role.DECODE, f"decode-{i}") for i in range(cluster.decode)]
        loading = [self._load(role, name) for role, name in names]
        started = [self._enter(each) for each in loading]
        self.links = self._introduce()
        return started

    def watch(self, on_up: Callable[[Started], None], on_down: Callable[[str], None]) -> None:
        """From now on tell of deaths, and start a new worker in place of a dead one."""

        def follow() -> None:
            while not self._closing.is_set():
                self.look(on_up, on_down)

        self._watcher = threading.Thread(target=follow, name="ray-watch", daemon=True)
        self._watcher.start()

    def look(self, on_up: Callable[[Started], None], on_down: Callable[[str], None]) -> None:
        """Wait a moment for a death or a worker that is ready; tell of it, replace the dead."""
        ended, ready = self._wait()
        for dead in ended:
            self._watched.remove(dead)
            on_down(dead.started.name)
            self._replace(dead.started.role, dead.started.name)
        for each in ready:
            self._starting.remove(each)
            try:
                on_up(self._enter(each))
            except DisaggError as error:
                log.error("%s did not start: %s; trying again", each.name, error)
                self._closing.wait(RETRY_S)
                self._replace(each.role, each.name)

    def close(self) -> None:
        """Stop private workers; those on a cluster stay."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
        if self._private:
            loading = [each.handle for each in self._starting]
            for handle in [each.handle for each in self._watched] + loading:
                ray.kill(handle)

    def _wait(self) -> tuple[list[Watched], list[Starting]]:
        """Those that ended and those whose start did, one way or the other, within CHECK_S."""
        calls = [each.end for each in self._watched] + [each.ready for each in self._starting]
        done = set(ray.wait(calls, timeout=CHECK_S)[0])
        ended = [each for each in self._watched if each.end in done]
        return ended, [each for each in self._starting if each.ready in done]

    def _replace(self, role: Role, name: str) -> None:
        if not self._closing.is_set():
            self._replaced += 1
            self._starting.append(self._load(role, f"{name.split('.')[0]}.{self._replaced}"))

    def _load(self, role: Role, name: str) -> Starting:
        gpus = gpu_share(int(ray.cluster_resources().get("GPU", 0)), self._config)
        options: dict[str, object] = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        options["num_gpus"] = gpus
        if self._config.cluster.pools:
            options["resources"] = {role.value: 1}
        if not self._private:
            options |= {"name": name, "lifetime": "detached", "get_if_exists": True}
        actor = ray.remote(concurrency_groups={"watch": 1})(Shell).options(**options)
        handle = actor.remote(self._config, role, name, self._token)
        ready = handle.start.remote("127.0.0.1" if self._private else None, self._config)
        return Starting(role, name, handle, ready)

    def _enter(self, each: Starting) -> Started:
        try:
            started = ray.get(each.ready)
        except RayError as error:
            raise PeerLostError(f"worker {each.name} broke while it started: {error}") from error
        if isinstance(started, tuple):
            raise error_from(*started)
        self._watched.append(Watched(started, each.handle, each.handle.watch.remote()))
        return started

    def _introduce(self) -> list[str]:
        """Let prefill workers measure their links to decode workers: "prefill-0: link to ..."."""
        there = self._watched
        decode = [x.started.address for x in there if x.started.role.decodes]
        asked = {
            x.started.name: x.handle.meet.remote(decode) for x in there if x.started.role.prefills
        }
        try:
            found = ray.get(list(asked.values()), timeout=MEET_S)
        except RayError:
            return []  # who is dead or slow is found out by the hand-offs
        return [f"{x}: {line}" for x, lines in zip(asked, found, strict=True) for line in lines]


@contextmanager
def connected(address: str, folder: Path | None) -> Iterator[None]:
    """A Ray session: a new one in `folder` for the address "local", else the one at an address.

    Never "auto": that joins whichever cluster is near. PeerLostError where nothing listens.
    """
    quiet = {"log_to_driver": False, "logging_level": "ERROR", "namespace": NAMESPACE}
    local = {
        "num_cpus": os.cpu_count(),
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_temp_dir": str(folder),
    }
    if address != LOCAL:
        _knock(address)
    try:
        ray.init(address=address, **quiet, **(local if address == LOCAL else {}))
    except (RuntimeError, ConnectionError, TimeoutError) as error:
        raise PeerLostError(f"Ray does not start or answer: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray itself tries for more than a minute before it says that nobody is there."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except (OSError, ValueError) as error:
        raise PeerLostError(f"no Ray at {address!r}: {error}") from error
