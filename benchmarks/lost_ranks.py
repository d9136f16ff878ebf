"""How soon a real service recovers from a rank that dies or freezes. Do answers stay exact?

    python -m benchmarks.lost_ranks --json --out FILE
    python -m benchmarks.lost_ranks --fault freeze --role decode --rank 1

`disagg serve` with a private Ray and two workers of each role, which are groups of ranks; clients
read answers all the time, every second of them sampled with a seed, and each answer is compared
with the one before any fault. No prefix is cached, so that prompts go to both prefill workers, and
every prompt is handed off. Two faults, at each rank of a worker of each role:

    kill    SIGKILL
    freeze  SIGSTOP, and never SIGCONT
"""

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product

from typer import Option

from benchmarks import command
from benchmarks.hung_workers import (
    NUM_PROMPTS,
    ROLES,
    Clients,
    HungService,
    HungWorkersOptions,
    hung_service,
    is_alive,
    longest_pause_s,
    wait_until,
)
from disagg.bench.result import Row, announce, result_of
from disagg.cli.bench import Out, show, without_none
from disagg.cli.options import Json
from disagg.errors import UnknownNameError

FAULTS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
TIMEOUT_S = 5.0
REPLACE_S = 15.0
NOTES = (
    "seconds from the fault. ended_s: until all processes of the group were gone; replaced_s: "
    "until another group served in its place. longest_pause_s: without a piece of an answer"
)


@dataclass(frozen=True)
class LostRanksOptions:
    """One fault at one rank after the other.

    roles:     of the workers
    victims:   their ranks
    ranks:     of each worker
    timeout_s: `cluster.rank_timeout_s`
    replace_s: `cluster.replace_s`, after which a frozen rank 0 is killed
    """

    faults: Sequence[str] = tuple(FAULTS)
    roles: Sequence[str] = ROLES
    victims: Sequence[int] = (0, 1)
    ranks: int = 2
    clients: int = 16
    tokens: int = 80
    codec: str = "raw"
    timeout_s: float = TIMEOUT_S
    replace_s: float = REPLACE_S

    def service(self) -> HungWorkersOptions:
        """The service and its clients."""
        return HungWorkersOptions(
            clients=self.clients,
            tokens=self.tokens,
            sampled=True,
            settings={
                "codec": self.codec,
                "cluster.prefill_ranks": self.ranks,
                "cluster.decode_ranks": self.ranks,
                "cluster.rank_timeout_s": self.timeout_s,
                "cluster.replace_s": self.replace_s,
                "transfer.min_disagg_tokens": 0,
            },
        )


def measure_lost_ranks(options: LostRanksOptions) -> Row:
    """A row for every fault, role and rank."""
    for fault in options.faults:
        if fault not in FAULTS:
            raise UnknownNameError.of("fault", fault, FAULTS)
    for role in options.roles:
        if role not in ROLES:
            raise UnknownNameError.of("role", role, ROLES)
    rows = []
    with hung_service(options.service()) as service:
        with ThreadPoolExecutor(NUM_PROMPTS) as pool:
            reads = pool.map(
                Clients(service, options.service()).read, range(NUM_PROMPTS)
            )
            expected = [answer.text for answer in reads]
        for fault, role, rank in product(
            options.faults, options.roles, options.victims
        ):
            announce(f"{fault} of rank {rank} of a {role} worker")
            row = {"fault": fault, "role": role, "rank": rank}
            rows.append(row | _measure_fault(service, options, row, expected))
            announce(str(rows[-1]))
    return result_of(rows, NOTES, options=asdict(options))


def _measure_fault(
    service: HungService, options: LostRanksOptions, row: Row, expected: Sequence[str]
) -> Row:
    before = service.pids(row["role"])
    (pid, name), *_ = before.items()
    group = service.rank_pids(name)
    with Clients(service, options.service()) as clients:
        wait_until(
            lambda: len([x for x in clients.answers if x.text]) >= options.clients,
            "all clients have a piece",
        )
        log_bytes = service.log.stat().st_size
        hit_at = time.monotonic()
        os.kill(group[row["rank"]], FAULTS[row["fault"]])
        wait_until(
            lambda: not any(map(is_alive, group)), f"{name}, processes {group}, ends"
        )
        ended_at = time.monotonic()
    wait_until(
        lambda: len(service.pids(row["role"]).keys() - {pid}) == len(before),
        f"another worker serves in the place of {name}",
    )
    replaced_at = time.monotonic()
    wait_until(lambda: not service.gauges(), "all gauges are zero")
    log = service.log.read_bytes()[log_bytes:].decode()
    answers = clients.answers
    return {
        "worker": name,
        "answers": len(answers),
        "exact": sum(answer.text == expected[answer.number] for answer in answers),
        "errors": [answer.error for answer in answers if answer.error],
        "ended_s": ended_at - hit_at,
        "replaced_s": replaced_at - hit_at,
        "longest_pause_s": longest_pause_s(answers),
        "gauges": service.gauges(),
        "log": [line for line in log.splitlines() if name in line],
    }


def lost_ranks(
    fault: list[str] | None = Option(
        None, "--fault", help=f"{', '.join(FAULTS)}; may be repeated; default: both."
    ),
    role: list[str] | None = Option(
        None, "--role", help=f"{', '.join(ROLES)}; may be repeated; default: both."
    ),
    rank: list[int] | None = Option(
        None, "--rank", min=0, help="Ranks that are hit; default: 0 and 1."
    ),
    codec: str = Option("raw", help="Codec spec."),
    clients: int = Option(16, min=1, help="Concurrent answers."),
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure how soon a service recovers from ranks that die or freeze."""
    fields = without_none(faults=fault, roles=role, victims=rank)
    options = LostRanksOptions(codec=codec, clients=clients, **fields)
    show(measure_lost_ranks(options), out, as_json)


if __name__ == "__main__":
    command.main(lost_ranks, "lost_ranks")
