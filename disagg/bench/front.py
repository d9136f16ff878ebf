"""`disagg bench front`: what one front end relays, and what can hold it up.

    raw clients ──► HTTP, tokenizer, router ──────────► gRPC ──► fake workers       a process each
    raw clients ──► doors: HTTP, tokenizer ──► router ──► gRPC ──► fake workers

Nothing is computed, so every figure is the front end's own. Its processor time stands beside wall
times, since the machine may be shared. Each part is a function that returns rows.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from disagg.bench.child import Child
from disagg.bench.doors import MeasuredDoor, MeasuredRouter
from disagg.bench.fake_workers import Fleet, FleetOptions
from disagg.bench.front_end import FrontEndFigures, MeasuredFront
from disagg.bench.raw_clients import (
    HttpAnswer,
    RawClients,
    TokenFigures,
    prompt_of_ids,
)
from disagg.bench.result import Row, announce, result_of
from disagg.bench.tables import table
from disagg.errors import UnknownNameError
from disagg.transfer.messages import WorkerInfo

PROMPT = 64  # tokens, unless a part has another
ENDLESS = 1900  # tokens of answers that no part waits for; with the prompt, a context
SETTLE_S = 0.5
MAX_FILES = 1024  # the usual limit of open files in a shell
MEGABYTE = 1e6
NOTES = (
    "late: how late the event loop was, every 10 ms; busy: its processor time between two of these "
    "looks, which neighbours on the machine do not change; cpu_s, cores, token_us, door_us, "
    "router_us: processor time of the front end, of its doors, of their router; token_p99_ms: from "
    "the worker of a token to its client"
)


@dataclass(frozen=True)
class Relay:
    """Streams that get `per_s` tokens a second each."""

    streams: int
    workers: int
    per_s: float

    @property
    def fleet(self) -> FleetOptions:
        return FleetOptions(decode=self.workers, step_s=1 / self.per_s)


@dataclass(frozen=True)
class FrontOptions:
    """How much of each part.

    parts:    names of `PARTS`
    relays:   the last one is more than one process can relay
    doors:    processes in front of the router, one number for each measurement
    window_s: of a measurement
    burst:    requests that arrive at once
    roles:    workers of each role that are full when a burst arrives
    streams:  beside sleepy connections, and on workers of which one hangs
    sleepy:   connections
    ignored_bytes: of fields that the service does not know
    choices:  of one request, each with `choice_tokens` tokens and 20 log-probabilities
    patience_s: for long prompts until they are the most urgent, and for what may never happen
    """

    parts: Sequence[str] = ()
    relays: Sequence[Relay] = (
        Relay(100, 8, per_s=10.0),
        Relay(1000, 64, per_s=10.0),
        Relay(1000, 64, per_s=20.0),
    )
    doors: Sequence[int] = (1, 2)
    window_s: float = 4.0
    burst: int = 1000
    roles: int = 64
    streams: int = 100
    sleepy: int = 2000
    ignored_bytes: int = 7_800_000
    choices: int = 128
    choice_tokens: int = 100
    patience_s: float = 16.0


@dataclass(frozen=True)
class Stage:
    """The processes of a measurement. doors: of the front end; router: behind them, if any."""

    doors: Sequence[Child]
    fleet: Child
    clients: Child
    workers: Sequence[WorkerInfo]
    router: Child | None = None

    @property
    def front(self) -> Child:
        """The only process of a front end."""
        (front,) = self.doors
        return front

    @property
    def processes(self) -> Sequence[Child]:
        """All processes of the front end; the router is the last one, if it has its own."""
        return self.doors if self.router is None else [*self.doors, self.router]

    def begin(self) -> int:
        """Begin a window in all of them; their memory, in bytes."""
        return sum(process.ask("begin") for process in self.processes)

    def read(self) -> list[FrontEndFigures]:
        """The figures of each."""
        return [process.ask("read") for process in self.processes]

    def open_streams(self, count: int, prompt_tokens: int = PROMPT) -> None:
        """Begin streams, and wait for the first token of each."""
        self.clients.ask("open_streams", count, prompt_tokens, ENDLESS)


@contextmanager
def staged(options: FleetOptions, max_files: int | None = None) -> Iterator[Stage]:
    """A front end of one process that serves fake workers, and clients that know it."""
    with ExitStack() as stack:
        # first: the process that the others are forked from imports its modules
        front = stack.enter_context(Child(MeasuredFront))
        fleet = stack.enter_context(Child(Fleet))
        clients = stack.enter_context(Child(RawClients))
        workers = fleet.ask("start", options)
        port = front.ask("start", workers, max_files)
        clients.ask("connect", port)
        yield Stage([front], fleet, clients, workers)


@contextmanager
def staged_doors(options: FleetOptions, num_doors: int) -> Iterator[Stage]:
    """A front end with several doors."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        path = Path(folder) / "router"
        router = stack.enter_context(Child(MeasuredRouter))
        doors = [stack.enter_context(Child(MeasuredDoor)) for _ in range(num_doors)]
        fleet = stack.enter_context(Child(Fleet))
        clients = stack.enter_context(Child(RawClients))
        workers = fleet.ask("start", options)
        router.ask("start", workers, path)
        ports = [door.ask("start", number, path) for number, door in enumerate(doors)]
        clients.ask("connect", *ports)
        yield Stage(doors, fleet, clients, workers, router)


