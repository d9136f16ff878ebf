"""Where a model computes: the choice, and what is not there."""

import pytest
import torch

from disagg.config import ModelConfig
from disagg.errors import ConfigError
from disagg.model.device import load_runner, pick_device


@pytest.mark.parametrize(("there", "device"), [(True, "cuda"), (False, "cpu")])
def test_auto_takes_a_gpu_where_there_is_one(there, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert pick_device("auto") == device
    assert pick_device("cpu") == "cpu"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        load_runner(ModelConfig(device="cuda"))


def test_an_unknown_device_is_refused():
    with pytest.raises(ConfigError, match="'tpu' is unknown; known: auto, cpu, cuda"):
        pick_device("tpu")
