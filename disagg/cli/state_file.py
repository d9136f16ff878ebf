"""The state file: how commands of one user find the service that runs on this host.

Only its owner may read or write it, because it holds the secret that stops the service.
"""

import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from disagg.errors import ConfigError
from disagg.launch.reaper import birth

MAX_PID = 1 << 31
MAX_CHARS = 1 << 16  # of a state file
ROOT = 0
# a link or a pipe in place of the file is an error, and neither is followed or waited for
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
DRAFT_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL


@dataclass(frozen=True)
class RunningService:
    """A service that runs, or that is starting.

    token:       an API key; the one in the state file also stops the service
    certificate: PEM file of its HTTPS certificate, trusted whatever name it carries
    grace_s:     how long its workers may take to end when it stops
    drain_s:     how long its requests may take to end before
    ready:       its workers serve
    born:        start time of its process; a reused process id has another one. None: unknown
    """

    url: str
    pid: int
    token: str
    certificate: str | None = None
    grace_s: float = 5.0
    drain_s: float = 0.0
    ready: bool = False
    born: str | None = None

    @property
    def alive(self) -> bool:
        """Whether its process exists."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it exists and belongs to another user
        return self.born in (None, birth(self.pid))


def write_state(path: Path, state: RunningService) -> None:
    """Write the file at once and for this user alone; ConfigError where that fails."""
    draft = f"{path.name}.{os.getpid()}"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open_folder(path.parent) as folder:
            with suppress(FileNotFoundError):
                os.unlink(draft, dir_fd=folder)
            descriptor = os.open(draft, DRAFT_FLAGS, 0o600, dir_fd=folder)
            try:
                with os.fdopen(descriptor, "w") as file:
                    json.dump(asdict(state), file)
                os.replace(draft, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                os.unlink(draft, dir_fd=folder)
                raise
    except OSError as error:
        raise ConfigError(
            f"state file {path} cannot be written: {error.strerror}"
        ) from error


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """A descriptor of the folder of a state file.

    ConfigError for a folder in which another user could replace our files: it has to belong to this
    user or to root, and others may write to it only if its sticky bit is set.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status = os.fstat(descriptor)
        owners = {status.st_uid, path.lstat().st_uid}  # of a link too
        is_open_to_others = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
        if not owners <= {os.getuid(), ROOT} or is_open_to_others:
            raise ConfigError(
                f"the folder {path} of the state file belongs to another user or may be written "
                "by others; remove it, or set --state-file"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def check_unannounced(path: Path) -> None:
    """ConfigError if the file belongs to a running service, which would become unreachable."""
    running = read_state(path)
    if running is not None:
        raise ConfigError(
            f"a service is already running at {running.url} (process {running.pid}, state file "
            f"{path}); stop it with `disagg stop`, or start another one with --state-file FILE "
            "--port PORT"
        )


@contextmanager
def announced(path: Path, state: RunningService) -> Iterator[Callable[[], None]]:
    """Keep the state file for as long as this block runs; yields a call that marks it ready.

    At the end, a file that another service has written since stays.
    """
    check_unannounced(path)
    write_state(path, state)
    try:
        yield lambda: write_state(path, replace(state, ready=True))
    finally:
        current = read_state(path)
        if current is not None and replace(current, ready=state.ready) == state:
            path.unlink(missing_ok=True)


def read_state(path: Path) -> RunningService | None:
    """The service of a state file, if it runs. ConfigError for a file that others could write."""
    state = _parse_state(path)
    return state if state and state.alive else None


def previous_token(path: Path) -> str | None:
    """The token of a service that was killed; its clients use it to resume at the next one."""
    state = _parse_state(path)
    return state.token if state else None


def _parse_state(path: Path) -> RunningService | None:
    try:
        text = _read_own(path)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"state file {path} cannot be read: {error}") from error
    try:
        state = RunningService(**json.loads(text))
        _check_target(state)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"state file {path} cannot be read: {error}; remove it"
        ) from error
    return state


def _read_own(path: Path) -> str:
    """The text of a file of this user; ConfigError for one that others could read or write.

    What is checked is what is read, by its descriptor: a name may point elsewhere a moment later.
    """
    with open_folder(path.parent) as folder:
        descriptor = os.open(path.name or ".", READ_FLAGS, dir_fd=folder)
        with os.fdopen(descriptor) as file:
            status = os.fstat(descriptor)
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise ConfigError(
                    f"state file {path} belongs to another user or is open to others; remove it"
                )
            return file.read(MAX_CHARS)


def _check_target(state: RunningService) -> None:
    """ValueError unless the process id names one process: 0 and -1 would signal many."""
    is_one_process = type(state.pid) is int and 0 < state.pid < MAX_PID
    if not is_one_process or type(state.url) is not str:
        raise ValueError(f"process {state.pid!r} at {state.url!r} cannot be a service")
