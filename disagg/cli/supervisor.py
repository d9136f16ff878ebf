"""A service of several processes: doors in front of one router. Starts them, and starts them again.

    supervisor ─┬─ router     router and workers; doors wait for the next one if it dies
                ├─ door 0     HTTP; each door accepts from a socket of its own at the same port,
                └─ door 1     which the supervisor holds too: connections wait for the next door

A process that ends without having been told is replaced, at once, then after longer and longer
pauses. A door that leaves (SIGTERM) accepts connections until its successor does.
"""

import logging
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self

from disagg.cli.children import DOOR, ROUTER, Pipe, Settings, command
from disagg.cli.shutdown import RAY_STOP_S
from disagg.config import Config
from disagg.errors import ConfigError, PeerLostError, error_from
from disagg.launch.private_ray import private_folder
from disagg.log import fields
from disagg.server.auth import check_tls, read_keys
from disagg.server.live_settings import plan_update, warn_of_fixed
from disagg.server.service import bind_many, served_name, url_of

STEADY_S = 30.0  # a process that lived for so long is replaced at once
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
POLL_S = 0.1
LINGER_S = 15.0  # for a process to end that has closed its pipe
END_S = 5.0  # beyond the time of requests, until doors are stopped or killed

log = logging.getLogger(__name__)


class ChildProcess:
    """A process of the service and its end of the pipe."""

    def __init__(self, kind: str, folder: Path, number: int, *inherited: socket.socket):
        ours, theirs = socket.socketpair()
        descriptors = [theirs.fileno(), *(each.fileno() for each in inherited)]
        with theirs:
            self._process = subprocess.Popen(
                command(kind, folder, number, *descriptors),
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                # a Ctrl-C is for the supervisor, which ends all in order
                start_new_session=True,
            )
        self.pipe = Pipe(ours)
        self.pid = self._process.pid

    def wait(self) -> int:
        """Its exit status. It is killed if it lives on without a pipe, or without a word."""
        try:
            status = self._process.wait(LINGER_S)
        except subprocess.TimeoutExpired:
            log.error("silent process killed", extra=fields(pid=self.pid))
            self._process.kill()
            status = self._process.wait()
        self.pipe.close()
        return status

    def stop(self, limit_s: float) -> None:
        """End it; after the limit by force."""
        self.pipe.send("stop")
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            log.error("process killed", extra=fields(pid=self.pid, after_s=limit_s))
            self._process.kill()
            self._process.wait()


class Slot:
    """A place that always has a process, until `stop`.

    up:        the first "serving" event, or the error that came instead of it
    silence_s: a process that serves and tells nothing for so long is replaced; None: never
    """

    def __init__(
        self,
        name: str,
        spawn: Callable[[], ChildProcess],
        on_event: Callable[[Mapping[str, Any]], None],
        silence_s: float | None = None,
    ):
        self.name = name
        self._silence_s = silence_s
        self.up: Future[Mapping[str, Any]] = Future()
        self._spawn = spawn
        self._on_event = on_event
        self._children: set[ChildProcess] = set()
        self._idle: set[ChildProcess] = set()
        self._leavers: list[ChildProcess] = []  # that accept until another one does
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, limit_s: float) -> None:
        """End its processes, those that leave too; returns when they are gone."""
        self._stopping.set()
        with self._lock:
            children = list(self._children)
        stops = [
            threading.Thread(target=child.stop, args=[limit_s]) for child in children
        ]
        for each in stops:
            each.start()
        for each in stops:
            each.join()

    def refuse(self) -> None:
        """Let no new requests in; processes that end are not replaced any more."""
        self._stopping.set()
        self.send("refuse")

    @property
    def is_idle(self) -> bool:
        """Whether all its processes have said that no request is left."""
        with self._lock:
            return self._children <= self._idle

    def send(self, event: str) -> None:
        """Tell its processes."""
        with self._lock:
            for child in self._children:
                child.pipe.send(event)

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stopping.wait(pause_s):
            began = time.monotonic()
            with self._lock:
                if self._stopping.is_set():
                    return
                child = self._spawn()
                self._children.add(child)
            log.info("process started", extra=fields(name=self.name, pid=child.pid))
            if self._follow(child):
                pause_s = 0.0
                continue
            if self._stopping.is_set():
                return
            is_steady = time.monotonic() >= began + STEADY_S
            pause_s = 0.0 if is_steady else longer(pause_s)

    def _follow(self, child: ChildProcess) -> bool:
        """Until it leaves, which is True, or has ended."""
        for event in child.pipe.events():
            if event["event"] == "leaving":
                log.info("process leaves", extra=fields(name=self.name, pid=child.pid))
                self._leavers.append(child)
                threading.Thread(
                    target=self._see_off, args=[child], daemon=True
                ).start()
                return True
            if event["event"] == "serving" and self._silence_s is not None:
                child.pipe.limit_silence(self._silence_s)
            self._take(child, event)
        self._end(child)
        return False

    def _take(self, child: ChildProcess, event: Mapping[str, Any]) -> None:
        self._note_idle(child, event)
        if event["event"] == "serving":
            for leaver in self._leavers:
                leaver.pipe.send("drain")
            self._leavers.clear()
            if not self.up.done():
                self.up.set_result(event)
        if event["event"] == "failed":
            error = error_from(event["reason"], event["message"])
            log.error("%s: %s", self.name, error)
            if not self.up.done():
                self.up.set_exception(error)
        self._on_event(event)

    def _see_off(self, child: ChildProcess) -> None:
        for event in child.pipe.events():
            self._note_idle(child, event)
            self._on_event(event)
        self._end(child)

    def _note_idle(self, child: ChildProcess, event: Mapping[str, Any]) -> None:
        if event["event"] == "idle":
            with self._lock:
                self._idle.add(child)

    def _end(self, child: ChildProcess) -> None:
        status = child.wait()
        with self._lock:
            self._children.discard(child)
        if not self._stopping.is_set():
            log.warning(
                "process ended",
                extra=fields(name=self.name, pid=child.pid, status=status),
            )
        if not self.up.done():
            error = PeerLostError(
                f"{self.name} ended with status {status} at its start"
            )
            self.up.set_exception(error)


