"""What a front end and a worker's actor say to each other at a start: plain data with a version.

Workers on a cluster outlive their front end, and the next one may have another version of this
package. Its classes would be unpickled into the old ones without a check, so none of them crosses.
"""

from dataclasses import asdict, fields
from typing import Any

from disagg.config import Config, replace_keys, settings_by_key
from disagg.errors import DisaggError, VersionError, error_from
from disagg.transfer.messages import Role, WorkerInfo

VERSION = 1  # of these messages
WORKER_GROUPS = (
    "codec",
    "codecs",
    "state",
    "model",
    "engine",
    "transfer",
    "security",
)
LOG_KEYS = ("log_level", "log_format")
WORKER_CLUSTER_KEYS = (
    "gpus",
    "ports",
    "runtime_env",
    "orphan_s",
    "prefill_ranks",
    "decode_ranks",
    "rank_timeout_s",
    "rank_placement",
)

Message = dict[str, Any]


def settings_message(config: Config) -> Message:
    """The settings for a worker, without those of the front end, such as the clients' keys."""
    shared = asdict(config)
    shared["server"] = {key: shared["server"][key] for key in LOG_KEYS}
    del shared["router"]
    return {"version": VERSION, "settings": shared}


def config_of(message: Message) -> Config:
    """The settings in a message; VersionError from another version of this package."""
    check_version(message, "a front end")
    try:
        return replace_keys(Config(), message["settings"])
    except DisaggError as error:
        raise VersionError(f"a front end of another version: {error}") from error


def worker_settings(config: Config) -> dict[str, Any]:
    """What a worker depends on, by key: "engine.max_sequences". Others change without a restart."""
    shared = asdict(config)
    used = {group: shared[group] for group in WORKER_GROUPS}
    del used["model"]["generation_config"]  # only the front end reads it
    used["cluster"] = {key: shared["cluster"][key] for key in WORKER_CLUSTER_KEYS}
    return settings_by_key(used)


def success(host: str, info: WorkerInfo) -> Message:
    """The reply of a worker that serves."""
    values = asdict(info) | {"role": info.role.value}
    return {"version": VERSION, "host": host, "info": values}


def failure(host: str, error: DisaggError) -> Message:
    """The reply of a worker that cannot serve this front end."""
    return {"version": VERSION, "host": host, "error": [error.reason, str(error)]}


def info_of(reply: Message) -> WorkerInfo:
    """How a worker can be reached. Raises the error in the reply.

    VersionError for a reply of another version.
    """
    check_version(reply, "a worker")
    if "error" in reply:
        raise error_from(*reply["error"])
    names = {field.name for field in fields(WorkerInfo)}
    values = {name: x for name, x in reply["info"].items() if name in names}
    try:
        return WorkerInfo(**values | {"role": Role(values["role"])})
    except (KeyError, TypeError, ValueError) as error:
        raise VersionError(f"a worker of another version: {error}") from error


def host_of(reply: Message, sender: str) -> str:
    """Where a worker runs; VersionError for a reply of another version."""
    check_version(reply, sender)
    return str(reply["host"])


def check_version(message: object, sender: str) -> None:
    """VersionError unless it is a message of this version."""
    version = message.get("version") if isinstance(message, dict) else None
    if version != VERSION:
        raise VersionError(
            f"{sender} has version {version} of the start messages; expected {VERSION}: "
            "upgrade the older package, or use another cluster.name until its workers have ended"
        )
