"""Every default value, one frozen dataclass per room, and how a file and flags override them.

    defaults here  <  a YAML file (`--config`)  <  flags (`--codec`, `--set engine.max_sequences=8`)

An unknown key is an error that lists the known ones. This module imports no room; rooms read their
settings from here.
"""

import contextlib
import dataclasses
import math
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from disagg.errors import ConfigError, UnknownNameError

T = TypeVar("T")

DEFAULT_CODEC = "banded:bits=3|kivi:bits=4,residual=64"
RANK_TIMEOUT_S = 30.0
MAX_RANKS = 64
AUTO = "auto"  # in place of a codec: the service chooses for each request
DEVICES = ("auto", "cpu", "cuda")
# how states of a hybrid model are handed off
STATE_FORMS = (AUTO, "exact", "bf16", "int8")
WEIGHTS = ("int4", "int8")  # what `model.weights` rounds to
MAX_WORKERS = 1024  # of a role
MAX_DOORS = 64


def at_least(least: float, *, default: Any, most: float = math.inf) -> Any:
    """A field whose value, unless it is None, is from `least` to `most`."""
    return field(default=default, metadata={"least": least, "most": most})


def one_of(*names: str) -> Any:
    """A field whose value is one of these names; the first is the default."""
    return field(default=names[0], metadata={"names": names})


def none_or(*names: str) -> Any:
    """A field whose value is one of these names, or None by default."""
    return field(default=None, metadata={"names": names})


def secret() -> Any:
    """A field, not set by default, whose value is never printed."""
    return field(default=None, metadata={"secret": True})


@dataclass(frozen=True)
class Bounded:
    """Checks its fields: ConfigError for a wrong value, with the key as a user would write it."""

    def __post_init__(self) -> None:
        room = type(self).__name__.removesuffix("Config").lower()
        for each in dataclasses.fields(self):
            key = f"{room}.{each.name}".removeprefix(".")
            value = getattr(self, each.name)
            if "least" in each.metadata and value is not None:
                _check_bounds(key, value, **each.metadata)
            names = each.metadata.get("names")
            if names is not None and value not in (each.default, *names):
                raise UnknownNameError.of(key, str(value), names)


def check_state_form(form: str) -> str:
    """The form of states, if it is known; else UnknownNameError."""
    if form not in STATE_FORMS:
        raise UnknownNameError.of("state", str(form), STATE_FORMS)
    return form


def _check_bounds(key: str, value: float, least: float, most: float) -> None:
    if not value >= least:  # which NaN is not either
        raise ConfigError(f"config key {key} is {value!r}; expected at least {least}")
    if value > most:
        raise ConfigError(f"config key {key} is {value!r}; expected at most {most}")


@dataclass(frozen=True)
class ModelConfig(Bounded):
    """Which model is served.

    name:   a folder or a Hugging Face name; None: the model that ships in the package
    dtype:  "auto", "float32", "bfloat16" or "float16". With "auto" a GPU computes in the dtype of
            the checkpoint. A CPU with bf16 units (AVX-512 bf16 or AMX) computes models stored in
            bfloat16 in bfloat16, if their weights are 100 MB or more; other CPUs and other models
            use float32. Set it where the CPUs of workers differ
    device: "auto" (one GPU per worker if the host has GPUs), "cpu" or "cuda"
    weights: on a CPU: "int8" or "int4" rounds the weights of large linear layers when the model is
            loaded, which makes steps of few tokens faster and changes answers; "int8" rounds the
            inputs of these layers too. All workers need the same. None: as stored
    context: maximum tokens of a prompt with its answer. A shorter context saves memory; a longer
            one is possible up to the limit that `disagg models check` shows. None: the default of
            the model
    generation_config: source of the sampling defaults for requests that do not set them: "auto"
            (generation_config.json of the model), "none", or the path of such a file or of a
            folder with one
    """

    name: str | None = None
    dtype: str = "auto"
    device: str = one_of(*DEVICES)
    weights: str | None = none_or(*WEIGHTS)
    context: int | None = at_least(2, default=None)
    generation_config: str = "auto"


