"""Keeps the workers of a service at their number: starts, watches, replaces and scales them.

start ──► watched ──► dead, or silent for too long ──► reported, and another one starts
            └ private Ray itself lost ──► all reported, Ray and workers restart, a few times
"""

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from disagg.config import Config
from disagg.errors import (
    CapacityError,
    ConfigError,
    DisaggError,
    OccupiedError,
    PeerLostError,
    UnknownNameError,
    VersionError,
)
from disagg.launch import actors
from disagg.launch.actors import Actor, start_actor
from disagg.launch.private_ray import Session
from disagg.launch.rank_bundles import remove_abandoned
from disagg.launch.ray_connection import LOCAL, RayConnection, lost_ray_is_an_error
from disagg.launch.resources import check_counts, check_place
from disagg.launch.retry_pauses import RetryPauses
from disagg.launch.scaling import plan_scaling
from disagg.launch.shared_facts import SharedFacts
from disagg.launch.worker_names import WorkerNames, place_of
from disagg.transfer.messages import Role, WorkerInfo, serves
from disagg.transfer.security import Authority, load_security, protected

PRIVATE_ORPHAN_S = 5.0
CHECK_S = 0.5
RETRY_S = 5.0
DRAIN_S = 60.0  # in which a worker that leaves may move or finish its requests
PROGRESS_S = 3.0  # between two reports of what loading workers do
# of a worker that another service, or another version, has started: its ranks keep their room
REFUSALS = (OccupiedError, VersionError)
RESTARTS = 3  # of a private Ray before a worker serves again; then the service gives up

log = logging.getLogger(__name__)


