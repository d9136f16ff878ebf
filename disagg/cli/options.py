"""Options that several commands share, and the config that comes out of them."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from disagg.cli.output import print_json
from disagg.config import DEFAULT_CODEC, ClusterConfig, Config, load_config
from disagg.errors import ConfigError

PICTURES = (".png", ".svg", ".pdf")
Json = Annotated[bool, Option("--json", help="Print one JSON object.")]
Model = Annotated[
    str | None,
    Option(
        help='Folder, Hugging Face name or "smollm2"; the packaged one unless given.'
    ),
]
Codec = Annotated[str | None, Option(help=f'Codec spec, "{DEFAULT_CODEC}", or a plan.')]
ConfigFile = Annotated[
    Path | None, Option("--config", help="YAML file; see --show-config for its keys.")
]
Set = Annotated[
    list[str] | None, Option("--set", help="Any config key: engine.max_sequences=8.")
]
ShowConfig = Annotated[
    bool, Option("--show-config", help="Print the config that would be used, and exit.")
]
ApiKey = Annotated[
    str | None, Option(envvar="DISAGG_API_KEY", help="What --url asks of its clients.")
]
StateFile = Annotated[
    Path | None,
    Option("--state-file", help="Where a running service says where it is."),
]


def read_config(
    path: Path | None, sets: list[str] | None, flags: Mapping[str, Any]
) -> Config:
    """Defaults, a file, `--set key=value`, flags: the later one wins."""
    given: dict[str, Any] = {}
    for item in sets or []:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item!r} has no value; write key=value")
        given[key.strip()] = value.strip()
    return load_config(path, given | {k: v for k, v in flags.items() if v is not None})


def refuse_idle(idle: object, where: str, **given: object) -> None:
    """ConfigError for an option that is given where it would be left out in silence."""
    for name, value in given.items():
        if idle and value:
            raise ConfigError(f"--{name.replace('_', '-')} means nothing {where}")


def writable(path: Path | None) -> Path | None:
    """ConfigError for a file that cannot be written, before anything is measured for it."""
    if path is not None:
        whole = path.absolute()
        there = next(x for x in (whole, *whole.parents) if x.exists())
        if there.is_dir() == (there == whole) or not os.access(there, os.W_OK):
            raise ConfigError(
                f"{path} cannot be written; a file where you may write is wanted"
            )
    return path


def drawable(path: Path | None) -> Path | None:
    """ConfigError unless a picture can be drawn there, before anything is measured for it."""
    if path is not None:
        if path.suffix not in PICTURES or not path.parent.is_dir():
            known = f"folders must exist, and {', '.join(PICTURES)}"
            raise ConfigError(f"no picture can be written to {path}: {known}")
        import disagg.report.transfer  # noqa: F401  # ConfigError without matplotlib
    return writable(path)


Plot = Annotated[
    Path | None,
    Option(callback=drawable, help="Also draw to this .png, .svg or .pdf file."),
]


def print_config(config: Config, as_json: bool) -> None:
    """As YAML that `--config` reads, or as JSON."""
    if as_json:
        print_json(asdict(config))
        return
    import yaml

    print(
        "# null: not set; of engine.arena_bytes 256 MiB on a CPU, by memory_share on a GPU"
    )
    print(yaml.safe_dump(asdict(config), sort_keys=False), end="")


def state_path(given: Path | str | None, name: str = ClusterConfig.name) -> Path:
    """The state file of this user's service of a name, unless another one is given."""
    if given is not None:
        return Path(given)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = (
        Path(runtime)
        if runtime
        else Path(tempfile.gettempdir()) / f"disagg-{os.getuid()}"
    )
    return folder / f"{name}.json"
