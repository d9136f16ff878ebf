"""A worker in a process of its own, as a Ray actor. The process ends with its worker."""

import faulthandler
import os
import signal
import threading
from typing import NoReturn

import ray

from disagg.config import changed_keys
from disagg.errors import DisaggError, OccupiedError
from disagg.launch import rank_bundles
from disagg.launch.resources import processes_of_host, worker_config
from disagg.launch.start_protocol import (
    Message,
    config_of,
    failure,
    success,
    worker_settings,
)
from disagg.log import configure
from disagg.transfer.messages import Role
from disagg.transfer.security import Authority, protected

# the process of a failed start ends after this; until then its error can be read
FAILED_S = 5.0
WATCH_S = 1.0  # the watch of a front end that is gone ends this long after the next one's begin
FORGOTTEN_S = 60.0  # a front end calls a worker as soon as it has a process
TAKEOVER_S = 5.0  # the connection of a killed service may look open for this long


class WorkerActor:
    """The methods of a worker that its service calls through Ray."""

    def __init__(
        self, settings: Message, role: str, name: str, authority: dict[str, str] | None
    ):
        faulthandler.enable()
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors are reported by name
        self._settings = settings
        self._role = role
        self._name = name
        self._authority = authority
        self._loaded = False
        self._was_called = threading.Event()
        self._num_watches = 0
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self.stop())
        self._await_call()

    def start(self, host: str | None, settings: Message) -> Message:
        """Load and serve, if it does not yet; the reply says how it can be reached.

        host:     address to listen on; None: the one that Ray knows
        settings: of the front end that calls

        The reply is an error if it cannot load, runs with other settings, or has a router of
        another service.
        """
        self._was_called.set()
        address = host or ray.util.get_node_ip_address()
        try:
            self._check_settings(settings)
            if not self._loaded:
                self._load(address)
                self._loaded = True
                end = threading.Thread(target=self._end_with_worker, daemon=True)
                end.start()
            self._check_alone()
        except Exception as error:
            if not self._loaded:
                # Ray would keep a detached actor
                threading.Timer(FAILED_S, self._end).start()
            if isinstance(error, DisaggError):
                return failure(address, error)
            raise
        return success(address, self._worker.info)

    def _check_settings(self, settings: Message) -> None:
        """OccupiedError unless the worker has the settings that this front end would give it."""
        self._config = config_of(self._settings)
        server = self._config.server
        configure(server.log_level, server.log_format)
        own = worker_settings(self._config)
        changed = changed_keys(own, worker_settings(config_of(settings)))
        if changed:
            orphan_s = self._config.cluster.orphan_s
            raise OccupiedError(
                f"{self._name} runs with other settings ({', '.join(changed)}), "
                f"until {orphan_s:g} s after its last router"
            )

    def _check_alone(self) -> None:
        """OccupiedError while a router of another service follows the worker."""
        if not self._worker.wait_alone(TAKEOVER_S):
            raise OccupiedError(
                f"{self._name} works for another service; "
                "stop that one, or use another cluster.name"
            )

    def _load(self, address: str) -> None:
        # not at the top: the launching process needs neither torch nor transformers
        import torch

        from disagg.launch.rank_actor import RankActors
        from disagg.worker.worker import Worker, settle_memory

        # of this thread, which loads; the engine's thread has its own number
        torch.set_num_threads(1)
        authority = Authority(**self._authority) if self._authority else None
        security = protected(self._config.security, authority, address)
        starter: RankActors | None = None
        if self._has_followers:
            starter = RankActors(self._config, self._role, address, authority, security)
        gpus = ray.get_runtime_context().get_assigned_resources().get("GPU")
        resources = host_resources()
        config = worker_config(self._config, gpus, resources)
        self._worker = Worker(
            config,
            Role(self._role),
            self._name,
            address,
            security,
            processes=processes_of_host(self._config, resources),
            starter=starter,
        )
        self._worker.start()
        settle_memory()

    @ray.method(concurrency_group="links")
    def meet(self, addresses: list[str]) -> list[str]:
        """Measure the links to decode workers; returns their speeds, in words."""
        return self._worker.meet(addresses)

    @ray.method(concurrency_group="watch")
    def doing(self) -> str:
        """What delays its start, in words; "" while it loads."""
        return self._worker.doing if hasattr(self, "_worker") else ""

    @ray.method(concurrency_group="watch")
    def assume(self, role: Role) -> None:
        """Change its role."""
        self._worker.assume(role)

    @ray.method(concurrency_group="watch")
    def stop(self, grace_s: float | None = None) -> None:
        """Finish or move its requests within the grace, then end. A loading one ends at once."""
        if not self._loaded:
            self._end()
        self._worker.stop(grace_s)

    @ray.method(concurrency_group="watch")
    def watch(self) -> bool:
        """True when the worker has ended, False when another front end watches; raises its error.

        The room of a worker that another front end watches is not free.
        """
        self._num_watches += 1
        number = self._num_watches
        while self._num_watches == number:
            if self._worker.wait(WATCH_S):
                return True
        return False

    def _end_with_worker(self) -> None:
        """End the process with the worker: Ray would keep a detached actor under its name."""
        try:
            self._worker.wait()
        finally:
            self._end()  # the thread that broke has printed its error

    def _await_call(self) -> None:
        """Let the process end unless its front end calls it soon."""
        threading.Thread(target=self._end_if_forgotten, daemon=True).start()

    def _end_if_forgotten(self) -> None:
        """End a process that waited for its host until its front end was gone."""
        if not self._was_called.wait(FORGOTTEN_S):
            self._end()

    @property
    def _has_followers(self) -> bool:
        return config_of(self._settings).cluster.ranks_of(self._role) > 1

    def _end(self) -> NoReturn:
        """End the process, and free the room of all ranks."""
        try:
            if self._has_followers:
                rank_bundles.leave()
        finally:
            os._exit(0)


def host_resources() -> dict[str, float]:
    """Ray's resources of this host."""
    node_id = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    return nodes[node_id]["Resources"]
