"""A worker in a process of its own, as a Ray actor: it loads, serves, and ends with its worker."""

import faulthandler
import os
import signal
import threading

import ray

from disagg.config import Config
from disagg.errors import ConfigError, DisaggError
from disagg.launch.resources import of_a_share
from disagg.transfer.messages import Role, WorkerInfo
from disagg.transfer.security import Authority, protected

FAILED_S = 5.0  # for the error of one that could not start, before it ends
WATCH_S = (
    1.0  # a front end that is gone watches no longer than this beside the next one
)
TAKEOVER_S = 5.0  # how long a service that was killed may still seem to listen


class WorkerActor:
    """What a service calls of its worker, through Ray."""

    def __init__(
        self, config: Config, role: Role, name: str, authority: Authority | None
    ):
        faulthandler.enable()
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what breaks is told by name
        self._config, self._role, self._name, self._authority = (
            config,
            role,
            name,
            authority,
        )
        self._loaded, self._watches = False, 0
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, lambda *_: self.stop())

    def start(self, host: str | None, config: Config) -> WorkerInfo | tuple[str, str]:
        """Load and serve; again: how it can be reached now, unless another service has it.

        An error comes as (reason, message).
        """
        if config != self._config:
            until = f"until {self._config.cluster.orphan_s:g} s after its last router"
            return ConfigError.reason, f"{self._name} runs with other settings, {until}"
        # here, not above: torch and transformers, which the process that launches need not load
        import torch

        from disagg.worker.worker import Worker, settle_memory

        if not self._loaded:
            torch.set_num_threads(
                1
            )  # of this thread, which loads; the engine's has its own
            try:
                address = host or ray.util.get_node_ip_address()
                security = protected(self._config.security, self._authority, address)
                gpus = (
                    ray.get_runtime_context().get_assigned_resources().get("GPU", 1.0)
                )
                config = of_a_share(self._config, gpus, resources_here())
                self._worker = Worker(config, self._role, self._name, address, security)
                self._worker.start()
                settle_memory()
            except Exception as error:
                threading.Timer(
                    FAILED_S, os._exit, [1]
                ).start()  # detached, it would stay
                if isinstance(error, DisaggError):
                    return error.reason, str(error)
                raise
            self._loaded = True
            threading.Thread(
                target=self._end_with_worker, name="end", daemon=True
            ).start()
        if not self._worker.wait_alone(TAKEOVER_S):
            other = "works for another service; stop that one, or use another cluster"
            return ConfigError.reason, f"{self._name} {other}"
        return self._worker.started

    def meet(self, addresses: list[str]) -> list[str]:
        """Measure the links to decode workers; what each can do, in words."""
        return self._worker.meet(addresses)

    @ray.method(concurrency_group="watch")
    def doing(self) -> str:
        """What takes long before it serves, in words; nothing where it only loads."""
        return self._worker.doing if hasattr(self, "_worker") else ""

    @ray.method(concurrency_group="watch")
    def assume(self, role: Role) -> None:
        """Do something else from now on."""
        self._worker.assume(role)

    @ray.method(concurrency_group="watch")
    def stop(self, grace_s: float | None = None) -> None:
        """Finish or move what is here within the grace, and end; one that loads just ends."""
        if not self._loaded:
            os._exit(0)
        self._worker.stop(grace_s)

    @ray.method(concurrency_group="watch")
    def watch(self) -> None:
        """Ends with the worker, one way or the other; or when another front end watches."""
        self._watches = mine = self._watches + 1
        while self._watches == mine and not self._worker.wait(WATCH_S):
            pass

    def _end_with_worker(self) -> None:
        """A detached actor would stay, and be taken by its name for one that works."""
        try:
            self._worker.wait()
        finally:
            os._exit(
                0
            )  # what broke it, if something did, was printed by its own thread


def resources_here() -> dict[str, float]:
    """Ray's resources of this host."""
    node = ray.get_runtime_context().get_node_id()
    return next(x["Resources"] for x in ray.nodes() if x["NodeID"] == node)
