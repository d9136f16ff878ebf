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
from disagg.cli.client import RunningService
from disagg.cli.output import print_json, print_table
from disagg.cli.serve import running
from disagg.errors import ConfigError

Wanted = Annotated[list[str], Argument(help="prefill=2 decode=3; or one of them.")]
Name = Annotated[str, Argument(help="A worker, as `disagg status` calls it.")]
PAUSE_S = 1.0
CLEAR = "\033[H\033[2J"
COLUMNS = ["worker", "role", ">running", ">waiting", ">pages %", ">tokens fit"]
COLUMNS += ["node", "backend"]  # last, so that a narrow terminal breaks nothing else


def status(
    url: str | None = Option(None, help="A service; else the one of the state file."),
    api_key: options.ApiKey = None,
    watch: bool = Option(False, "--watch", help="Again every second, until Ctrl-C."),
    state_file: options.StateFile = None,
    as_json: options.Json = False,
) -> None:
    """Say how the running service is and what its workers do."""
    options.refuse_idle(url, "with --url, which names a service", state_file=state_file)
    service = RunningService(url, 0, api_key or "") if url else running(state_file)
    for found in looks(service, watch):
        if as_json:
            print_json(found)
        else:
            print(CLEAR if watch and sys.stdout.isatty() else "", end="")
            with client.understood(service):
                draw(found)
            sys.stdout.flush()


def scale(
    wanted: Wanted, state_file: options.StateFile = None, as_json: options.Json = False
) -> None:
    """Run so many workers of each role; what they have moves."""
    if wrong := [
        x for x in wanted if not re.fullmatch(r"(prefill|decode)=[0-9]{1,9}", x)
    ]:
        raise ConfigError(f"{wrong[0]!r} is no prefill=NUMBER or decode=NUMBER")
    pairs = [each.split("=") for each in wanted]
    body = {role: int(number) for role, number in pairs}
    if len(body) < len(pairs):
        raise ConfigError(f"{' '.join(wanted)!r} names a role twice; once is wanted")
    state = running(state_file)
    found = client.post(state, "/scale", body)
    told = ", ".join(f"{number} {role}" for role, number in body.items())
    print_json(found) if as_json else print(f"{told}: they come and leave one by one")


def drain(
    name: Name, state_file: options.StateFile = None, as_json: options.Json = False
) -> None:
    """Let a worker leave once another one has its place."""
    state = running(state_file)
    found = client.post(state, f"/workers/{quote(name, safe='')}/drain")
    print_json(found) if as_json else print(f"{name} leaves once another worker serves")


def looks(service: RunningService, again: bool) -> Iterator[dict[str, Any]]:
    """What the service says of itself: once, or every second."""
    yield client.get(service, "/status")
    while again:
        time.sleep(PAUSE_S)
        yield client.get(service, "/status")


def draw(found: dict[str, Any]) -> None:
    """One screen."""
    told = [found["model"], found["codec"], f"{found['requests']} requests"]
    told += [f"{found[x]} {x}" for x in ("queued", "moved", "retried") if found.get(x)]
    if fp16 := found.get("fp16_bytes"):
        share = 100 * found["wire_bytes"] / fp16
        told.append(f"{found['wire_bytes']:,} bytes sent, {share:.0f} % of fp16")
    print_table(" · ".join(told), COLUMNS, map(row_of, found["workers"]))
    there = Counter(worker["role"] for worker in found["workers"])
    for role, number in found.get("wanted", {}).items():
        if there[role] != number:
            rest = (
                "more load, or wait for a place"
                if there[role] < number
                else "others leave"
            )
            print(f"{role}: {there[role]} there, {number} wanted; {rest}")


def row_of(worker: dict[str, Any]) -> list[str]:
    """A line about one worker."""
    gauges, cells = worker.get("gauges", {}), [worker["name"], worker["role"]]
    if "error" in worker:
        return [*cells, *[""] * 4, worker["address"], worker["error"]]
    pages = 100 * gauges.get("used_bytes", 0) / gauges.get("arena_bytes", 1)
    busy = [f"{gauges.get(f'engine_{x}', 0):.0f}" for x in ("running", "waiting")]
    fit = f"{worker.get('tokens_fit', 0):,}"
    cells += [*busy, f"{pages:.0f}", fit]
    return [*cells, worker.get("node", ""), worker.get("backend", "")]
