"""`disagg status`, `disagg scale`, `disagg drain`: the workers of the running service."""

import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

from typer import Argument, Option

from disagg.cli import client, options
from disagg.cli.output import print_json, print_table
from disagg.cli.serve import running
from disagg.cli.state_file import RunningService
from disagg.errors import ConfigError

Counts = Annotated[list[str], Argument(help="prefill=2 decode=3, or just one of them.")]
Name = Annotated[str, Argument(help="Worker name as in `disagg status`.")]
PAUSE_S = 1.0
CLEAR = "\033[H\033[2J"
COLUMNS = ["worker", "role", ">running", ">waiting", ">pages %", ">tokens fit"]
COLUMNS += ["node", "backend"]  # last: a narrow terminal breaks nothing else


def status(
    url: str | None = Option(None, help="URL of a service; default: the running one."),
    api_key: options.ApiKey = None,
    watch: bool = Option(False, "--watch", help="Refresh every second until Ctrl-C."),
    state_file: options.StateFile = None,
    as_json: options.Json = False,
) -> None:
    """Show the running service and its workers."""
    options.refuse_idle(url, "with --url, which names a service", state_file=state_file)
    service = RunningService(url, 0, api_key or "") if url else running(state_file)
    clear = CLEAR if watch and sys.stdout.isatty() else ""
    for report in reports(service, watch):
        if as_json:
            print_json(report)
            continue
        print(clear, end="")
        with client.understood(service):
            draw(report)
        sys.stdout.flush()


def scale(
    counts: Counts, state_file: options.StateFile = None, as_json: options.Json = False
) -> None:
    """Change the number of workers while the service runs."""
    body = parse_counts(counts)
    state = running(state_file)
    answer = client.post(state, "/scale", body)
    if as_json:
        print_json(answer)
        return
    target = ", ".join(f"{number} {role}" for role, number in body.items())
    print(f"{target}: workers start and leave one by one; `disagg status` shows them")


def parse_counts(counts: list[str]) -> dict[str, int]:
    """{"prefill": 2} of ["prefill=2"]; ConfigError for anything else."""
    body: dict[str, int] = {}
    for count in counts:
        if not re.fullmatch(r"(prefill|decode)=[0-9]{1,9}", count):
            raise ConfigError(f"{count!r}: expected prefill=NUMBER or decode=NUMBER")
        role, number = count.split("=")
        if role in body:
            raise ConfigError(
                f"{' '.join(counts)!r} names a role twice; name each role once"
            )
        body[role] = int(number)
    return body


def drain(
    name: Name, state_file: options.StateFile = None, as_json: options.Json = False
) -> None:
    """Replace a worker and move its running sequences to others."""
    state = running(state_file)
    answer = client.post(state, f"/workers/{quote(name, safe='')}/drain")
    if as_json:
        print_json(answer)
    else:
        print(f"{name} leaves once its replacement serves; `disagg status` shows both")


def reports(service: RunningService, repeat: bool) -> Iterator[dict[str, Any]]:
    """The status of a service: once, or every second."""
    yield client.get(service, "/status")
    while repeat:
        time.sleep(PAUSE_S)
        yield client.get(service, "/status")


def draw(report: dict[str, Any]) -> None:
    """Print a status report as one screen of text."""
    parts = [report["model"], report["codec"], f"{report['requests']} requests"]
    for key in ("queued", "moved", "retried"):
        if report.get(key):
            parts.append(f"{report[key]} {key}")
    fp16_bytes = report.get("fp16_bytes")
    if fp16_bytes:
        kv_bytes = report["wire_bytes"] - report.get("wire_state_bytes", 0)
        share = 100 * kv_bytes / fp16_bytes
        parts.append(f"{report['wire_bytes']:,} bytes sent, {share:.0f} % of fp16")
    print_table(" · ".join(parts), COLUMNS, map(row_of, report["workers"]))
    current = Counter(worker["role"] for worker in report["workers"])
    for role, number in report.get("wanted", {}).items():
        if current[role] < number:
            print(
                f"{role}: {current[role]} of {number}; more are loading or wait for resources"
            )
        elif current[role] > number:
            print(f"{role}: {current[role]} of {number}; the others are leaving")
    for name, words in report.get("lacks_room", {}).items():
        print(f"{name} waits for room: {words}")


def row_of(worker: dict[str, Any]) -> list[str]:
    """A line about one worker."""
    head = [worker["name"], worker["role"]]
    if "error" in worker:
        return [*head, "", "", "", "", worker["address"], worker["error"]]
    gauges = worker.get("gauges", {})
    pages = 100 * gauges.get("used_bytes", 0) / gauges.get("arena_bytes", 1)
    return [
        *head,
        f"{gauges.get('engine_running', 0):.0f}",
        f"{gauges.get('engine_waiting', 0):.0f}",
        f"{pages:.0f}",
        f"{worker.get('tokens_fit', 0):,}",
        worker.get("node", ""),
        _backend(worker),
    ]


def _backend(worker: dict[str, Any]) -> str:
    """What computes its model, in how many ranks, and where if they are on several hosts."""
    backend: str = worker.get("backend", "")
    ranks = worker.get("ranks", 1)
    if ranks == 1:
        return backend
    backend += f", {ranks} ranks"
    counts = Counter(worker.get("rank_hosts", []))
    if len(counts) <= 1:
        return backend
    hosts = [x if count == 1 else f"{x} ({count})" for x, count in counts.items()]
    return f"{backend} on {', '.join(hosts)}"
