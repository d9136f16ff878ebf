"""Workers as Ray actors: started, watched, replaced. Only `ray_actor.py` knows Ray beside this.

    start ──► watched ──► dead ──► reported, and another one starts in its place
                └ private Ray itself lost ──► all reported, Ray and workers restart, a few times

Ray starts processes and tells when they die; nothing else goes through it. Private workers die
with the process that started them. Workers on a cluster are detached, so that they outlive a front
end that was killed: the next one finds them by name, and finds their secrets in Ray.
"""

import json
import logging
import os
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.experimental import internal_kv
from ray.job_config import JobConfig

from disagg.config import Config, ServerConfig
from disagg.errors import (
    ConfigError,
    DisaggError,
    PeerLostError,
    UnknownNameError,
    error_from,
)
from disagg.launch.private_ray import Session
from disagg.launch.ray_actor import WorkerActor
from disagg.launch.resources import check_counts, check_place, equal_share, gpu_share
from disagg.launch.scaling import plan_scaling
from disagg.transfer.messages import Role, WorkerInfo, serves
from disagg.transfer.security import Authority, load_security, protected

LOCAL = "local"
AUTO = "auto"
# keys under which Ray keeps facts for the next front end
AUTHORITY_KEY = b"disagg-authority"
COUNTS_KEY = b"disagg-counts"
OBJECT_STORE_BYTES = 80 << 20  # nothing is put into it; Ray requires at least 75 MB
PRIVATE_ORPHAN_S = 5.0
CHECK_S = 0.5
KNOCK_S = 1.0
RETRY_S = 5.0
DRAIN_S = 60.0  # in which a worker that leaves may move or finish its requests
MEET_S = 10.0
PROGRESS_S = 3.0  # between two reports of what loading workers do
RESTARTS = 3  # of a private Ray before a worker serves again; then the service gives up

log = logging.getLogger(__name__)


class InstalledOnly(JobConfig):
    """Workers import what is installed, not what lies in the user's working folder.

    Ray puts that folder first on their path, unless they have a working folder of their own.
    """

    def _runtime_env_has_working_dir(self) -> bool:
        return True


@dataclass(eq=False)
class Actor:
    """A worker that loads, then serves.

    call:   returns when it serves; then another one, when it has ended
    info:   once it serves
    leaves: it stops once those that stay can serve
    """

    role: Role
    name: str
    handle: ray.actor.ActorHandle
    call: ray.ObjectRef
    info: WorkerInfo | None = None
    leaves: bool = False


