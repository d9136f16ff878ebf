"""A worker as its service holds it: an actor that Ray starts, and the calls to it.

Ray starts processes and reports their end; requests and tokens do not go through it. Workers of a
private Ray die with the process that started them. Workers on a cluster are detached, so that they
outlive a front end that was killed: the next one finds them by name.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from disagg.config import Config
from disagg.errors import CapacityError, PeerLostError
from disagg.launch.rank_bundles import (
    RankBundles,
    alive_hosts,
    as_options,
    in_bundle,
    reserve,
)
from disagg.launch.ray_actor import WorkerActor
from disagg.launch.ray_connection import LOCAL
from disagg.launch.resources import rank_resources
from disagg.launch.start_protocol import host_of, info_of, settings_message
from disagg.transfer.messages import Role, WorkerInfo
from disagg.transfer.security import Authority

MEET_S = 10.0
STOP_S = 5.0  # for the end of a process, after its grace
# calls that run beside the start of a worker: links to workers that do not answer take minutes
CONCURRENCY = {"watch": 2, "links": 1}
DOING_S = 3.0


@dataclass(eq=False)
class Actor:
    """A worker that loads, then serves.

    call:   returns when it serves; once it serves, its `watch`
    info:   once it serves
    leaves: it stops once those that stay can serve
    host:   its address, once known
    bundles: of its ranks, if it has several
    """

    role: Role
    name: str
    handle: ray.actor.ActorHandle
    call: ray.ObjectRef
    info: WorkerInfo | None = None
    leaves: bool = False
    host: str = ""
    bundles: RankBundles | None = None

    def __str__(self) -> str:
        return f"{self.name} at {self.host}" if self.host else self.name

    def enter(self) -> WorkerInfo:
        """Take the result of loading, and wait for its end from now on.

        Raises the error that it ended with instead; PeerLostError if its process broke.
        """
        try:
            reply = ray.get(self.call)
        except RayTaskError as error:  # its text is a traceback, in colours
            self.host = process_of(error).host or self.host
            cause = f"{type(error.cause).__name__}: {error.cause}"
            raise self._broken(cause) from error
        except RayError as error:  # its text begins with the actor and its host
            self.host = process_of(error).host or self.host
            raise self._broken(last_line(error)) from error
        self.host = host_of(reply, f"worker {self.name}")
        info = info_of(reply)
        self.info = info
        self.role = info.role
        if info.role is Role.NONE:  # an earlier front end let it leave
            self.leaves = True
        self.call = self.handle.watch.remote()
        return info

    def _broken(self, cause: str) -> PeerLostError:
        return PeerLostError(f"worker {self.name} broke while it started: {cause}")

    def assume(self, role: Role) -> None:
        """Change its role."""
        self.role = role
        self.handle.assume.remote(role)

    def stop(self, grace_s: float) -> None:
        """Let it finish or move its requests within the grace, then end.

        One that waits for room gets none: it would take it from others, only to end.
        """
        if self.info is None and self._lacks_room():
            self.kill()
        else:
            self.handle.stop.remote(grace_s)

    def _lacks_room(self) -> bool:
        try:
            return bool(self.waits_for())
        except CapacityError:
            return True

    def waits_for(self) -> str:
        """What room its ranks wait for, in words; "" if for none. CapacityError if in vain."""
        return self.bundles.waits_for() if self.bundles else ""

    def kill(self) -> None:
        ray.kill(self.handle)
        self.free_room()

    def free_room(self) -> None:
        """Of its ranks; ends those that still run."""
        if self.bundles is not None:
            self.bundles.remove()


def start_actor(
    config: Config, authority: Authority | None, role: Role, name: str
) -> Actor:
    """Let Ray start a worker, which then loads; on a cluster, take over the one of this name."""
    # the class has its name in Ray's lists
    kind = type(f"{role.title()}Worker", (WorkerActor,), {})
    cluster = config.cluster
    is_private = cluster.address == LOCAL
    resources = _rank_resources(config, role)
    ranks = cluster.ranks_of(role)
    bundles: RankBundles | None = None
    if ranks > 1:
        bundles = reserve(cluster, resources, ranks, name, is_private)
        options = _options(config, name) | in_bundle(bundles.group, rank=0)
    else:
        options = _options(config, name) | as_options(resources)
    actor = ray.remote(concurrency_groups=CONCURRENCY)(kind).options(**options)
    settings = settings_message(config)
    secrets = asdict(authority) if authority else None
    handle = actor.remote(settings, role.value, name, secrets)
    host = "127.0.0.1" if is_private else None
    call = handle.start.remote(host, settings)
    return Actor(role, name, handle, call, bundles=bundles)


def _rank_resources(config: Config, role: Role) -> dict[str, float]:
    resources = rank_resources(config, role, list(alive_hosts().values()))
    if config.cluster.address == LOCAL:
        # a private Ray runs nothing else, so its workers need no share of the cores
        resources.pop("CPU", None)
    return resources


def _options(config: Config, name: str) -> dict[str, object]:
    cluster = config.cluster
    options: dict[str, object] = {
        "name": name,
        "namespace": cluster.name,
        "max_restarts": 0,
        "max_task_retries": 0,
    }
    if cluster.runtime_env is not None:
        options["runtime_env"] = cluster.runtime_env
    if cluster.address != LOCAL:
        options["lifetime"] = "detached"
        options["get_if_exists"] = True
    return options


def names_of_running(cluster_name: str) -> list[str]:
    """The workers that an earlier front end of this cluster name started."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in actors if actor["namespace"] == cluster_name]


