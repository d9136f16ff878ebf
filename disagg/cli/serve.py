"""`disagg serve` and `disagg stop`, and the private service that `disagg submit` starts.

What needs tokenizers, torch or Ray is imported inside functions.
"""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from disagg.cli import client, options
from disagg.cli import state_file as state_files
from disagg.cli.checks import check_model, check_request, read_answer_formats
from disagg.cli.output import print_json, stages, tell
from disagg.cli.shutdown import RAY_STOP_S, ShutdownGuard
from disagg.cli.state_file import RunningService, read_state
from disagg.config import Config, replace_keys
from disagg.errors import ConfigError, DeadlineError, DisaggError, PeerLostError
from disagg.launch.reaper import birth
from disagg.log import configure

if TYPE_CHECKING:
    from disagg.cli.supervisor import Supervisor
    from disagg.server.service import Service

STOP_S = 5.0  # beyond the time limits of the service itself
POLL_S = 0.05
PRIVATE = {  # a service for one prompt listens on this host, for one client
    "host": "127.0.0.1",
    "port": 0,
    "api_key": None,
    "api_key_file": None,
    "metrics_key": None,
    "tls_certificate": None,
    "tls_key": None,
    "pd_ports": None,
    "doors": 1,
    "drain_s": 0.0,
}
ModelArgument = Annotated[
    str | None, Argument(metavar="[MODEL]", help="Same as --model.")
]


def serve(
    model_argument: ModelArgument = None,
    model: options.Model = None,
    served_model_name: str | None = Option(None, help="Model name in the API."),
    chat_template: options.ChatTemplate = None,
    tool_parser: str | None = Option(
        None, help="Format of the model's tool calls; none: not read. Default: auto."
    ),
    reasoning_parser: str | None = Option(
        None, help="Format of the model's thoughts; none: not read. Default: auto."
    ),
    dtype: str | None = Option(
        None, help="Dtype of the model: auto, float32, bfloat16 or float16."
    ),
    codec: options.Codec = None,
    state: options.State = None,
    codecs: str | None = Option(
        None,
        help='Codecs for --codec auto; on a GPU, for requests too: "fp8,int8".',
    ),
    error_budget: float | None = Option(
        None, min=0, help="Relative attention error allowed for --codec auto."
    ),
    prefill: int | None = Option(
        None, min=1, help="Number of prefill workers; default: 1."
    ),
    decode: int | None = Option(
        None, min=1, help="Number of decode workers; default: 1."
    ),
    colocated: bool | None = Option(
        None, "--colocated", help="Every worker prefills and decodes; no hand-offs."
    ),
    ranks: int | None = Option(
        None,
        min=1,
        help="Processes of each worker, which share its model; default: 1.",
    ),
    prefill_ranks: int | None = Option(
        None, min=1, help="The same of prefill workers alone."
    ),
    decode_ranks: int | None = Option(
        None, min=1, help="The same of decode workers alone."
    ),
    min_disagg_tokens: int | None = Option(
        None, min=0, help="Prompts below this length are not handed off."
    ),
    host: str | None = Option(None, help="Address to listen on."),
    port: int | None = Option(None, help="Port to listen on; 0: any free port."),
    doors: int | None = Option(
        None,
        min=1,
        help="Processes with HTTP in front of one router; default: 1, with both.",
    ),
    pd_ports: int | None = Option(
        None, help="First of one port per worker, for vLLM's routers; 0: any free."
    ),
    api_key: str | None = Option(
        None, envvar="DISAGG_API_KEY", help="API key that clients must send."
    ),
    api_key_file: str | None = Option(None, help="File of API keys, one per line."),
    ssl_certfile: str | None = Option(
        None, help="PEM file of the certificate; turns on HTTPS."
    ),
    ssl_keyfile: str | None = Option(None, help="PEM file of the private key."),
    allowed_origins: str | None = Option(
        None, help='Web origins allowed by CORS: "https://chat.example"; "*": all.'
    ),
    log_level: str | None = Option(
        None, help="debug, info, warning or error; info logs every request."
    ),
    log_format: str | None = Option(None, help="text, or json: one object per line."),
    name: str | None = Option(
        None, "--name", help="Name of this service on a cluster."
    ),
    config: options.ConfigFile = None,
    sets: options.Set = None,
    show_config: options.ShowConfig = False,
    state_file: options.StateFile = None,
    as_json: options.Json = False,
) -> None:
    """Serve completions until stopped."""
    if model is not None and model_argument is not None:
        raise ConfigError(
            f"two models: {model_argument!r} and --model {model!r}; expected one"
        )
    flags = {
        "model.name": model or model_argument,
        "model.dtype": dtype,
        "codec": codec,
        "state": state,
        "codecs": split_specs(codecs),
        "cluster.name": name,
        "cluster.prefill": prefill,
        "cluster.decode": decode,
        "cluster.prefill_ranks": prefill_ranks or ranks,
        "cluster.decode_ranks": decode_ranks or ranks,
        "cluster.colocated": colocated,
        "transfer.min_disagg_tokens": min_disagg_tokens,
        "router.error_budget": error_budget,
        "server.served_model_name": served_model_name,
        "server.chat_template": chat_template,
        "server.tool_parser": tool_parser,
        "server.reasoning_parser": reasoning_parser,
        "server.host": host,
        "server.port": port,
        "server.doors": doors,
        "server.pd_ports": pd_ports,
        "server.api_key": read_api_key(api_key),
        "server.api_key_file": api_key_file,
        "server.tls_certificate": ssl_certfile,
        "server.tls_key": ssl_keyfile,
        "server.allowed_origins": split_origins(allowed_origins),
        "server.log_level": log_level,
        "server.log_format": log_format,
        "server.state_file": state_file and str(state_file),
    }
    read_settings = partial(options.read_config, config, sets, flags)
    if show_config:
        options.print_config(read_settings(), as_json)
    else:
        run_service(read_settings, as_json)