def longer(pause_s: float) -> float:
    """The pause after this one."""
    return min(MAX_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))


class Supervisor:
    """Serves while entered, at `url`, as `Service` does in one process.

    say:    called with a description of each stage of the start
    secret: lets its owner stop the service, which sets `stopped`; None: a new one
    """

    pd_addresses: tuple[str, ...] = ()

    def __init__(
        self,
        config: Config,
        say: Callable[[str], None] = lambda stage: None,
        secret: str | None = None,
    ):
        check_doors(config)
        read_keys(config.server)
        check_tls(config.server)
        self.config = config
        self.name = served_name(config)
        self.secret = secret or secrets.token_hex(16)
        self.stopped = threading.Event()
        self.links: list[str] = []  # each worker's room and its links, for the log
        self._say = say
        self._stages: SimpleQueue[str] = SimpleQueue()
        server = config.server
        self._sockets = bind_many(server.host, server.port, server.doors)
        self.url = url_of(self._sockets[0], server)
        self._is_up = False
        self._ends_now = False
        self._doors: list[Slot] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for listening in self._sockets:
                stack.callback(listening.close)
            self._folder = private_folder()
            stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            Settings(self.config, self.secret, self._folder).write()
            router, self._doors = self._slots(self._folder)
            self._all_slots = (router, *self._doors)
            # until the end doors say that the service stops
            stack.callback(self._stop_doors)
            stack.callback(router.stop, 2 * self.config.cluster.grace_s + RAY_STOP_S)
            stack.callback(self._drain)
            for slot in self._all_slots:
                slot.start()
            self._wait_for([slot.up for slot in self._all_slots])
            self._is_up = True
            self.links = list(router.up.result()["links"])
            self._stack = stack.pop_all()
        return self

    def reload(self, config: Config) -> None:
        """Apply what running processes can use of a configuration that was read again.

        ConfigError, and nothing changes, for files that cannot be used.
        """
        update = plan_update(self.config, config)
        read_keys(update.config.server)
        check_tls(update.config.server)
        self.config = update.config
        Settings(self.config, self.secret, self._folder).write()
        for slot in self._all_slots:
            slot.send("reload")
        warn_of_fixed(update)

    def end_now(self) -> None:
        """End without time for requests, or without any more of it; from any thread."""
        self._ends_now = True
        self.stopped.set()
        for door in self._doors:
            door.send("cut")

    def _wait_for(self, ups: Sequence[Future[Mapping[str, Any]]]) -> None:
        """Until all processes serve; raises the first error of one that cannot."""
        while any(not up.done() for up in ups):
            with suppress(Empty):
                self._say(self._stages.get(timeout=POLL_S))
            for up in ups:
                if up.done():
                    up.result()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _slots(self, folder: Path) -> tuple[Slot, list[Slot]]:
        """The router's, and one for each door."""

        def spawn_door(number: int) -> Callable[[], ChildProcess]:
            listening = self._sockets[number]
            return lambda: ChildProcess(DOOR, folder, number, listening)

        silence_s = self.config.cluster.replace_s
        router = Slot(
            ROUTER,
            lambda: ChildProcess(ROUTER, folder, 0),
            self._on_event,
            silence_s,
        )
        doors = [
            Slot(f"{DOOR} {number}", spawn_door(number), self._on_event, silence_s)
            for number in range(self.config.server.doors)
        ]
        return router, doors

    def _on_event(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "stage":
            if self._is_up:
                log.info("stage", extra=fields(text=event["text"]))
            else:
                self._stages.put(event["text"])
        elif event["event"] == "stop" and event.get("now"):
            self.end_now()
        elif event["event"] == "stop":
            self.stopped.set()

    def _drain(self) -> None:
        """Wait until no door has a request. An idle one serves on: clients may be sent to it."""
        if not self._is_up:
            return
        for door in self._doors:
            door.refuse()
        if self._ends_now:
            self.end_now()
        limit_s = self.config.server.drain_s + END_S
        log.info("stopping", extra=fields(drain_s=self.config.server.drain_s))
        until = time.monotonic() + limit_s
        while time.monotonic() < until and not all(x.is_idle for x in self._doors):
            time.sleep(POLL_S)

    def _stop_doors(self) -> None:
        """All at once."""
        stops = [
            threading.Thread(target=door.stop, args=[END_S]) for door in self._doors
        ]
        for each in stops:
            each.start()
        for each in stops:
            each.join()


def check_doors(config: Config) -> None:
    """ConfigError for settings that need one process for everything."""
    if config.server.pd_ports is not None:
        raise ConfigError(
            f"server.doors is {config.server.doors} with --pd-ports; expected 1, since the "
            "handles of these ports are in the memory of one process"
        )
