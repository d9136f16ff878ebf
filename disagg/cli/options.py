"""Options that several commands share, and the configuration they produce."""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
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
        help='Folder, Hugging Face name or "smollm2"; by default the packaged model.'
    ),
]
ChatTemplate = Annotated[
    str | None,
    Option(help="File with a chat template that replaces the model's."),
]
Codec = Annotated[
    str | None, Option(help=f'Codec spec or plan, such as "{DEFAULT_CODEC}".')
]
State = Annotated[
    str | None,
    Option(help='States as handed off: "exact", "bf16" or "int8"; default: "auto".'),
]
ConfigFile = Annotated[
    Path | None,
    Option("--config", help="YAML file of settings; `serve --show-config` lists them."),
]
Set = Annotated[
    list[str] | None, Option("--set", help="Set any setting: engine.max_sequences=8.")
]
ShowConfig = Annotated[
    bool, Option("--show-config", help="Print the settings in force, and exit.")
]
ApiKey = Annotated[
    str | None,
    Option(envvar="DISAGG_API_KEY", help="API key of the service at --url."),
]
StateFile = Annotated[
    Path | None,
    Option("--state-file", help="State file of the service."),
]


def read_config(
    path: Path | None, sets: list[str] | None, flags: Mapping[str, Any]
) -> Config:
    """Defaults, a file, `--set key=value`, flags: the later one wins."""
    overrides: dict[str, Any] = {}
    for item in sets or []:
        key, equals, value = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item!r} has no value; write key=value")
        overrides[key.strip()] = value.strip()
    for key, value in flags.items():
        if value is not None:
            overrides[key] = value
    return load_config(path, overrides)


def refuse_idle(idle: object, where: str, **values: object) -> None:
    """ConfigError for an option that would have no effect."""
    for name, value in values.items():
        if idle and value:
            raise ConfigError(f"--{name.replace('_', '-')} has no effect {where}")


def writable(path: Path | None) -> Path | None:
    """ConfigError for a file that cannot be written; checked before measuring."""
    if path is not None:
        target = path.absolute()
        nearest = next(x for x in (target, *target.parents) if x.exists())
        is_folder = nearest == target and nearest.is_dir()
        is_below_file = nearest != target and not nearest.is_dir()
        if is_folder or is_below_file or not os.access(nearest, os.W_OK):
            raise ConfigError(
                f"cannot write {path}; expected a file in a writable folder"
            )
    return path


def drawable(path: Path | None) -> Path | None:
    """ConfigError unless a picture can be written here; checked before measuring."""
    if path is not None:
        if path.suffix not in PICTURES or not path.parent.is_dir():
            formats = ", ".join(PICTURES)
            raise ConfigError(
                f"cannot draw to {path}; "
                f"expected a {formats} file in an existing folder"
            )
        import disagg.report.transfer  # noqa: F401  # ConfigError without matplotlib
    return writable(path)


Plot = Annotated[
    Path | None,
    Option(callback=drawable, help="Also draw to this .png, .svg or .pdf file."),
]


def print_config(config: Config, as_json: bool) -> None:
    """As YAML that `--config` reads, or as JSON; secrets are printed as ***."""
    settings = without_secrets(config)
    if as_json:
        print_json(settings)
        return
    import yaml

    print(
        "# null: not set; engine.arena_bytes is 256 MiB on a CPU, by memory_share on a GPU"
    )
    print(yaml.safe_dump(settings, sort_keys=False), end="")


def without_secrets(config: Any) -> dict[str, Any]:
    """A configuration as plain values, with *** for each secret that is set."""
    settings: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            settings[field.name] = without_secrets(value)
        else:
            is_hidden = value and field.metadata.get("secret")
            settings[field.name] = "***" if is_hidden else value
    return settings


def state_path(path: Path | str | None, name: str = ClusterConfig.name) -> Path:
    """The state file at a path, by default that of this user's service of a name."""
    if path is not None:
        return Path(path)
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        return Path(runtime) / f"{name}.json"
    return Path(tempfile.gettempdir()) / f"disagg-{os.getuid()}" / f"{name}.json"