@dataclass(frozen=True)
class EngineConfig(Bounded):
    """How one worker computes.

    max_batch_tokens: maximum tokens per step, prompt tokens included. Longer prompts are computed
                      in chunks; shorter prompts and decoding on the same worker wait for one chunk
    chunk_s:          seconds that chunks of prompts may add to a step in which sequences decode, so
                      that tokens come steadily. Chunks are sized by the time that earlier ones
                      took, and have at least 256 tokens. None: no limit
    max_sequences:    maximum sequences per decode step; None: 64 on a GPU, which records steps of
                      every size at start. On a CPU one for every 1,024 tokens that the arena holds
                      with the default codec of the service, from 64 to 256
    arena_bytes:      memory for KV pages; None: derived from memory_share
    workspace_bytes:  limit for the exact KV of prompts during prefill; None: derived from
                      memory_share
    memory_share:     share of GPU memory for weights, arena and workspaces. On a CPU the workers of
                      a host divide this share of its memory (or of the container's limit): each
                      gets an eighth of its part as arena, from 256 MiB to 8 GiB, and an eighth for
                      workspaces. Both take memory only as they are used. For a hybrid model the
                      arena also has room for the states of max_sequences sequences (of 64, where
                      that is not set), up to a quarter of the host's memory
    watermark:        share of the arena that is kept free for running sequences to grow
    prefix_cache:     reuse the KV of a prefix that an earlier prompt had, instead of computing it
    snapshot_share:   share of the arena that state snapshots may fill. A hybrid model reuses a
                      prefix only with a snapshot, which is as large as the states of a sequence.
                      Like all cached KV, snapshots give way to sequences. 0: a hybrid model
                      computes every prompt in full
    speculative_tokens: maximum tokens of a draft of look-up speculation: what followed the last
                      tokens earlier in the text, or what the request's prediction says, which a
                      step verifies; answers stay the same. 0: no drafts. None: 7 on a CPU, 0 on a
                      GPU, where more than 7 run without a recorded CUDA graph. Models with states
                      have no drafts
    torch_threads:    threads per worker; None: the host's cores divided by its workers
    stuck_s:          a step without progress for this long ends its worker, with the stacks of its
                      threads in the log; each layer of a prompt is progress. Keep it below
                      cluster.replace_s, which kills the worker without these stacks
    """

    max_batch_tokens: int = at_least(1, default=2048)
    chunk_s: float | None = at_least(0.001, default=0.5)
    max_sequences: int | None = at_least(1, default=None)
    arena_bytes: int | None = at_least(
        1 << 20, most=1 << 38, default=None
    )  # int32 ids of 128 B
    workspace_bytes: int | None = at_least(1, default=None)
    memory_share: float = at_least(0.01, most=1, default=0.9)
    watermark: float = at_least(0, most=1, default=0.02)
    prefix_cache: bool = True
    snapshot_share: float = at_least(0, most=1, default=0.5)
    speculative_tokens: int | None = at_least(0, most=64, default=None)
    torch_threads: int | None = at_least(1, most=1024, default=None)
    stuck_s: float = at_least(1, default=45.0)


@dataclass(frozen=True)
class TransferConfig(Bounded):
    """How a prompt is handed off.

    lease_s:     a reservation of pages ends this long after the last message of its sender
    frame_bytes: maximum size of a frame; use smaller frames on slow links
    link_mbps:   rate limit of the sender in megabits per second; None: no limit
    burst_bytes: bytes that a rate-limited sender may send at once
    overlap:     send pages while later layers compute; False, for comparison: send them afterwards
    dedup:       do not send pages that the decode worker already has from other prompts
    min_disagg_tokens: shorter prompts are computed on the decode worker, without a hand-off. None:
                 prompts whose hand-off would be no smaller than their KV in fp16. With a codec that
                 is never smaller, such as raw, every prompt is handed off
    channel:     "grpc", or "direct": the same frames over a plain socket that gRPC negotiates; if
                 it cannot be opened, gRPC
    """

    lease_s: float = at_least(0.001, default=10.0)
    frame_bytes: int = at_least(
        1024, most=4 << 20, default=2 << 20
    )  # as much as is credited
    link_mbps: float | None = at_least(0.001, default=None)
    burst_bytes: int = at_least(1, default=64 << 10)
    overlap: bool = True
    dedup: bool = True
    min_disagg_tokens: int | None = at_least(0, default=None)
    channel: str = one_of("grpc", "direct")


