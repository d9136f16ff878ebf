"""Every default value, one frozen dataclass per room; and how a file and flags change them.

    defaults here  <  a YAML file (`--config`)  <  flags (`--codec`, `--set engine.max_sequences=8`)

A key that nobody knows is an error that lists the known ones. Knows no room: rooms take what they
need from here.
"""

import contextlib
import dataclasses
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import ge, le
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from disagg.errors import ConfigError, UnknownNameError

T = TypeVar("T")

DEFAULT_CODEC = "banded:bits=3|kivi:bits=4,residual=64"
AUTO = "auto"  # what who leaves the codec to the service calls it
DEVICES = ("auto", "cpu", "cuda")
MAX_WORKERS = 1024  # of a role


def at_least(least: float, *, default: Any, most: float | None = None) -> Any:
    """A field whose value, if it is not None, is neither below `least` nor above `most`."""
    return field(default=default, metadata={"least": least, "most": most})


def one_of(*names: str) -> Any:
    """A field whose value is one of these; the first by default."""
    return field(default=names[0], metadata={"names": names})


@dataclass(frozen=True)
class Bounded:
    """ConfigError for a value that cannot be, with the key as a user would write it."""

    def __post_init__(self) -> None:
        room = type(self).__name__.removesuffix("Config").lower()
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            for end, fits in (("least", ge), ("most", le)):
                bound: Any = each.metadata.get(end)
                if None not in (bound, value) and not fits(value, bound):
                    wanted = f"at {end} {bound} is wanted"
                    raise ConfigError(
                        f"config key {room}.{each.name} is {value!r}; {wanted}"
                    )
            if value not in (names := each.metadata.get("names", [value])):
                raise UnknownNameError.of(f"{room}.{each.name}", str(value), names)


@dataclass(frozen=True)
class ModelConfig(Bounded):
    """Which model is served.

    name:   a folder or a Hugging Face name; None: the model that ships in the package
    dtype:  "auto" (float32 on a CPU, else the checkpoint's), "float32", "bfloat16" or "float16"
    device: "auto" (a GPU for each worker where there are some), "cpu" or "cuda"
    """

    name: str | None = None
    dtype: str = "auto"
    device: str = one_of(*DEVICES)


@dataclass(frozen=True)
class EngineConfig(Bounded):
    """How one worker computes.

    max_batch_tokens: tokens of one step, those of prompts included: longer prompts go in chunks;
                      a shorter one, and who decodes on the same worker, waits for one of them
    max_sequences:    rows of a decode batch
    arena_bytes:      size of the arena that holds the pages; None: by memory_share
    workspace_bytes:  exact KV of prompts while they prefill, at most; None: by memory_share
    memory_share:     of an accelerator, for weights, arena and workspaces; on a CPU the arena has
                      256 MiB, and workspaces this share of an eighth of the memory
    watermark:        share of the arena that is kept free for sequences that grow
    prefix_cache:     what a prompt shares with earlier ones is not computed again
    torch_threads:    None: the cores of the host shared among its workers
    """

    max_batch_tokens: int = at_least(1, default=2048)
    max_sequences: int = at_least(1, default=64)
    arena_bytes: int | None = at_least(
        1 << 20, most=1 << 38, default=None
    )  # int32 ids of 128 B
    workspace_bytes: int | None = at_least(1, default=None)
    memory_share: float = at_least(0.01, most=1, default=0.9)
    watermark: float = at_least(0, most=1, default=0.02)
    prefix_cache: bool = True
    torch_threads: int | None = at_least(1, most=1024, default=None)


