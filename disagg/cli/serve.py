"""`disagg serve`, `disagg stop`: a service that stays, and its end.

Also the service that `disagg submit` starts for one prompt, and what is checked before anything
heavy starts. What needs tokenizers, torch or Ray is imported inside functions.
"""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from typer import Option

from disagg.cli import client, options
from disagg.cli.client import RunningService
from disagg.cli.output import print_json, stages, tell
from disagg.config import DEFAULT_CODEC, ClusterConfig, Config, replace_keys
from disagg.errors import DeadlineError, PeerLostError, PromptTooLongError, RequestError
from disagg.launch.reaper import birth

if TYPE_CHECKING:
    from disagg.model.describe import ModelInfo
    from disagg.model.tokenizer import Tokenizer

ENDS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)  # the last one: a terminal was closed
STUCK_S = 15.0  # for all that Ray has to do at the end
STOP_S = 5.0  # beyond what the end may take
POLL_S = 0.05
DEFAULT_DIM = 16  # DEFAULT_CODEC takes heads of any multiple


def serve(
    model: options.Model = None,
    served_model_name: str | None = Option(None, help="What clients call the model."),
    codec: options.Codec = None,
    codecs: str | None = Option(
        None, help='Of --codec auto, and all there are on a GPU: "fp8,kivi:bits=4".'
    ),
    error_budget: float | None = Option(
        None, min=0, help="Of --codec auto: relative error of attention outputs."
    ),
    host: str | None = Option(None, help="Address to listen on."),
    port: int | None = Option(None, help="Port to listen on; 0: any free one."),
    pd_ports: int | None = Option(
        None, help="First of one port for each worker, for vLLM's routers; 0: any."
    ),
    api_key: str | None = Option(
        None, envvar="DISAGG_API_KEY", help="What clients have to show."
    ),
    api_key_file: str | None = Option(None, help="File with such keys, one in a line."),
    ssl_certfile: str | None = Option(
        None, help="PEM file; with --ssl-keyfile: HTTPS."
    ),
    ssl_keyfile: str | None = Option(
        None, help="PEM file with the key of the certificate."
    ),
    allowed_origins: str | None = Option(
        None, help='Whose pages may ask: "https://chat.example"; "*": all.'
    ),
    colocated: bool | None = Option(None, "--colocated", help="Workers do both."),
    min_disagg_tokens: int | None = Option(
        None, min=0, help="Shorter prompts stay whole where they decode."
    ),
    name: str | None = Option(
        None, "--name", help="Of this service among those on a cluster."
    ),
    config: options.ConfigFile = None,
    sets: options.Set = None,
    show_config: options.ShowConfig = False,
    state_file: options.StateFile = None,
    as_json: options.Json = False,
) -> None:
    """Serve completions until stopped, with workers of its own."""
    flags: dict[str, Any] = {"model.name": model, "codec": codec, "server.host": host}
    flags |= {"server.served_model_name": served_model_name, "cluster.name": name}
    flags |= {"server.port": port, "server.pd_ports": pd_ports}
    flags |= {"router.error_budget": error_budget}
    flags |= {
        "codecs": codecs and re.split(r",(?![\w-]+=)", codecs)
    }  # options have = behind them
    if api_key is None:
        api_key = os.environ.get(
            "DISAGG_API_KEY"
        )  # typer takes an empty one, an error, for none
    flags |= {"server.api_key": api_key, "server.api_key_file": api_key_file}
    flags |= {"server.tls_certificate": ssl_certfile, "server.tls_key": ssl_keyfile}
    flags |= {"server.allowed_origins": allowed_origins}
    if allowed_origins and not allowed_origins.startswith(
        "["
    ):  # a list, as vLLM takes it
        flags |= {"server.allowed_origins": allowed_origins.split(",")}
    flags |= {
        "cluster.colocated": colocated,
        "transfer.min_disagg_tokens": min_disagg_tokens,
    }
    state = state_file and str(state_file)
    settled = options.read_config(config, sets, flags | {"server.state_file": state})
    if show_config:
        options.print_config(settled, as_json)
    else:
        run_service(settled, as_json)


def stop(state_file: options.StateFile = None, as_json: options.Json = False) -> None:
    """Stop the running service; returns when nothing of it is left."""
    state = running(state_file)
    if state.ready:
        with suppress(PeerLostError):  # it ends already, and HTTP goes first
            client.post(state, "/stop")
    else:
        os.kill(state.pid, signal.SIGTERM)
    began, patience_s = time.monotonic(), 2 * state.grace_s + STUCK_S + STOP_S
    with stages() as say:
        say(f"stopping the service at {state.url}")
        while state.alive:
            if time.monotonic() > began + patience_s:
                raise DeadlineError(
                    f"process {state.pid} still runs after {patience_s:.0f} s"
                )
            time.sleep(POLL_S)
    if as_json:
        print_json({"stopped": state.url})