def split_specs(specs: str | None) -> list[str] | None:
    """Split specs at commas, but not at the commas between options of one spec."""
    return specs and re.split(r",(?![\w-]+=)", specs)  # type: ignore[return-value]


def split_origins(origins: str | None) -> str | list[str] | None:
    """Split origins at commas; a JSON list, as vLLM takes it, stays as it is."""
    is_list = not origins or origins.startswith("[")
    return origins if is_list else origins.split(",")  # type: ignore[union-attr]


def read_api_key(api_key: str | None) -> str | None:
    """The flag, else the variable: typer ignores an empty one, which is an error here."""
    return os.environ.get("DISAGG_API_KEY") if api_key is None else api_key


def run_service(read_settings: Callable[[], Config], as_json: bool) -> None:
    """Serve until a stop signal or `disagg stop`; the state file exists as long.

    read_settings: called again on SIGHUP
    """
    config = read_settings()
    path = options.state_path(config.server.state_file, config.cluster.name)
    state_files.check_unannounced(path)
    check_model(config)
    configure(config.server.log_level, config.server.log_format)
    try:
        grace_s, drain_s = config.cluster.grace_s, config.server.drain_s
        with ShutdownGuard(grace_s, drain_s) as guard, ExitStack() as stack:
            with stages(is_live=False) as report:
                token = state_files.previous_token(path)
                service = new_service(config, guard.reporting(report), token)
                announced = state_files.announced(path, state_of(service, config))
                mark_ready = stack.enter_context(announced)
                stack.enter_context(service)
                stack.callback(guard.begin, service.end_now)
            mark_ready()
            guard.started()
            hung_up = guard.take_hang_up()
            print_start(service, config, as_json)
            while not service.stopped.wait(1.0):
                guard.take_signals()  # a restarted Ray has set its own handlers
                if hung_up.is_set():
                    hung_up.clear()
                    reload_settings(service, read_settings)
    except (KeyboardInterrupt, SystemExit):  # Ray's handler raises the second one
        tell("stopped")


def new_service(
    config: Config, say: Callable[[str], None], secret: str | None
) -> "Service | Supervisor":
    """A service in this process, or in several if there are doors."""
    if config.server.doors > 1:
        from disagg.cli.supervisor import Supervisor

        return Supervisor(config, say, secret)
    from disagg.server.service import Service

    return Service(config, say, secret)


def reload_settings(
    service: "Service | Supervisor", read_settings: Callable[[], Config]
) -> None:
    """Apply changed settings; those that cannot be used change nothing."""
    try:
        service.reload(read_settings())
    except DisaggError as error:
        tell(f"settings not read again: {error}")


