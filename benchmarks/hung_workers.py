"""How soon a real service recovers from a worker that hangs.

    python -m benchmarks.hung_workers --json --out FILE
    python -m benchmarks.hung_workers --fault stop --role decode

`disagg serve` with a private Ray and two workers of each role; clients read answers all the time,
and each answer is compared with the one before any fault. No prefix is cached, so that prompts go
to both prefill workers. Two faults, at a worker of each role:

    hang  a step of its engine never ends, while the worker answers every call
    stop  SIGSTOP, and never SIGCONT

An answer is held up if it began less than ten seconds after the fault and paused for more than two.
Later answers began after all of these had continued.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from typer import Option

from benchmarks import command
from benchmarks.worker_group import IDLE_GAUGES
from disagg.bench.result import Row, announce, result_of
from disagg.bench.workers import TEXT
from disagg.cli.bench import Out, show, without_none
from disagg.cli.client import complete, get
from disagg.cli.options import Json
from disagg.cli.state_file import RunningService, read_state
from disagg.errors import DeadlineError, DisaggError, PeerLostError, UnknownNameError

HANG_HOOK = Path(__file__).parent / "hang_hook"
FAULTS = ("hang", "stop")
ROLES = ("decode", "prefill")
NUM_PROMPTS = 8
NO_CACHE = ("--set=engine.prefix_cache=false", "--set=transfer.dedup=false")
HELD_UP_S = 2.0
PLACED_S = 10.0  # answers that begin so soon after a fault may be held up too
POLL_S = 0.1
PAUSE_S = 0.3  # between two answers of a client
PATIENCE_S = 300.0
STOP_S = 60.0
NOTES = (
    "seconds from the fault. elsewhere_s: until all answers that it held up went on; replaced_s: "
    "until another worker served in the place of the one that hangs, whose process was gone; "
    "start_s, start_cpu_s: how long the other worker took to start, and its processor time so far"
)


@dataclass(frozen=True)
class HungWorkersOptions:
    """Faults, clients and settings.

    faults, roles: one fault at a worker of one role after the other
    tokens:        per answer
    sampled:       every second prompt is answered with samples, by a seed
    settings:      of the service, beside its defaults
    """

    faults: Sequence[str] = FAULTS
    roles: Sequence[str] = ROLES
    clients: int = 8
    tokens: int = 120
    sampled: bool = False
    settings: Mapping[str, float | str] = field(default_factory=dict)


@dataclass
class TimedAnswer:
    """An answer as its client read it. at: when it was asked for, and when each piece came."""

    number: int
    at: list[float]
    text: str = ""
    error: str = ""

    def pauses(self) -> Iterator[tuple[float, float]]:
        """From one moment to the next."""
        return pairwise(self.at)


class HungService:
    """A service whose workers can be made to hang.

    log: what it has written to stderr
    """

    def __init__(self, options: HungWorkersOptions, folder: Path):
        self._folder = folder
        self.log = folder / "log"
        settings = [f"--set={key}={value}" for key, value in options.settings.items()]
        state_folder = folder / "state"
        self._state_path = state_folder / "disagg.json"
        counts = ["--prefill=2", "--decode=2"]
        arguments = ["serve", "--port=0", *counts, *NO_CACHE, *settings]
        path = os.pathsep.join([str(HANG_HOOK), *sys.path])
        environment = {**os.environ, "PYTHONPATH": path, "HANG_FOLDER": str(folder)}
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "disagg"),
                    *arguments,
                    f"--state-file={self._state_path}",
                ],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=log,
            )

    def wait_until_ready(self) -> None:
        """PeerLostError with its log if it ends before."""
        wait_until(
            lambda: self._is_ready() or self._has_ended(), "the service is ready"
        )
        if self._has_ended():
            raise PeerLostError(f"the service ended: {self.log.read_text()}")

    def _is_ready(self) -> bool:
        state = read_state(self._state_path)
        return state is not None and state.ready

    def _has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def state(self) -> RunningService:
        state = read_state(self._state_path)
        assert state is not None, self.log.read_text()
        return state

    def pids(self, role: str) -> dict[int, str]:
        """The processes of the workers of a role that answer, with their names."""
        workers = get(self.state, "/status")["workers"]
        return {
            worker["pid"]: worker["name"]
            for worker in workers
            if worker["role"] == role and "pid" in worker
        }

    def rank_pids(self, name: str) -> list[int]:
        """The processes of all ranks of a worker."""
        for worker in get(self.state, "/status")["workers"]:
            if worker["name"] == name:
                return [*worker["rank_pids"]]
        raise AssertionError(f"no worker {name}")

    def gauges(self) -> dict[str, float]:
        """Every gauge that an idle worker would not have, by worker and name."""
        gauges = {}
        for worker in get(self.state, "/status")["workers"]:
            for gauge, value in worker.get("gauges", {"silent": 1.0}).items():
                if value and gauge not in IDLE_GAUGES:
                    gauges[f"{worker['name']} {gauge}"] = value
        return gauges

    def hit(self, fault: str, pid: int) -> None:
        """Let a worker hang."""
        if fault == "stop":
            os.kill(pid, signal.SIGSTOP)
        else:
            (self._folder / str(pid)).touch()

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def hung_service(options: HungWorkersOptions) -> Iterator[HungService]:
    """The service, once it is ready."""
    with TemporaryDirectory() as folder:
        service = HungService(options, Path(folder))
        try:
            service.wait_until_ready()
            yield service
        finally:
            service.stop()


class Clients:
    """Threads that read answers of a service while they are entered.

    answers: of all clients
    """

    def __init__(self, service: HungService, options: HungWorkersOptions):
        self.answers: list[TimedAnswer] = []
        self._service = service
        self._options = options
        self._over = Event()
        self._pool = ThreadPoolExecutor(options.clients)
        self._threads: list[Future[None]] = []

    def __enter__(self) -> "Clients":
        numbers = range(self._options.clients)
        self._threads = [self._pool.submit(self._run, number) for number in numbers]
        return self

    def __exit__(self, *_: object) -> None:
        """Returns when each has its last answer."""
        self._over.set()
        with self._pool:
            for thread in self._threads:
                thread.result()

    def _run(self, number: int) -> None:
        while not self._over.wait(PAUSE_S):
            number = (number + 1) % NUM_PROMPTS
            self.read(number)

    def read(self, number: int) -> TimedAnswer:
        """The answer to one prompt, without a second try."""
        answer = TimedAnswer(number, [time.monotonic()])
        self.answers.append(answer)
        body = {
            "prompt": f"{number}. {12 * TEXT}",
            "max_tokens": self._options.tokens,
            "temperature": number % 2 if self._options.sampled else 0,
            "seed": number,
            "ignore_eos": True,
        }

        def note(piece: str) -> None:
            answer.at.append(time.monotonic())
            answer.text += piece

        try:
            complete(self._service.state, body, note)
        except DisaggError as error:
            answer.error = f"{error.reason}: {error}"
        return answer


def measure_hung_workers(options: HungWorkersOptions) -> Row:
    """A row for every fault and role."""
    for fault in options.faults:
        if fault not in FAULTS:
            raise UnknownNameError.of("fault", fault, FAULTS)
    for role in options.roles:
        if role not in ROLES:
            raise UnknownNameError.of("role", role, ROLES)
    rows = []
    with hung_service(options) as service:
        with ThreadPoolExecutor(NUM_PROMPTS) as pool:
            reads = pool.map(Clients(service, options).read, range(NUM_PROMPTS))
            expected = [answer.text for answer in reads]
        for fault, role in product(options.faults, options.roles):
            announce(f"{fault} of a {role} worker")
            rows.append(_measure_fault(service, options, fault, role, expected))
    return result_of(rows, NOTES, options=asdict(options))


def _measure_fault(
    service: HungService,
    options: HungWorkersOptions,
    fault: str,
    role: str,
    expected: Sequence[str],
) -> Row:
    before = service.pids(role)
    (pid, name), *_ = before.items()
    with Clients(service, options) as clients:
        wait_until(
            lambda: len([x for x in clients.answers if x.text]) >= options.clients,
            "all clients have a token",
        )
        log_bytes = service.log.stat().st_size
        hit_at = time.monotonic()
        service.hit(fault, pid)
        wait_until(lambda: not is_alive(pid), "the process of the worker ends")
        ended_at = time.monotonic()
        wait_until(
            lambda: len(service.pids(role).keys() - {pid}) == len(before),
            "another worker serves in its place",
        )
        replaced_at = time.monotonic()
        (successor,) = service.pids(role).keys() - before.keys()
        start_cpu_s = cpu_s_of(successor)
    wait_until(lambda: not service.gauges(), "all gauges are zero")
    elsewhere_at = went_on_at(clients.answers, hit_at)
    later = [
        answer
        for answer in clients.answers
        if elsewhere_at <= answer.at[0] and answer.at[-1] <= ended_at
    ]
    log = service.log.read_bytes()[log_bytes:].decode()
    return {
        "fault": fault,
        "worker": name,
        "answers": len(clients.answers),
        "exact": sum(
            answer.text == expected[answer.number] for answer in clients.answers
        ),
        "errors": [answer.error for answer in clients.answers if answer.error],
        "held_up": len(held_up(clients.answers, hit_at)),
        "elsewhere_s": elsewhere_at - hit_at,
        "later": len(later),
        "later_pause_s": longest_pause_s(later),
        "ended_s": ended_at - hit_at,
        "replaced_s": replaced_at - hit_at,
        "start_s": replaced_at - ended_at,
        "start_cpu_s": start_cpu_s,
        "gauges": service.gauges(),
        "log": [line for line in log.splitlines() if name in line],
    }


def held_up(answers: Sequence[TimedAnswer], hit_at: float) -> list[tuple[float, float]]:
    """Pauses longer than HELD_UP_S, in answers that began before PLACED_S."""
    return [
        (before, after)
        for answer in answers
        if answer.at[0] < hit_at + PLACED_S
        for before, after in answer.pauses()
        if after > max(before, hit_at) + HELD_UP_S and before < hit_at + PLACED_S
    ]


def went_on_at(answers: Sequence[TimedAnswer], hit_at: float) -> float:
    """When the last answer that a fault held up continued."""
    return max((after for _, after in held_up(answers, hit_at)), default=hit_at)


def longest_pause_s(answers: Sequence[TimedAnswer]) -> float:
    """The longest time without a piece, also before the first one."""
    pauses = [pause for answer in answers for pause in answer.pauses()]
    return max((after - before for before, after in pauses), default=0.0)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits for its parent does not."""
    try:
        state, *_ = stat_of(pid)
    except OSError:
        return False
    return state != "Z"


def cpu_s_of(pid: int) -> float:
    """The processor time of a process so far."""
    user, system = map(int, stat_of(pid)[11:13])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def stat_of(pid: int) -> list[str]:
    """The fields of a process in /proc, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def wait_until(condition: Callable[[], object], description: str) -> None:
    """Wait for a condition; DeadlineError with its description after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise DeadlineError(f"not within {PATIENCE_S:g} s: {description}")
        time.sleep(POLL_S)


def hung_workers(
    fault: list[str] | None = Option(
        None, "--fault", help=f"{', '.join(FAULTS)}; may be repeated; default: both."
    ),
    role: list[str] | None = Option(
        None, "--role", help=f"{', '.join(ROLES)}; may be repeated; default: both."
    ),
    clients: int = Option(8, min=1, help="Concurrent answers."),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure how soon a service recovers from workers that hang."""
    fields: dict[str, Any] = without_none(faults=fault, roles=role)
    options = HungWorkersOptions(clients=clients, **fields)
    show(measure_hung_workers(options), out, as_json)


if __name__ == "__main__":
    command.main(hung_workers, "hung_workers")
