"""`disagg serve`, `disagg status`, `disagg stop`: a service that stays, and how it is."""

import os
import signal
import sys
import time
from types import FrameType
from typing import Annotated, Any

import typer

from disagg.cli import options
from disagg.cli.client import get, post
from disagg.cli.output import print_json, print_table
from disagg.cli.state import State, announced, read_state
from disagg.config import Config
from disagg.errors import DeadlineError, PeerLostError

Host = Annotated[str | None, typer.Option(help="Address to listen on.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0: any free one.")]
Url = Annotated[str | None, typer.Option(help="A service; else the one of the state file.")]
STOP_S = 15.0
POLL_S = 0.05


def serve(
    model: options.Model = None,
    codec: options.Codec = None,
    host: Host = None,
    port: Port = None,
    config: options.ConfigFile = None,
    sets: options.Set = None,
    show_config: options.ShowConfig = False,
    state_file: options.StateFile = None,
    as_json: options.Json = False,
) -> None:
    """Serve completions until stopped, with prefill and decode workers of its own."""
    flags = {"model.name": model, "codec": codec, "server.host": host, "server.port": port}
    state = state_file and str(state_file)
    settled = options.read_config(config, sets, flags | {"server.state_file": state})
    if show_config:
        options.print_config(settled, as_json)
    else:
        run_service(settled, as_json)


def status(
    url: Url = None, state_file: options.StateFile = None, as_json: options.Json = False
) -> None:
    """What the running service is and what its workers hold."""
    found = get(url or running(state_file).url, "/status")
    if as_json:
        print_json(found)
        return
    rows = [_worker_row(worker) for worker in found["workers"]]
    title = f"{found['model']} · {found['codec']} · {found['requests']} requests"
    print_table(title, ["worker", "role", "address", "holds"], rows)


def stop(state_file: options.StateFile = None, as_json: options.Json = False) -> None:
    """Stop the running service; returns when nothing of it is left."""
    state = running(state_file)
    post(state.url, "/stop", state.token)
    until = time.monotonic() + STOP_S
    while state.alive:
        if time.monotonic() > until:
            raise DeadlineError(f"process {state.pid} still runs after {STOP_S:.0f} s")
        time.sleep(POLL_S)
    if as_json:
        print_json({"stopped": state.url})


def running(state_file: Any) -> State:
    """The service of the state file; PeerLostError if there is none."""
    path = options.state_path(state_file)
    state = read_state(path)
    if state is None:
        raise PeerLostError(f"no service runs, says {path}; `disagg serve` starts one")
    return state


def run_service(config: Config, as_json: bool) -> None:
    """Serve until SIGINT, SIGTERM or `disagg stop`; the state file lives as long."""
    from disagg.cli.private import check_codec
    from disagg.model.describe import describe_model
    from disagg.server.service import Service

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    path = options.state_path(config.server.state_file)
    check_codec(config.codec, describe_model(config.model.name, config.model.dtype))
    try:
        with Service(config) as service:
            signal.signal(signal.SIGTERM, interrupt)  # Ray sets one of its own when it starts
            with announced(path, State(service.url, os.getpid(), service.secret)):
                if as_json:
                    print_json({"url": service.url, "pid": os.getpid()})
                for line in (*service.links, f"serving at {service.url}"):
                    print(line, file=sys.stderr, flush=True)
                service.stopped.wait()
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)


def _worker_row(worker: dict[str, Any]) -> tuple[str, str, str, str]:
    stays = ("arena_bytes", "cached_bytes", "cached_pages")
    gauges = {k: v for k, v in worker.get("gauges", {}).items() if v and k not in stays}
    holds = ", ".join(f"{name} {value:.0f}" for name, value in sorted(gauges.items()))
    told = worker.get("error") or holds or "nothing"
    return worker["name"], worker["role"], worker["address"], told