def running(state_file: Any) -> RunningService:
    """The service of the state file; PeerLostError if there is none."""
    path = options.state_path(state_file)
    state = client.read_state(path)
    if state is None:
        raise PeerLostError(f"no service runs, says {path}; `disagg serve` starts one")
    return state


def run_service(config: Config, as_json: bool) -> None:
    """Serve until a signal of ENDS or `disagg stop`; the state file lives as long."""
    path = options.state_path(config.server.state_file, config.cluster.name)
    client.check_unannounced(path)
    check_model(config)
    from disagg.server.service import Service

    try:
        with ShutdownGuard(config.cluster.grace_s) as ending, ExitStack() as stack:
            with stages() as say:
                service = Service(config, ending.telling(say), client.left_token(path))
                tls = config.server.tls_certificate
                tls = tls and os.path.abspath(tls)  # clients are in other folders
                mine = os.getpid(), service.secret, tls, config.cluster.grace_s
                state = RunningService(service.url, *mine, born=birth(os.getpid()))
                is_ready = stack.enter_context(client.announced(path, state))
                stack.enter_context(service)
                stack.callback(ending.begin)
            is_ready()
            ending.started()
            if as_json:
                print_json({"url": service.url, "pid": os.getpid()})
            told = f"serving {service.name} at {service.url}"
            for line in (*service.links, *service.doors, *_open_to_all(config), told):
                tell(line)
            while not service.stopped.wait(1.0):
                ending.take_signals()  # a Ray that starts anew has its own again
    except (KeyboardInterrupt, SystemExit):  # Ray's handler raises the second one
        tell("stopped")


class ShutdownGuard:
    """How this process ends: by the signals of ENDS, unless they are ignored, and whatever hangs.

    Ray's C++ waits without end for a raylet that had the signal too, or that answers no more, and
    Python's handlers wait for it. What is left of a private service then its reaper takes away.
    """

    def __init__(self, grace_s: float):
        self._limit_s = 2 * grace_s + STUCK_S  # for answers, then for workers
        self._deaf_until = 0.0
        self._started = threading.Event()

    def __enter__(self) -> Self:
        self._ours, theirs = socket.socketpair()
        self._ours.setblocking(False)
        self._before = signal.set_wakeup_fd(
            self._ours.fileno(), warn_on_full_buffer=False
        )
        threading.Thread(target=self._watch, args=[theirs], daemon=True).start()
        told = b"stopped, though Ray answers no more\n"
        self._timer = threading.Timer(self._limit_s, _leave, [told, 1])
        self._timer.daemon = True
        self.take_signals()
        return self

    def __exit__(self, *_: object) -> None:
        self.started()
        self._timer.cancel()
        signal.set_wakeup_fd(self._before)
        self._ours.close()

    def started(self) -> None:
        """From here on the handlers suffice; before, the end came STUCK_S after a signal."""
        self._started.set()

    def begin(self) -> None:
        """It ends now, within its time."""
        self._timer.start()

    def take_signals(self) -> None:
        """Again after each start of Ray: its C++ handler of SIGTERM aborts the process."""
        for number in ENDS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._interrupt)

    def telling(self, say: Callable[[str], None]) -> Callable[[str], None]:
        """What tells of stages, and takes the signals before each."""

        def take_and_say(stage: str) -> None:
            self.take_signals()
            say(stage)

        return take_and_say

    def _interrupt(self, *_: object) -> None:
        """Say that the end begins, which takes seconds, and begin with it: signals come in twos,
        and a second one would leave half of it undone."""
        if time.monotonic() < self._deaf_until:
            return
        self._deaf_until = time.monotonic() + STUCK_S
        with suppress(RuntimeError):  # a line was just being written
            tell("stopping ...")
        raise KeyboardInterrupt

    def _watch(self, theirs: socket.socket) -> None:
        with theirs:
            while told := theirs.recv(1):
                if told[0] in ENDS and not self._started.wait(STUCK_S):
                    _leave(b"stopped while Ray started\n", 128 + told[0])


def _leave(told: bytes, status: int) -> None:
    with suppress(OSError):
        os.write(2, told)
    os._exit(status)


def ready(path: Path) -> RunningService | None:
    """The service of a state file, once its workers serve; None if there is none to wait for.

    PeerLostError if it ends before.
    """
    state = client.read_state(path)
    if state is None or state.ready:
        return state
    with stages() as say:
        say(f"waiting for the service at {state.url}")
        while not state.ready:
            time.sleep(POLL_S)
            state = running(path)
    return state