@dataclass(frozen=True)
class RouterConfig(Bounded):
    """Queueing, retries and deadlines.

    deadline_s:   a request that gets no token for this long fails
    max_attempts: a request fails after this many workers died while running it
    silence_s:    a worker that does not answer for this long counts as dead
    stuck_s:      so does a worker whose engine has work and makes no progress for this long, unless
                  it has been slow before
    max_queue:    maximum answers waiting for a worker; more are refused with 429, except from an
                  API key with less than its share
    error_budget: for codec auto: acceptable relative error of the attention output
    first_decode_s: for codec auto: target time to the second token, the first one decoded
    """

    deadline_s: float = at_least(0.001, default=300.0)
    max_attempts: int = at_least(1, default=3)
    silence_s: float = at_least(0.001, default=5.0)
    stuck_s: float = at_least(0.001, default=10.0)
    max_queue: int = at_least(1, default=1024)
    error_budget: float = at_least(0, default=0.15)
    first_decode_s: float = at_least(0.001, default=2.0)


@dataclass(frozen=True)
class ClusterConfig(Bounded):
    """Where the workers run.

    address: "local" starts a private Ray; "host:port" joins a cluster; "auto" joins the cluster
             that Ray itself would choose: RAY_ADDRESS, or one on this host
    name:    name of this service on a cluster; also its Ray namespace
    prefill, decode: number of workers of this role
    prefill_ranks, decode_ranks: processes of each worker of this role, which compute its model
             together, each with its share of the heads and weights and on a GPU of its own. The
             two may differ. `colocated` workers have `prefill_ranks`
    rank_timeout_s: a worker one of whose ranks does not answer for this long ends
    rank_placement: pack: all ranks of a worker are on one host; spread: on as many hosts as Ray can
             give them, which costs a network's delay twice a layer
    colocated: start only `prefill` workers, which prefill and decode; nothing is handed off
    pools:   place each worker on a node with a Ray resource named after its role (prefill or
             decode), one rank per unit; without such a node it waits, and an autoscaler may
             start one
    gpus:    GPUs per worker, may be a fraction; None: the GPUs that Ray has at start, divided
             equally
    ports:   port range of the workers on every host, and of the router in Ray Serve,
             [first, last]; None: any free ports
    runtime_env: runtime environment of the workers, in Ray's format: {env_vars: {HF_HOME: /models}}
    orphan_s: workers exit this long after the last router left
    replace_s: a worker that is silent for this long, or whose engine does not finish a step, is
              killed and another one starts
    grace_s:  time for running requests to finish when a worker or the router stops
    detach:   on a cluster, keep the workers for orphan_s after the service ends, so that the next
              service can use them
    """

    address: str = "local"
    name: str = "disagg"
    prefill: int = at_least(1, most=MAX_WORKERS, default=1)
    decode: int = at_least(1, most=MAX_WORKERS, default=1)
    prefill_ranks: int = at_least(1, most=MAX_RANKS, default=1)
    decode_ranks: int = at_least(1, most=MAX_RANKS, default=1)
    rank_timeout_s: float = at_least(0.001, default=RANK_TIMEOUT_S)
    rank_placement: str = one_of("pack", "spread")
    colocated: bool = False
    pools: bool = False
    gpus: float | None = at_least(0, default=None)
    ports: list | None = None
    runtime_env: dict | None = None
    orphan_s: float = at_least(0, default=60.0)
    replace_s: float = at_least(0.001, default=60.0)
    grace_s: float = at_least(0, default=5.0)
    detach: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[\w-]+", self.name):
            raise ConfigError(
                f"config key cluster.name is {self.name!r}; expected letters, digits, - and _"
            )
        if self.ports is not None and not _is_port_range(self.ports):
            raise ConfigError(
                f"config key cluster.ports is {self.ports!r}; "
                "expected the first and the last port: [20000, 20099]"
            )

    @property
    def ranks(self) -> int:
        """The most ranks that a worker has."""
        if self.colocated:
            return self.prefill_ranks
        return max(self.prefill_ranks, self.decode_ranks)

    def ranks_of(self, role: str) -> int:
        """The ranks of a worker that starts with this role."""
        return self.decode_ranks if role == "decode" else self.prefill_ranks

    @property
    def processes(self) -> int:
        """The ranks of all workers."""
        return sum(count * self.ranks_of(role) for role, count in self.roles.items())

    @property
    def roles(self) -> dict[str, int]:
        """How many workers of each role there are."""
        if self.colocated:
            return {"both": self.prefill}
        return {"prefill": self.prefill, "decode": self.decode}


def _is_port_range(ports: Any) -> bool:
    match ports:
        case [int(first), int(last)]:
            return 0 < first <= last < 1 << 16
    return False


