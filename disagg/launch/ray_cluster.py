"""Workers as Ray actors: started at once, watched, replaced. What knows Ray is here and in `shell`.

    start ──► watched ──► dead ──► told, and another one starts in its place
                └ private Ray itself lost ──► all told, Ray and workers start anew, a few times

Ray starts processes and tells when they die; nothing else goes through it. Private workers die
with the process that started them. Workers on a cluster are detached, so that they outlive a front
end that was killed: the next one finds them by name, and in Ray what they were protected with.
"""

import json
import logging
import os
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import count, islice

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
from disagg.transfer.messages import Role, WorkerInfo, serves
from disagg.transfer.security import Authority, load_security, protected

LOCAL, AUTO = "local", "auto"
KEPT, COUNTS = (
    b"disagg-authority",
    b"disagg-counts",
)  # what Ray keeps for the next front end
OBJECT_STORE_BYTES = 80 << 20  # nothing is put into it; Ray wants at least 75 MB
PRIVATE_ORPHAN_S = 5.0
CHECK_S = 0.5
KNOCK_S = 1.0
RETRY_S = 5.0
DRAIN_S = 60.0  # for what a worker has to move, or to end, where it leaves
MEET_S = 10.0
TELL_S = 3.0  # between two looks at what workers do that load
RESTARTS = 3  # of a private Ray before a worker serves again; then the service gives up

log = logging.getLogger(__name__)


class Apart(JobConfig):
    """Of workers that import what is installed, whatever lies where the user stands.

    Ray puts the working folder in front of all they import, unless they have one of their own.
    """

    def _runtime_env_has_working_dir(self) -> bool:
        return True


@dataclass(eq=False)
class Actor:
    """A worker that loads, then serves.

    call:   ends when it serves, then when it has ended
    leaves: it stops once those that stay can serve
    """

    role: Role
    name: str
    handle: ray.actor.ActorHandle
    call: ray.ObjectRef
    started: WorkerInfo | None = None
    leaves: bool = False