class Cluster:
    """The workers of one service, on the private Ray of a session, or on a cluster.

    security:      of the front end itself, once connected
    target_counts: target number of workers of each role
    links:         speeds measured at the start, in words
    lacks_room:    what room workers wait for, in words, by name
    """

    def __init__(self, config: Config, session: Session | None = None):
        self.security = load_security(config.security)  # its errors before Ray starts
        self._private = config.cluster.address == LOCAL
        if self._private:
            orphan_s = min(config.cluster.orphan_s, PRIVATE_ORPHAN_S)
            config = replace(config, cluster=replace(config.cluster, orphan_s=orphan_s))
        self._config = config
        self.target_counts = {
            Role(role): number for role, number in config.cluster.roles.items()
        }
        self.links: list[str] = []
        self.lacks_room: dict[str, str] = {}
        self._connection = RayConnection(config.cluster.address, session)
        self._facts = None if self._private else SharedFacts(config.cluster.name)
        self._authority = Authority(session.token) if session else None
        self._names = WorkerNames()
        self._pauses = RetryPauses()
        self._actors: list[Actor] = []
        self._losses_in_a_row = 0  # of a private Ray, since a worker served
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None

    # -- the life of a service

    def connect(self) -> None:
        """Open the connection to Ray.

        PeerLostError if no Ray starts or answers, ConfigError if a private one can never have
        room for all workers.
        """
        self._connection.open()
        if self._connection.gpus is not None:
            check_place(self._connection.gpus, self._config, self.target_counts)
        if self._facts is not None:
            self._authority = self._facts.authority(self._config.security.plane)
        self.security = protected(
            self._config.security, self._authority, self._connection.host
        )

    def start(
        self, report: Callable[[str], None] = lambda stage: None
    ) -> list[WorkerInfo]:
        """Load all workers; returns when there is one of each role. `watch` reports the others.

        report: called with what takes the workers long, in words

        On a cluster a worker that cannot start does not stop the others; it is tried again later.
        Raises ModelError and others, as the workers raised them, once a role has no worker.
        """
        self._adopt()
        names = self._names.initial(self.target_counts)
        self._actors = [self._load(role, name) for role, name in names]
        loading = list(self._actors)
        serving: list[WorkerInfo] = []
        last_stage = ""
        while loading and not serves([info.role for info in serving]):
            ready = actors.wait_for_any(loading, PROGRESS_S)
            if ready:
                loading.remove(ready[0])
                serving += self._enter_at_start(ready[0])
                continue
            for actor, error in self._look_for_room(loading):
                loading.remove(actor)
                actor.kill()
                self._actors.remove(actor)
                self._skip(actor, error)
            stage = self._stage(loading)
            if stage not in ("", last_stage):
                report(stage)
                last_stage = stage
        self.links = actors.measure_links(self._actors)
        return serving

    def watch(
        self,
        on_up: Callable[[WorkerInfo], None],
        on_down: Callable[[str], None],
        on_end: Callable[[DisaggError], None],
        silent_s: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """From now on report deaths, and start a new worker in place of a dead one.

        on_end:   called once, if Ray itself is lost for good
        silent_s: seconds of silence by worker name; 0 for a healthy one. A worker that is silent
                  for `cluster.replace_s` is killed
        """

        def follow() -> None:
            while not self._closing.is_set():
                try:
                    self.poll(on_up, on_down, silent_s)
                except DisaggError as error:
                    on_end(error)
                    break
                except Exception:
                    log.exception("watching the workers broke; going on")
                    self._closing.wait(RETRY_S)

        self._watcher = threading.Thread(target=follow, name="ray-watch", daemon=True)
        self._watcher.start()

    def poll(
        self,
        on_up: Callable[[WorkerInfo], None],
        on_down: Callable[[str], None],
        silent_s: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """Wait a moment for a death or a worker that is ready; report it, replace the dead.

        PeerLostError once a private Ray was lost again and again, and no worker served between.
        """
        if self._connection.is_lost():
            self._restart_ray(on_down)
            return
        if not self._actors:  # every place pauses
            self._closing.wait(CHECK_S)
        for actor in actors.wait_for_any(self._actors, CHECK_S):
            if actor.info is not None:
                self._end(actor, on_down)
            else:
                self._enter(actor, on_up)
        self._kill_silent(silent_s(), on_down)
        self._check_room()
        self._adjust()

    def close(self) -> None:
        """Stop the workers, those of a cluster within their grace, and leave Ray."""
        self._closing.set()
        if self._watcher is not None:
            self._watcher.join()
        try:
            if self._private or not self._config.cluster.detach:
                self._stop()
        except PeerLostError as error:
            log.error("the workers could not be stopped: %s", error)
        self._connection.close()

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
        check_counts(counts, self._connection.gpus, self._config)
        self.target_counts = counts
        if self._facts is not None:
            self._facts.store_counts(counts)

    def drain(self, name: str) -> None:
        """Let a worker leave, with another one in its place."""
        by_name = {actor.name: actor for actor in self._actors}
        if name not in by_name:
            raise UnknownNameError.of("worker", name, by_name)
        by_name[name].leaves = True

    # -- inside

    def _adopt(self) -> None:
        """Take over the workers of an earlier front end, and the counts that it had set."""
        if self._facts is None:
            return
        cluster_name = self._config.cluster.name
        running = actors.names_of_running(cluster_name)
        self._names = WorkerNames(running)
        remove_abandoned(cluster_name, running)
        stored_counts = self._facts.load_counts()
        if stored_counts and self._names.adopted:
            self.target_counts = stored_counts
        self._facts.store_counts(self.target_counts)

    def _enter_at_start(self, actor: Actor) -> list[WorkerInfo]:
        """The worker, if it could load; else its place pauses, or its error is raised."""
        try:
            info = actor.enter()
        except DisaggError as error:
            self._drop_unserved(actor, error)
            has_left = actor.name in self._names.adopted
            if not (has_left and isinstance(error, PeerLostError)):
                self._skip(actor, error)
            return []
        self._pauses.served(place_of(actor.name))
        return [info]

    def _stage(self, loading: Sequence[Actor]) -> str:
        """What takes loading workers long, in words; "" if nothing special."""
        for name, words in self.lacks_room.items():
            return f"{name} waits for room: {words}"
        return actors.progress(loading)

    def _look_for_room(
        self, loading: Sequence[Actor]
    ) -> list[tuple[Actor, CapacityError]]:
        """Note what groups of ranks that stay wait for; those that wait in vain."""
        hopeless: list[tuple[Actor, CapacityError]] = []
        waiting: dict[str, str] = {}
        for actor in loading:
            if actor.leaves:
                continue
            try:
                if words := actor.waits_for():
                    waiting[actor.name] = words
            except CapacityError as error:
                hopeless.append((actor, error))
        self.lacks_room = waiting
        return hopeless

    def _drop(self, actor: Actor) -> None:
        """A worker has ended."""
        self._actors.remove(actor)
        actor.free_room()

    def _drop_unserved(self, actor: Actor, error: DisaggError) -> None:
        """A worker does not serve: it cannot load, or it goes on for another service."""
        if isinstance(error, REFUSALS):
            self._actors.remove(actor)
        else:
            self._drop(actor)

    def _load(self, role: Role, name: str) -> Actor:
        return start_actor(self._config, self._authority, role, name)

    def _enter(self, actor: Actor, on_up: Callable[[WorkerInfo], None]) -> None:
        """Report a worker that has loaded; drop one that could not."""
        try:
            on_up(actor.enter())
            self._losses_in_a_row = 0
            self._pauses.served(place_of(actor.name))
        except DisaggError as error:
            self._drop_unserved(actor, error)
            if not actor.leaves:
                self._pause(actor, error)

    def _skip(self, actor: Actor, error: DisaggError) -> None:
        """At the start, go on without a worker; raises its error where its role has no other."""
        others = [other for other in self._actors if other.role is actor.role]
        if self._private or not others:
            raise error
        self._pause(actor, error)

    def _pause(self, actor: Actor, error: DisaggError) -> None:
        """Say why a worker did not start; its place stays empty for a while."""
        pause_s = self._pauses.failed(place_of(actor.name))
        log.error("%s did not start: %s; trying again in %g s", actor, error, pause_s)

    def _end(self, actor: Actor, on_down: Callable[[str], None]) -> None:
        """Report a worker that has ended, and drop it."""
        if actors.is_taken_over(actor):
            self._give_away(actor, on_down)
            return
        self._drop(actor)
        on_down(actor.name)
        if not actor.leaves:
            cause, pid = actors.cause_of_death(actor)
            log.warning(
                "%s ended%s; another one starts%s",
                actor.name,
                cause,
                self._pause_after_end(actor),
            )
            last_words = self._connection.last_words(pid)
            if last_words:
                log.error("%s wrote before it ended:\n%s", actor.name, last_words)

    def _give_away(self, actor: Actor, on_down: Callable[[str], None]) -> None:
        """Another front end, of the same cluster name, has a worker now."""
        self._actors.remove(actor)
        on_down(actor.name)
        log.warning("%s works for another service now", actor)

    def _pause_after_end(self, actor: Actor) -> str:
        """When the next worker starts, for the log: at once unless several ended early."""
        pause_s = self._pauses.ended(place_of(actor.name))
        return f" in {pause_s:g} s" if pause_s else ""

    def _check_room(self) -> None:
        """Say what groups of ranks wait for; those that wait in vain are tried again later."""
        earlier = self.lacks_room
        loading = [actor for actor in self._actors if actor.info is None]
        for actor, error in self._look_for_room(loading):
            actor.kill()
            self._actors.remove(actor)
            self._pause(actor, error)
        for name, words in self.lacks_room.items():
            if earlier.get(name) != words:
                log.warning("%s waits for room: %s", name, words)

    def _kill_silent(
        self, silent_s: Mapping[str, float], on_down: Callable[[str], None]
    ) -> None:
        """Kill workers that live but do not answer: a frozen process would stay for ever."""
        for actor in [actor for actor in self._actors if actor.info is not None]:
            seconds = silent_s.get(actor.name, 0.0)
            if seconds < self._config.cluster.replace_s:
                continue
            log.error(
                "%s was silent for %.0f s and is killed; another one starts%s",
                actor,
                seconds,
                self._pause_after_end(actor),
            )
            actor.kill()
            self._actors.remove(actor)
            on_down(actor.name)

    def _adjust(self) -> None:
        """Change roles, load workers and let some leave, until every role has its number."""
        may_change_role = not self._config.cluster.pools
        plan = plan_scaling(self._actors, self.target_counts, may_change_role)
        for actor, role in plan.role_changes:
            actor.assume(role)
        for role, count in Counter(plan.loads).items():
            self._load_more(role, count)
        for actor in plan.leaving:
            actor.leaves = True
        if plan.loads:
            return  # those that leave wait until others are in their place
        if all(actor.info or actor.leaves for actor in self._actors):
            for actor in self._actors:
                if actor.leaves:
                    actor.stop(DRAIN_S)

    def _load_more(self, role: Role, count: int) -> None:
        """Load workers at free places whose pause is over.

        A private Ray loads only as many at once as there are cores, so that the rest can still
        be called off.
        """
        staying = [actor.name for actor in self._actors if not actor.leaves]
        for place in self._names.free_places(role, staying, count):
            num_loading = sum(actor.info is None for actor in self._actors)
            is_full = self._private and num_loading >= (os.cpu_count() or 1)
            if is_full or self._closing.is_set():
                return
            if self._pauses.is_over(place):
                name = self._names.replacement(place)
                self._actors.append(self._load(role, name))

    def _stop(self) -> None:
        """Stop the workers of this service; those on a cluster get the grace.

        Workers that serve another front end stay.
        """
        with lost_ray_is_an_error():
            if not self._private:
                serving = [actor for actor in self._actors if actor.info]
                actors.stop_all(serving, self._config.cluster.grace_s)
            for actor in self._actors:
                if actor.info or actor.name not in self._names.adopted:
                    actor.kill()

    def _restart_ray(self, on_down: Callable[[str], None]) -> None:
        """Ray is gone, and its workers with it: start another one, with all workers."""
        self._losses_in_a_row += 1
        for actor in self._actors:
            on_down(actor.name)
        self._actors = []
        if self._losses_in_a_row > RESTARTS:
            self._connection.close()
            raise PeerLostError(
                f"the private Ray was lost {self._losses_in_a_row} times before a worker "
                "served; given up"
            )
        log.error("the private Ray is gone; starting another one")
        try:
            self._connection.reopen()
        except PeerLostError as error:
            log.error("%s; trying again", error)
            self._closing.wait(RETRY_S)
        else:
            self._adjust()