# -- parts


def measure_relay(options: FrontOptions) -> list[Row]:
    """Tokens a second and a core, and how late they are, by streams and workers."""
    rows = []
    for relay in options.relays:
        with staged(relay.fleet) as stage:
            relayed = _relay(stage, relay, options.window_s)
        rows.append(relayed.as_row())
    return rows


def measure_doors(options: FrontOptions) -> list[Row]:
    """The last relay through doors, and what more of them would give, by a model."""
    relay = options.relays[-1]
    rows = []
    for num_doors in options.doors:
        with staged_doors(relay.fleet, num_doors) as stage:
            relayed = _relay(stage, relay, options.window_s)
        *doors, router = relayed.figures
        num_tokens = relayed.tokens.tokens
        door_us = 1e6 * sum(door.cpu_s for door in doors) / max(1, num_tokens)
        router_us = 1e6 * router.cpu_s / max(1, num_tokens)
        own = {"doors": num_doors, "door_us": door_us, "router_us": router_us}
        rows.append({"what": "measured", **own, **relayed.as_row()})
    rows.append(_modelled(rows[-1]))
    return rows


def _modelled(measured: Row) -> Row:
    """Four doors and a router with a core each: the slower side decides."""
    num_doors = 4
    doors_per_s = num_doors * 1e6 / measured["door_us"]
    router_per_s = 1e6 / measured["router_us"]
    return {
        "what": "model: 4 doors on 8 cores",
        "doors": num_doors,
        "door_us": measured["door_us"],
        "router_us": measured["router_us"],
        "tokens_per_s": min(doors_per_s, router_per_s),
    }


@dataclass(frozen=True)
class Relayed:
    """A relay in one window. stream_bytes: memory of a stream, of all processes."""

    relay: Relay
    tokens: TokenFigures
    figures: Sequence[FrontEndFigures]
    stream_bytes: float

    def as_row(self) -> Row:
        tokens, figures = self.tokens, self.figures
        cpu_s = sum(x.cpu_s for x in figures)
        return {
            "streams": self.relay.streams,
            "workers": self.relay.workers,
            "offered_per_s": self.relay.streams * self.relay.per_s,
            "tokens_per_s": tokens.tokens / tokens.seconds,
            "token_p99_ms": 1e3 * tokens.token_p99_s,
            "longest_gap_ms": 1e3 * tokens.longest_gap_s,
            "token_us": 1e6 * cpu_s / max(1, tokens.tokens),
            "tokens_per_core_s": tokens.tokens / cpu_s,
            "cores": cpu_s / figures[0].seconds,
            "late_p99_ms": 1e3 * max(x.late_p99_s for x in figures),
            "late_max_ms": 1e3 * max(x.late_max_s for x in figures),
            "busy_max_ms": 1e3 * max(x.busy_max_s for x in figures),
            "collection_ms": 1e3 * max(x.collection_s for x in figures),
            "stream_kb": self.stream_bytes / 1e3,
        }


def _relay(stage: Stage, relay: Relay, window_s: float) -> Relayed:
    idle_bytes = stage.begin()
    stage.open_streams(relay.streams)
    time.sleep(SETTLE_S)
    stage.begin()
    tokens: TokenFigures = stage.clients.ask("read_window", window_s)
    figures = stage.read()
    stream_bytes = sum(x.resident_bytes for x in figures) - idle_bytes
    return Relayed(relay, tokens, figures, stream_bytes / relay.streams)


def measure_burst(options: FrontOptions) -> list[Row]:
    """Requests that arrive while every worker is full, wait, and leave."""
    return [*_burst_at_router(options), _burst_at_server(options)]


