"""What a model's authors recommend applies where a request is silent, unless it is turned off."""

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.engine.sampling_defaults import describe_defaults, read_sampling_defaults
from disagg.errors import ConfigError, ModelError

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}


def written(folder: Path, content: Any) -> str:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return str(folder)


@pytest.mark.parametrize(
    ("content", "defaults"),
    [
        (QWEN, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        ({"repetition_penalty": 1.05, "min_p": 0.1}, None),
        ({"max_new_tokens": 2048, "max_length": 20}, {"max_tokens": 2048}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"temperature": None, "top_k": -1, "eos_token_id": 3}, {"top_k": 0}),
        ({}, {}),
    ],
    ids=str,
)
def test_the_numbers_of_the_file_are_the_defaults(content, defaults, tmp_path):
    expected = content if defaults is None else defaults

    assert read_sampling_defaults(written(tmp_path, content)) == expected


def test_a_model_without_the_file_has_no_defaults(tmp_path):
    assert read_sampling_defaults(str(tmp_path)) == {}


def test_none_turns_them_off_and_a_path_replaces_them(tmp_path):
    model = written(tmp_path, QWEN)
    other = tmp_path / "other"
    other.mkdir()
    written(other, {"temperature": 0.3})
    file = str(other / "generation_config.json")

    assert read_sampling_defaults(model, "none") == {}
    assert read_sampling_defaults(model, str(other)) == {"temperature": 0.3}
    assert read_sampling_defaults(model, file) == {"temperature": 0.3}
    with pytest.raises(ConfigError, match=r"expected auto, none, or the path"):
        read_sampling_defaults(model, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"expected auto, none, or the path"):
        read_sampling_defaults(model, "~nobody-of-that-name/file.json")


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "hot"},
        {"temperature": -1},
        {"top_p": 0},
        {"top_k": 1.5},
        {"repetition_penalty": 0},
        {"max_new_tokens": 0},
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused_with_the_way_out(wrong, tmp_path):
    (key,) = {*wrong} - {"max_new_tokens"} or {"max_tokens"}

    with pytest.raises(
        ModelError, match=f"generation_config.json: {key} is"
    ) as refused:
        read_sampling_defaults(written(tmp_path, wrong))
    assert "model.generation_config: none" in str(refused.value)


def test_defaults_are_told_in_words():
    words = describe_defaults({"temperature": 0.6, "top_k": 20})

    assert words == "temperature 0.6, top_k 20"
