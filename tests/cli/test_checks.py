"""What is checked before workers start: weights that cannot be unpacked are refused there."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from disagg.cli.checks import check_model
from disagg.config import Config, ModelConfig
from disagg.errors import ConfigError, ModelError
from disagg.model import quantized_linear, runner
from tests.model.packers import PACKERS, add_to_config, save, save_packed
from tests.model.tiny import save_tiny

SCALE = "model.layers.0.mlp.up_proj.weight_scale"


def config_of(folder: Path) -> Config:
    return Config(model=ModelConfig(name=str(folder)))


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    plain = save_tiny("llama", tmp_path / "plain", num_hidden_layers=1)
    return save_packed(plain, tmp_path / "packed", PACKERS["modelopt-fp8"])


def test_packed_weights_pass(packed):
    info, _ = check_model(config_of(packed))

    assert info.path == packed


def test_a_missing_scale_is_refused(packed):
    stored = load_file(packed / "model.safetensors")
    del stored[SCALE]
    save(stored, packed)

    with pytest.raises(ModelError, match=SCALE):
        check_model(config_of(packed))


def test_packed_weights_without_a_marker_are_refused(packed):
    (packed / "hf_quant_config.json").unlink()

    with pytest.raises(ModelError, match="no file says how to read it"):
        check_model(config_of(packed))


def test_a_format_that_is_not_unpacked_is_refused(packed):
    add_to_config(packed, quantization_config={"load_in_4bit": True})

    with pytest.raises(ModelError, match="bitsandbytes"):
        check_model(config_of(packed))


def test_weights_are_refused_for_a_model_of_small_layers(packed, monkeypatch):
    monkeypatch.setattr(quantized_linear, "check_weights_setting", lambda *_: None)
    config = Config(model=ModelConfig(name=str(packed), weights="int8"))

    with pytest.raises(ConfigError, match=r"no linear layer .* 6,000,000 numbers"):
        check_model(config)


def test_weights_that_the_device_does_not_take_are_refused(packed, monkeypatch):
    monkeypatch.setattr(runner, "pick_device", lambda _: "cuda")
    config = Config(model=ModelConfig(name=str(packed), weights="int8"))

    with pytest.raises(ConfigError, match=r"model\.weights is int8, which is for CPUs"):
        check_model(config)