@dataclass(frozen=True)
class ServerConfig(Bounded):
    """The HTTP server: address, limits, keys, TLS and log.

    host:              address to listen on; 0.0.0.0: every IPv4 address of this host
    port:              port to listen on; 0: any free port
    doors:             processes with HTTP and tokenizer in front of one with the router; 1: one
                       process does both. In Ray Serve: replicas in front of the router
    pd_ports:          first port of a range with one port per worker, for vLLM's routers; 0: any
                       free ports
    state_file:        file in which other commands find the service; None: one in a folder of this
                       user
    served_model_name: model name in the API; None: the model's name, or that of its folder
    chat_template:     file with a chat template that replaces the model's: Jinja, or JSON with
                       the key chat_template
    tool_parser:       format of the model's tool calls: "auto" (by its chat template), a name of
                       the table in docs/agents.md, or "none": answers are left as they are
    reasoning_parser:  format of the model's thoughts, in the same way
    max_body_bytes:    larger request bodies are refused while they arrive
    silence_s:         a connection is closed if the header of a request takes longer than this, or
                       if the client pauses for this long in a body; it stays open while the client
                       waits for a response
    idle_s:            a connection is closed if no request begins for this long after a response;
                       longer than proxies keep theirs
    drain_s:           on SIGTERM and `disagg stop`, running requests have this long to end, and new
                       ones are refused with 503; a second signal ends them at once
    max_connections:   further connections are refused with 503; None: 200 fewer than the limit of
                       open files, which is raised as far as the system allows
    api_key:           key that clients must send as "Authorization: Bearer KEY"
    api_key_file:      file with more keys, one per line; read at start and on SIGHUP
    metrics_key:       key for GET /metrics, beside the API keys; None: it is open to everybody
    tls_certificate, tls_key: PEM files; both together turn on HTTPS. Read again on SIGHUP
    allowed_origins:   web origins allowed by CORS, ["https://chat.example"]; ["*"]: all
    log_level:         "info", "debug", "warning" or "error"; workers too
    log_format:        "text", or "json": one object per line
    traces_endpoint:   where OpenTelemetry spans are sent: http://HOST:4318 (OTLP over HTTP) or
                       grpc://HOST:4317; None: where the OTEL_* variables say, if they say it
    """

    host: str = "127.0.0.1"
    port: int = at_least(0, default=8000)
    doors: int = at_least(1, most=MAX_DOORS, default=1)
    pd_ports: int | None = at_least(0, default=None)
    state_file: str | None = None
    served_model_name: str | None = None
    chat_template: str | None = None
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO
    max_body_bytes: int = at_least(1024, default=8 << 20)
    silence_s: float = at_least(0.001, default=20.0)
    idle_s: float = at_least(0.001, default=120.0)
    drain_s: float = at_least(0, default=45.0)
    max_connections: int | None = at_least(1, default=None)
    api_key: str | None = secret()
    api_key_file: str | None = None
    metrics_key: str | None = secret()
    tls_certificate: str | None = None
    tls_key: str | None = None
    allowed_origins: list[str] = field(default_factory=list)
    log_level: str = one_of("info", "debug", "warning", "error")
    log_format: str = one_of("text", "json")
    traces_endpoint: str | None = None


@dataclass(frozen=True)
class SecurityConfig(Bounded):
    """Authentication and TLS between workers. Every host reads its own copy of the files.

    plane:       minimum on a cluster: "tls" with a token, or "token" without encryption. The
                 service creates what the files below do not provide
    token_file:  file with the secret that every call between workers carries
    ca:          PEM file of the authority that signed the certificates of all hosts
    certificate: PEM file of this host's certificate. With ca and key: mutual TLS
    key:         PEM file of the private key of certificate
    """

    plane: str = one_of("tls", "token")
    token_file: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


@dataclass(frozen=True)
class Config(Bounded):
    """How the KV cache is compressed.

    codec:  a codec spec for all layers; or a plan with one for each range of layers,
            "0-1:kivi:bits=4;2-:kivi:bits=2"; or "auto": the service chooses one of `codecs` for
            each request
    codecs: the codecs that "auto" chooses from. On a GPU also the only ones, besides codec, that
            requests may name, because workers compile them at start
    state:  for hybrid models, some of whose layers keep a state of fixed size instead of K and V:
            the form in which states are handed off. They are rounded once, when the prompt is
            computed: "exact" (not at all), "bf16", "int8" with a scale for each row and column, or
            "auto": exact with codec raw, else int8
    """

    codec: str = DEFAULT_CODEC
    codecs: list[str] = field(default_factory=list)
    state: str = one_of(*STATE_FORMS)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)

    @property
    def listed(self) -> list[str]:
        """Every codec that is named, the default first; ConfigError for codec auto alone."""
        specs = dict.fromkeys((self.codec, *self.codecs))
        specs.pop(AUTO, None)
        if not specs:
            raise ConfigError(
                'codec "auto" chooses among `codecs`, and none are listed'
            )
        return list(specs)