def state_of(service: "Service | Supervisor", config: Config) -> RunningService:
    """The entry of a service in this process for the state file."""
    certificate = config.server.tls_certificate
    return RunningService(
        url=service.url,
        pid=os.getpid(),
        token=service.secret,
        certificate=certificate and os.path.abspath(certificate),
        grace_s=config.cluster.grace_s,
        drain_s=config.server.drain_s,
        born=birth(os.getpid()),
    )


def print_start(service: "Service | Supervisor", config: Config, as_json: bool) -> None:
    """Print where it listens, its workers and links, and warnings."""
    if as_json:
        print_json({"url": service.url, "pid": os.getpid()})
    notes = (
        *sampling_notes(config),
        *parser_notes(config),
        *open_access_warnings(config),
    )
    for line in (*service.links, *service.pd_addresses, *notes):
        tell(line)
    tell(f"serving {service.name} at {service.url}")


def sampling_notes(config: Config) -> list[str]:
    """The sampling defaults that the model brings, if any, and the setting for them."""
    from disagg.engine.sampling_defaults import (
        describe_defaults,
        read_sampling_defaults,
    )

    model = config.model
    defaults = read_sampling_defaults(model.name, model.generation_config)
    if not defaults:
        return []
    values = describe_defaults(defaults)
    return [
        f"sampling defaults of the model: {values} (model.generation_config: "
        f"{model.generation_config})"
    ]


def parser_notes(config: Config) -> list[str]:
    """The parsers of the model's calls and thoughts, if any, and the settings for them."""
    formats = read_answer_formats(config)
    chosen = {
        "tool calls": (formats.tool, config.server.tool_parser),
        "thoughts": (formats.reasoning, config.server.reasoning_parser),
    }
    return [
        f"parser of {kind}: {chosen_format.name} ({setting})"
        for kind, (chosen_format, setting) in chosen.items()
        if chosen_format is not None
    ]


def open_access_warnings(config: Config) -> list[str]:
    """A warning where other machines can reach a service that asks for no key."""
    host = config.server.host
    if config.server.api_key or config.server.api_key_file:
        return []
    try:
        is_local = ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if is_local:
        return []
    return [f"warning: anyone who can reach {host} can use this service without a key"]


def stop(
    now: bool = Option(False, "--now", help="Give running requests no time to end."),
    state_file: options.StateFile = None,
    as_json: options.Json = False,
) -> None:
    """Stop the running service and wait for its end."""
    state = running(state_file)
    if state.ready:
        with suppress(PeerLostError):  # it is ending already, and HTTP ends first
            client.post(state, "/stop", {"now": now})
    else:
        os.kill(state.pid, signal.SIGTERM)
    drain_s = 0.0 if now else state.drain_s
    patience_s = drain_s + 2 * state.grace_s + RAY_STOP_S + STOP_S
    deadline = time.monotonic() + patience_s
    with stages() as report:
        report(f"stopping the service at {state.url}{stop_hint(drain_s)}")
        while state.alive:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"process {state.pid} still runs after {patience_s:.0f} s"
                )
            time.sleep(POLL_S)
    if as_json:
        print_json({"stopped": state.url})


def stop_hint(drain_s: float) -> str:
    """How long requests have, unless they have no time."""
    if not drain_s:
        return ""
    return f"; its requests have {drain_s:g} s to end (--now: none)"


def running(state_file: Path | None) -> RunningService:
    """The service of the state file; PeerLostError if there is none."""
    path = options.state_path(state_file)
    state = read_state(path)
    if state is None:
        raise PeerLostError(
            f"no service is running (state file {path}); `disagg serve` starts one"
        )
    return state


def ready(path: Path) -> RunningService | None:
    """The service of a state file, once its workers serve; None if no service is announced.

    PeerLostError if it ends while it starts.
    """
    state = read_state(path)
    if state is None or state.ready:
        return state
    with stages() as report:
        report(f"waiting for the service at {state.url}")
        while not state.ready:
            time.sleep(POLL_S)
            state = running(path)
    return state


@contextmanager
def private_service(config: Config, body: Mapping[str, Any]) -> Iterator[str]:
    """The URL of a service that lives as long as this block.

    body: the request it is for; errors in it are raised before anything starts
    """
    check_request(config, body)
    config = replace_keys(config, {"server": PRIVATE})
    from disagg.server.service import Service

    with ShutdownGuard(config.cluster.grace_s) as guard, ExitStack() as stack:
        with stages() as report:
            service = stack.enter_context(Service(config, guard.reporting(report)))
            stack.callback(guard.begin, service.end_now)
        guard.started()
        yield service.url
