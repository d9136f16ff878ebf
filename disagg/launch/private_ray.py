"""A private Ray session: its secret, its folder, and a guard that removes both. Knows no Ray.

Enter it before `disagg.launch.ray_cluster` is imported: Ray reads its environment then.
"""

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

REAPER = Path(__file__).parent / "reaper.py"
REAP_S = 60.0  # it kills after 3 s; a busy machine takes its time
# longest path of a temporary folder: Ray appends up to 80 characters for its sockets
MAX_TMP_CHARS = 20

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # asks nothing, sends nothing, writes nothing at home
    "RAY_prestart_worker_first_driver": "0",  # there are no tasks that it could do
    # its own address is this host's on loopback, as on those systems: any other may go away
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_worker_niceness": "0",  # Ray would run workers at 15, behind everything else here
    # a busy machine is no dead one: Ray's own limits gave its only node up at load 6
    "RAY_health_check_timeout_ms": "60000",
    "RAY_health_check_failure_threshold": "10",
    # threads of torch that wait for work leave a core to others sooner than they would
    "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "20000"),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # leave the workers' view of GPUs alone, no warning
}

# else a paragraph on standard output for every worker that dies, whatever `log_to_driver` says
SILENT = {"RAY_DEDUP_LOGS": "1", "RAY_DEDUP_LOGS_SKIP_REGEX": "."}


class Session:
    """Everything of a private service that lives outside of this process.

    token:  secret of Ray and of the gRPC plane
    folder: closed to other users; its path is short, as Ray puts sockets below it, whose paths may
            have 107 characters
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(24)
        tmp = tempfile.gettempdir()
        if len(tmp) > MAX_TMP_CHARS:
            tmp = "/tmp"
        self.folder = Path(tempfile.mkdtemp(prefix="dg-", dir=tmp))

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
        """Returns when nothing is left."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._reaper.communicate(timeout=REAP_S)  # ends its input
