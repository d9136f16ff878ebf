"""What crosses between a front end and a worker's actor, and what a worker depends on."""

import pickle
import pickletools
from dataclasses import asdict, fields, replace

import pytest

from disagg.config import Config, changed_keys, load_config, settings_by_key
from disagg.errors import CapacityError, VersionError
from disagg.launch import start_protocol
from disagg.launch.start_protocol import (
    config_of,
    failure,
    host_of,
    info_of,
    settings_message,
    success,
    worker_settings,
)
from disagg.transfer.messages import Role, WorkerInfo

INFO = WorkerInfo(
    name="decode-0",
    role=Role.DECODE,
    address="192.0.2.2:4000",
    epoch=3,
    model="fingerprint",
    min_tokens=7,
    room=1000,
    step_tokens=512,
    snapshots=9,
    sizes={"raw": {64: 100, 128: 200}},
    speaks=("frames 4", "model fingerprint"),
    ranks=2,
)
# a setting that is in neither set fails the test below: decide whether workers use it
UNUSED_GROUPS = {"router", "server"}
UNUSED_KEYS = {"model.generation_config"}
UNUSED_CLUSTER_KEYS = {
    "address",
    "name",
    "prefill",
    "decode",
    "colocated",
    "pools",
    "replace_s",
    "grace_s",
    "detach",
}


@pytest.mark.parametrize("key", settings_by_key(asdict(Config())))
def test_a_worker_depends_on_the_settings_that_it_uses(key):
    group, _, name = key.partition(".")
    is_cluster_key = group == "cluster" and name in UNUSED_CLUSTER_KEYS
    is_unused = group in UNUSED_GROUPS or key in UNUSED_KEYS or is_cluster_key

    assert (key in worker_settings(Config())) is not is_unused


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"router.max_queue": 7}, []),
        ({"server.api_key": "secret"}, []),
        ({"cluster.prefill": 7, "cluster.decode": 9}, []),
        ({"cluster.grace_s": 7}, []),
        ({"codec": "raw"}, ["codec"]),
        ({"codecs": ["raw"]}, ["codecs"]),
        ({"model.dtype": "float16"}, ["model.dtype"]),
        ({"model.context": 1000}, ["model.context"]),
        ({"model.generation_config": "none"}, []),
        ({"engine.max_sequences": 7}, ["engine.max_sequences"]),
        ({"transfer.lease_s": 7}, ["transfer.lease_s"]),
        ({"security.plane": "token"}, ["security.plane"]),
        ({"cluster.runtime_env": {"env_vars": {}}}, ["cluster.runtime_env"]),
    ],
    ids=str,
)
def test_changed_keys_are_named(flags, expected):
    old = worker_settings(Config())
    new = worker_settings(load_config(None, flags))

    assert changed_keys(old, new) == expected


def test_a_key_that_only_one_side_has_counts_as_changed():
    assert changed_keys({"a": 1, "old": None}, {"a": 1, "new": None}) == ["old", "new"]


def test_settings_reach_a_worker_without_those_of_the_front_end():
    flags = {"engine.max_sequences": 7, "cluster.ports": [1, 2], "server.api_key": "x"}

    config = config_of(settings_message(load_config(None, flags)))

    assert config.engine.max_sequences == 7
    assert config.cluster.ports == [1, 2]
    assert config.server.api_key is None


def test_an_info_arrives_as_it_was_sent():
    reply = success("192.0.2.2", INFO)

    assert info_of(reply) == INFO
    assert host_of(reply, "worker decode-0") == "192.0.2.2"


@pytest.mark.parametrize("field", fields(WorkerInfo), ids=lambda field: field.name)
def test_the_info_of_these_tests_has_no_default(field):
    """So that a new field is tested too."""
    assert getattr(INFO, field.name) != field.default


def test_an_error_arrives_as_its_class():
    with pytest.raises(CapacityError, match="no room"):
        info_of(failure("192.0.2.2", CapacityError("no room")))


MESSAGES = [success("h", INFO), settings_message(Config())]


@pytest.mark.parametrize("message", MESSAGES, ids=["reply", "settings"])
def test_messages_hold_no_class_of_this_package(message):
    names = [
        argument
        for _, argument, _ in pickletools.genops(pickle.dumps(message))
        if isinstance(argument, str)
    ]

    assert not any(name.startswith("disagg.") for name in names)


@pytest.mark.parametrize(
    "reply",
    [INFO, ("config", "no"), {"version": 2}, {}],
    ids=["a class", "a tuple", "a later version", "no version"],
)
def test_a_worker_of_another_version_is_an_error(reply):
    with pytest.raises(VersionError, match=r"decode-0 has version .*; expected 1"):
        host_of(reply, "worker decode-0")


def test_a_front_end_of_another_version_is_an_error(monkeypatch):
    message = settings_message(Config())
    monkeypatch.setattr(start_protocol, "VERSION", 2)

    with pytest.raises(VersionError, match="version 1 of the start messages"):
        config_of(message)


def test_a_setting_that_a_worker_does_not_know_is_an_error():
    message = settings_message(Config())
    message["settings"]["engine"]["warp"] = 9

    with pytest.raises(VersionError, match=r"unknown config key 'engine.warp'"):
        config_of(message)


def test_a_field_that_only_the_worker_knows_is_ignored():
    reply = success("192.0.2.2", INFO)
    reply["info"]["warp"] = 9

    assert info_of(reply) == INFO


def test_an_info_without_a_needed_field_is_an_error():
    reply = success("192.0.2.2", INFO)
    del reply["info"]["address"]

    with pytest.raises(VersionError, match="address"):
        info_of(reply)


def test_a_field_that_the_worker_does_not_know_has_its_default():
    reply = success("192.0.2.2", INFO)
    del reply["info"]["room"]

    assert info_of(reply) == replace(INFO, room=0)