def _burst_at_router(options: FrontOptions) -> list[Row]:
    """Without HTTP, one a turn of the loop: late is what a single arrival delays."""
    slots = 2
    fleet = FleetOptions(prefill=options.roles, decode=options.roles, slots=slots)
    with staged(fleet) as stage:
        full = slots * options.roles
        stage.front.ask("begin_requests", full, PROMPT, ENDLESS)
        time.sleep(2 * SETTLE_S)
        phases = {
            "arrive": stage.front.ask("begin_requests", options.burst, PROMPT, ENDLESS),
            "wait": stage.front.ask("idle", options.window_s / 2),
            "leave": stage.front.ask("cancel_requests"),
        }
    return [
        {
            "what": f"{options.burst} {phase} at the router",
            "workers": f"{options.roles} + {options.roles}",
            **_lateness(figures),
        }
        for phase, figures in phases.items()
    ]


def _lateness(figures: FrontEndFigures) -> Row:
    return {
        "late_max_ms": 1e3 * figures.late_max_s,
        "late_sum_s": figures.late_sum_s,
        "busy_max_ms": 1e3 * figures.busy_max_s,
        "cpu_s": figures.cpu_s,
        "seconds": figures.seconds,
    }


def _burst_at_server(options: FrontOptions) -> Row:
    """Over HTTP, all at once, at one worker: how long the streams that run there stand still."""
    slots = 8
    with staged(FleetOptions(decode=1, slots=slots)) as stage:
        stage.open_streams(slots)
        time.sleep(SETTLE_S)
        stage.front.ask("begin")
        stage.clients.ask("begin_window")
        stage.clients.ask("open_streams", options.burst, PROMPT, ENDLESS, False)
        time.sleep(options.window_s)
        stage.clients.ask("close_streams", options.burst)
        time.sleep(options.window_s / 2)
        tokens: TokenFigures = stage.clients.ask("end_window")
        figures: FrontEndFigures = stage.front.ask("read")
    return {
        "what": f"{options.burst} arrive and leave over HTTP",
        "workers": "1",
        **_lateness(figures),
        "longest_gap_ms": 1e3 * tokens.longest_gap_s,
    }


def measure_long_prompts(options: FrontOptions) -> list[Row]:
    """Short prompts a second beside long ones that wait for room: one for each decode worker."""
    return [_long_prompts(options, workers) for workers in (1, 4)]


def _long_prompts(options: FrontOptions, workers: int) -> Row:
    # tokens: what a worker holds, and prompts
    room, running, short, long = 2000, 100, 20, 1950
    per_s = 20.0
    fleet = FleetOptions(prefill=workers, decode=workers, room=room)
    with staged(fleet) as stage:
        # long answers, beside which no long prompt finds room
        stage.open_streams(workers, running)
        request = {"prompt": prompt_of_ids(short), "max_tokens": 4}
        stage.clients.ask("begin_requests", request, per_s)
        alone: list[HttpAnswer] = stage.clients.ask("take_answers", options.window_s)
        stage.clients.ask("open_streams", workers, long, 4, False)
        time.sleep(options.patience_s / 2)  # until they are the most urgent
        beside: list[HttpAnswer] = stage.clients.ask("take_answers", options.window_s)
        stage.clients.ask("end_requests")
    return {
        "workers": f"{workers} + {workers}",
        "long_prompts": workers,
        "short_per_s_alone": len(alone) / options.window_s,
        "short_per_s_beside": len(beside) / options.window_s,
        "kept_share": len(beside) / max(1, len(alone)),
    }


def measure_hung_engine(options: FrontOptions) -> list[Row]:
    """One engine of four makes no step any more, while its worker answers every call."""
    with staged(FleetOptions(decode=4)) as stage:
        count = min(40, options.streams)
        stage.open_streams(count)
        stage.fleet.ask("hang", stage.workers[0].address)
        waited_s, stalled = stage.clients.ask("wait_for_progress", options.patience_s)
    return [
        {
            "streams": count,
            "all_go_on_after_s": None if stalled else waited_s,
            "stalled": stalled,
            "patience_s": options.patience_s,
        }
    ]


def measure_sleepy(options: FrontOptions) -> list[Row]:
    """Streams with and without connections that send a byte now and then."""
    rows = []
    with staged(FleetOptions(decode=8), MAX_FILES) as stage:
        stage.open_streams(options.streams)
        for sleepy in (0, options.sleepy):
            accepted = stage.clients.ask("open_sleepy", sleepy) if sleepy else 0
            stage.front.ask("begin")
            tokens = stage.clients.ask("read_window", options.window_s)
            health: list[HttpAnswer] = stage.clients.ask("check_health", 10, 0.1)
            figures: FrontEndFigures = stage.front.ask("read")
            answered = [x for x in health if x.status == 200]
            rows.append(
                {
                    "streams": options.streams,
                    "sleepy": sleepy,
                    "accepted": accepted,
                    "tokens_per_s": tokens.tokens / tokens.seconds,
                    "token_p99_ms": 1e3 * tokens.token_p99_s,
                    "health_answered": f"{len(answered)} of {len(health)}",
                    "health_max_ms": 1e3 * max(x.seconds for x in health),
                    "cpu_share": figures.cpu_s / figures.seconds,
                    "log_lines": figures.log_lines,
                }
            )
    return rows