class Cluster:
    """The workers of one service, on the private Ray of a session, or on a cluster.

    security: of the front end itself, once connected
    wanted:   how many workers of each role there shall be
    """

    def __init__(self, config: Config, session: Session | None = None):
        self.security = load_security(config.security)  # its errors before Ray starts
        self._private = config.cluster.address == LOCAL
        if self._private:
            orphan_s = min(config.cluster.orphan_s, PRIVATE_ORPHAN_S)
            config = replace(config, cluster=replace(config.cluster, orphan_s=orphan_s))
        self._config = replace(
            config, server=ServerConfig()
        )  # a new front end may have another
        self._session = session
        self._authority = Authority(session.token) if session else None
        self._gpus: int | None = None  # of a private Ray: a cluster may grow
        self._guest = False  # of a process that had joined Ray before
        self._actors: list[Actor] = []
        self.wanted = {
            Role(role): number for role, number in config.cluster.roles.items()
        }
        self._found: list[str] = []  # names of workers that were there before
        self._replaced = self._restarts = self._lost = (
            0  # the last one: since a worker served
        )
        self._doors: list[tuple[str, int]] = []  # where a private Ray listens
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self.links: list[str] = []  # what was measured at the start, in words

    # -- the life of a service

    def connect(self) -> None:
        """A new Ray, the one at an address, or the one that this process is a part of.

        PeerLostError where none starts or answers, ConfigError where a new one can never have
        a place for all workers. Never "auto" unless that was said: it joins whichever is near.
        """
        self._guest = not self._private and ray.is_initialized()
        try:
            if not self._guest:
                ray.init(**self._where(), log_to_driver=False, logging_level="ERROR")
            if self._private:
                (node,) = ray.nodes()
                self._gpus = int(node["Resources"].get("GPU", 0))
                check_place(self._gpus, self._config, sum(self.wanted.values()))
                gcs = host_and_port(ray.get_runtime_context().gcs_address)
                self._doors = [
                    gcs,
                    (node["NodeManagerAddress"], node["NodeManagerPort"]),
                ]
            else:
                self._authority = self._agree()
            here = ray.util.get_node_ip_address()
        except (RuntimeError, ConnectionError, TimeoutError, RayError) as error:
            raise PeerLostError(f"Ray does not start or answer: {error}") from error
        self.security = protected(self._config.security, self._authority, here)

    def start(
        self, tell: Callable[[str], None] = lambda doing: None
    ) -> list[WorkerInfo]:
        """One of each role, loaded side by side with all others, which `watch` tells of.

        tell: is told what takes them long, in words
        ModelError and others as the workers had them.
        """
        self._actors = [self._load(role, name) for role, name in self._names()]
        loading = {actor.call: actor for actor in self._actors}
        started, told = list[WorkerInfo](), ""
        while loading and not serves([x.role for x in started]):
            ready, _ = ray.wait(list(loading), timeout=TELL_S)
            if ready:
                try:
                    started.append(self._enter(actor := loading.pop(ready[0])))
                except PeerLostError:
                    if actor.name not in self._found:
                        raise
                    self._actors.remove(
                        actor
                    )  # it left meanwhile; `look` starts another one
            elif (doing := self._doing(*loading.values())) not in ("", told):
                tell(told := doing)
        self.links = self._introduce()
        return started

    def watch(
        self,
        on_up: Callable[[WorkerInfo], None],
        on_down: Callable[[str], None],
        on_end: Callable[[DisaggError], None],
    ) -> None:
        """From now on tell of deaths, and start a new worker in place of a dead one.

        on_end: called once if Ray itself is lost for good
        """

        def follow() -> None:
            while not self._closing.is_set():
                try:
                    self.look(on_up, on_down)
                except DisaggError as error:
                    on_end(error)
                    break
                except Exception:
                    log.exception("watching the workers broke; going on")
                    self._closing.wait(RETRY_S)

        self._watcher = threading.Thread(target=follow, name="ray-watch", daemon=True)
        self._watcher.start()

    def look(
        self, on_up: Callable[[WorkerInfo], None], on_down: Callable[[str], None]
    ) -> None:
        """Wait a moment for a death or a worker that is ready; tell of it, replace the dead.

        PeerLostError once a private Ray was lost again and again, and no worker served between.
        """
        if not all(knock(*door) for door in self._doors):
            self._start_anew(on_down)
            return
        calls = [actor.call for actor in self._actors]
        done = ray.wait(calls, timeout=CHECK_S)[0] if calls else []
        for actor in [x for x in self._actors if x.call in done]:
            try:
                if actor.started is None:
                    on_up(self._enter(actor))
                    self._lost = 0
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

    # -- who shall be there: asked from any thread, done at the next look

    def scale(self, prefill: int | None, decode: int | None) -> None:
        """So many workers of each role; some change what they do, new ones load, others leave."""
        if self._config.cluster.colocated:
            raise ConfigError("all workers of this service do both; they stay as many")
        given = {Role.PREFILL: prefill, Role.DECODE: decode}
        wanted = self.wanted | {role: x for role, x in given.items() if x is not None}
        check_counts(wanted, self._gpus, self._config)
        self.wanted = wanted
        self._keep_counts()

    def drain(self, name: str) -> None:
        """Let a worker leave, with another one in its place."""
        if name not in (known := {actor.name: actor for actor in self._actors}):
            raise UnknownNameError.of("worker", name, known)
        known[name].leaves = True

    def _adjust(self) -> None:
        """Change roles, load workers and let some leave, as it is wanted."""
        stay = {
            role: [x for x in self._actors if x.role is role and not x.leaves]
            for role in self.wanted
        }
        spare = [x for role, number in self.wanted.items() for x in stay[role][number:]]
        able = [x for x in spare if x.started and not self._config.cluster.pools]
        for role, number in self.wanted.items():
            for _ in range(number - len(stay[role])):
                if able:
                    able[0].role = role
                    able[0].handle.assume.remote(role)
                    spare.remove(able.pop(0))
                else:
                    self._load_another(role)
        for actor in spare:
            actor.leaves = True
        for actor in self._actors:
            if actor.leaves and all(x.started or x.leaves for x in self._actors):
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
        if not self._guest:
            ray.shutdown()

    # -- inside

    def _where(self) -> dict[str, object]:
        """What Ray is told of where it is."""
        if self._session is not None:
            # Ray opens its folder to everybody: it lies in one that is closed
            folder = f"{self._session.folder}/r{self._restarts or ''}"
            size = {
                "num_cpus": os.cpu_count(),
                "object_store_memory": OBJECT_STORE_BYTES,
            }
            rest = {"include_dashboard": False, "job_config": Apart()}
            return {"address": LOCAL, "_temp_dir": folder, **size, **rest}
        address = self._config.cluster.address
        if address == AUTO:
            address = os.environ.get("RAY_ADDRESS", AUTO)
        if address != AUTO and not knock(*host_and_port(address)):
            # Ray itself tries for more than a minute before it says that nobody is there
            raise PeerLostError(f"no Ray at {address!r}")
        if "://" in address:  # a client of Ray's, which gives workers no folder anyway
            return {"address": address}
        return {"address": address, "job_config": Apart()}

    def _agree(self) -> Authority:
        """What the first front end of this name made, as far as it is wanted."""
        plane, place = (
            self._config.security.plane,
            {"namespace": self._config.cluster.name},
        )
        if (kept := internal_kv._internal_kv_get(KEPT, **place)) is None:
            made = json.dumps(asdict(Authority.make()))
            internal_kv._internal_kv_put(KEPT, made, overwrite=False, **place)
            kept = internal_kv._internal_kv_get(KEPT, **place)
        authority = Authority(**json.loads(kept))
        return authority if plane == "tls" else Authority(authority.token)

    def _names(self) -> list[tuple[Role, str]]:
        """The workers that are there, and as many more as were wanted last."""
        cluster = self._config.cluster
        if not self._private:
            actors = ray.util.list_named_actors(all_namespaces=True)
            self._found = sorted(
                x["name"] for x in actors if x["namespace"] == cluster.name
            )
            self._replaced = max(
                (int(x.partition(".")[2] or 0) for x in self._found), default=0
            )
            kept = internal_kv._internal_kv_get(COUNTS, namespace=cluster.name)
            if kept and self._found:
                self.wanted = {
                    Role(role): number for role, number in json.loads(kept).items()
                }
            self._keep_counts()
        names = []
        for role, number in self.wanted.items():
            mine = [name for name in self._found if name.startswith(f"{role}-")]
            new = (x for i in range(number) if (x := f"{role}-{i}") not in mine)
            names += [
                (role, x) for x in (*mine, *islice(new, max(0, number - len(mine))))
            ]
        return names

    def _keep_counts(self) -> None:
        if not self._private:
            counts, name = json.dumps(self.wanted), self._config.cluster.name
            internal_kv._internal_kv_put(COUNTS, counts, namespace=name)

    def _stop(self) -> None:
        """Those of a cluster that serve us end by themselves, if they can; others' stay."""
        serving = [
            actor for actor in self._actors if actor.started and not self._private
        ]
        for actor in serving:
            actor.handle.stop.remote()
        if ends := [actor.call for actor in serving]:
            ray.wait(
                ends,
                num_returns=len(ends),
                timeout=self._config.cluster.grace_s + RETRY_S,
            )
        for actor in self._actors:
            if actor.started or actor.name not in self._found:
                ray.kill(actor.handle)

    def _start_anew(self, on_down: Callable[[str], None]) -> None:
        """Ray is gone, and its workers with it: another one, with all workers."""
        self._restarts += 1
        self._lost += 1
        for actor in self._actors:
            on_down(actor.name)
        self._actors = []
        ray.shutdown()
        if self._lost > RESTARTS:
            told = f"the private Ray was lost {self._lost} times before a worker served"
            raise PeerLostError(f"{told}; given up")
        log.error("the private Ray is gone; starting another one")
        try:
            self.connect()
        except PeerLostError as error:
            log.error("%s; trying again", error)
            self._closing.wait(RETRY_S)
        else:
            self._adjust()

    def _load_another(self, role: Role) -> None:
        """Under a free name; a private Ray loads few at once: the rest can be called off."""
        loads = sum(actor.started is None for actor in self._actors)
        if not self._closing.is_set() and (
            not self._private or loads < (os.cpu_count() or 1)
        ):
            self._replaced += 1
            taken = {x.name.split(".")[0] for x in self._actors if not x.leaves}
            name = next(x for i in count() if (x := f"{role}-{i}") not in taken)
            self._actors.append(self._load(role, f"{name}.{self._replaced}"))

    def _load(self, role: Role, name: str) -> Actor:
        cluster, units = self._config.cluster, ray.cluster_resources()
        options: dict[str, object] = {
            "name": name,
            "namespace": cluster.name,
            "max_restarts": 0,
        }
        cpus = (
            0 if self._private else int(units.get("CPU", 0))
        )  # where all are ours, no limit
        options |= {"max_task_retries": 0, "num_cpus": equal_share(cpus, self._config)}
        options["num_gpus"] = gpu_share(int(units.get("GPU", 0)), self._config)
        if cluster.runtime_env is not None:
            options["runtime_env"] = cluster.runtime_env
        if cluster.pools:
            options["resources"] = {role.value: 1}
        if not self._private:
            options |= {"lifetime": "detached", "get_if_exists": True}
        shell = type(
            f"{role.title()}Worker", (WorkerActor,), {}
        )  # its name in Ray's lists
        actor = ray.remote(concurrency_groups={"watch": 2})(shell).options(**options)
        handle = actor.remote(self._config, role, name, self._authority)
        ready = handle.start.remote(
            "127.0.0.1" if self._private else None, self._config
        )
        return Actor(role, name, handle, ready)

    def _enter(self, actor: Actor) -> WorkerInfo:
        try:
            started = ray.get(actor.call)
        except RayError as error:
            told = (
                str(error).strip().rpartition("\n")[2]
            )  # before it: which actor, on which host
            if isinstance(error, RayTaskError):  # with a traceback, in colours
                told = f"{type(error.cause).__name__}: {error.cause}"
            raise PeerLostError(
                f"worker {actor.name} broke while it started: {told}"
            ) from error
        if isinstance(started, tuple):
            raise error_from(*started)
        actor.started, actor.role = started, started.role
        actor.leaves |= (
            started.role is Role.NONE
        )  # as the front end before this one told it
        actor.call = actor.handle.watch.remote()
        return started

    def _doing(self, *loading: Actor) -> str:
        """What the first of those that load does, if it can say so."""
        try:
            found = ray.get(
                [actor.handle.doing.remote() for actor in loading], timeout=TELL_S
            )
        except RayError:
            return ""  # its process still starts, or has ended: the call says how
        return next(filter(None, found), "")

    def _introduce(self) -> list[str]:
        """Let prefill workers measure their links to decode workers: "prefill-0: link to ..."."""
        there = [(actor, actor.started) for actor in self._actors if actor.started]
        decode = [x.address for _, x in there if x.role.decodes]
        asked = {
            x.name: actor.handle.meet.remote(decode)
            for actor, x in there
            if x.role.prefills
        }
        try:
            found = ray.get(list(asked.values()), timeout=MEET_S)
        except RayError:
            return []  # who is dead or slow is found out by the hand-offs
        return [
            f"{x}: {line}"
            for x, lines in zip(asked, found, strict=True)
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


def host_and_port(address: str) -> tuple[str, int]:
    """Of "host:port", also behind "ray://"; PeerLostError for what is neither."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        raise PeerLostError(f"no Ray at {address!r}: it is no host:port")
    return host, int(port)


def knock(host: str, port: int) -> bool:
    """Whether somebody listens there; one that is too busy to answer counts as there."""
    try:
        socket.create_connection((host, port), timeout=KNOCK_S).close()
    except TimeoutError:
        return True
    except (OSError, OverflowError):
        return False
    return True