@contextmanager
def private_service(config: Config, body: Mapping[str, Any]) -> Iterator[str]:
    """The URL of a service that ends with this block, whatever ends it.

    body: the request it is for; what is wrong with it is found out first
    """
    check(config, body)
    alone = {"host": "127.0.0.1", "port": 0, "api_key": None, "api_key_file": None}
    alone |= {"tls_certificate": None, "tls_key": None, "pd_ports": None}
    config = replace_keys(config, {"server": alone})
    from disagg.server.service import Service

    with ShutdownGuard(config.cluster.grace_s) as ending, ExitStack() as stack:
        with stages() as say:
            service = stack.enter_context(Service(config, ending.telling(say)))
            stack.callback(ending.begin)
        ending.started()
        yield service.url


def check(config: Config, body: Mapping[str, Any]) -> None:
    """What can be known of a request before workers run: model, codec, length, all its fields."""
    from disagg.model.chat import read_template
    from disagg.server.limits import check_prompt, check_text
    from disagg.server.schema import ChatRequest, CompletionRequest

    info, tokenizer = check_model(config)
    text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
    check_text(len(text), info.context_length, tokenizer.longest_token, "prompt")
    check_prompt(len(tokenizer.encode(text)), info.context_length)
    (ChatRequest if "messages" in body else CompletionRequest).read(
        json.dumps(body).encode()
    )
    if "messages" in body and read_template(config.model.name) is None:
        raise RequestError(
            f"{info.path.name!r} has no chat template; without --chat it goes on"
        )


def check_model(config: Config) -> "tuple[ModelInfo, Tokenizer]":
    """What the files of a model tell before workers run: sizes, tokenizer, codecs that fit."""
    from disagg.model.chat import read_template
    from disagg.model.describe import check_weights
    from disagg.model.tokenizer import Tokenizer

    info = check_codecs(config.model.name, config.listed, config.model.dtype)
    if (
        config.cluster.address == ClusterConfig.address
    ):  # else workers have them, on their hosts
        check_weights(info.path)
        if config.model.device == "cuda":
            from disagg.model.runner import pick_device

            pick_device("cuda")
    read_template(config.model.name)  # its errors now
    check_arena(config, info)
    return info, Tokenizer.load(config.model.name)


def check_codecs(
    model: str | None, specs: Iterable[str], dtype: str = "auto", tokens: int = 0
) -> "ModelInfo":
    """What a model is; ConfigError unless all specs make plans, PromptTooLongError unless a prompt
    with its answer, of so many tokens, fits."""
    from disagg.model.describe import describe_model

    info = describe_model(model, dtype)
    if tokens > info.context_length:
        told = f"{tokens:,} tokens of a prompt and its answer are too many"
        most = f"the model's context holds at most {info.context_length:,}"
        raise PromptTooLongError(f"{told}; {most}")
    for spec in specs:
        check_codec(spec, info)
    return info


def check_codec(spec: str, info: "ModelInfo") -> None:
    """ConfigError unless a spec makes a plan for a model.

    Codecs need torch, which takes a second to import: the default is known to be good for heads
    of whole 16 channels, so that who asks for nothing special waits for nothing.
    """
    if spec == DEFAULT_CODEC and info.head_dim % DEFAULT_DIM == 0:
        return
    from disagg.codecs.planning import parse_plan
    from disagg.model.capacity import kv_shape

    parse_plan(spec, kv_shape(info))


def check_arena(config: Config, info: "ModelInfo") -> None:
    """ConfigError where the codecs of a service want a larger arena than is configured."""
    if config.engine.arena_bytes is None:
        return
    from disagg.codecs.planning import parse_plan
    from disagg.engine.arena import check_slabs, slab_bytes_for
    from disagg.model.capacity import kv_shape

    slab_bytes = slab_bytes_for(info.num_layers, info.heads, info.head_dim)
    plans = [parse_plan(spec, kv_shape(info)) for spec in config.listed]
    check_slabs(config.engine.arena_bytes, slab_bytes, plans, info.context_length)


def _open_to_all(config: Config) -> list[str]:
    """A warning for who serves more than this machine and asks nobody for a key."""
    host = config.server.host
    if config.server.api_key or config.server.api_key_file:
        return []
    try:
        here = ip_address(host).is_loopback
    except ValueError:
        here = host == "localhost"
    return (
        []
        if here
        else [f"warning: whoever reaches {host} may use this service, without a key"]
    )