def measure_ignored_fields(options: FrontOptions) -> list[Row]:
    """Bodies full of fields that the service ignores: the longest /health, and memory held."""
    padded = (PROMPT, ENDLESS, options.ignored_bytes)
    memory = []
    with staged(FleetOptions(decode=2)) as stage:
        stage.clients.ask("begin_health")
        stage.front.ask("begin")
        for _ in range(3):
            stage.clients.ask("open_padded_stream", *padded)
            time.sleep(SETTLE_S)
            memory.append(stage.front.ask("resident_bytes"))
        figures: FrontEndFigures = stage.front.ask("read")
        answers: list[HttpAnswer] = stage.clients.ask("end_requests")
    # the first one also takes memory that the later ones use again
    held_bytes = (memory[-1] - memory[0]) / (len(memory) - 1)
    return [
        {
            "body_mb": options.ignored_bytes / MEGABYTE,
            "health_max_ms": 1e3 * max(x.seconds for x in answers),
            "busy_max_ms": 1e3 * figures.busy_max_s,
            "held_mb": held_bytes / MEGABYTE,
        }
    ]


def measure_scores(options: FrontOptions) -> list[Row]:
    """One short request for many answers with log-probabilities."""
    body = {
        "prompt": prompt_of_ids(PROMPT),
        "n": options.choices,
        "max_tokens": options.choice_tokens,
        "logprobs": 20,
    }
    with staged(FleetOptions(decode=4)) as stage:
        stage.clients.ask("begin_health")
        before_bytes = stage.front.ask("begin")
        answer: HttpAnswer = stage.clients.ask("post", body)
        time.sleep(SETTLE_S)
        figures: FrontEndFigures = stage.front.ask("read")
        health: list[HttpAnswer] = stage.clients.ask("end_requests")
    return [
        {
            "choices": options.choices,
            "tokens": options.choice_tokens,
            "status": answer.status,
            "seconds": answer.seconds,
            "answer_mb": len(answer.body) / MEGABYTE,
            "health_max_ms": 1e3 * max(x.seconds for x in health),
            "busy_max_ms": 1e3 * figures.busy_max_s,
            "memory_mb": (figures.resident_bytes - before_bytes) / MEGABYTE,
        }
    ]


def measure_link_again(options: FrontOptions) -> list[Row]:
    """Bytes over a link for a short hand-off, the first time and after the link was idle."""
    from disagg.bench.idle_link import measure_crossings  # imports torch

    crossings = measure_crossings(times=3)
    return [
        {
            "use": number,
            "payload_kb": crossing.payload_bytes / 1e3,
            "crossed_kb": crossing.crossed_bytes / 1e3,
        }
        for number, crossing in enumerate(crossings, 1)
    ]


PARTS: dict[str, Callable[[FrontOptions], list[Row]]] = {
    "relay": measure_relay,
    "doors": measure_doors,
    "burst": measure_burst,
    "long-prompts": measure_long_prompts,
    "hung-engine": measure_hung_engine,
    "sleepy": measure_sleepy,
    "ignored-fields": measure_ignored_fields,
    "scores": measure_scores,
    "link-again": measure_link_again,
}


def measure_front(options: FrontOptions) -> Row:
    """Rows of all parts; each names its part."""
    for name in options.parts:
        if name not in PARTS:
            raise UnknownNameError.of("part", name, list(PARTS))
    rows = []
    parts = []
    for name in options.parts or PARTS:
        announce(f"part {name}")
        began = time.monotonic()
        rows += [{"part": name, **row} for row in PARTS[name](options)]
        seconds = time.monotonic() - began
        parts.append({"part": name, "seconds": seconds, "load": os.getloadavg()[0]})
    return result_of(rows, NOTES, parts=parts)


def draw_front(result: dict[str, Any]) -> str:
    """A table for each part."""
    by_part: dict[str, list[Row]] = {}
    for row in result["rows"]:
        columns = {name: value for name, value in row.items() if name != "part"}
        by_part.setdefault(row["part"], []).append(columns)
    return "\n\n".join(f"{part}\n{table(rows)}" for part, rows in by_part.items())
