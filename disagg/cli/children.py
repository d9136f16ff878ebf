"""The processes of a service with doors: what their parent tells them, and what they run.

    parent ── "stop", "refuse", "cut", "drain", "reload", or the end of the pipe ──► child
    parent ◄── events: one JSON object a line ── child

Each child ends with its parent, whatever ends that.
"""

import json
import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from disagg.config import Config, replace_keys
from disagg.errors import DisaggError
from disagg.log import configure

if TYPE_CHECKING:
    from disagg.server.door import Door
    from disagg.server.router_process import RouterProcess

SETTINGS_FILE = "settings.json"
SOCKET_FILE = "router"
ROUTER = "router"
DOOR = "door"
BEAT_S = 1.0
LAST_S = 2.0  # for the last bytes of responses, when a door stops
log = logging.getLogger(__name__)
# a child imports what its parent imports, from wherever that was started
PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from disagg.cli.children import main; main()"
)


@dataclass(frozen=True)
class Settings:
    """What all processes of a service know. folder: closed to others; secret: of its owner."""

    config: Config
    secret: str
    folder: Path

    def write(self) -> None:
        """Into the folder, for this user alone."""
        content = {"config": asdict(self.config), "secret": self.secret}
        path = self.folder / SETTINGS_FILE
        draft = path.with_suffix(".draft")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file)
        draft.replace(path)

    @classmethod
    def read(cls, folder: Path) -> Self:
        content = json.loads((folder / SETTINGS_FILE).read_text())
        config = replace_keys(Config(), content["config"])
        return cls(config, content["secret"], folder)

    @property
    def socket_path(self) -> Path:
        """Where doors reach the router."""
        return self.folder / SOCKET_FILE


class Pipe:
    """One end of the connection between parent and child; lines from any thread."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, event: str, **fields: Any) -> None:
        """Tell the other side; nothing happens if it is gone."""
        line = json.dumps({"event": event, **fields}) + "\n"
        with self._lock, suppress(OSError):
            self._connection.sendall(line.encode())

    def limit_silence(self, limit_s: float) -> None:
        """From now on a side that tells nothing for so long counts as gone."""
        self._connection.settimeout(limit_s)

    def events(self) -> Iterator[Mapping[str, Any]]:
        """What the other side tells, until it is gone."""
        with suppress(OSError), self._connection.makefile() as lines:
            for line in lines:
                yield json.loads(line)

    def close(self) -> None:
        self._connection.close()


def command(kind: str, folder: Path, number: int, *descriptors: int) -> list[str]:
    """The command line of a child. descriptors: its pipe, and the socket of a door."""
    program = PROGRAM.format(path=sys.path)
    return [
        *(sys.executable, "-P", "-c", program),
        *(kind, str(folder), str(number)),
        *map(str, descriptors),
    ]


def main() -> None:
    """Run the child that the command line names; errors go to its parent by name."""
    kind, folder, number, *descriptors = sys.argv[1:]
    connection, *listening = map(_inherited, descriptors)
    pipe = Pipe(connection)
    settings = Settings.read(Path(folder))
    try:
        server = settings.config.server
        configure(server.log_level, server.log_format)
        if kind == ROUTER:
            run_router(settings, pipe)
        else:
            run_door(settings, pipe, int(number), listening)
    except DisaggError as error:
        pipe.send("failed", reason=error.reason, message=str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)


def _inherited(descriptor: str) -> socket.socket:
    """A socket of the parent, which children of this process do not get."""
    inherited = socket.socket(fileno=int(descriptor))
    inherited.set_inheritable(False)
    return inherited


def run_router(settings: Settings, pipe: Pipe) -> None:
    """The router and its workers, until the parent or a signal ends them."""
    from disagg.cli.shutdown import ShutdownGuard
    from disagg.server.router_process import RouterProcess
    from disagg.transfer.rpc import start_local_server
    from disagg.transfer.security import Security

    def tell(stage: str) -> None:
        pipe.send("stage", text=stage)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    config = settings.config
    listen = partial(
        start_local_server,
        path=settings.socket_path,
        security=Security(token=settings.secret),
    )
    with ShutdownGuard(config.cluster.grace_s, say=tell) as guard, ExitStack() as stack:
        process = RouterProcess(config, listen, guard.reporting(tell))
        orders = {
            "stop": interrupt,
            "reload": lambda: reload_settings(settings, process),
        }
        follow_parent(pipe, settings.folder, orders, interrupt)
        stack.enter_context(process)
        stack.callback(guard.begin, process.end_now)
        guard.started()
        pipe.send("serving", links=process.links)
        send_beats(pipe, process.call_soon)
        while not process.stopped.wait(1.0):
            guard.take_signals()


def run_door(
    settings: Settings, pipe: Pipe, number: int, sockets: list[socket.socket]
) -> None:
    """A door, until the parent ends it.

    On SIGTERM another one takes its place, and it ends with its last request; on a second SIGTERM
    it does not wait for the other one.
    """
    import asyncio

    from disagg.server.door import Door

    door = Door(
        settings.config,
        number,
        sockets,
        settings.socket_path,
        settings.secret,
        on_stop=lambda now: pipe.send("stop", now=now),
    )

    def leave(*_: object) -> None:
        if door.is_leaving:
            door.end()
        else:
            door.leave()
            pipe.send("leaving")

    signal.signal(signal.SIGTERM, leave)
    signal.signal(
        signal.SIGHUP, signal.SIG_IGN
    )  # its parent says when to read settings

    def say_idle() -> None:
        pipe.send("idle")

    drain_s = settings.config.server.drain_s
    orders: dict[str, Callable[[], None]] = {
        "refuse": lambda: door.refuse(drain_s, say_idle),
        "cut": lambda: door.refuse(0.0, say_idle),
        "stop": lambda: door.end(LAST_S),
        "drain": door.end,
        "reload": lambda: reload_settings(settings, door),
    }
    follow_parent(pipe, settings.folder, orders, on_orphaned=lambda: door.end(0))
    serving = Serving(lambda: asyncio.run(door.serve(lambda: pipe.send("serving"))))
    serving.start()
    send_beats(pipe, door.call_soon)
    while serving.is_alive():
        serving.join(1.0)  # in steps: a signal is handled between two
    if serving.error is not None:
        raise serving.error


class Serving(threading.Thread):
    """A thread whose error can be read once it has ended."""

    def __init__(self, serve: Callable[[], None]):
        super().__init__(name="http", daemon=True)
        self._serve = serve
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self.error = error


def follow_parent(
    pipe: Pipe,
    folder: Path,
    orders: Mapping[str, Callable[[], None]],
    on_orphaned: Callable[[], None],
) -> None:
    """Do what the parent says, on another thread. The folder of a parent that died is removed."""

    def follow() -> None:
        for event in pipe.events():
            orders[event["event"]]()
        shutil.rmtree(folder, ignore_errors=True)
        on_orphaned()

    threading.Thread(target=follow, name="parent", daemon=True).start()


def send_beats(pipe: Pipe, call_soon: Callable[[Callable[[], None]], None]) -> None:
    """Tell the parent again and again that the event loop of this process goes on."""

    def send() -> None:
        pipe.send("beat")

    def run() -> None:
        with suppress(RuntimeError):  # the loop has ended
            while True:
                time.sleep(BEAT_S)
                call_soon(send)

    threading.Thread(target=run, name="beat", daemon=True).start()


def reload_settings(settings: Settings, process: "RouterProcess | Door") -> None:
    """Settings that cannot be used change nothing."""
    try:
        process.reload(Settings.read(settings.folder).config)
    except DisaggError as error:
        log.error("settings not read again: %s", error)