@dataclass(frozen=True)
class TransferConfig(Bounded):
    """How a prompt is handed off.

    lease_s:     a reservation ends this long after its sender's last sign of life
    frame_bytes: where frames are cut; smaller ones for slow links
    link_mbps:   pace of the sender in megabits per second; None: as fast as it goes
    burst_bytes: what a paced sender may send at once
    overlap:     pages leave while later layers compute; False, for comparison: only afterwards
    dedup:       pages that the decode worker has of other prompts are not sent again
    min_disagg_tokens: shorter prompts are computed whole where they decode; None: those of which
                 not fewer bytes would be sent than their KV has in fp16; a plan of which that is
                 true at any length, such as raw, sends them all
    channel:     frames over "grpc", or "direct" over a socket that gRPC negotiated
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
    """How requests are kept alive.

    deadline_s:   a request of which no token comes for so long is given up
    max_attempts: workers that may die under one request before it is refused
    silence_s:    a worker that does not answer for so long counts as dead
    max_queue:    requests that may wait for workers; more are refused
    error_budget: relative, of attention outputs, where a request leaves its codec to the service
    first_decode_s: until its second token, the first that decode says, such a request aims at
    """

    deadline_s: float = at_least(0.001, default=300.0)
    max_attempts: int = at_least(1, default=3)
    silence_s: float = at_least(0.001, default=5.0)
    max_queue: int = at_least(1, default=1024)
    error_budget: float = at_least(0, default=0.15)
    first_decode_s: float = at_least(0.001, default=2.0)


@dataclass(frozen=True)
class ClusterConfig(Bounded):
    """Where the workers run.

    address: "local" starts a private Ray; else that of a cluster, "host:port", or "auto": the one
             that Ray itself would join, of RAY_ADDRESS or of this host
    name:    of the service among others on a cluster, Ray's namespace
    prefill, decode: how many workers of each role
    colocated: `prefill` workers that do both, and no others: nothing is handed off
    pools:   workers run only on nodes with a Ray resource named as their role, one for each unit;
             they wait for such nodes, and an autoscaler starts them
    gpus:    of each worker; None: those that Ray has at the start, shared equally
    ports:   where workers listen, [first, last], on every host; None: on any free ones
    runtime_env: of the workers, as Ray takes it: {env_vars: {HF_HOME: /models}}
    orphan_s: workers exit so long after the last router left
    grace_s:  how long a stopping worker may finish what it has
    detach:   a service that ends leaves its workers on a cluster to the next, for orphan_s
    """

    address: str = "local"
    name: str = "disagg"
    prefill: int = at_least(1, most=MAX_WORKERS, default=1)
    decode: int = at_least(1, most=MAX_WORKERS, default=1)
    colocated: bool = False
    pools: bool = False
    gpus: float | None = at_least(0, default=None)
    ports: list | None = None
    runtime_env: dict | None = None
    orphan_s: float = at_least(0, default=60.0)
    grace_s: float = at_least(0, default=5.0)
    detach: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not re.fullmatch(r"[\w-]+", self.name):
            wanted = "letters, digits, - and _ are wanted"
            raise ConfigError(f"config key cluster.name is {self.name!r}; {wanted}")
        match self.ports:
            case None:
                pass
            case [int(first), int(last)] if 0 < first <= last < 1 << 16:
                pass
            case ports:
                wanted = "the first and the last port are wanted: [20000, 20099]"
                raise ConfigError(f"config key cluster.ports is {ports!r}; {wanted}")

    @property
    def roles(self) -> dict[str, int]:
        """How many workers of each role there are."""
        apart = {"prefill": self.prefill, "decode": self.decode}
        return {"both": self.prefill} if self.colocated else apart


@dataclass(frozen=True)
class ServerConfig(Bounded):
    """Where clients find the service, and what they may send.

    port:              0: any free one
    pd_ports:          the first of one port for each worker, for routers of vLLM; 0: any free ones
    state_file:        where the service says where it is; None: in a folder of the user's own
    served_model_name: what clients call the model; None: its name, or that of its folder
    max_body_bytes:    longer requests are refused while they arrive
    silence_s:         a connection is closed when nothing came for so long, in a request or after
                       one; while its client waits for an answer it stays
    api_key:           what clients have to show, each as "Authorization: Bearer KEY"
    api_key_file:      a file with more of them, one in a line; it is read at the start
    tls_certificate, tls_key: PEM files; together: HTTPS
    allowed_origins:   of pages whose scripts may ask, ["https://chat.example"]; ["*"]: of all
    """

    host: str = "127.0.0.1"
    port: int = at_least(0, default=8000)
    pd_ports: int | None = at_least(0, default=None)
    state_file: str | None = None
    served_model_name: str | None = None
    max_body_bytes: int = at_least(1024, default=8 << 20)
    silence_s: float = at_least(0.001, default=30.0)
    api_key: str | None = None
    api_key_file: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    allowed_origins: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SecurityConfig(Bounded):
    """Who may speak on the plane between workers. Files, read on each host by its processes.

    plane:       what a cluster has at least, made by the service where no file gives it: "tls" with
                 a token, or "token" without encryption
    token_file:  the shared secret that every call carries
    certificate: PEM of this host, with its `key`; `ca` is the authority of all. Together: TLS,
                 in which both sides show their certificates
    """

    plane: str = one_of("tls", "token")
    token_file: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


@dataclass(frozen=True)
class Config:
    """All of it.

    codec:  a spec for every layer, a plan "0-1:kivi:bits=4;2-:kivi:bits=2", or "auto": the service
            chooses for each request among `codecs`
    codecs: others that requests may name where a worker compiles them at its start: on a GPU; and
            what "auto" chooses from
    """

    codec: str = DEFAULT_CODEC
    codecs: list[str] = field(default_factory=list)
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)

    @property
    def listed(self) -> list[str]:
        """Every codec that is named, the one of who names none first; ConfigError without any."""
        if found := [x for x in dict.fromkeys((self.codec, *self.codecs)) if x != AUTO]:
            return found
        raise ConfigError('codec "auto" chooses among `codecs`, and none are listed')


def load_config(
    path: str | Path | None = None, flags: Mapping[str, Any] | None = None
) -> Config:
    """Defaults, changed by a YAML file, changed by flags such as {"server.port": 9000}.

    A flag that is None was not given. A string is read as YAML where a number is wanted. Raises
    UnknownNameError for a key nobody knows, ConfigError for a file or value that cannot be.
    """
    config = Config()
    if path is not None:
        config = replace_keys(config, _read_yaml(Path(path)))
    for key, value in (flags or {}).items():
        if value is not None:
            *rooms, name = key.split(".")
            nested: Mapping[str, Any] = {name: value}
            for room in reversed(rooms):
                nested = {room: nested}
            config = replace_keys(config, nested)
    return config


def replace_keys(config: T, changes: Mapping[str, Any], where: str = "") -> T:
    """A copy of a config dataclass with some keys changed, nested ones too."""
    hints = get_type_hints(type(config))
    changed: dict[str, Any] = {}
    for key, value in changes.items():
        name = f"{where}{key}"
        if key not in hints:
            raise UnknownNameError.of(
                "config key", name, [f"{where}{known}" for known in hints]
            )
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


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        found = _parse_yaml(f"file {path}", path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read config file {path}: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config file {path} is not YAML: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"config file {path} holds no map of keys")
    return found


def _parse_yaml(name: str, text: str) -> Any:
    import yaml  # here, because only those who need it pay for the import

    class Loader(yaml.SafeLoader):  # of whose keys the last one counts, without a word
        def construct_mapping(
            self, node: yaml.MappingNode, deep: bool = False
        ) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            if twice := [key for i, key in enumerate(keys) if key in keys[:i]]:
                raise ConfigError(f"config {name} has the key {twice[0]!r} twice")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a 30th of February
        raise ConfigError(f"config {name} is not YAML: {error}") from error


def _fit(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type a key wants; text from a flag is parsed."""
    union = get_origin(hint) in (Union, types.UnionType)
    kinds = [
        k for k in (get_args(hint) if union else (hint,)) if k is not types.NoneType
    ]
    if union and (value is None or value == "null"):
        return None
    (kind,) = (get_origin(k) or k for k in kinds)
    if isinstance(value, str) and kind is bool:
        value = {"true": True, "false": False}.get(value.lower(), value)
    elif isinstance(value, str) and kind in (list, dict):
        value = _parse_yaml(f"key {name}", value)
    elif isinstance(value, str) and kind is not str:
        with contextlib.suppress(ValueError):  # reported below, with what was given
            value = kind(value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"config key {name} is {value!r}; {kind.__name__} is wanted")
    if hint == list[str] and (wrong := [x for x in value if type(x) is not str]):
        raise ConfigError(f"config key {name} has {wrong[0]!r}; str is wanted")
    return value