def load_config(
    path: str | Path | None = None, flags: Mapping[str, Any] | None = None
) -> Config:
    """Defaults, changed by a YAML file, changed by flags such as {"server.port": 9000}.

    A flag that is None changes nothing. A string is parsed if the key holds another type. Raises
    UnknownNameError for an unknown key, ConfigError for an unusable file or value.
    """
    config = Config()
    if path is not None:
        config = replace_keys(config, _read_yaml(Path(path)))
    for key, value in (flags or {}).items():
        if value is not None:
            nested: Any = value
            for name in reversed(key.split(".")):
                nested = {name: nested}
            config = replace_keys(config, nested)
    return config


def replace_keys(config: T, changes: Mapping[str, Any], prefix: str = "") -> T:
    """A copy of a config dataclass with some keys changed, including nested ones."""
    hints = get_type_hints(type(config))
    changed: dict[str, Any] = {}
    for key, value in changes.items():
        name = f"{prefix}{key}"
        if key not in hints:
            known_keys = [f"{prefix}{hint}" for hint in hints]
            raise UnknownNameError.of("config key", name, known_keys)
        old = getattr(config, key)
        if not dataclasses.is_dataclass(old):
            changed[key] = _fit(name, value, hints[key])
        elif value is None or isinstance(value, Mapping):  # None: no key below it
            changed[key] = replace_keys(old, value or {}, f"{name}.")
        else:
            raise ConfigError(
                f"config key {name} is {value!r}; it holds keys of its own"
            )
    return dataclasses.replace(config, **changed)  # type: ignore[type-var]


def settings_by_key(groups: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in groups, such as `asdict(config)`, by their whole key: "engine.max_sequences"."""
    settings: dict[str, Any] = {}
    for group, value in groups.items():
        if isinstance(value, Mapping):
            for name, nested in value.items():
                settings[f"{group}.{name}"] = nested
        else:
            settings[group] = value
    return settings


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, or that only one side has."""
    keys = dict.fromkeys((*old, *new))
    return [
        key for key in keys if key not in old or key not in new or old[key] != new[key]
    ]


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        content = _parse_yaml(f"file {path}", path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read config file {path}: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not YAML: {error}") from error
    if content is None:
        return {}
    is_map = isinstance(content, Mapping)
    if not is_map or not all(isinstance(key, str) for key in content):
        raise ConfigError(f"config file {path} holds no map of keys")
    return content


def _parse_yaml(name: str, text: str) -> Any:
    import yaml  # here, so that other commands do not pay for the import

    class Loader(yaml.SafeLoader):
        """Refuses a key that occurs twice, where YAML takes the last one silently."""

        def construct_mapping(
            self, node: yaml.MappingNode, deep: bool = False
        ) -> dict[Any, Any]:
            earlier_keys = []
            for key, _ in node.value:
                if key.value in earlier_keys:
                    raise ConfigError(f"config {name} has the key {key.value!r} twice")
                earlier_keys.append(key.value)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a 30th of February
        raise ConfigError(f"config {name} is not YAML: {error}") from error


def _fit(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type of a key; text, which may come from a flag, is parsed."""
    kind, is_optional = _type_of(hint)
    if is_optional and value in (None, "null"):
        return None
    if isinstance(value, str):
        value = _parse(name, value, kind)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"config key {name} is {value!r}; expected {kind.__name__}")
    if hint == list[str]:
        _check_strings(name, value)
    return value


def _check_strings(name: str, items: Any) -> None:
    for item in items:
        if type(item) is not str:
            raise ConfigError(f"config key {name} has {item!r}; expected str")


def _type_of(hint: Any) -> tuple[type, bool]:
    """The type of a key, without its parameters, and whether it may be None as well."""
    if get_origin(hint) not in (Union, types.UnionType):
        return get_origin(hint) or hint, False
    (kind,) = (member for member in get_args(hint) if member is not types.NoneType)
    return get_origin(kind) or kind, True


def _parse(name: str, text: str, kind: type) -> Any:
    """Text as a value of a type, or the text itself if it is not one."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if kind in (list, dict):
        return _parse_yaml(f"key {name}", text)
    with contextlib.suppress(ValueError):
        return kind(text)
    return text
