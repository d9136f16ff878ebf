"""A private Ray session: its secret, its folder, and a guard process that cleans up. No Ray.

Enter it before `disagg.launch.ray_cluster` is imported: Ray reads its environment at import.
"""

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

REAPER = Path(__file__).parent / "reaper.py"
REAP_S = 60.0  # the reaper kills after 3 s; a busy machine takes longer
# longest path of a temporary folder: Ray appends up to 80 characters for its sockets
MAX_TMP_CHARS = 20

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no question, no report, no file in the home folder
    "RAY_prestart_worker_first_driver": "0",  # it would wait for tasks, and there are none
    # use the loopback address as on those systems: any other address may go away
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",  # Ray's default is 15, behind every other process
    # a busy machine is not dead: with its default limits Ray gave up its only node at load 6
    "RAY_health_check_timeout_ms": "60000",
    "RAY_health_check_failure_threshold": "10",
    # idle threads of torch release their core sooner than by default
    "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "20000"),
    # kernels that torch and oneDNN keep by shape: with their default of 1,024 a worker grows by
    # 0.4 GB over its first thousand lengths of prompts
    "LRU_CACHE_CAPACITY": os.environ.get("LRU_CACHE_CAPACITY", "256"),
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": os.environ.get(
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256"
    ),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # keep the workers' view of GPUs, without a warning
}

# without these Ray prints a paragraph for every worker that dies, whatever `log_to_driver` says
SILENT = {"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}


class Session:
    """What a private service has outside of this process; nothing of it remains after the end.

    token:  secret of Ray and of the gRPC plane
    folder: closed to other users. Its path is short, since Ray puts sockets below it, and the
            path of a socket has at most 107 characters
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(24)
        self.folder = private_folder()

    def __enter__(self) -> Self:
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(REAPER)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        assert self._reaper.stdin is not None
        self._reaper.stdin.write(f"{self.token}\n{self.folder}\n")
        self._reaper.stdin.flush()
        variables = {**QUIET, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        self._before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        return self

    def __exit__(self, *_: object) -> None:
        """Returns when all processes of the session are gone."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._reaper.communicate(timeout=REAP_S)  # ends its input


def private_folder() -> Path:
    """A new folder that is closed to other users, with a path short enough for sockets."""
    tmp = tempfile.gettempdir()
    if len(tmp) > MAX_TMP_CHARS:
        tmp = "/tmp"
    return Path(tempfile.mkdtemp(prefix="dg-", dir=tmp))