def wait_for_any(actors: Sequence[Actor], timeout_s: float) -> list[Actor]:
    """The actors whose call is done, as soon as one is; none after the timeout."""
    if not actors:
        return []
    done, _ = ray.wait([actor.call for actor in actors], timeout=timeout_s)
    return [actor for actor in actors if actor.call in done]


def stop_all(actors: Sequence[Actor], grace_s: float) -> None:
    """Stop actors that serve, and wait until they have ended, but not much longer."""
    for actor in actors:
        actor.stop(grace_s)
    if actors:
        calls = [actor.call for actor in actors]
        ray.wait(calls, num_returns=len(calls), timeout=grace_s + STOP_S)


def progress(actors: Sequence[Actor]) -> str:
    """What the first loading worker does, if it can say so; else ""."""
    calls = [actor.handle.doing.remote() for actor in actors]
    try:
        answers = ray.get(calls, timeout=DOING_S)
    except RayError:
        return ""  # a process still starts, or has ended; its call will raise
    return next(filter(None, answers), "")


def measure_links(actors: Sequence[Actor]) -> list[str]:
    """Speeds from prefill to decode workers, in words: "prefill-0: link to ..."."""
    addresses = [
        actor.info.address for actor in actors if actor.info and actor.info.role.decodes
    ]
    calls = {
        actor.name: actor.handle.meet.remote(addresses)
        for actor in actors
        if actor.info and actor.info.role.prefills
    }
    if not calls:
        return []
    ray.wait(list(calls.values()), num_returns=len(calls), timeout=MEET_S)
    lines: list[str] = []
    for name, call in calls.items():
        try:
            links = ray.get(call, timeout=0)
        except RayError:
            continue  # hand-offs will show whether the worker is dead or slow
        lines += [f"{name}: {link}" for link in links]
    return lines


def is_taken_over(actor: Actor) -> bool:
    """Whether a worker whose watch is over lives, and another front end watches it."""
    try:
        has_ended = ray.get(actor.call, timeout=0)
    except RayError:
        return False
    return has_ended is False  # None from a worker of an older version


def cause_of_death(actor: Actor) -> tuple[str, str]:
    """How the process of a worker ended, for the log, and its id.

    Both are "" if it left by itself. Ray knows no exit code or signal: a kill, a crash and the
    kernel's out-of-memory killer look alike to it.
    """
    try:
        ray.get(actor.call, timeout=0)
    except RayError as error:
        process = process_of(error)
        exit_type = re.search(r"exit type: (\w+)", str(error))
        if not (process.pid and process.host and exit_type):
            return f": {last_line(error)}", process.pid
        name = f"process {process.pid} at {process.host}"
        cause = f": its {name} was killed or crashed (Ray: {exit_type[1]})"
        return cause, process.pid
    return "", ""


class Process(NamedTuple):
    """A process that ended, as an error of Ray names it; "" for what it does not say."""

    pid: str
    host: str


def process_of(error: RayError) -> Process:
    text = str(error)
    pid = re.search(r"^\s*pid: (\d+)", text, re.M)
    # on a line of its own, or in the title of the process: "(pid=7, ip=10.0.0.2"
    host = re.search(r"(?:^\s*ip: |, ip=)([^\s,)]+)", text, re.M)
    return Process(pid[1] if pid else "", host[1] if host else "")


def last_line(error: RayError) -> str:
    """The line of Ray's text that says what happened."""
    return str(error).strip().rpartition("\n")[2]
