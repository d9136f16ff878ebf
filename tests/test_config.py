"""Defaults, a YAML file, flags: in this order, and unknown keys never pass."""

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from disagg.config import Config, load_config
from disagg.errors import ConfigError, UnknownNameError


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "disagg.yaml"
    path.write_text(text)
    return path


def test_without_file_and_flags_the_defaults_hold():
    assert load_config() == Config()


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = write(tmp_path, "codec: raw\nserver: {port: 9000, host: 0.0.0.0}\n")
    config = load_config(path, {"server.port": "9001", "codec": None})

    assert (config.codec, config.server.host, config.server.port) == (
        "raw",
        "0.0.0.0",
        9001,
    )
    assert config.engine == Config().engine


def test_what_is_shown_can_be_loaded_again(tmp_path):
    config = load_config(None, {"transfer.link_mbps": "50", "cluster.decode": 2})
    assert load_config(write(tmp_path, yaml.safe_dump(asdict(config)))) == config


@pytest.mark.parametrize(
    ("flags", "known_names"),
    [
        ({"codex": "raw"}, "codec, codecs, engine"),
        ({"server.prot": 1}, "server.metrics_key, server.pd_ports, server.port"),
        ({"model.device": "tpu"}, "unknown model.device 'tpu'; known: auto, cpu, cuda"),
        ({"state": "int4"}, "unknown state 'int4'; known: auto, bf16, exact, int8"),
    ],
    ids=["top", "nested", "value", "value at the top"],
)
def test_an_unknown_name_lists_the_known_ones(flags, known_names):
    with pytest.raises(UnknownNameError, match=known_names):
        load_config(None, flags)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server: {port: many}", "server.port is 'many'; expected int"),
        ("server: {port: true}", "server.port is True; expected int"),
        ("server: 8000", "keys of its own"),
        ("codec: null", "codec is None; expected str"),
        ("codecs: [raw, 5]", "codecs has 5; expected str"),
        ("server: {allowed_origins: [5]}", "allowed_origins has 5; expected str"),
        ("server: {allowed_origins: all}", "allowed_origins is 'all'; expected list"),
        ("- raw", "no map of keys"),
        ("a: [", "not YAML"),
        (
            "server: {port: 1}\ncodec: raw\nserver: {host: a}",
            r"disagg.yaml has the key 'server' twice",
        ),
        ("server: {port: 1, port: 2}", "the key 'port' twice"),
        ("server: {served_model_name: 2024-02-30}", "not YAML: day is out of range"),
        ("[" * 5000, "not YAML"),
    ],
)
def test_a_value_that_cannot_be_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_a_missing_file_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot read config file"):
        load_config(tmp_path / "none.yaml")


def test_a_section_without_keys_changes_nothing(tmp_path):
    assert (
        load_config(write(tmp_path, "server:\n  # port: 9000\ncodec: raw")).codec
        == "raw"
    )


def test_an_optional_key_can_be_unset_and_takes_integers(tmp_path):
    path = write(tmp_path, "transfer: {link_mbps: 50}")

    assert load_config(path).transfer.link_mbps == 50.0
    assert load_config(path, {"transfer.link_mbps": "null"}).transfer.link_mbps is None


@pytest.mark.parametrize(("text", "value"), [("false", False), ("True", True)])
def test_a_flag_can_switch(text, value):
    assert load_config(None, {"transfer.overlap": text}).transfer.overlap is value


@pytest.mark.parametrize(
    ("key", "values", "says"),
    [
        ("transfer.overlap", ["maybe"], "is 'maybe'; expected bool"),
        ("cluster.prefill", ["0"], "is .*; expected at least .*"),
        ("engine.max_sequences", ["-1"], "is .*; expected at least .*"),
        ("transfer.link_mbps", ["0"], "is .*; expected at least .*"),
        ("router.deadline_s", ["nan"], "is .*; expected at least .*"),
        ("engine.memory_share", ["5"], "is 5.0; expected at most 1"),
        (
            "engine.arena_bytes",
            ["300000000000"],
            "is 3.*; expected at most 274877906944",
        ),
        ("engine.watermark", ["2"], "is 2.0; expected at most 1"),
        ("transfer.frame_bytes", ["4194305"], "is 4194305; expected at most 4194304"),
        ("engine.torch_threads", ["1000000"], "is 1000000; expected at most 1024"),
        (
            "cluster.ports",  # the first and the last one
            ["[1]", "[7, 6]", "[0, 9]", "[1, 65536]", "['a', 'b']", "{}", "7"],
            "is .*; expected ",
        ),
        (
            "cluster.name",
            ["", "a b", "../up"],
            "is .*; expected ",
        ),  # files have it in their names
    ],
)
def test_a_flag_that_cannot_be_is_named_with_what_is_wanted(key, values, says):
    for value in values:
        with pytest.raises(ConfigError, match=f"config key {key} {says}"):
            load_config(None, {key: value})


def test_lists_and_maps_are_yaml_in_a_file_and_in_a_flag(tmp_path):
    text = "cluster: {ports: [2000, 2009], runtime_env: {env_vars: {HF_HOME: /models}}}"
    flags = {"cluster.ports": "[2000, 2009]"}
    flags |= {"cluster.runtime_env": "{env_vars: {HF_HOME: /models}}"}

    config = load_config(None, flags)

    assert config == load_config(write(tmp_path, text))
    assert config.cluster.runtime_env == {"env_vars": {"HF_HOME": "/models"}}
    with pytest.raises(ConfigError, match=r"config key cluster.ports is not YAML"):
        load_config(None, {"cluster.ports": "[2000"})