class Cluster:
    """The workers of one service, on the private Ray of a session, or on a cluster.

    security: of the front end itself, once connected
    target_counts: target number of workers of each role
    links:    speeds measured at the start, in words
    """

    def __init__(self, config: Config, session: Session | None = None):
        self.security = load_security(config.security)  # its errors before Ray starts
        self._private = config.cluster.address == LOCAL
        if self._private:
            orphan_s = min(config.cluster.orphan_s, PRIVATE_ORPHAN_S)
            config = replace(config, cluster=replace(config.cluster, orphan_s=orphan_s))
        # workers are compared by their settings, and the next front end may have another server
        self._config = replace(config, server=ServerConfig())
        self.target_counts = {
            Role(role): number for role, number in config.cluster.roles.items()
        }
        self.links: list[str] = []
        self._session = session
        self._authority = Authority(session.token) if session else None
        self._gpus: int | None = None  # of a private Ray; a cluster may grow
        self._is_guest = False  # this process had joined Ray before
        self._addresses: list[tuple[str, int]] = []  # where a private Ray listens
        self._actors: list[Actor] = []
        self._adopted: list[str] = []  # names of workers of an earlier front end
        self._num_replaced = 0
        self._num_restarts = 0
        self._losses_in_a_row = 0  # of a private Ray, since a worker served
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None

    # -- the life of a service

    def connect(self) -> None:
        """A new Ray, the one at an address, or the one that this process is a part of.

        PeerLostError if none starts or answers, ConfigError if a new one can never have room for
        all workers. It joins a Ray that is near only if the address is "auto".
        """
        self._is_guest = not self._private and ray.is_initialized()
        try:
            if not self._is_guest:
                ray.init(
                    **self._init_options(), log_to_driver=False, logging_level="ERROR"
                )
            if self._private:
                (node,) = ray.nodes()
                self._gpus = int(node["Resources"].get("GPU", 0))
                check_place(self._gpus, self._config, sum(self.target_counts.values()))
                self._addresses = [
                    host_and_port(ray.get_runtime_context().gcs_address),
                    (node["NodeManagerAddress"], node["NodeManagerPort"]),
                ]
            else:
                self._authority = self._shared_authority()
            host = ray.util.get_node_ip_address()
        except (RuntimeError, ConnectionError, TimeoutError, RayError) as error:
            raise PeerLostError(f"Ray does not start or answer: {error}") from error
        self.security = protected(self._config.security, self._authority, host)

    def start(
        self, tell: Callable[[str], None] = lambda doing: None
    ) -> list[WorkerInfo]:
        """Load all workers; returns when there is one of each role. `watch` reports the others.

        tell: called with what the workers do that takes long, in words

        Raises ModelError and others, as the workers raised them.
        """
        self._actors = [self._load(role, name) for role, name in self._initial_names()]
        loading = {actor.call: actor for actor in self._actors}
        serving: list[WorkerInfo] = []
        last_doing = ""
        while loading and not serves([info.role for info in serving]):
            ready, _ = ray.wait(list(loading), timeout=PROGRESS_S)
            if not ready:
                doing = self._doing(*loading.values())
                if doing not in ("", last_doing):
                    tell(doing)
                    last_doing = doing
                continue
            actor = loading.pop(ready[0])
            try:
                serving.append(self._enter(actor))
            except PeerLostError:
                if actor.name not in self._adopted:
                    raise
                # it left meanwhile; `poll` starts another one
                self._actors.remove(actor)
        self.links = self._measure_links()
        return serving

    def watch(
        self,
        on_up: Callable[[WorkerInfo], None],
        on_down: Callable[[str], None],
        on_end: Callable[[DisaggError], None],
    ) -> None:
        """From now on report deaths, and start a new worker in place of a dead one.

        on_end: called once, if Ray itself is lost for good
        """

        def follow() -> None:
            while not self._closing.is_set():
                try:
                    self.poll(on_up, on_down)
                except DisaggError as error:
                    on_end(error)
                    break
                except Exception:
                    log.exception("watching the workers broke; going on")
                    self._closing.wait(RETRY_S)

        self._watcher = threading.Thread(target=follow, name="ray-watch", daemon=True)
        self._watcher.start()

    def poll(
        self, on_up: Callable[[WorkerInfo], None], on_down: Callable[[str], None]
    ) -> None:
        """Wait a moment for a death or a worker that is ready; report it, replace the dead.

        PeerLostError once a private Ray was lost again and again, and no worker served between.
        """
        if not all(knock(host, port) for host, port in self._addresses):
            self._restart_ray(on_down)
            return
        calls = [actor.call for actor in self._actors]
        done, _ = ray.wait(calls, timeout=CHECK_S) if calls else ([], [])
        for actor in [x for x in self._actors if x.call in done]:
            try:
                if actor.info is None:
                    on_up(self._enter(actor))
                    self._losses_in_a_row = 0
                    continue
                on_down(actor.name)
                if not actor.leaves:
                    log.warning(
                        "%s ended%s; another one starts",
                        actor.name,
                        death_of(actor.call),
                    )
            except DisaggError as error:
                if not actor.leaves:
                    log.error("%s did not start: %s; trying again", actor.name, error)
                    self._closing.wait(RETRY_S)
            self._actors.remove(actor)
        self._adjust()

    # -- scaling: asked from any thread, done at the next poll

    def scale(self, prefill: int | None, decode: int | None) -> None:
        """Set the number of workers of each role; None keeps it.

        Some workers then change their role, new ones load, others leave.
        """
        if self._config.cluster.colocated:
            raise ConfigError("all workers of this service do both; they stay as many")
        counts = dict(self.target_counts)
        if prefill is not None:
            counts[Role.PREFILL] = prefill
        if decode is not None:
            counts[Role.DECODE] = decode
        check_counts(counts, self._gpus, self._config)
        self.target_counts = counts
        self._store_counts()

    def drain(self, name: str) -> None:
        """Let a worker leave, with another one in its place."""
        actors = {actor.name: actor for actor in self._actors}
        if name not in actors:
            raise UnknownNameError.of("worker", name, actors)
        actors[name].leaves = True

    def _adjust(self) -> None:
        """Change roles, load workers and let some leave, until every role has its number."""
        may_change_role = not self._config.cluster.pools
        plan = plan_scaling(self._actors, self.target_counts, may_change_role)
        for actor, role in plan.role_changes:
            actor.role = role
            actor.handle.assume.remote(role)
        for role in plan.loads:
            self._load_another(role)
        for actor in plan.leaving:
            actor.leaves = True
        if all(actor.info or actor.leaves for actor in self._actors):
            for actor in self._actors:
                if actor.leaves:
                    actor.handle.stop.remote(DRAIN_S)

    def close(self) -> None:
        """Stop the workers, those of a cluster within their grace, and leave Ray."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
        try:
            if self._private or not self._config.cluster.detach:
                self._stop()
        except RayError as error:
            log.error("the workers could not be stopped: %s", error)
        if not self._is_guest:
            ray.shutdown()

    # -- inside

    def _init_options(self) -> dict[str, object]:
        """Arguments of `ray.init`: which Ray to start or join."""
        if self._session is not None:
            return {
                "address": LOCAL,
                # Ray lets every user read its folder, so it is inside a closed one
                "_temp_dir": f"{self._session.folder}/r{self._num_restarts or ''}",
                "num_cpus": os.cpu_count(),
                "object_store_memory": OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "job_config": InstalledOnly(),
            }
        address = self._config.cluster.address
        if address == AUTO:
            address = os.environ.get("RAY_ADDRESS", AUTO)
        if address != AUTO and not knock(*host_and_port(address)):
            # Ray itself would try for more than a minute
            raise PeerLostError(f"no Ray at {address!r}")
        if "://" in address:  # Ray Client gives workers no folder anyway
            return {"address": address}
        return {"address": address, "job_config": InstalledOnly()}

    def _shared_authority(self) -> Authority:
        """The secrets of this cluster name, made by the first front end; only those in use."""
        stored = self._load_fact(AUTHORITY_KEY)
        if stored is None:
            fresh = json.dumps(asdict(Authority.make()))
            self._store_fact(AUTHORITY_KEY, fresh, overwrite=False)
            # of two front ends at once, the first one wins
            stored = self._load_fact(AUTHORITY_KEY)
        authority = Authority(**json.loads(stored))
        if self._config.security.plane == "tls":
            return authority
        return Authority(authority.token)

    def _initial_names(self) -> list[tuple[Role, str]]:
        """The workers of an earlier front end, and new ones up to the number of each role."""
        if not self._private:
            self._adopt()
        names: list[tuple[Role, str]] = []
        for role, number in self.target_counts.items():
            adopted = [x for x in self._adopted if x.startswith(f"{role}-")]
            free = [f"{role}-{i}" for i in range(number)]
            free = [name for name in free if name not in adopted]
            missing = max(0, number - len(adopted))
            names += [(role, name) for name in adopted + free[:missing]]
        return names

    def _adopt(self) -> None:
        """Take over the workers of an earlier front end, and the numbers that it had set."""
        namespace = self._config.cluster.name
        self._adopted = sorted(
            actor["name"]
            for actor in ray.util.list_named_actors(all_namespaces=True)
            if actor["namespace"] == namespace
        )
        replacements = [int(name.partition(".")[2] or 0) for name in self._adopted]
        self._num_replaced = max(replacements, default=0)
        stored = self._load_fact(COUNTS_KEY)
        if stored and self._adopted:
            self.target_counts = {
                Role(role): number for role, number in json.loads(stored).items()
            }
        self._store_counts()

    def _store_counts(self) -> None:
        if not self._private:
            self._store_fact(COUNTS_KEY, json.dumps(self.target_counts))

    def _load_fact(self, key: bytes) -> Any:
        namespace = self._config.cluster.name
        return internal_kv._internal_kv_get(key, namespace=namespace)

    def _store_fact(self, key: bytes, value: str, **options: bool) -> None:
        namespace = self._config.cluster.name
        internal_kv._internal_kv_put(key, value, namespace=namespace, **options)

    def _stop(self) -> None:
        """Stop the workers of this service; those on a cluster get their grace.

        Workers that serve another front end stay.
        """
        serving = [actor for actor in self._actors if actor.info and not self._private]
        for actor in serving:
            actor.handle.stop.remote()
        if serving:
            ray.wait(
                [actor.call for actor in serving],
                num_returns=len(serving),
                timeout=self._config.cluster.grace_s + RETRY_S,
            )
        for actor in self._actors:
            if actor.info or actor.name not in self._adopted:
                ray.kill(actor.handle)

    def _restart_ray(self, on_down: Callable[[str], None]) -> None:
        """Ray is gone, and its workers with it: start another one, with all workers."""
        self._num_restarts += 1
        self._losses_in_a_row += 1
        for actor in self._actors:
            on_down(actor.name)
        self._actors = []
        ray.shutdown()
        if self._losses_in_a_row > RESTARTS:
            raise PeerLostError(
                f"the private Ray was lost {self._losses_in_a_row} times before a worker "
                "served; given up"
            )
        log.error("the private Ray is gone; starting another one")
        try:
            self.connect()
        except PeerLostError as error:
            log.error("%s; trying again", error)
            self._closing.wait(RETRY_S)
        else:
            self._adjust()

    def _load_another(self, role: Role) -> None:
        """Load a worker under a free name.

        A private Ray loads only as many at once as there are cores, so that the rest can still
        be called off.
        """
        if self._closing.is_set():
            return
        num_loading = sum(actor.info is None for actor in self._actors)
        if self._private and num_loading >= (os.cpu_count() or 1):
            return
        self._num_replaced += 1
        in_use = {x.name.split(".")[0] for x in self._actors if not x.leaves}
        names = (f"{role}-{i}" for i in count())
        name = next(name for name in names if name not in in_use)
        self._actors.append(self._load(role, f"{name}.{self._num_replaced}"))

    def _load(self, role: Role, name: str) -> Actor:
        # the class has its name in Ray's lists
        kind = type(f"{role.title()}Worker", (WorkerActor,), {})
        options = self._actor_options(role, name)
        actor = ray.remote(concurrency_groups={"watch": 2})(kind).options(**options)
        handle = actor.remote(self._config, role, name, self._authority)
        host = "127.0.0.1" if self._private else None
        return Actor(role, name, handle, handle.start.remote(host, self._config))

    def _actor_options(self, role: Role, name: str) -> dict[str, object]:
        cluster = self._config.cluster
        resources = ray.cluster_resources()
        # a private Ray runs nothing else, so its workers need no share of the cores
        cpus = 0 if self._private else int(resources.get("CPU", 0))
        gpus = int(resources.get("GPU", 0))
        options: dict[str, object] = {
            "name": name,
            "namespace": cluster.name,
            "max_restarts": 0,
            "max_task_retries": 0,
            "num_cpus": equal_share(cpus, self._config),
            "num_gpus": gpu_share(gpus, self._config),
        }
        if cluster.runtime_env is not None:
            options["runtime_env"] = cluster.runtime_env
        if cluster.pools:
            options["resources"] = {role.value: 1}
        if not self._private:
            options["lifetime"] = "detached"
            options["get_if_exists"] = True
        return options

    def _enter(self, actor: Actor) -> WorkerInfo:
        """A worker has loaded: watch it. Raises the error that it ended with instead."""
        try:
            result = ray.get(actor.call)
        except RayTaskError as error:  # its text is a traceback, in colours
            cause = f"{type(error.cause).__name__}: {error.cause}"
            raise _broken(actor, cause) from error
        except RayError as error:  # its text begins with the actor and its host
            raise _broken(actor, str(error).strip().rpartition("\n")[2]) from error
        if isinstance(result, tuple):
            raise error_from(*result)
        info: WorkerInfo = result
        actor.info = info
        actor.role = info.role
        if info.role is Role.NONE:  # the front end before this one let it leave
            actor.leaves = True
        actor.call = actor.handle.watch.remote()
        return info

    def _doing(self, *loading: Actor) -> str:
        """What the first loading worker does, if it can say so."""
        calls = [actor.handle.doing.remote() for actor in loading]
        try:
            answers = ray.get(calls, timeout=PROGRESS_S)
        except RayError:
            return ""  # a process still starts, or has ended; its call will raise
        return next(filter(None, answers), "")

    def _measure_links(self) -> list[str]:
        """Speeds from prefill to decode workers: "prefill-0: link to ..."."""
        addresses = [
            actor.info.address
            for actor in self._actors
            if actor.info and actor.info.role.decodes
        ]
        calls = {
            actor.name: actor.handle.meet.remote(addresses)
            for actor in self._actors
            if actor.info and actor.info.role.prefills
        }
        try:
            answers = ray.get(list(calls.values()), timeout=MEET_S)
        except RayError:
            return []  # hand-offs will show which worker is dead or slow
        return [
            f"{name}: {line}"
            for name, lines in zip(calls, answers, strict=True)
            for line in lines
        ]


def death_of(call: "ray.ObjectRef") -> str:
    """How the process of a call that is done ended, for the log; "" if the call returned.

    Ray knows no exit code or signal: a kill, a crash and the kernel's out-of-memory killer look
    alike to it.
    """
    try:
        ray.get(call, timeout=0)
    except RayError as error:
        text = str(error)
        pid = re.search(r"^\s*pid: (\d+)", text, re.M)
        host = re.search(r"^\s*ip: (\S+)", text, re.M)
        exit_type = re.search(r"exit type: (\w+)", text)
        if not (pid and host and exit_type):
            return f": {text.strip().rpartition(chr(10))[2]}"
        process = f"process {pid[1]} at {host[1]}"
        return f": its {process} was killed or crashed (Ray: {exit_type[1]})"
    return ""


def _broken(actor: Actor, cause: str) -> PeerLostError:
    return PeerLostError(f"worker {actor.name} broke while it started: {cause}")


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of "host:port" or "ray://host:port"; PeerLostError for anything else."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        raise PeerLostError(f"no Ray at {address!r}: it is no host:port")
    return host, int(port)


def knock(host: str, port: int) -> bool:
    """Whether a server listens at this address; one too busy to answer counts."""
    try:
        socket.create_connection((host, port), timeout=KNOCK_S).close()
    except TimeoutError:
        return True
    except (OSError, OverflowError):
        return False
    return True
