"""The state file: how `submit`, `status` and `stop` find the service of this user."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from disagg.errors import ConfigError


@dataclass(frozen=True)
class State:
    """A running service. `token`: what POST /stop asks for."""

    url: str
    pid: int
    token: str

    @property
    def alive(self) -> bool:
        """Whether its process exists."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def write_state(path: Path, state: State) -> None:
    """Readable by this user alone, from its first byte on."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(asdict(state), file)


@contextmanager
def announced(path: Path, state: State) -> Iterator[None]:
    """The state file exists inside this block; one that somebody else wrote meanwhile stays."""
    write_state(path, state)
    try:
        yield
    finally:
        if read_state(path) == state:
            path.unlink(missing_ok=True)


def read_state(path: Path) -> State | None:
    """The service of a state file, if it runs. ConfigError for a file that others could write."""
    try:
        found = path.stat()
        text = path.read_text()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"state file {path} cannot be read: {error}") from error
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"state file {path} belongs or is open to others; remove it")
    try:
        state = State(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"state file {path} cannot be read: {error}; remove it") from error
    return state if state.alive else None
