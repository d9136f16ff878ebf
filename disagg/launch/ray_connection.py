"""This process's connection to Ray: a private Ray that it starts, or a cluster that it joins."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.job_config import JobConfig

from disagg.errors import PeerLostError
from disagg.launch.private_ray import Session

LOCAL = "local"
AUTO = "auto"
OBJECT_STORE_BYTES = 80 << 20  # nothing is put into it; Ray requires at least 75 MB
KNOCK_S = 1.0
LAST_CHARS = 16_000  # of the stderr of a worker that died: the stacks of its threads
LOST_RAY = (RuntimeError, ConnectionError, TimeoutError, RayError)
RAY_MARKS = (":job_id:", ":actor_name:", ":task_name:")  # lines that Ray adds


class InstalledOnly(JobConfig):
    """Workers import what is installed, not what lies in the user's working folder.

    Ray puts that folder first on their path, unless they have a working folder of their own.
    """

    def _runtime_env_has_working_dir(self) -> bool:
        return True


class RayConnection:
    """Starts or joins Ray, checks that it answers, and leaves it.

    session: of a private Ray, which gets its folder
    host:    address of this host, once open
    gpus:    of a private Ray's only host, once open; None on a cluster, which may grow
    """

    host: str

    def __init__(self, address: str, session: Session | None = None):
        self._address = address
        self._session = session
        self._is_guest = False  # this process had joined Ray before
        self._num_opened = 0
        self._listening: list[tuple[str, int]] = []  # addresses of a private Ray
        self.gpus: int | None = None

    def open(self) -> None:
        """Start a private Ray, or join the one at the address.

        A process that is in a Ray already stays in it. Joins a Ray nearby only if the address is
        "auto". PeerLostError if none starts or answers.
        """
        is_private = self._address == LOCAL
        self._is_guest = not is_private and ray.is_initialized()
        with lost_ray_is_an_error():
            if not self._is_guest:
                options = (
                    self._private_options() if is_private else self._join_options()
                )
                self._num_opened += 1
                ray.init(**options, log_to_driver=False, logging_level="ERROR")
            if is_private:
                (node,) = ray.nodes()
                self.gpus = int(node["Resources"].get("GPU", 0))
                self._listening = [
                    host_and_port(ray.get_runtime_context().gcs_address),
                    (node["NodeManagerAddress"], node["NodeManagerPort"]),
                ]
            self.host = ray.util.get_node_ip_address()

    def reopen(self) -> None:
        """Start another private Ray in place of a lost one."""
        ray.shutdown()
        self.open()

    def is_lost(self) -> bool:
        """Whether a private Ray has ended. A cluster never counts as lost."""
        return not all(knock(host, port) for host, port in self._listening)

    def last_words(self, pid: str) -> str:
        """The end of the stderr of a worker of a private Ray; "" if it wrote nothing.

        Also "" on a cluster, where each host keeps the logs of its workers.
        """
        if self._session is None or not pid:
            return ""
        files = Path(self._session.folder).glob(f"r*/session_*/logs/worker-*-{pid}.err")
        with suppress(OSError):
            for path in files:
                lines = path.read_text(errors="replace").splitlines()
                words = [line for line in lines if not line.startswith(RAY_MARKS)]
                return "\n".join(words).strip()[-LAST_CHARS:]
        return ""

    def close(self) -> None:
        """Leave Ray; a private one ends."""
        if not self._is_guest:
            ray.shutdown()

    def _private_options(self) -> dict[str, object]:
        assert self._session is not None
        return {
            "address": LOCAL,
            # Ray lets every user read its folder, so it is inside a closed one
            "_temp_dir": f"{self._session.folder}/r{self._num_opened or ''}",
            "num_cpus": os.cpu_count(),
            "object_store_memory": OBJECT_STORE_BYTES,
            "include_dashboard": False,
            "job_config": InstalledOnly(),
        }

    def _join_options(self) -> dict[str, object]:
        address = self._address
        if address == AUTO:
            address = os.environ.get("RAY_ADDRESS", AUTO)
        if address != AUTO and not knock(*host_and_port(address)):
            # Ray itself would try for more than a minute
            raise PeerLostError(f"no Ray at {address!r}")
        if "://" in address:  # Ray Client gives workers no folder anyway
            return {"address": address}
        return {"address": address, "job_config": InstalledOnly()}


@contextmanager
def lost_ray_is_an_error() -> Iterator[None]:
    """PeerLostError in place of what Ray raises when it does not start or answer."""
    try:
        yield
    except Exception as error:
        # a plain Exception is how Ray says that its processes did not start in time
        if type(error) is not Exception and not isinstance(error, LOST_RAY):
            raise
        raise PeerLostError(f"Ray does not start or answer: {error}") from error


def host_and_port(address: str) -> tuple[str, int]:
    """The parts of "host:port" or "ray://host:port"; PeerLostError for anything else."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        raise PeerLostError(f"no Ray at {address!r}; expected host:port")
    return host, int(port)


def knock(host: str, port: int) -> bool:
    """Whether a server listens at this address; one too busy to answer counts."""
    try:
        socket.create_connection((host, port), timeout=KNOCK_S).close()
    except TimeoutError:
        return True
    except (OSError, OverflowError):
        return False
    return True
