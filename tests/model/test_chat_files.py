"""Where the chat template of a model is found, and what is said of one that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from disagg.errors import ConfigError, ModelError
from disagg.model.chat import ChatTemplate
from disagg.model.chat_files import TemplateSource, read_template
from tests.model.tiny import byte_tokenizer

WRITE = "{{ messages[0].content }}"
NAMED = [
    {"name": "default", "template": "default"},
    {"name": "tool_use", "template": "tools"},
]
BOS = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False}
CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}


def save(folder: Path, files: dict[str, Any]) -> str:
    """A model's folder with these files; objects and lists are written as JSON."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = CLASS | files.get("tokenizer_config.json", {})
    for name, content in (files | {"tokenizer_config.json": config}).items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(folder)


PLACES: dict[str, dict[str, Any]] = {
    "config": {"tokenizer_config.json": {"chat_template": "a"}},
    "config-names": {"tokenizer_config.json": {"chat_template": NAMED}},
    "file": {"chat_template.jinja": "a"},
    "file-first": {
        "chat_template.jinja": "a",
        "tokenizer_config.json": {"chat_template": "b"},
    },
    "more-files": {
        "chat_template.jinja": "a",
        "additional_chat_templates/tool_use.jinja": "tools",
        "tokenizer_config.json": {"chat_template": "b"},
    },
    "tokens-in-config": {
        "chat_template.jinja": "a",
        "tokenizer_config.json": {
            "bos_token": {"__type": "AddedToken", **BOS},
            "eos_token": "</s>",
        },
    },
    "tokens-in-map": {
        "chat_template.jinja": "a",
        "special_tokens_map.json": {"bos_token": BOS, "eos_token": "</s>"},
    },
    "tokens-in-both": {
        "chat_template.jinja": "a",
        "special_tokens_map.json": {"bos_token": "<map>"},
        "tokenizer_config.json": {"bos_token": "<config>", "eos_token": "</s>"},
    },
    "token-of-the-model": {
        "chat_template.jinja": "a",
        "tokenizer_config.json": {
            "image_token": "<image>",
            "extra_special_tokens": {"video_token": "<video>"},
        },
    },
}


@pytest.mark.parametrize("files", PLACES.values(), ids=PLACES)
def test_a_template_is_found_as_transformers_finds_it(files, tmp_path):
    folder = save(tmp_path, files)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    source = read_template(folder)

    assert source is not None
    assert source.text == tokenizer.get_chat_template()
    assert dict(source.words) == tokenizer.special_tokens_map


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.json": {"chat_template": "a"}},
        {"processor_config.json": {"chat_template": "a"}},
        {"chat_template.json": {"chat_template": {"default": "a", "tool_use": "b"}}},
        {"tokenizer_config.json": {"chat_template": [{"name": "x", "template": "a"}]}},
        {"additional_chat_templates/tool_use.jinja": "a"},
        {
            "additional_chat_templates/tool_use.jinja": "b",
            "tokenizer_config.json": {"chat_template": "a"},
        },
        {"chat_template.jinja": "", "tokenizer_config.json": {"chat_template": "a"}},
    ],
    ids=[
        "image-models",
        "processor",
        "image-model-names",
        "one-name",
        "one-file",
        "default-in-config",
        "empty-file",
    ],
)
def test_a_template_at_other_places_is_used_too(files, tmp_path):
    source = read_template(save(tmp_path, files))

    assert source is not None
    assert source.text == "a"


def test_the_map_fills_tokens_that_the_config_leaves_out(tmp_path):
    config = {"added_tokens_decoder": {}, "bos_token": "<s>", "eos_token": None}
    mapped = {"bos_token": "<map>", "eos_token": "</s>"}
    files = {"tokenizer_config.json": config, "special_tokens_map.json": mapped}

    source = read_template(save(tmp_path, files | {"chat_template.jinja": "a"}))

    assert source is not None
    assert source.words == {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"chat_template.jinja": "a\n{% if %}"}, "is not Jinja, line 2: Expected an"),
        ({"chat_template.jinja": "{% if a %}" * 2000}, "is nested too deep"),
        ({"tokenizer_config.json": {"chat_template": 5}}, "is not text"),
        ({"tokenizer_config.json": {"chat_template": [{"name": "a"}]}}, "is not text"),
        ({"tokenizer_config.json": {"chat_template": {"default": 5}}}, "is not text"),
        (
            {"tokenizer_config.json": {"chat_template": {"rag": "a", "tools": "b"}}},
            "has the chat templates rag, tools, and none is named default",
        ),
    ],
    ids=["syntax", "deep", "number", "nameless", "no-text", "no-default"],
)
def test_a_template_that_cannot_be_used_is_refused(files, problem, tmp_path):
    folder = save(tmp_path, files)

    with pytest.raises(ModelError, match=problem):
        read_template(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [("own.jinja", "own"), ("own.json", '{"chat_template": "own", "x": 1}')],
)
def test_a_file_takes_the_place_of_the_template(name, content, tmp_path):
    config = {"bos_token": "<s>", "chat_template": "a"}
    folder = save(tmp_path, {"tokenizer_config.json": config, name: content})

    source = read_template(folder, str(tmp_path / name))

    assert source == TemplateSource("own", {"bos_token": "<s>"})


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("missing.jinja", None, "cannot read .*: No such file"),
        ("own.jinja", "{{", "is not Jinja"),
        ("own.json", "[]", "is not a JSON object"),
        ("own.json", "{}", "has no key chat_template"),
    ],
)
def test_a_file_that_holds_no_template_is_refused(name, content, problem, tmp_path):
    file = tmp_path / name
    if content is not None:
        file.write_text(content)

    with pytest.raises(ConfigError, match=f"server.chat_template: .*{problem}"):
        read_template(None, str(file))


def test_the_start_warns_of_words_that_nothing_defines(tmp_path, caplog):
    text = WRITE + "{{ bos_token }}{{ datetime }}{% for x in functions %}{% endfor %}"
    config = {"chat_template": text, "eos_token": "</s>"}
    folder = save(tmp_path, {"tokenizer_config.json": config})

    ChatTemplate.load(folder)

    (message,) = caplog.messages
    assert message.endswith("which are empty: bos_token, datetime, functions")


@pytest.mark.parametrize(
    "text",
    [
        "{{ tools | tojson }}{{ messages }}{{ range(3) }}{{ strftime_now('%Y') }}",
        "{% if thinking %}{{ thinking }}{% endif %}",
        "{{ date if not today and date else '' }}",
        "{% if date is defined %}{{ date }}{% endif %}",
        "{{ date | default('today') }}",
        "{% for m in messages %}{% set ns = m %}{{ ns }}{{ loop.index }}{% endfor %}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(1) }}",
        "{% generation %}{{ bos_token }}{% endgeneration %}",
        "{% for m in messages %}{% break %}{% endfor %}",
    ],
)
def test_words_that_are_defined_or_asked_for_are_not_warned_of(text):
    assert TemplateSource(text, {"bos_token": "<s>"}).undefined_words == []
