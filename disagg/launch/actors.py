"""A worker as its service holds it: an actor that Ray starts, and the calls to it.

Ray starts processes and reports their end; requests and tokens do not go through it. Workers of a
private Ray die with the process that started them. Workers on a cluster are detached, so that they
outlive a front end that was killed: the next one finds them by name.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import RayError, RayTaskError

from disagg.config import Config
from disagg.errors import PeerLostError, error_from
from disagg.launch.ray_actor import WorkerActor
from disagg.launch.ray_connection import LOCAL
from disagg.launch.resources import equal_share, gpu_share
from disagg.transfer.messages import Role, WorkerInfo
from disagg.transfer.security import Authority

MEET_S = 10.0
DOING_S = 3.0


@dataclass(eq=False)
class Actor:
    """A worker that loads, then serves.

    call:   returns when it serves; once it serves, another call that returns when it has ended
    info:   once it serves
    leaves: it stops once those that stay can serve
    """

    role: Role
    name: str
    handle: ray.actor.ActorHandle
    call: ray.ObjectRef
    info: WorkerInfo | None = None
    leaves: bool = False

    def enter(self) -> WorkerInfo:
        """Take the result of loading, and wait for its end from now on.

        Raises the error that it ended with instead; PeerLostError if its process broke.
        """
        try:
            result = ray.get(self.call)
        except RayTaskError as error:  # its text is a traceback, in colours
            cause = f"{type(error.cause).__name__}: {error.cause}"
            raise self._broken(cause) from error
        except RayError as error:  # its text begins with the actor and its host
            raise self._broken(last_line(error)) from error
        if isinstance(result, tuple):
            raise error_from(*result)
        info: WorkerInfo = result
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

    def stop(self, grace_s: float | None = None) -> None:
        """Let it finish or move its requests within the grace, by default its own setting."""
        self.handle.stop.remote(grace_s)

    def kill(self) -> None:
        ray.kill(self.handle)


def start_actor(
    config: Config, authority: Authority | None, role: Role, name: str
) -> Actor:
    """Let Ray start a worker, which then loads; on a cluster, take over the one of this name."""
    # the class has its name in Ray's lists
    kind = type(f"{role.title()}Worker", (WorkerActor,), {})
    options = _options(config, role, name)
    actor = ray.remote(concurrency_groups={"watch": 2})(kind).options(**options)
    handle = actor.remote(config, role, name, authority)
    host = "127.0.0.1" if config.cluster.address == LOCAL else None
    return Actor(role, name, handle, handle.start.remote(host, config))


def _options(config: Config, role: Role, name: str) -> dict[str, object]:
    cluster = config.cluster
    is_private = cluster.address == LOCAL
    resources = ray.cluster_resources()
    # a private Ray runs nothing else, so its workers need no share of the cores
    cpus = 0 if is_private else int(resources.get("CPU", 0))
    gpus = int(resources.get("GPU", 0))
    options: dict[str, object] = {
        "name": name,
        "namespace": cluster.name,
        "max_restarts": 0,
        "max_task_retries": 0,
        "num_cpus": equal_share(cpus, config),
        "num_gpus": gpu_share(gpus, config),
    }
    if cluster.runtime_env is not None:
        options["runtime_env"] = cluster.runtime_env
    if cluster.pools:
        options["resources"] = {role.value: 1}
    if not is_private:
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


def stop_all(actors: Sequence[Actor], timeout_s: float) -> None:
    """Stop actors that serve, and wait until they have ended."""
    for actor in actors:
        actor.stop()
    if actors:
        calls = [actor.call for actor in actors]
        ray.wait(calls, num_returns=len(calls), timeout=timeout_s)


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
    try:
        answers = ray.get(list(calls.values()), timeout=MEET_S)
    except RayError:
        return []  # hand-offs will show which worker is dead or slow
    return [
        f"{name}: {line}"
        for name, lines in zip(calls, answers, strict=True)
        for line in lines
    ]


def cause_of_death(actor: Actor) -> str:
    """How the process of a worker that has ended ended, for the log; "" if it left by itself.

    Ray knows no exit code or signal: a kill, a crash and the kernel's out-of-memory killer look
    alike to it.
    """
    try:
        ray.get(actor.call, timeout=0)
    except RayError as error:
        text = str(error)
        pid = re.search(r"^\s*pid: (\d+)", text, re.M)
        host = re.search(r"^\s*ip: (\S+)", text, re.M)
        exit_type = re.search(r"exit type: (\w+)", text)
        if not (pid and host and exit_type):
            return f": {last_line(error)}"
        process = f"process {pid[1]} at {host[1]}"
        return f": its {process} was killed or crashed (Ray: {exit_type[1]})"
    return ""


def last_line(error: RayError) -> str:
    """The line of Ray's text that says what happened."""
    return str(error).strip().rpartition("\n")[2]
